"""All accepted partials of a job put together: integer sums per statistical cluster. Divides nothing.

A cluster is a document: its rows from several shards are added up. Where a shard reports its whole documents
as one lump, that shard is the cluster. Integer sums do not depend on order, so neither does anything here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval_kernel.partial import NonFinite, Partial, RowSums

#: Places of non-finite losses that a tally names; beyond these only the count grows.
MAX_TALLY_PLACES = 64


@dataclass(frozen=True, slots=True)
class Cluster:
    """Sums over one document, or over the lump of whole documents of one shard."""

    steps: int  # loss sum in grid steps of 2^-30 nat
    tokens: int
    bytes: int
    words: int
    documents: int


class Tally:
    """The exact sum of the partials added so far: the same ones, in whatever order, give equal tallies."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.steps = 0  #: loss sum over the finite losses, in grid steps of 2^-30 nat
        self.tokens = 0  #: scored tokens, those with a non-finite loss included
        self.bytes = 0
        self.words = 0
        self.nonfinite = 0  #: tokens whose loss was NaN or infinite; in no sum
        self.extra: dict[str, int] = {}  #: further sums that the job asked for
        self.places: list[NonFinite] = []  #: where, in order of document and token; the first ones only
        self.by_shard: dict[int, tuple[int, int, int]] = {}  #: steps, tokens and non-finite ones of each shard
        # Keys: (0, document) for a document, (1, shard) for a lump.
        self._clusters: dict[tuple[int, int], Cluster] = {}
        self._spoiled: set[tuple[int, int]] = set()

    @property
    def shards(self) -> int:
        """How many shards have been added."""
        return len(self.by_shard)

    @property
    def spoiled(self) -> Sequence[Cluster]:
        """The clusters that have, or may have, a token without a finite loss: their sums are too small.

        Where a partial names every place, these are the documents named; else, all of its clusters.
        """
        return [self._clusters[key] for key in sorted(self._spoiled)]

    @property
    def sound(self) -> Sequence[Cluster]:
        """The clusters that are not spoiled: what ratios may be computed from."""
        return [cluster for key, cluster in sorted(self._clusters.items()) if key not in self._spoiled]

    @property
    def documents(self) -> int:
        """Documents with a scored token so far; one that is spread over several shards counts once."""
        return sum(c.documents for c in self._clusters.values())

    def has(self, shard: int) -> bool:
        """Whether the shard of this index has been added."""
        return shard in self.by_shard

    def add(self, partial: Partial) -> None:
        """Add a shard's partial.

        Raises ``ValueError``, with nothing changed, for a shard that is already in and for rows that do not
        add up to the partial's totals.
        """
        if partial.shard in self.by_shard:
            raise ValueError(f"shard {partial.shard} is in the tally already")
        for name in ("steps", "tokens", "bytes", "words"):
            total, rows = getattr(partial, name), sum(getattr(row, name) for row in partial.rows)
            if total != rows:
                raise ValueError(f"shard {partial.shard}: its rows' {name} add up to {rows}, its total is {total}")
        self.by_shard[partial.shard] = (partial.steps, partial.tokens, partial.nonfinite)
        self.steps += partial.steps
        self.tokens += partial.tokens
        self.bytes += partial.bytes
        self.words += partial.words
        self.nonfinite += partial.nonfinite
        for name, value in partial.extra:
            self.extra[name] = self.extra.get(name, 0) + value
        # The smallest of a union do not depend on the order of the unions, the first that arrived would.
        places = sorted([*self.places, *partial.places], key=lambda p: (p.document, p.token, p.value))
        self.places = places[:MAX_TALLY_PLACES]
        named = {place.document for place in partial.places}
        all_named = partial.nonfinite == len(partial.places)
        for row in partial.rows:
            self._put(partial.shard, row)
            if partial.nonfinite and (not all_named or row.document is None or row.document in named):
                self._spoiled.add(_key(partial.shard, row))

    def document(self, index: int) -> Cluster | None:
        """Return a document's sums so far; None where it has none, or is in a lump."""
        return self._clusters.get((0, index))

    def clusters(self) -> Sequence[Cluster]:
        """Return the clusters: documents in order of their index, then lumps in order of their shard."""
        return [cluster for _, cluster in sorted(self._clusters.items())]

    def digest(self) -> str:
        """Return ``sha256:<hex>`` over totals, places and clusters: equal digests, bit-identical results."""
        content: dict[str, Any] = {
            "totals": [self.steps, self.tokens, self.bytes, self.words, self.nonfinite],
            "spoiled": sorted(self._spoiled),
            "places": [[p.document, p.token, p.value] for p in self.places],
            "clusters": [
                [*key, c.steps, c.tokens, c.bytes, c.words, c.documents] for key, c in sorted(self._clusters.items())
            ],
        }
        if self.extra:
            content["extra"] = self.extra
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same shards and the same sums."""
        if not isinstance(other, Tally):
            return NotImplemented
        return vars(self) == vars(other)

    def __repr__(self) -> str:
        """Return the totals, for a person."""
        documents = f"{self.shards} shards, {self.documents} documents"
        return f"Tally({documents}, {self.tokens} tokens, {self.steps} steps, {self.nonfinite} non-finite)"

    def _put(self, shard: int, row: RowSums) -> None:
        """Add a row to its cluster."""
        key = _key(shard, row)
        old = self._clusters.get(key)
        if old is None:
            self._clusters[key] = Cluster(row.steps, row.tokens, row.bytes, row.words, row.documents)
            return
        # Parts of one document are one document; two lumps of one shard would be two sets of documents.
        documents = old.documents + row.documents if row.document is None else old.documents
        self._clusters[key] = Cluster(
            old.steps + row.steps,
            old.tokens + row.tokens,
            old.bytes + row.bytes,
            old.words + row.words,
            documents,
        )


def _key(shard: int, row: RowSums) -> tuple[int, int]:
    """The key of a row's cluster: a document sorts before every lump."""
    return (1, shard) if row.document is None else (0, row.document)
