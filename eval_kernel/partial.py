"""What one shard yields: named sums and counts. Immutable, integers only; knows nothing of how it was computed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from eval_kernel.gridsum import to_nats

#: Places of non-finite losses that are named one by one; beyond these only the count grows.
MAX_PLACES = 16


@dataclass(frozen=True, slots=True)
class RowSums:
    """Sums over the scored tokens of one document's part in a shard, or of many whole documents lumped together.

    ``document`` is the document's index in the dataset, or ``None`` for the lump of a shard that holds more
    than ``plan.MAX_ROWS`` whole documents; ``documents`` is how many documents the row stands for.
    """

    document: int | None
    documents: int
    steps: int  # loss sum in grid steps of 2^-30 nat
    tokens: int
    bytes: int
    words: int


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where a token's loss was NaN or infinite: document index and the token's position in its document."""

    document: int
    token: int
    value: str  # "nan" or "inf"


@dataclass(frozen=True, slots=True)
class Partial:
    """The result of one shard. Two partials of one shard are equal when these fields are.

    ``tokens`` counts the scored tokens, the non-finite ones included (so that counts can be checked against
    the plan); ``steps`` sums the finite ones only; ``nonfinite`` says how many were left out of the sum.
    """

    shard: int
    steps: int
    tokens: int
    bytes: int
    words: int
    rows: tuple[RowSums, ...]
    nonfinite: int = 0
    places: tuple[NonFinite, ...] = ()
    extra: tuple[tuple[str, int], ...] = ()  # further sums that a job asked for, by name, in order of the names

    @property
    def nats(self) -> float:
        """The loss sum in nats (exact below 2^23)."""
        return to_nats(self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict that ``from_json`` turns back into an equal partial."""
        return {
            "shard": self.shard,
            "sums": [self.steps, self.tokens, self.bytes, self.words],
            "rows": [[r.document, r.documents, r.steps, r.tokens, r.bytes, r.words] for r in self.rows],
            "nonfinite": self.nonfinite,
            "places": [[p.document, p.token, p.value] for p in self.places],
            **({"extra": dict(self.extra)} if self.extra else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Partial:
        """Build a partial from ``to_json``'s dict."""
        steps, tokens, nbytes, words = data["sums"]
        return cls(
            shard=data["shard"],
            steps=steps,
            tokens=tokens,
            bytes=nbytes,
            words=words,
            rows=tuple(RowSums(*row) for row in data["rows"]),
            nonfinite=data["nonfinite"],
            places=tuple(NonFinite(*place) for place in data["places"]),
            extra=tuple(sorted(data.get("extra", {}).items())),
        )


@dataclass(frozen=True, slots=True)
class Execution:
    """How a partial was computed: facts for the report, no part of the partial's identity."""

    seconds: float = 0.0  # wall time of scoring, model loading excluded
    device: str = ""  # e.g. "cpu", "cuda:0 NVIDIA H100"
    dtype: str = ""  # compute dtype really used, e.g. "float32"
    threads: int = 0
    peak_bytes: int = 0  # peak device memory (CUDA) or resident set (CPU) of the worker
    software: dict[str, str] = field(default_factory=dict)  # library name -> version
    # class of weights -> format and kernel really used; "weights" -> digest of the quantised weights
    precision: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Share what is the same for thousands of shards: a coordinator keeps one of these for every one."""
        for name in ("device", "dtype"):
            object.__setattr__(self, name, sys.intern(getattr(self, name)))
        for name in ("software", "precision"):
            object.__setattr__(self, name, _shared(getattr(self, name)))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Execution:
        """Build from ``to_json``'s dict."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class ScoredShard:
    """A partial together with how it was computed."""

    partial: Partial
    execution: Execution


#: Equal dicts of executions, one of each kind; beyond this many kinds nothing more is shared.
_SHARED: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
_MAX_SHARED = 4096


def _shared(facts: dict[str, str]) -> dict[str, str]:
    """Return a dict equal to ``facts``, the same one for each equal call; nobody changes it."""
    key = tuple(facts.items())
    if len(_SHARED) >= _MAX_SHARED:
        return _SHARED.get(key, facts)
    return _SHARED.setdefault(key, facts)
