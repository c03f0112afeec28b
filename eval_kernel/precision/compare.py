"""Two precisions of one model on the same tokens: the paired difference of their losses, with its interval.

Pairing takes out what both find hard, which is most of the spread: the difference has an error many times smaller
than either loss. Pure arithmetic on partials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from eval_kernel.errors import PlanRefused
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.intervals import ratio_interval
from eval_kernel.partial import Partial
from eval_kernel.plan import Manifest

#: Fields of a manifest that may differ between two precisions of one model.
PRECISION_FIELDS = ("dtype", "precision_plan")
#: Fields that must be equal in two reports.
SAME_FIELDS = (
    "weights_digest",
    "data_digest",
    "tokenizer_digest",
    "policy",
    "context",
    "stride",
    "join",
    "bos",
    "scored_tokens",
    "shards",
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One cluster scored twice: loss sums in grid steps, and the scored tokens."""

    reference: int
    other: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the other precision costs: ``delta`` in nats per token, other minus reference, with its 95 % interval.

    ``change`` is the relative change of perplexity, exp(delta) - 1. There is no interval with fewer than two clusters.
    """

    tokens: int
    clusters: int
    unit: str  # what a cluster is: "document" or "shard"
    reference_perplexity: float
    perplexity: float
    delta: float
    se: float | None
    low: float | None
    high: float | None
    change: float
    change_low: float | None
    change_high: float | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


def compare(reference: Iterable[Partial], other: Iterable[Partial], by: str = "auto") -> Comparison:
    """Compare two sets of partials of the same shards.

    ``by``: ``document``, ``shard``, or ``auto``: documents where there are more of them than shards. Raises
    ``PlanRefused`` where the two did not score the same tokens, or scored none.
    """
    a = {p.shard: p for p in reference}
    b = {p.shard: p for p in other}
    if set(a) != set(b):
        raise PlanRefused(
            f"the two have different shards: {len(a)} and {len(b)}; compare complete jobs of one manifest"
        )
    for shard, partial in sorted(a.items()):
        if partial.tokens != b[shard].tokens or partial.nonfinite or b[shard].nonfinite:
            raise PlanRefused(f"shard {shard}: the two did not score the same tokens with finite losses")
    shards = [Pair(a[s].steps, b[s].steps, a[s].tokens) for s in sorted(a)]
    documents = _documents(a, b)
    if by == "document" or (by == "auto" and len(documents) > len(shards)):
        return of_pairs(documents, "document")
    return of_pairs(shards, "shard")


def of_pairs(pairs: list[Pair], unit: str) -> Comparison:
    """Compare cluster by cluster. Raises ``PlanRefused`` where nothing was scored."""
    tokens = sum(p.tokens for p in pairs)
    if tokens == 0:
        raise PlanRefused("nothing was scored by both")
    found = ratio_interval([(p.other - p.reference, p.tokens) for p in pairs], STEPS_PER_NAT)
    assert found.value is not None
    low = high = None
    if found.high is not None:
        half = found.high - found.value  # the lower end is cut at zero for losses; a difference may be negative
        low, high = found.value - half, found.high
    nats = [sum(p.reference for p in pairs) / STEPS_PER_NAT, sum(p.other for p in pairs) / STEPS_PER_NAT]
    return Comparison(
        tokens=tokens,
        clusters=len(pairs),
        unit=unit,
        reference_perplexity=math.exp(nats[0] / tokens),
        perplexity=math.exp(nats[1] / tokens),
        delta=found.value,
        se=found.se,
        low=low,
        high=high,
        change=math.expm1(found.value),
        change_low=None if low is None else math.expm1(low),
        change_high=None if high is None else math.expm1(high),
    )


def compare_reports(reference: dict[str, Any], other: dict[str, Any]) -> Comparison:
    """Compare two complete reports shard by shard. Raises ``PlanRefused`` unless they differ in precision only."""
    for report in (reference, other):
        if not report.get("complete") or not report.get("shards"):
            raise PlanRefused(
                f"the report of job {report.get('job')} is incomplete or lists no shards; both jobs must have "
                "succeeded, with few enough shards to be listed"
            )
    ours, theirs = reference["provenance"], other["provenance"]
    for name in SAME_FIELDS:
        if ours[name] != theirs[name]:
            raise PlanRefused(
                f"{name} differs ({ours[name]} and {theirs[name]}): only precisions of one model on the same data are "
                "compared token by token"
            )
    a, b = ({row[0]: row[1:] for row in report["shards"]} for report in (reference, other))
    if set(a) != set(b) or any(a[k][1:] != b[k][1:] for k in a):
        raise PlanRefused("the two did not cut the same shards; submit both with the same window and shard keys")
    return of_pairs([Pair(a[k][0], b[k][0], a[k][1]) for k in sorted(a)], "shard")


def check_manifests(reference: Manifest, other: Manifest) -> None:
    """Raise ``PlanRefused`` unless the two differ in nothing but precision."""
    for name, value in reference.to_json().items():
        if name not in PRECISION_FIELDS and value != getattr(other, name):
            raise PlanRefused(
                f"{name} differs ({value} and {getattr(other, name)}): only precisions of one model on the same data "
                "are compared token by token"
            )


def _documents(a: dict[int, Partial], b: dict[int, Partial]) -> list[Pair]:
    """Rows of the two put together by document, or by shard where documents are lumped."""
    sums: dict[tuple[int, int], list[int]] = {}
    for column, partials in enumerate((a, b)):
        for shard, partial in partials.items():
            for row in partial.rows:
                key = (1, shard) if row.document is None else (0, row.document)
                cell = sums.setdefault(key, [0, 0, 0])
                cell[column] += row.steps
                if column == 0:
                    cell[2] += row.tokens
    return [Pair(*cell) for _, cell in sorted(sums.items()) if cell[2]]
