"""Tensor parallelism by hand on plain tensors: each rank holds its heads and columns, quantised or not, and adds up.

Weights are cut in their canonical form and only then packed for a kernel, so every format works that can be cut:
outputs (q, k, v, gate, up) at heads and at whole rows, inputs (o, down) at whole groups of scales. Attention whose
heads the degree does not divide is computed whole by every rank. Losses come from a head that is cut by vocabulary;
logits are never gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from eval_kernel import kernels, scoring
from eval_kernel.budget import Budget
from eval_kernel.errors import LayoutUnsupported
from eval_kernel.head import Head, Shape
from eval_kernel.model import Model
from eval_kernel.parallel.dims import divisors
from eval_kernel.precision import canonical, loading
from eval_kernel.precision.accelerate import accelerate
from eval_kernel.precision.assembly import Assembly
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.plan import PrecisionPlan, Weight
from eval_kernel.precision.source import Origin

#: Modules cut by outputs, and by inputs, of attention and of the multi-layer perceptron.
ATTENTION = ({"q_proj", "k_proj", "v_proj"}, {"o_proj"})
MLP = ({"gate_proj", "up_proj"}, {"down_proj"})
#: Parts of these blocks that are the same on every rank.
WHOLE = {"q_norm", "k_norm", "act_fn"}
#: Losses of so many positions are computed together.
POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a matrix [outputs, inputs] a rank holds: along ``dim``, from ``start`` to ``end``."""

    dim: int
    start: int
    end: int


def cuts(module: Any, plan: PrecisionPlan, rank: int, degree: int) -> tuple[dict[str, Cut], bool]:
    """Return the cut of each module that a rank holds a part of, and whether attention is among them.

    Raises ``LayoutUnsupported`` for modules of unknown kinds, and for a degree that divides nothing.
    """
    config = module.config.get_text_config()
    heads = int(config.num_attention_heads)
    shared = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = int(getattr(config, "intermediate_size", 0) or 0)
    groups = _groups(plan)
    units = {"down_proj": inner // groups.get("down_proj", 1)}
    by_heads = heads % degree == 0 and shared % degree == 0 and _whole_groups(plan, "o_proj", degree)
    by_columns = inner % degree == 0 and units["down_proj"] % degree == 0
    if not by_columns:
        possible = ", ".join(str(d) for d in divisors(units["down_proj"]) if d <= 64)
        raise LayoutUnsupported(
            f"parallel.tp is {degree}, but this model's inner size {inner} cannot be cut into {degree} parts of whole "
            f"columns and scales; possible: {possible}"
        )
    blocks = [MLP, ATTENTION] if by_heads else [MLP]
    found: dict[str, Cut] = {}
    known = {name for block in blocks for part in block for name in part}
    for name, layer in module.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf not in known:
            continue
        dim = 0 if any(leaf in block[0] for block in blocks) else 1
        size = int(layer.out_features if dim == 0 else layer.in_features)
        found[name] = Cut(dim, size * rank // degree, size * (rank + 1) // degree)
    _check_known(module)
    return found, by_heads


def _check_known(module: Any) -> None:
    for name, block in module.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf not in ("mlp", "self_attn"):
            continue
        outputs, inputs = MLP if leaf == "mlp" else ATTENTION
        children = {child for child, _ in block.named_children()}
        if children - WHOLE != outputs | inputs:
            raise LayoutUnsupported(
                f"parallel.tp: {name} of this model has the parts {', '.join(sorted(children))}, which cannot be cut; "
                "use dp_shard"
            )


def _groups(plan: PrecisionPlan) -> dict[str, int]:
    """The largest group of scales of each kind of module."""
    found: dict[str, int] = {}
    for t in plan.tensors:
        leaf = t.module.rpartition(".")[2]
        group = FORMATS[t.format].group or 1
        found[leaf] = max(found.get(leaf, 1), group)
    return found


def _whole_groups(plan: PrecisionPlan, leaf: str, degree: int) -> bool:
    for t in plan.tensors:
        if t.module.rpartition(".")[2] == leaf and t.kind != "vector":
            group = FORMATS[t.format].group or 1
            if t.columns % (group * degree):
                return False
    return True


def part_of(weight: Quantised, cut: Cut) -> Quantised:
    """Return a rank's part of a quantised weight; the values are those of the whole."""
    groups = weight.scales.shape[1]
    if cut.dim == 0:
        if weight.zeros is None or (cut.start * groups % 2 == 0):
            return weight.row_range(cut.start, cut.end)
        return _with_zeros(weight, slice(cut.start, cut.end), slice(None), cut.end - cut.start, weight.columns)
    per_byte = 2 if weight.format.bits == 4 else 1
    values = weight.values[:, cut.start // per_byte : cut.end // per_byte].contiguous()
    width = weight.columns // groups
    columns = slice(None) if groups == 1 else slice(cut.start // width, cut.end // width)
    made = _with_zeros(weight, slice(None), columns, weight.rows, cut.end - cut.start)
    return replace(made, values=values)


def _with_zeros(weight: Quantised, rows: slice, columns: slice, height: int, width: int) -> Quantised:
    """Cut scales and zeros; the zeros are packed anew."""
    zeros = canonical._zeros(weight)
    packed = None
    if zeros is not None:
        flat = zeros[rows, columns].flatten()
        if len(flat) % 2:
            flat = torch.cat([flat, flat.new_zeros(1)])
        packed = flat[0::2] | (flat[1::2] << 4)
    scales = weight.scales[rows, columns].contiguous()
    return Quantised(weight.format, height, width, weight.values[rows], scales, packed)


class _Parts:
    """A source that gives a rank's part of what another source has."""

    def __init__(self, source: Origin, cut: dict[str, Cut], rank: int) -> None:
        self.module = source.module
        self._source, self._cuts, self._rank = source, cut, rank

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``Origin``."""
        module, _, attribute = name.rpartition(".")
        cut = self._cuts.get(module)
        if cut is None:
            return self._source.floats(name, dtype, device)
        whole = self._source.floats(name, dtype, torch.device("cpu"))
        if attribute == "bias":
            # What the ranks' products are added up to gets its bias once.
            part = whole[cut.start : cut.end] if cut.dim == 0 else whole if self._rank == 0 else whole * 0
        else:
            part = whole[cut.start : cut.end] if cut.dim == 0 else whole[:, cut.start : cut.end]
        return part.to(device).clone(memory_format=torch.contiguous_format)

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See ``Origin``."""
        return self._source.rows(weight, chunks)


class TensorParallel:
    """A model of which this rank holds a part. All ranks of ``group`` score the same rows in the same batches."""

    def __init__(
        self, found: loading.Ingredients, device: torch.device, rank: int, degree: int, group: Any, shape: Shape
    ) -> None:
        """Load this rank's part. Raises ``LayoutUnsupported`` for what cannot be cut so."""
        if found.skeleton.tensors is None:
            raise LayoutUnsupported(
                "parallel.tp: transformers has to convert this checkpoint as a whole; save it once with transformers' "
                "save_pretrained, or use dp_replicate"
            )
        module = found.source.module
        cut, self.by_heads = cuts(module, found.plan, rank, degree)
        self._group, self.plan, self.device, self._shape = group, found.plan, device, shape
        source = _Parts(found.source, cut, rank)
        weights = {
            t.name: part_of(found.pack.weights[t.name], cut[t.module])
            if t.module in cut
            else found.pack.weights[t.name]
            for t in found.plan.tensors
            if t.quantised
        }
        filled = Assembly(source, found.plan, found.skeleton.outline, device).all(weights)
        self.refused = accelerate(filled, found.plan.kernels, getattr(torch, found.plan.compute))
        self.module = filled
        for name, piece in cut.items():
            if piece.dim == 1:
                filled.get_submodule(name).register_forward_hook(self._added)
        self._head = _head_part(filled, shape, rank, degree)

    def _added(self, _module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        out = out.contiguous()
        dist.all_reduce(out, group=self._group)
        return out

    def as_model(self, kernel: str) -> Model:
        """Return the model that scores this way."""
        compute = getattr(torch, self.plan.compute)
        vocabulary = int(self.module.config.get_text_config().vocab_size)
        return Model(
            self.device, compute, vocabulary, True, self._hidden, _absent, _absent, None, kernel, scorer=self.score
        )

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def score(self, rows: list[scoring.Row], budget: Budget, beat: Any, extra: Any) -> list[scoring.Losses]:
        """As ``scoring.score``. Raises ``LayoutUnsupported`` for sums that need whole logits."""
        if extra is not None:
            raise LayoutUnsupported(
                "metrics: calibration needs all logits of a token in one place, which parallel.tp never has; "
                "use dp_replicate or dp_shard"
            )
        results: dict[int, scoring.Losses] = {}
        for members in scoring.by_shape(rows):
            size = budget.rows(len(rows[members[0]].inputs))
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                with torch.inference_mode():
                    steps = self._batch([rows[i] for i in batch])
                for index, losses in zip(batch, steps, strict=True):
                    results[index] = losses
                beat()
        return [results[i] for i in range(len(rows))]

    def _batch(self, rows: list[scoring.Row]) -> list[scoring.Losses]:
        ids, targets = scoring.tensors(self, rows)  # type: ignore[arg-type]  # of a model it wants the device alone
        count, scored = targets.shape
        states = self._hidden(ids)[:count, -scored:].flatten(0, 1)
        wanted = targets.flatten()
        losses = [
            self._losses(states[at : at + POSITIONS], wanted[at : at + POSITIONS])
            for at in range(0, len(wanted), POSITIONS)
        ]
        steps, finite, nan = scoring.on_grid(torch.cat(losses).reshape(count, scored))
        return [scoring.Losses(steps[k], finite[k], nan[k]) for k in range(count)]

    def _losses(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Losses from this rank's logits and two numbers per position from every other rank."""
        tops, sums, picked = self._head.parts(states, targets)
        scale = torch.logsumexp(tops.double() + sums.double().log(), 0)
        mine = torch.stack([scale, picked.double()])
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, mine, group=self._group)
        every = torch.stack(found)
        target = every[0, 1]
        for other in every[1:, 1]:
            target = torch.where(torch.isnan(target), other, target)
        return (torch.logsumexp(every[:, 0], 0) - target).clamp_min(0.0)


def _absent(*_: Any) -> torch.Tensor:
    raise AssertionError("a rank of a tensor-parallel model has no whole logits")


class _Tiles(torch.nn.Module):
    """Some tiles of an output layer."""

    def __init__(self, tiles: list[torch.nn.Module]) -> None:
        super().__init__()
        self._tiles = tiles

    def tiles(self, outputs: int) -> list[torch.nn.Module]:
        """The tiles; they are cut already."""
        return self._tiles


def _head_part(module: Any, shape: Shape, rank: int, degree: int) -> Head:
    """The part of the output layer that a rank multiplies: whole tiles where there are enough of them."""
    layer = module.get_output_embeddings()
    size = int(layer.out_features)
    if isinstance(layer, torch.nn.Linear):
        unit = kernels.TILE if size >= kernels.TILE * degree else 1
        start, end = (min(size, -(-size // unit) * k // degree * unit) for k in (rank, rank + 1))
        part = torch.nn.Linear(1, 1, bias=False, device="meta")
        part.out_features, part.in_features = end - start, layer.in_features
        tied = layer.weight is module.get_input_embeddings().weight
        weight = layer.weight[start:end] if tied else layer.weight[start:end].clone()
        part.weight = torch.nn.Parameter(weight, requires_grad=False)
        part.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias[start:end], requires_grad=False)
        if not tied:
            module.set_output_embeddings(part)  # the rest is another rank's
        return Head(part, shape, start)
    tiles = kernels.tiles_of(layer)
    if len(tiles) < degree:
        raise LayoutUnsupported(
            f"parallel.tp: the head of {size} tokens in this format cannot be cut into {degree} parts; "
            "keep the head in a float format, or use dp_replicate"
        )
    start, end = len(tiles) * rank // degree, len(tiles) * (rank + 1) // degree
    return Head(_Tiles(tiles[start:end]), shape, start * kernels.TILE)
