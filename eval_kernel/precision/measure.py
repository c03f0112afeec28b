"""Measures sensitivities: one group at a time in another format, against the unchanged model on the same tokens.

Layers before the group are not computed again: they answer with what they answered the first time. Choosing formats
from the measurements is ``planner``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eval_kernel.errors import ModelUnsupported
from eval_kernel.precision import calibrated, canonical, distance, gptq, search
from eval_kernel.precision.formats import FORMATS, Kind
from eval_kernel.precision.groups import Cell, Group
from eval_kernel.precision.plan import Weight

#: Positions whose distributions are compared at one time.
CHUNK = 128


class Meter:
    """A float model and what it yields on a few rows, ready to be compared with versions of itself."""

    def __init__(self, module: Any, rows: torch.Tensor, quantiser: str, calibration: torch.Tensor | None) -> None:
        """Run the rows [rows, length] once. The module is changed during a measurement, and changed back.

        ``calibration``: rows for the quantiser gptq, other ones than those that are measured. It costs least when
        groups then come in order of their layers.
        """
        self._module, self._rows, self._quantiser = module, rows, quantiser
        self._prefix, self._layers = calibrated.decoder_layers(module)
        self._calibration = calibration
        self._walk: calibrated.Walk | None = None
        self._outputs: list[list[Any]] = []  # by row, by layer
        self._reference: list[torch.Tensor] = []  # log-probabilities by row
        self._moments: tuple[int, dict[str, torch.Tensor]] | None = None
        for row in rows:
            outputs: list[Any] = []
            hooks = [
                layer.register_forward_hook(lambda _m, _a, out, to=outputs: to.append(out)) for layer in self._layers
            ]
            try:
                logits = self._logits(row)
            finally:
                for hook in hooks:
                    hook.remove()
            if len(outputs) != len(self._layers):
                raise ModelUnsupported(
                    "sensitivities need decoder layers that are each called once; this model's are not"
                )
            self._outputs.append(outputs)
            self._reference.append(torch.log_softmax(logits, -1))

    def measure(self, group: Group, name: str) -> Cell:
        """Return what changes when the group is in a format."""
        first = group.layer if group.layer is not None else len(self._layers) if group.name == "head" else 0
        sums = [0, 0, 0, 0]
        with self._changed(group, name):
            for k, row in enumerate(self._rows):
                with self._cached(k, first):
                    logits = self._logits(row)
                for i, value in enumerate(_compare(self._reference[k], logits, row)):
                    sums[i] += value
        return Cell(*sums)

    def _logits(self, row: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = self._module(input_ids=row.unsqueeze(0), use_cache=False).logits[0]
        return found.float()

    @contextmanager
    def _cached(self, row: int, first: int) -> Iterator[None]:
        """Let the layers before ``first`` answer from memory."""
        real = list(self._layers)
        try:
            for number in range(first):
                self._layers[number] = _Answer(real[number], self._outputs[row][number])
            yield
        finally:
            for number, layer in enumerate(real):
                self._layers[number] = layer

    @contextmanager
    def _changed(self, group: Group, name: str) -> Iterator[None]:
        """Put the group's weights as that format holds them in the place of its floats."""
        saved: list[tuple[Any, str, Any]] = []
        places: dict[int, list[str]] = {id(p): [] for p in self._module.parameters()}
        for full, parameter in self._module.named_parameters(remove_duplicate=False):
            places[id(parameter)].append(full)
        try:
            for weight in group.weights:
                parameter = self._module.get_parameter(weight.name)
                changed = torch.nn.Parameter(self._in_format(group, weight, parameter, name), requires_grad=False)
                for full in places[id(parameter)]:
                    owner, _, attribute = full.rpartition(".")
                    module = self._module.get_submodule(owner)
                    saved.append((module, attribute, parameter))
                    setattr(module, attribute, changed)
            yield
        finally:
            for module, attribute, parameter in saved:
                setattr(module, attribute, parameter)

    def _in_format(self, group: Group, weight: Weight, parameter: torch.Tensor, name: str) -> torch.Tensor:
        form = FORMATS[name]
        if form.kind is Kind.FLOAT:
            narrow: torch.Tensor = getattr(torch, form.text)
            return parameter.to(narrow).to(parameter.dtype)
        rows = (parameter.t() if weight.transposed else parameter).float().contiguous()
        with search.one_thread():
            if self._quantiser == "gptq" and group.layer is not None and form.kind is Kind.INTEGER:
                made = gptq.quantise(rows, self._inputs(group.layer)[weight.name], form)
            else:
                made = search.quantise(rows, form, "rtn" if self._quantiser == "rtn" else "mse")
        floats = canonical.dequantised(made, parameter.dtype)
        return floats.t().contiguous() if weight.transposed else floats

    def _inputs(self, layer: int) -> dict[str, torch.Tensor]:
        """Second moments of the inputs of one layer's linear modules, in the unchanged model."""
        if self._moments is None or self._moments[0] != layer:
            assert self._calibration is not None, "the quantiser gptq needs calibration rows"
            if self._walk is None or self._walk.at > layer:
                self._walk = calibrated.Walk(self._module, self._calibration)
            prefix = f"{self._prefix}.{layer}"
            targets = [
                (f"{prefix}.{name}.weight", part)
                for name, part in self._layers[layer].named_modules()
                if isinstance(getattr(part, "weight", None), torch.Tensor) and part.weight.dim() == 2
            ]
            self._moments = (layer, self._walk.moments(layer, targets))
        return self._moments[1]


class _Answer(torch.nn.Module):
    """Stands where a layer stood and answers what that layer answered before."""

    def __init__(self, layer: Any, answer: Any) -> None:
        super().__init__()
        self.__dict__["layer"], self.__dict__["answer"] = layer, answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Answer."""
        return self.__dict__["answer"]


def _compare(reference: torch.Tensor, logits: torch.Tensor, row: torch.Tensor) -> tuple[int, int, int, int]:
    """Tokens, divergence and change of loss in grid steps, and how often the most likely token is the same."""
    divergence = change = same = 0
    targets = row[1:]
    for start in range(0, len(targets), CHUNK):
        part = slice(start, min(start + CHUNK, len(targets)))
        p, q = reference[part], torch.log_softmax(logits[part], -1)
        divergence += distance.steps(distance.divergence(p, q))
        index = targets[part].unsqueeze(-1)
        change += distance.steps(p.gather(-1, index) - q.gather(-1, index))
        same += distance.agreements(p, q)
    return len(targets), divergence, change, same
