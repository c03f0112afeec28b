"""Weights put into the modules of a skeleton, each in its planned format, wherever it is used.

Where they come from is ``source``'s business, and what they are ``plan``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from eval_kernel import heap
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import DTYPE_NAMES
from eval_kernel.precision.modules import CastEmbedding, CastLinear, QuantisedEmbedding, QuantisedLinear
from eval_kernel.precision.plan import Outline, PrecisionPlan, TensorPlan, Weight
from eval_kernel.precision.source import Origin


class Assembly:
    """A module that is being filled."""

    def __init__(self, source: Origin, plan: PrecisionPlan, outline: Outline, device: torch.device) -> None:
        self.module = source.module
        self._source, self._plan, self._device = source, plan, device
        self._compute: torch.dtype = getattr(torch, plan.compute)
        self._weights = by_tensor(plan, outline)
        self._places = _aliases(self.module)
        if plan.untied:
            table = next(w.name for w in outline.weights if w.module == outline.embedding)
            self._places[table].remove(f"{outline.head}.weight")

    def all(self, quantised: Mapping[str, Quantised]) -> Any:
        """Fill everything, and return the module on its device."""
        self.buffers()
        # Vectors first: a layer that is replaced takes its bias along.
        for t in sorted(self._plan.tensors, key=lambda t: t.kind != "vector"):
            if t.quantised:
                self.put_quantised(t, quantised[t.name])
            else:
                self.put_floats(t, getattr(torch, DTYPE_NAMES[t.format]))
        heap.trim()
        return self.module.to(self._device)

    def buffers(self) -> None:
        """Fill the buffers that the checkpoint stores."""
        for name, stored in self.module.state_dict(keep_vars=True).items():
            if not isinstance(stored, torch.nn.Parameter):
                dtype = self._compute if stored.is_floating_point() else stored.dtype
                _set(self.module, name, self._source.floats(name, dtype, self._device))

    def put_floats(self, t: TensorPlan, dtype: torch.dtype) -> None:
        """Fill in one weight as floats."""
        weight = self._weights[t.name]
        values = self._source.floats(weight.name, dtype, self._device)
        if dtype == self._compute:
            parameter = torch.nn.Parameter(values, requires_grad=False)
            for place in self._places.get(t.name, [t.name]):
                _set(self.module, place, parameter)
            return
        values = values.t().contiguous() if weight.transposed else values
        for place in self._places.get(t.name, [t.name]):
            _replace(self.module, place, partial(_cast_layer, values, self._compute))

    def put_quantised(self, t: TensorPlan, weight: Quantised) -> None:
        """Fill in one quantised weight."""
        weight = weight.to(self._device)
        for place in self._places.get(t.name, [t.name]):
            _replace(self.module, place, partial(_quantised_layer, weight, self._compute))


def by_tensor(plan: PrecisionPlan, outline: Outline) -> dict[str, Weight]:
    """The checkpoint's weight of each planned tensor: an untied head comes from the embedding's table."""
    weights = {w.name: w for w in outline.weights}
    table = next((w for w in outline.weights if w.module == outline.embedding), None)
    return {t.name: found for t in plan.tensors if (found := weights.get(t.name, table)) is not None}


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
