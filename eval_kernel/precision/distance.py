"""How far apart two precisions of one model are: their distributions compared token by token, on the same windows.

Beside the paired change of loss that ``compare`` takes from two reports stand what needs both models at once: the
Kullback-Leibler divergence from the reference, and how often the most likely token is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.intervals import Interval, ratio_interval
from eval_kernel.precision.compare import Comparison, Pair, of_pairs

#: Positions whose distributions are held at one time, twice: 128 x 49,152 float32 are 25 MB each.
CHUNK = 128

#: Float32 logits [positions, vocabulary] of scored tokens, and these tokens.
Pieces = Iterable[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Sums:
    """What some tokens yield: loss sums and divergence in grid steps, and agreements of the most likely token."""

    tokens: int
    reference: int
    other: int
    divergence: int
    agreements: int

    def __add__(self, more: Sums) -> Sums:
        """Add up."""
        return Sums(*(getattr(self, name) + getattr(more, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Distance:
    """Two precisions of a model: paired change of loss, divergence in nats per token, share of agreement."""

    change: Comparison
    divergence: Interval
    agreement: Interval

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**self.change.to_json(), "divergence": asdict(self.divergence), "agreement": asdict(self.agreement)}


def of_pieces(reference: Pieces, other: Pieces) -> Sums:
    """Compare a shard's logits, piece by piece."""
    total = Sums(0, 0, 0, 0, 0)
    for (p, targets), (q, _) in zip(reference, other, strict=True):
        total += of_logits(p, q, targets)
    return total


def of_logits(p: torch.Tensor, q: torch.Tensor, targets: torch.Tensor) -> Sums:
    """Compare float32 logits [positions, vocabulary]. Each token's values are rounded once, as losses are."""
    p, q = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
    index = targets.unsqueeze(-1)
    return Sums(
        tokens=len(targets),
        reference=steps(-p.gather(-1, index)),
        other=steps(-q.gather(-1, index)),
        divergence=steps(divergence(p, q)),
        agreements=agreements(p, q),
    )


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of q from p in nats, position by position, of log-probabilities."""
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def agreements(p: torch.Tensor, q: torch.Tensor) -> int:
    """At how many positions the two have the same most likely token."""
    return int((p.argmax(-1) == q.argmax(-1)).sum())


def steps(values: torch.Tensor) -> int:
    """Sum of values in grid steps, each rounded once: sums do not depend on how tokens are spread over nodes."""
    return int(torch.round(values.double() * STEPS_PER_NAT).to(torch.int64).sum())


def distance(shards: Iterable[Sums]) -> Distance:
    """What the shards' sums come to, with intervals over shards. Raises ``PlanRefused`` where nothing was scored."""
    found = list(shards)
    return Distance(
        of_pairs([Pair(s.reference, s.other, s.tokens) for s in found], "shard"),
        ratio_interval([(s.divergence, s.tokens) for s in found], STEPS_PER_NAT),
        ratio_interval([(s.agreements, s.tokens) for s in found]),
    )


def lines(found: Distance) -> Iterator[str]:
    """The distance for people."""

    def ends(low: float | None, high: float | None, form: str) -> str:
        return "" if low is None or high is None else f", 95 %: {low:{form}} .. {high:{form}}"

    c, d, a = found.change, found.divergence, found.agreement
    yield (
        f"perplexity   {c.reference_perplexity:.4f} -> {c.perplexity:.4f}, ratio {1 + c.change:.6f} "
        f"({c.change:+.3%}{ends(c.change_low, c.change_high, '+.3%')})"
    )
    yield f"difference   {c.delta:+.6f} nats per token{ends(c.low, c.high, '+.6f')}"
    yield f"divergence   {d.value:.6f} nats per token{ends(d.low, d.high, '.6f')}"
    yield f"agreement    {a.value:.3%} of the most likely tokens{ends(a.low, a.high, '.3%')}"
    yield f"paired over  {c.clusters:,} shards, {c.tokens:,} tokens"
