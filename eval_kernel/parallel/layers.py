"""A model's decoder layers one at a time: fetched when they are visited, the next one meanwhile, and freed behind.

Where a layer's weights come from is the ``Source``'s: mapped files here, the other ranks in ``sharded``. What is done
during a visit is ``streaming``'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from eval_kernel import heap
from eval_kernel.errors import LayoutUnsupported, PrecisionUnsupported
from eval_kernel.parallel.memory import Sizes, streamed
from eval_kernel.precision import calibrated, loading
from eval_kernel.precision.accelerate import accelerate
from eval_kernel.precision.assembly import Assembly
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import DTYPE_NAMES
from eval_kernel.precision.plan import PrecisionPlan, TensorPlan, Weight
from eval_kernel.precision.source import Origin

#: Readies a filled layer for use: packs it for this machine's kernels.
Ready = Callable[[Any], None]


class Layers:
    """The layers of a model that is assembled but for them. ``module`` has a stub where each layer belongs.

    A stub fetches its layer when it is called, so the whole module computes as if it were resident.
    """

    def __init__(self, found: loading.Ingredients, device: torch.device, fraction: float, ready: Ready) -> None:
        """Fill in what lies outside the layers, and the layers that stay resident.

        Raises ``LayoutUnsupported`` for a model whose layers cannot be had one by one.
        """
        if found.skeleton.tensors is None:
            raise LayoutUnsupported(
                "parallel: the layers of this checkpoint cannot be fetched one by one, since transformers has to "
                "convert it; save it once with transformers' save_pretrained, or use a node with more memory"
            )
        self.module, self.plan, self.device = found.source.module, found.plan, device
        self._weights: Mapping[str, Quantised] = found.pack.weights
        whole = Assembly(found.source, found.plan, found.skeleton.outline, device)
        try:
            self._name, self._list = calibrated.decoder_layers(self.module)
        except PrecisionUnsupported:
            raise LayoutUnsupported(
                "parallel: this model has no list of decoder layers; use a node where it fits"
            ) from None
        self._inside, self._outside = by_layer(found.plan, self._name)
        self._found: dict[int, list[tuple[str, str]]] = {}  # what the weights of each layer are held in
        self._ready = ready
        self.sizes = sizes(found.plan)
        self._bare = list(self._list)
        # Layers are filled in apart from the module, which may be computing at the same time.
        self._workshop = torch.nn.ModuleList(self._bare)
        apart = _Apart(found.source, _nested(self._name, self._workshop))
        self._assembly = Assembly(apart, replace(found.plan, untied=False), found.skeleton.outline, device)
        self._pool = ThreadPoolExecutor(1, "fetch")
        self._ahead: tuple[int, Future[Any]] | None = None
        whole.buffers()
        for t in _vectors_first(self._outside):
            self._fill(whole, t)
        for part_name, part in list(self.module.named_children()):
            _to_device(self.module, part_name, part, self._list, device)
        gone = streamed(len(self._bare), fraction)
        self.kept = {number: self._fetch(number) for number in range(len(gone)) if not gone[number]}
        for number, bare in enumerate(self._bare):
            self._list[number] = Stub(self, number, bare)
        heap.trim()

    def __len__(self) -> int:
        return len(self._bare)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights that are in memory at one time during a visit."""
        return self.sizes.resident(1 - len(self.kept) / len(self))

    def bare(self, number: int) -> Any:
        """Return a layer without its weights."""
        return self._bare[number]

    def used(self) -> dict[str, str]:
        """What the weights of each class are held and multiplied in; of the layers, those that were ever fetched."""
        found = [
            (t.role, loading.described(self.module.get_submodule(t.module), t, self.plan, {}))
            for t in self._outside
            if t.kind != "vector"
        ]
        return loading.counted(found + [entry for number in sorted(self._found) for entry in self._found[number]])

    @contextmanager
    def standing(self, stand_ins: Sequence[Any] | None = None) -> Iterator[None]:
        """Have other modules stand where the layers belong: by default the layers without their weights."""
        real = list(self._list)
        try:
            for number, module in enumerate(self._bare if stand_ins is None else stand_ins):
                self._list[number] = module
            yield
        finally:
            for number, stub in enumerate(real):
                self._list[number] = stub

    def visit(self, number: int, following: int | None = None) -> Any:
        """Return a layer, ready for use; start to fetch the ``following`` one. Who keeps it, keeps its memory."""
        layer = self.kept.get(number)
        if layer is None:
            if self._ahead is not None and self._ahead[0] == number:
                future = self._ahead[1]
                self._ahead = None
                layer = future.result()
            else:
                layer = self._fetch(number)
        if following is not None and following not in self.kept and self._ahead is None:
            self._ahead = (following, self._pool.submit(self._fetch, following))
        return layer

    def visits(self) -> Iterator[tuple[int, Any]]:
        """Yield every layer once, in order, fetching the next streamed one while the last one yielded is at work."""
        for number in range(len(self)):
            following = next((n for n in range(number + 1, len(self)) if n not in self.kept), None)
            layer = self.visit(number, following)
            yield number, layer
            del layer

    def close(self) -> None:
        """Drop what was fetched ahead, and end the thread."""
        if self._ahead is not None:
            self._ahead[1].cancel()
            self._ahead = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        """What a fetch is wrapped in: another source makes its weights available here."""
        yield

    def _fetch(self, number: int) -> Any:
        with torch.inference_mode(), self.fetching(number):
            layer = self._workshop[number] = copy.deepcopy(self._bare[number])
            try:
                for t in _vectors_first(self._inside.get(number, [])):
                    self._fill(self._assembly, t)
            finally:
                self._workshop[number] = self._bare[number]
            layer = layer.to(self.device)
            refused = accelerate(layer, self.plan.kernels, getattr(torch, self.plan.compute))
            if number not in self._found:
                self._found[number] = [self._described(layer, number, t, refused) for t in self._weights_of(number)]
            self._ready(layer)
            return layer

    def _weights_of(self, number: int) -> list[TensorPlan]:
        return [t for t in self._inside.get(number, []) if t.kind != "vector"]

    def _described(self, layer: Any, number: int, t: TensorPlan, refused: dict[str, str]) -> tuple[str, str]:
        inner = t.module.removeprefix(f"{self._name}.{number}").removeprefix(".")
        return t.role, loading.described(layer.get_submodule(inner), t, self.plan, refused)

    def _fill(self, assembly: Assembly, t: TensorPlan) -> None:
        if t.quantised:
            assembly.put_quantised(t, self._weights[t.name])
        else:
            assembly.put_floats(t, getattr(torch, DTYPE_NAMES[t.format]))


class Stub(torch.nn.Module):
    """Stands where a decoder layer belongs, and has it fetched for each call."""

    def __init__(self, layers: Layers, number: int, bare: Any) -> None:
        super().__init__()
        self.__dict__.update(_layers=layers, _number=number, _bare=bare)  # no children: they have no weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_bare"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch, and compute."""
        layers, number = self.__dict__["_layers"], self.__dict__["_number"]
        following = number + 1 if number + 1 < len(layers) else None
        return layers.visit(number, following)(*args, **kwargs)


@dataclass(slots=True)
class _Apart:
    """A source whose weights are put into other modules than its own."""

    source: Origin
    module: Any

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``Origin``."""
        return self.source.floats(name, dtype, device)

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See ``Origin``."""
        return self.source.rows(weight, chunks)


def _nested(path: str, module: torch.nn.Module) -> torch.nn.Module:
    """Return a module that has ``module`` at ``path``, and nothing else."""
    for name in reversed(path.split(".")):
        outer = torch.nn.Module()
        outer.add_module(name, module)
        module = outer
    return module


def by_layer(plan: PrecisionPlan, name: str) -> tuple[dict[int, list[TensorPlan]], list[TensorPlan]]:
    """Return a plan's tensors by the layer of the list ``name`` that holds them, and the others."""
    inside: dict[int, list[TensorPlan]] = {}
    outside = []
    for t in plan.tensors:
        if t.module.startswith(f"{name}."):
            inside.setdefault(int(t.module.removeprefix(f"{name}.").partition(".")[0]), []).append(t)
        else:
            outside.append(t)
    return inside, outside


def sizes(plan: PrecisionPlan) -> Sizes:
    """Return what the layers of a plan weigh; the list of layers is the one with most numbered modules."""
    layers: dict[int, int] = {}
    outside = 0
    for t in plan.tensors:
        number = next((int(part) for part in t.module.split(".") if part.isdigit()), None)
        if number is None:
            outside += t.value_bytes + t.scale_bytes
        else:
            layers[number] = layers.get(number, 0) + t.value_bytes + t.scale_bytes
    return Sizes(tuple(layers[number] for number in sorted(layers)) or (0,), outside)


def _vectors_first(tensors: list[TensorPlan]) -> list[TensorPlan]:
    """A layer that is replaced takes its bias along."""
    return sorted(tensors, key=lambda t: t.kind != "vector")


def _to_device(owner: Any, name: str, part: Any, layers: Any, device: torch.device) -> None:
    """Move what lies outside the layers; they have no weights that could be moved."""
    if part is layers:
        return
    if any(inner is layers for inner in part.modules()):
        for key, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[key] = buffer.to(device)
        for child_name, child in list(part.named_children()):
            _to_device(part, child_name, child, layers, device)
    else:
        setattr(owner, name, part.to(device))
