"""Layers of which each rank keeps a share: gathered from all ranks when they are visited, and freed behind.

Every weight of a layer, in its planned format, is one run of bytes; rank k keeps the k-th part of it. The gathered
layer is the whole one bit for bit, so losses are those of resident weights. FSDP2 cannot hold quantised weights
(``aten.split`` on them), and gathers for each call where this gathers once for all windows of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from eval_kernel.budget import Budget
from eval_kernel.errors import LayoutUnsupported
from eval_kernel.parallel.layers import Layers, Ready
from eval_kernel.parallel.ranks import Ranks
from eval_kernel.parallel.streaming import Streaming
from eval_kernel.precision import loading
from eval_kernel.precision.canonical import Quantised, shapes
from eval_kernel.precision.formats import DTYPE_NAMES, FORMATS
from eval_kernel.precision.plan import TensorPlan, Weight
from eval_kernel.precision.source import Origin

#: Tensors of a run of bytes begin at multiples of this.
ALIGNMENT = 64
#: torch 2.13 gave the operation a new name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where one tensor lies in its layer's run of bytes; ``part`` names it within a quantised weight."""

    name: str
    part: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(self.dtype.itemsize) * math.prod(self.shape)


class ShardedLayers(Layers):
    """Layers whose bytes lie on all ranks of ``group``. All of them visit the layers in the same order."""

    def __init__(
        self, found: loading.Ingredients, device: torch.device, ready: Ready, rank: int, degree: int, group: Any
    ) -> None:
        """Read this rank's share of every layer. Raises as ``Layers`` does."""
        self._group, self._degree = group, degree
        self._floats = _Gathered(found.source)
        self._shares: dict[int, torch.Tensor] = {}
        self._pieces: dict[int, list[_Piece]] = {}
        super().__init__(replace(found, source=self._floats), device, 1.0, ready)
        for number in range(len(self)):
            pieces, size = _run(self._inside.get(number, []), found)
            self._pieces[number] = pieces
            share = -(-size // (degree * ALIGNMENT)) * ALIGNMENT
            self._shares[number] = _share(pieces, found, share * rank, share).to(device)

    @property
    def share_bytes(self) -> int:
        """Bytes of layers that this rank keeps."""
        return sum(share.numel() for share in self._shares.values())

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        """Gather a layer, for as long as it is put together."""
        share = self._shares[number]
        whole = torch.empty(share.numel() * self._degree, dtype=torch.uint8, device=share.device)
        _gather(whole, share, group=self._group)
        quantised: dict[str, dict[str, torch.Tensor]] = {}
        plans = {t.name: t for t in self._inside[number]}
        for piece in self._pieces[number]:
            view = whole[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(piece.shape)
            if piece.part:
                quantised.setdefault(piece.name, {})[piece.part] = view
            else:
                self._floats.present[piece.name] = view
        known = self._weights
        gathered = {
            name: Quantised(FORMATS[plans[name].format], plans[name].rows, plans[name].columns, **parts)
            for name, parts in quantised.items()
        }
        self._weights = gathered
        try:
            yield
        finally:
            self._weights = known
            self._floats.present.clear()


class _Gathered:
    """A source of the floats that were just gathered; the others come from the files."""

    def __init__(self, source: Origin) -> None:
        self.module = source.module
        self.present: dict[str, torch.Tensor] = {}
        self._source = source

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``Origin``. The layer owns what it gets: the gathered bytes go with it."""
        found = self.present.get(name)
        return self._source.floats(name, dtype, device) if found is None else found.to(device=device, dtype=dtype)

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See ``Origin``."""
        return self._source.rows(weight, chunks)


def _run(tensors: list[TensorPlan], found: loading.Ingredients) -> tuple[list[_Piece], int]:
    """Lay out a layer's tensors one after the other; return them and the length in bytes."""
    pieces: list[_Piece] = []
    at = 0

    def add(name: str, part: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        nonlocal at
        pieces.append(_Piece(name, part, at, dtype, shape))
        at += -(-pieces[-1].nbytes // ALIGNMENT) * ALIGNMENT

    for t in tensors:
        if t.quantised:
            for part, (dtype, shape) in shapes(FORMATS[t.format], t.rows, t.columns).items():
                add(t.name, part, dtype, shape)
        else:
            dtype = getattr(torch, DTYPE_NAMES[t.format])
            add(t.name, "", dtype, tuple(found.source.floats(t.name, dtype, torch.device("cpu")).shape))
    return pieces, at


def _share(pieces: list[_Piece], found: loading.Ingredients, start: int, size: int) -> torch.Tensor:
    """The bytes ``start`` to ``start + size - 1`` of a layer's run."""
    out = torch.zeros(size, dtype=torch.uint8)
    weights: Mapping[str, Quantised] = found.pack.weights
    for piece in pieces:
        first, end = max(piece.start, start), min(piece.start + piece.nbytes, start + size)
        if first >= end:
            continue
        if piece.part:
            values = weights[piece.name].tensors()[piece.part]
        else:
            values = found.source.floats(piece.name, piece.dtype, torch.device("cpu"))
        flat = values.contiguous().view(-1).view(torch.uint8)
        out[first - start : end - start] = flat[first - piece.start : end - piece.start]
    return out


class ShardedScoring(Streaming):
    """Scores with sharded layers: every rank visits them as often as any other, whatever rows it has."""

    def bind(self, ranks: Ranks) -> None:
        """Have the ranks agree before each shard; all ranks of the group take part."""
        self._ranks = ranks
        if not self._model.split:
            raise LayoutUnsupported(
                "parallel.dp_shard: the seam between this model's layers and its head is unknown, so its layers are "
                "fetched for each batch and ranks would get out of step; use dp_replicate"
            )

    def score(self, rows: Any, budget: Budget, beat: Any, extra: Any) -> Any:
        """As ``scoring.score``."""
        single = any(extra is None and self._goes_alone(row) for row in rows)
        other = any(extra is not None or not self._goes_alone(row) for row in rows)
        all_single, all_other = self._ranks.largest([int(single), int(other)])
        # The visits of single rows come first, then those of batches; who has no such rows keeps the others company.
        if all_single and not single:
            self._idle()
        mine = super().score(rows, budget, beat, extra) if rows else []
        if all_other and not other:
            self._idle()
        return mine

    def _idle(self) -> None:
        with torch.inference_mode():
            for _, layer in self._layers.visits():
                del layer
