"""Quantisation with calibration data, decoder layer by decoder layer: each sees what the layers before it now yield.

One layer exists as floats at a time. What the numbers become is ``gptq``'s business; where the text comes from,
``calibration``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from eval_kernel.errors import PrecisionUnsupported, reason
from eval_kernel.precision import gptq, search
from eval_kernel.precision.assembly import Assembly, by_tensor
from eval_kernel.precision.canonical import Quantised, empty
from eval_kernel.precision.formats import FORMATS, Kind
from eval_kernel.precision.plan import Outline, PrecisionPlan, TensorPlan
from eval_kernel.precision.source import Origin

Note = Callable[[str], None]


def quantised(
    plan: PrecisionPlan, outline: Outline, source: Origin, ids: torch.Tensor, note: Note
) -> Iterator[tuple[str, Quantised]]:
    """Yield the quantised weights of a plan, with their names. ``ids``: token ids [rows, length].

    ``plan.compute`` must be float32 here, whatever the job computes in. Raises ``PrecisionUnsupported`` for a model
    whose decoder layers cannot be run one by one.
    """
    assembly = Assembly(source, plan, outline, torch.device("cpu"))
    module = assembly.module
    name, layers = decoder_layers(module)
    weights = by_tensor(plan, outline)
    inside: dict[int, list[TensorPlan]] = {}
    outside = []
    for t in plan.tensors:
        if t.module.startswith(f"{name}."):
            inside.setdefault(int(t.module.removeprefix(f"{name}.").partition(".")[0]), []).append(t)
        else:
            outside.append(t)
    assembly.buffers()
    for t in sorted(outside, key=lambda t: t.kind != "vector"):
        if not t.quantised:
            assembly.put_floats(t, torch.float32)
            continue
        made = empty(t.format, t.rows, t.columns)
        chunks = search.row_chunks(FORMATS[t.format], t.rows, t.columns)
        with search.one_thread():
            for start, end, floats in source.rows(weights[t.name], chunks):
                search.fill(made, start, end, floats, "mse")
        assembly.put_quantised(t, made)
        yield t.name, made
    walk = Walk(module, ids)
    for number in range(len(layers)):
        note(f"calibrating layer {number + 1} of {len(layers)}")
        tensors = sorted(inside.get(number, []), key=lambda t: t.kind != "vector")
        for t in tensors:
            assembly.put_floats(t, torch.float32)
        todo = [t for t in tensors if t.quantised]
        moments = walk.moments(number, [(t.name, module.get_submodule(t.module)) for t in todo])
        for t in todo:
            made = _quantise(t, module, weights[t.name].transposed, moments[t.name])
            assembly.put_quantised(t, made)
            yield t.name, made
        walk.advance(number + 1)
        layers[number] = torch.nn.Identity()  # frees it


def _quantise(t: TensorPlan, module: Any, transposed: bool, moments: torch.Tensor) -> Quantised:
    weight = module.get_parameter(t.name).detach()
    weight = (weight.t() if transposed else weight).float().contiguous()
    form = FORMATS[t.format]
    if form.kind is Kind.FLOAT8:
        return search.quantise(weight, form, "rtn")
    with search.one_thread():
        return gptq.quantise(weight, moments, form)


def decoder_layers(module: Any) -> tuple[str, Any]:
    """The decoder's layers: the longest list of modules of one class."""
    lists = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.ModuleList) and len({type(layer) for layer in part}) == 1
    ]
    if not lists:
        raise PrecisionUnsupported(
            "calibration runs a model layer by layer, and this one has no list of decoder layers; use quantiser: mse"
        )
    return max(lists, key=lambda entry: len(entry[1]))


class Walk:
    """Hidden states of a few rows on their way through a model's decoder layers, one layer at a time."""

    def __init__(self, module: Any, ids: torch.Tensor) -> None:
        """Enter the first layer with token ids [rows, length]. Raises ``PrecisionUnsupported``."""
        self._layers = decoder_layers(module)[1]
        with torch.inference_mode():
            self._states, self._calls = _entrance(module, self._layers, ids)
        self.at = 0  #: the layer whose entrance the states have reached

    def advance(self, number: int) -> None:
        """Go on to the entrance of a layer, through those before it as they are now."""
        with torch.inference_mode():
            while self.at < number:
                self._states = [self._run(x) for x in self._states]
                self.at += 1

    def moments(self, number: int, targets: list[tuple[str, Any]]) -> dict[str, torch.Tensor]:
        """Second moments of the inputs of some of a layer's modules, by the name given. Layers must come in order.

        Modules that share an input share them. Raises ``PrecisionUnsupported`` for a module that is never reached.
        """
        self.advance(number)
        sums: dict[str, torch.Tensor] = {}
        leaders: dict[str, str] = {}  # name -> the first name that has the same input
        seen: dict[int, tuple[str, torch.Tensor]] = {}  # holds the tensors, so that no id is given twice

        def watch(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
            def note(_: Any, args: tuple[Any, ...]) -> None:
                x = args[0]
                leader = leaders.setdefault(name, seen.setdefault(id(x), (name, x))[0])
                if leader == name:
                    flat = x.reshape(-1, x.shape[-1]).float()
                    with search.one_thread():
                        sums[name] = sums[name].addmm_(flat.t(), flat) if name in sums else flat.t() @ flat

            return note

        hooks = [part.register_forward_pre_hook(watch(name)) for name, part in targets]
        try:
            with torch.inference_mode():
                for x in self._states:
                    seen.clear()
                    self._run(x)
        finally:
            for hook in hooks:
                hook.remove()
        missing = [name for name, _ in targets if name not in leaders]
        if missing:
            raise PrecisionUnsupported(
                f"quantiser gptq: calibration never reached {missing[0]}; use quantiser: mse, or other calibration text"
            )
        return {name: sums[leaders[name]] for name, _ in targets}

    def _run(self, states: torch.Tensor) -> torch.Tensor:
        args, kwargs = self._calls[self.at]
        out = self._layers[self.at](states, *args, **kwargs)
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found


class _Recorder(torch.nn.Module):
    """Stands where a decoder layer stood, notes what it is called with, and passes the hidden states on."""

    def __init__(self, layer: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no child: its attributes may be asked for, its weights are not here
        self.__dict__["calls"] = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)

    def forward(self, states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note and pass on."""
        self.calls.append((args, kwargs))
        return states


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _entrance(module: Any, layers: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[Call]]:
    """The hidden states that enter the first layer, row by row, and what else each layer is called with."""
    body, real = module.base_model, list(layers)
    entered: list[torch.Tensor] = []
    hook = None
    calls: list[Call] = []
    try:
        for number, layer in enumerate(real):
            layers[number] = _Recorder(layer, calls)
        hook = layers[0].register_forward_pre_hook(lambda _, args: entered.append(args[0].clone()))
        for row in ids:
            calls.clear()
            body(input_ids=row.unsqueeze(0), use_cache=False)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise PrecisionUnsupported(
            f"quantiser gptq cannot run this model layer by layer ({reason(error)}); use quantiser: mse"
        ) from None
    finally:
        if hook is not None:
            hook.remove()
        for number, layer in enumerate(real):
            layers[number] = layer
    if len(calls) != len(real) or len(entered) != len(ids):
        raise PrecisionUnsupported(
            "quantiser gptq needs layers that are each called once, in order; this model's are not: use quantiser: mse"
        )
    return entered, calls
