"""A model in the precision of a plan: tensor by tensor from mapped files into modules that began without weights.

Peak memory is that of the finished model and one piece of one tensor. A checkpoint that transformers has to convert is
loaded whole first; ``Loaded.streamed`` says so. Scoring and the seam of the head are ``model``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval_kernel.checkpoint import Checkpoint
from eval_kernel.errors import OutOfMemory, reason
from eval_kernel.kernels import Int8Linear
from eval_kernel.precision import canonical, packs, search
from eval_kernel.precision.accelerate import PackedInt4Linear, accelerate
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import DTYPE_NAMES, FORMATS, SHORT_NAMES
from eval_kernel.precision.modules import CastEmbedding, CastLinear, QuantisedEmbedding, QuantisedLinear
from eval_kernel.precision.plan import Outline, PrecisionPlan, Weight, resolve
from eval_kernel.precision.policy import PrecisionSpec
from eval_kernel.precision.skeleton import build
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


def load(
    checkpoint: Checkpoint, weights_digest: str, plan: PrecisionPlan, device: torch.device, cache: Path, note: Note
) -> Loaded:
    """Load a model. Raises ``ModelCorrupt``, ``ModelNotFinite``, ``ModelUnsupported`` and ``OutOfMemory``."""
    with _memory(checkpoint, device):
        skeleton = build(checkpoint, getattr(torch, plan.compute))
        source = origin(checkpoint, skeleton, getattr(torch, plan.compute))
        pack = packs.Pack({}, "")
        if plan.quantised:
            made = _maker(plan, skeleton.outline, source)
            pack = packs.obtain(cache, weights_digest, plan, made, note)
        module = _assemble(source, plan, skeleton.outline, pack, device)
        refused = accelerate(module, plan.kernels, getattr(torch, plan.compute))
    return Loaded(module, pack.digest, skeleton.tensors is not None, used(module, plan, refused))


def load_floats(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Any:
    """Load a model with every weight in one float dtype (torch's name). Raises as ``load`` does."""
    with _memory(checkpoint, device):
        skeleton = build(checkpoint, getattr(torch, dtype))
        plan = resolve(PrecisionSpec(default=SHORT_NAMES[dtype]), skeleton.outline)
        source = origin(checkpoint, skeleton, getattr(torch, dtype))
        return _assemble(source, plan, skeleton.outline, packs.Pack({}, ""), device)


@contextmanager
def _memory(checkpoint: Checkpoint, device: torch.device) -> Iterator[None]:
    """Turn what libraries raise for want of memory into our own error."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemory(
            f"model {checkpoint.directory}: does not fit into the memory of {device} ({reason(error)})"
        ) from None


def _maker(plan: PrecisionPlan, outline: Outline, source: Origin) -> packs.Maker:
    weights = _by_tensor(plan, outline)

    def make() -> Iterable[tuple[str, Quantised]]:
        for t in plan.tensors:
            if t.quantised:
                form = FORMATS[t.format]
                result = canonical.empty(t.format, t.rows, t.columns)
                chunks = search.row_chunks(form, t.rows, t.columns)
                for start, end, floats in source.rows(weights[t.name], chunks):
                    search.fill(result, start, end, floats, plan.quantiser)
                yield t.name, result

    return make


def _by_tensor(plan: PrecisionPlan, outline: Outline) -> dict[str, Weight]:
    """The checkpoint's weight of each planned tensor: an untied head comes from the embedding's table."""
    weights = {w.name: w for w in outline.weights}
    table = next((w for w in outline.weights if w.module == outline.embedding), None)
    return {t.name: found for t in plan.tensors if (found := weights.get(t.name, table)) is not None}


# ---------------------------------------------------------------- putting it together


def _assemble(source: Origin, plan: PrecisionPlan, outline: Outline, pack: packs.Pack, device: torch.device) -> Any:
    module, compute = source.module, getattr(torch, plan.compute)
    weights = _by_tensor(plan, outline)
    aliases = _aliases(module)
    if plan.untied:
        table = next(w.name for w in outline.weights if w.module == outline.embedding)
        aliases[table].remove(f"{outline.head}.weight")
    for name, stored in module.state_dict(keep_vars=True).items():
        if not isinstance(stored, torch.nn.Parameter):
            _set(module, name, source.floats(name, compute if stored.is_floating_point() else stored.dtype, device))
    # Vectors first: a layer that is replaced takes its bias along.
    for t in sorted(plan.tensors, key=lambda t: t.kind != "vector"):
        weight, places = weights[t.name], aliases.get(t.name, [t.name])
        if t.quantised:
            packed = pack.weights[t.name].to(device)
            for place in places:
                _replace(module, place, partial(_quantised_layer, packed, compute))
            continue
        dtype = getattr(torch, DTYPE_NAMES[t.format])
        values = source.floats(weight.name, dtype, device)
        if dtype == compute:
            parameter = torch.nn.Parameter(values, requires_grad=False)
            for place in places:
                _set(module, place, parameter)
        else:
            values = values.t().contiguous() if weight.transposed else values
            for place in places:
                _replace(module, place, partial(_cast_layer, values, compute))
    return module.to(device)


def _aliases(module: Any) -> dict[str, list[str]]:
    """Every name of each parameter, by its first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {known[0]: known for known in names.values()}


def _set(module: Any, name: str, value: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    place = module.get_submodule(owner)
    (place._parameters if isinstance(value, torch.nn.Parameter) else place._buffers)[attribute] = value


def _replace(module: Any, parameter: str, make: Callable[[Any], torch.nn.Module]) -> None:
    """Put another layer in the place of the one that owns a parameter."""
    owner = parameter.rpartition(".")[0]
    parent, _, attribute = owner.rpartition(".")
    setattr(module.get_submodule(parent), attribute, make(module.get_submodule(owner)))


def _quantised_layer(weight: Quantised, compute: torch.dtype, owner: Any) -> torch.nn.Module:
    if _is_embedding(owner):
        return QuantisedEmbedding(weight, compute, getattr(owner, "embed_scale", None))
    return QuantisedLinear(weight, getattr(owner, "bias", None))


def _cast_layer(values: torch.Tensor, compute: torch.dtype, owner: Any) -> torch.nn.Module:
    if _is_embedding(owner):
        return CastEmbedding(values, compute, getattr(owner, "embed_scale", None))
    return CastLinear(values, getattr(owner, "bias", None))


def _is_embedding(owner: Any) -> bool:
    return isinstance(owner, (torch.nn.Embedding, QuantisedEmbedding, CastEmbedding))


def used(module: Any, plan: PrecisionPlan, refused: dict[str, str]) -> dict[str, str]:
    """What the weights of each class are really held and multiplied in, in words with counts, read off the modules.

    ``refused`` tells by format why a kernel was not used.
    """
    counts: dict[str, Counter[str]] = {}
    for t in plan.tensors:
        if t.kind == "vector":
            continue
        layer = module.get_submodule(t.module)
        if isinstance(layer, QuantisedLinear):
            form = layer.quantised.format.name
            why = f"; no fast kernel: {refused[form]}" if form in refused else ""
            how = f"{form} weights, {plan.compute} products (dequantised{why})"
        elif isinstance(layer, Int8Linear):
            how = f"{t.format} weights, int8 products ({layer.route})"
        elif isinstance(layer, PackedInt4Linear):
            how = f"{layer.format.name} weights, {plan.compute} products ({layer.kernel})"
        elif isinstance(layer, QuantisedEmbedding):
            how = f"{layer.quantised.format.name} table"
        else:
            held = str(layer.get_parameter(t.name.rpartition(".")[2]).dtype).removeprefix("torch.")
            how = held if held == plan.compute else f"{held} weights, {_wider(held, plan.compute)} products"
        counts.setdefault(t.role, Counter())[how] += 1
    return {role: "; ".join(f"{n} x {how}" for how, n in sorted(found.items())) for role, found in counts.items()}


def _wider(a: str, b: str) -> str:
    return str(torch.promote_types(getattr(torch, a), getattr(torch, b))).removeprefix("torch.")
