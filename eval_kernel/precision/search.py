"""Choosing scales and zeros, a few rows at a time: plain rounding, or the least squared error without calibration.

``least`` tries a fixed ladder of scales (symmetric: with both signs, as the integers reach further on one side), then
refits the best by least squares. Sums are added in a fixed order, so that every machine chooses the same. Eight bits
are always rounded plainly: there, clipping saves 1 % of the squared error, and loses more perplexity than it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from eval_kernel.precision import canonical
from eval_kernel.precision.formats import Format, Kind

#: Scales tried, as shares of the one that covers the whole range.
LADDER = (1.07, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
#: Rounds of refitting the scale to the values, and the values to the scale.
REFITS = 3
#: Elements worked on at a time: intermediate results stay below 10 MB.
CHUNK_ELEMENTS = 1 << 18


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread: on pieces of this size it is faster, and sums of products do not depend on how many."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quantise(
    weight: torch.Tensor, form: Format, method: str, importance: torch.Tensor | None = None
) -> canonical.Quantised:
    """Quantise a whole float32 matrix. ``importance`` [columns] weighs the squared errors (``mse`` only)."""
    result = canonical.empty(form.name, *weight.shape)
    for start, end in row_chunks(form, *weight.shape):
        fill(result, start, end, weight[start:end], method, importance)
    return result


def row_chunks(form: Format, rows: int, columns: int) -> list[tuple[int, int]]:
    """Ranges of rows, each a small piece of work; they begin at even rows, as packed zeros need it."""
    step = max(2, CHUNK_ELEMENTS // columns // 2 * 2)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def fill(
    target: canonical.Quantised,
    start: int,
    end: int,
    weight: torch.Tensor,
    method: str,
    importance: torch.Tensor | None = None,
) -> None:
    """Quantise rows ``start`` to ``end - 1``, given as float32, into ``target``."""
    form = target.format
    part = target.row_range(start, end).tensors()
    if form.kind is Kind.FLOAT8:
        scales, _ = canonical.plain_scales(weight, form)
        made = canonical.float8_parts(weight, scales)
    else:
        plain = method == "rtn" or form.bits == 8
        chosen = canonical.plain_scales(weight, form) if plain else least(weight, form, importance)
        groups = canonical.grouped(weight, form)
        made = canonical.pack(canonical.to_integers(groups, *chosen, form), *chosen, form)
    for key, tensor in part.items():
        tensor.copy_(made[key])


def least(
    weight: torch.Tensor, form: Format, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and zeros, float32 [rows, groups], with the least (weighted) squared error found."""
    groups = canonical.grouped(weight, form)
    weights = None if importance is None else canonical.grouped(importance.float().unsqueeze(0), form)
    scales, zeros = canonical.plain_scales(weight, form)
    best = _error(groups, scales, zeros, form, weights)
    if form.symmetric:
        peak = groups.abs().amax(-1)
        # The integers reach from -8 to 7: the group's largest value is best met by the longer side.
        top = torch.where(groups.amax(-1) >= peak, -1.0, 1.0)
        for share in LADDER:
            for sign in (top, -top):
                tried = canonical.stored(sign * peak * (share / -form.minimum), form)
                best, scales, zeros = _better(groups, tried, None, form, weights, best, scales, zeros)
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        # A range that does not hold 0 may still be covered: the zero is clamped, never the values.
        for share in LADDER:
            shrink = (high - low) * ((1.0 - share) / 2)
            tried = canonical.stored((high - low) * (share / (form.maximum - form.minimum)), form)
            point = canonical.zeros_for(low + shrink, tried, form)
            best, scales, zeros = _better(groups, tried, point, form, weights, best, scales, zeros)
    for _ in range(REFITS):
        q = canonical.to_integers(groups, scales, zeros, form)
        centred = q if zeros is None else q - zeros.unsqueeze(-1)
        load = centred if weights is None else centred * weights
        power = ordered_sum(load * centred)
        fitted = ordered_sum(load * groups) / torch.where(power > 0, power, 1.0)
        tried = canonical.stored(torch.where(power > 0, fitted, scales), form)
        before = best
        best, scales, zeros = _better(groups, tried, zeros, form, weights, best, scales, zeros)
        if torch.equal(before, best):
            break
    return scales, zeros


def _better(
    groups: torch.Tensor,
    tried: torch.Tensor,
    point: torch.Tensor | None,
    form: Format,
    weights: torch.Tensor | None,
    best: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Take the tried scales where their error is smaller."""
    error = _error(groups, tried, point, form, weights)
    wins = error < best
    if zeros is not None and point is not None:
        zeros = torch.where(wins, point, zeros)
    return torch.where(wins, error, best), torch.where(wins, tried, scales), zeros


def _error(
    groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format, weights: torch.Tensor | None
) -> torch.Tensor:
    """Squared error of each group, [rows, groups]."""
    difference = canonical.to_floats(canonical.to_integers(groups, scales, zeros, form), scales, zeros)
    difference -= groups
    difference *= difference
    if weights is not None:
        difference *= weights
    return ordered_sum(difference)


def ordered_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension by halving: additions in one fixed order, whatever the machine."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        if size % 2:
            folded[..., 0] += x[..., -1]
        x = folded
    return x[..., 0]
