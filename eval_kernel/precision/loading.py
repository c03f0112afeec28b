"""A model in the precision of a plan: tensor by tensor from mapped files into modules that began without weights.

Peak memory is that of the finished model and one piece of one tensor. A checkpoint that transformers has to convert is
loaded whole first; ``Loaded.streamed`` says so. Scoring and the seam of the head are ``model``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eval_kernel.checkpoint import Checkpoint
from eval_kernel.errors import OutOfMemory, reason
from eval_kernel.kernels import Int8Linear
from eval_kernel.precision import calibrated, canonical, packs, search
from eval_kernel.precision.accelerate import PackedInt4Linear, accelerate
from eval_kernel.precision.assembly import Assembly, by_tensor
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import FORMATS, SHORT_NAMES
from eval_kernel.precision.modules import QuantisedEmbedding, QuantisedLinear
from eval_kernel.precision.plan import Outline, PrecisionPlan, TensorPlan, resolve
from eval_kernel.precision.policy import PrecisionSpec
from eval_kernel.precision.skeleton import Skeleton, build
from eval_kernel.precision.source import Origin, origin

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module in a plan's precision. ``digest`` names the quantised weights; it is empty where there are none.

    ``used`` says what each class of weights is really held and multiplied in.
    """

    module: Any
    digest: str
    streamed: bool
    used: dict[str, str]


@dataclass(frozen=True, slots=True)
class Ingredients:
    """A model that is still to be put together: its empty modules, and where their weights come from."""

    skeleton: Skeleton
    source: Origin
    plan: PrecisionPlan
    pack: packs.Pack


def load(
    checkpoint: Checkpoint,
    weights_digest: str,
    plan: PrecisionPlan,
    device: torch.device,
    cache: Path,
    note: Note,
    rows: torch.Tensor | None = None,
) -> Loaded:
    """Load a model. ``rows``: token ids [rows, length] to calibrate on, for a plan that says so.

    Raises ``ModelCorrupt``, ``ModelNotFinite``, ``ModelUnsupported``, ``PrecisionUnsupported`` and ``OutOfMemory``.
    """
    with memory(checkpoint, device):
        found = ingredients(checkpoint, weights_digest, plan, cache, note, rows)
        module = Assembly(found.source, plan, found.skeleton.outline, device).all(found.pack.weights)
        refused = accelerate(module, plan.kernels, getattr(torch, plan.compute))
    return Loaded(module, found.pack.digest, found.skeleton.tensors is not None, used(module, plan, refused))


def ingredients(
    checkpoint: Checkpoint,
    weights_digest: str,
    plan: PrecisionPlan,
    cache: Path,
    note: Note,
    rows: torch.Tensor | None = None,
) -> Ingredients:
    """Return what a model is put together from; its weights are mapped, not loaded. Raises as ``load`` does."""
    skeleton = build(checkpoint, getattr(torch, plan.compute))
    source = origin(checkpoint, skeleton, getattr(torch, plan.compute))
    pack = packs.Pack({}, "")
    if plan.quantised:
        made = _maker(plan, skeleton.outline, source)
        if plan.quantiser == "gptq":
            made = _calibrating(checkpoint, plan, rows, note)
        pack = packs.obtain(cache, weights_digest, plan, made, note)
    return Ingredients(skeleton, source, plan, pack)


def load_floats(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """Load a model with every weight in one float dtype (torch's name). Raises as ``load`` does."""
    with memory(checkpoint, device):
        skeleton = build(checkpoint, getattr(torch, dtype))
        plan = resolve(PrecisionSpec(default=SHORT_NAMES[dtype]), skeleton.outline)
        source = origin(checkpoint, skeleton, getattr(torch, dtype))
        return Assembly(source, plan, skeleton.outline, device).all({})


@contextmanager
def memory(checkpoint: Checkpoint, device: torch.device) -> Iterator[None]:
    """Turn what libraries raise for want of memory into our own error."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(
            f"model {checkpoint.directory}: does not fit into the memory of {device} ({reason(error)})"
        ) from None


def _maker(plan: PrecisionPlan, outline: Outline, source: Origin) -> packs.Maker:
    weights = by_tensor(plan, outline)

    def make() -> Iterable[tuple[str, Quantised]]:
        for t in plan.tensors:
            if t.quantised:
                form = FORMATS[t.format]
                result = canonical.empty(t.format, t.rows, t.columns)
                chunks = search.row_chunks(form, t.rows, t.columns)
                with search.one_thread():
                    for start, end, floats in source.rows(weights[t.name], chunks):
                        search.fill(result, start, end, floats, plan.quantiser)
                yield t.name, result

    return make


def _calibrating(checkpoint: Checkpoint, plan: PrecisionPlan, rows: torch.Tensor | None, note: Note) -> packs.Maker:
    if rows is None:
        raise ValueError("a plan with the quantiser gptq needs rows to calibrate on")

    def make() -> Iterable[tuple[str, Quantised]]:
        # Modules of their own, in float32 whatever the job computes in: equal packs for every compute dtype.
        wide = replace(plan, compute="float32")
        skeleton = build(checkpoint, torch.float32)
        source = origin(checkpoint, skeleton, torch.float32)
        return calibrated.quantised(wide, skeleton.outline, source, rows, note)

    return make


def used(module: Any, plan: PrecisionPlan, refused: dict[str, str]) -> dict[str, str]:
    """What the weights of each class are really held and multiplied in, in words with counts, read off the modules.

    ``refused`` tells by format why a kernel was not used.
    """
    weights = [t for t in plan.tensors if t.kind != "vector"]
    return counted([(t.role, described(module.get_submodule(t.module), t, plan, refused)) for t in weights])


def counted(found: list[tuple[str, str]]) -> dict[str, str]:
    """Put together what the weights of each class are held in. What a node tells of itself is bounded where it ends."""
    counts: dict[str, Counter[str]] = {}
    for role, how in found:
        counts.setdefault(role, Counter())[how] += 1
    return {role: "; ".join(f"{n} x {how}" for how, n in sorted(found.items()))[:400] for role, found in counts.items()}


def described(layer: Any, t: TensorPlan, plan: PrecisionPlan, refused: dict[str, str]) -> str:
    """What one layer's weight is held and multiplied in."""
    if isinstance(layer, QuantisedLinear):
        form = layer.quantised.format.name
        why = f"; no fast kernel: {refused[form]}" if form in refused else ""
        return f"{form} weights, {plan.compute} products (dequantised{why})"
    if isinstance(layer, Int8Linear):
        return f"{t.format} weights, int8 products ({layer.route})"
    if isinstance(layer, PackedInt4Linear):
        return f"{layer.format.name} weights, {plan.compute} products ({layer.kernel})"
    if isinstance(layer, QuantisedEmbedding):
        return f"{layer.quantised.format.name} table"
    held = str(layer.get_parameter(t.name.rpartition(".")[2]).dtype).removeprefix("torch.")
    return held if held == plan.compute else f"{held} weights, {_wider(held, plan.compute)} products"


def _wider(a: str, b: str) -> str:
    return str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.")
