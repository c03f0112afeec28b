"""Calibration of a model's confidence, from sums that add up exactly: the best temperature, and reliability by bins.

The loss is summed at each of a grid of temperatures in the same pass, and confidences (the probability of the most
likely token) fall into 15 equal bins with their hits, as in Guo et al., 2017 (https://arxiv.org/abs/1706.04599). What
is computed here never replaces the plain perplexity. Pure; ``confidence`` makes the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eval_kernel.gridsum import STEPS_PER_NAT

#: Temperatures, a sixteenth of an octave apart; the ninth is 1.
TEMPERATURES = tuple(2.0 ** ((k - 8) / 16) for k in range(17))
BINS = 15


def loss_name(k: int) -> str:
    """Name of the loss sum at the k-th temperature."""
    return f"temperature_{k:02d}"


def bin_names(b: int) -> tuple[str, str, str]:
    """Names of a bin's tokens, sum of confidences (grid steps), and hits."""
    return f"bin_{b:02d}_tokens", f"bin_{b:02d}_confidence", f"bin_{b:02d}_hits"


#: All names, in order.
NAMES = tuple(loss_name(k) for k in range(len(TEMPERATURES))) + tuple(n for b in range(BINS) for n in bin_names(b))


def reliability(sums: Mapping[str, int], tokens: int) -> dict[str, Any] | None:
    """Return temperature fit, expected calibration error and the table of bins; None unless all tokens are in the sums.

    The temperature is the best of the grid, so that its perplexity is an exact sum; between grid points the loss
    differs in second order only. It is fitted on the very tokens that are evaluated, which the text says.
    """
    counts = [sums.get(bin_names(b)[0], 0) for b in range(BINS)]
    if not tokens or sum(counts) != tokens or any(loss_name(k) not in sums for k in range(len(TEMPERATURES))):
        return None
    losses = [sums[loss_name(k)] for k in range(len(TEMPERATURES))]
    best = min(range(len(losses)), key=lambda k: (losses[k], abs(k - 8)))
    nats = losses[best] / STEPS_PER_NAT / tokens
    bins, error = [], 0.0
    for b in range(BINS):
        count, confidence, hits = (sums.get(name, 0) for name in bin_names(b))
        mean = confidence / STEPS_PER_NAT / count if count else None
        accuracy = hits / count if count else None
        if mean is not None and accuracy is not None:
            error += abs(mean - accuracy) * count / tokens
        bins.append({"from": b / BINS, "tokens": count, "confidence": mean, "accuracy": accuracy})
    edge = best in (0, len(losses) - 1)
    return {
        "temperature": TEMPERATURES[best],
        "nats_per_token": nats,
        "perplexity": math.exp(nats) if nats < 700 else None,
        "ece": error,
        "accuracy": sum(sums.get(bin_names(b)[2], 0) for b in range(BINS)) / tokens,
        "bins": bins,
        "text": "temperature fitted on the evaluated tokens themselves, on a grid of 2^(1/16)"
        + ("; the best lies at the end of the grid" if edge else ""),
    }


def problem(sums: Mapping[str, int], tokens: int) -> str | None:
    """Return what is wrong with a shard's sums of which ``tokens`` are finite; None where nothing is."""
    if not sums:
        return None
    if set(sums) != set(NAMES):
        odd = sorted(set(sums) ^ set(NAMES))[0]
        return f"its sums for calibration lack or add {odd!r}"
    if min(sums.values()) < 0 or max(sums.values()) >= 1 << 63:
        return "a sum for calibration is negative or beyond 2^63"
    bins = [[sums[name] for name in bin_names(b)] for b in range(BINS)]
    if sum(count for count, _, _ in bins) != tokens:
        return f"its bins hold {sum(count for count, _, _ in bins)} tokens, {tokens} have a finite loss"
    if any(hits > count or confidence > count * STEPS_PER_NAT for count, confidence, hits in bins):
        return "a bin has more hits or confidence than tokens"
    return None
