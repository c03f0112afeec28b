"""Scoring layer by layer: all of a shard's windows visit one layer before the next layer's weights are needed.

So weights are fetched once a shard, however many windows it has, and the fetching of the next layer hides behind the
computing of this one. Where the layers come from is ``layers``'; what comes out is bit for bit what resident weights
give: the same kernels see the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from eval_kernel import decoder, fast, kernels, lanes, scoring
from eval_kernel.attention import Attention
from eval_kernel.budget import Budget
from eval_kernel.errors import LayoutUnsupported
from eval_kernel.head import Head, Parts, Shape, by_row, combined, laid_out
from eval_kernel.model import Model
from eval_kernel.parallel.layers import Layers

Beat = Callable[[], None]
Item = TypeVar("Item")
Result = TypeVar("Result")
Row = scoring.Row
Losses = scoring.Losses


class Streaming:
    """Scores with a model whose layers come one at a time. ``model`` is that model, its layers fetched at each call."""

    def __init__(self, layers: Layers, model: Model, shape: Shape) -> None:
        """Build the fast way for single rows where there is one, and prove it on a few tokens."""
        self._layers, self._model, self._shape = layers, model, shape
        self._body = self._decoder()
        self._local = threading.local()
        self.kernel = model.kernel
        if self._body is not None:
            self._prove()

    def as_model(self) -> Model:
        """Return the model that scores this way."""
        return replace(self._model, kernel=self.kernel, scorer=self.score)

    def score(self, rows: list[Row], budget: Budget, beat: Beat, extra: scoring.Extra | None) -> list[Losses]:
        """As ``scoring.score``."""
        results: list[Losses | None] = [None] * len(rows)
        single = [i for i, row in enumerate(rows) if extra is None and self._goes_alone(row)]
        # Without rows of one kind the layers are still visited by those of the other; with none, by nobody.
        if single:
            with torch.inference_mode():
                found = self._rows([rows[i] for i in single], beat)
            for index, values in zip(single, found, strict=True):
                results[index] = Losses(*scoring.on_grid(values))
        others = [i for i, known in enumerate(results) if known is None]
        if others:
            scored = self._batches([rows[i] for i in others], budget, beat, extra)
            for index, losses in zip(others, scored, strict=True):
                results[index] = losses
        return [r for r in results if r is not None]

    # ---------------------------------------------------------------- rows for themselves, on a CPU

    def _decoder(self) -> decoder.Decoder | None:
        module, dtype = self._layers.module, self._model.dtype
        if self._model.device.type != "cpu" or dtype not in fast.TOLERANCE or not self._model.split:
            return None
        with self._layers.standing():
            return decoder.build(module.base_model, module.config.get_text_config())

    def _goes_alone(self, row: Row) -> bool:
        if self._body is None:
            return False
        return self._body.longest is None or len(row.inputs) <= self._body.longest

    def _prove(self) -> None:
        """Compare with transformers' way through the same layers. Where it differs, that way is taken."""
        assert self._body is not None
        vocabulary, length = self._model.vocabulary, min(fast.PROBE, self._body.longest or fast.PROBE)
        ids = (torch.arange(length) * 7919 + 13) % vocabulary
        targets = (torch.arange(length) * 104729 + 7) % vocabulary
        row = Row(ids.numpy().astype(np.int32), targets.numpy().astype(np.int32))
        with torch.inference_mode():
            logits = self._model.whole(ids.unsqueeze(0), length)[0].double()
            expected = float((torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).sum())
            got = float(self._rows([row], lambda: None)[0].sum())
        tolerance = fast.tolerance(self._layers.visit(0), self._model.dtype)
        difference = abs(got - expected) / abs(expected)
        if not difference <= tolerance:
            self._body = None
            self.kernel = f"transformers (the fast path's self-test was off by {difference:.1e} of the loss)"
        else:
            packed = "onednn" if kernels.packs("cpu", self._model.dtype) else "plain"
            self.kernel = f"rows/{decoder.BLOCK}, {packed} products"

    def _rows(self, rows: list[Row], beat: Beat) -> list[torch.Tensor]:
        """Float64 losses of rows that go through each layer for themselves."""
        body = self._body
        assert body is not None
        together = decoder.gathered([len(row.inputs) for row in rows])
        strips = [decoder.Strip.of([torch.from_numpy(rows[i].inputs.astype(np.int64)) for i in m]) for m in together]
        targets = [[torch.from_numpy(rows[i].targets.astype(np.int64)) for i in members] for members in together]
        scored = [[len(wanted) for wanted in some] for some in targets]
        states = [body.embedding(strip.ids) for strip in strips]
        tables = {strip.spans: body.tables(strip) for strip in strips}
        last = len(self._layers) - 1
        for number, module in self._layers.visits():
            layer = decoder.parts_of(module)
            assert layer is not None, "the bare layer was known"

            def work(k: int, layer: decoder.Layer = layer, final: bool = number == last) -> None:
                strip = strips[k]
                with torch.inference_mode():
                    needed = strip.unneeded(scored[k]) if final else 0
                    room = self._attention(strip.room)
                    body.advance(layer, states[k], strip.spans, tables[strip.spans], room, needed)

            lanes.each(work, range(len(strips)), beat)
            del module, layer, work
        hidden = [body.ending(x, strip, counts) for x, strip, counts in zip(states, strips, scored, strict=True)]
        found: dict[int, torch.Tensor] = {}
        for members, several in zip(together, self._losses(hidden, targets, beat), strict=True):
            found.update(zip(members, several, strict=True))
        return [found[i] for i in range(len(rows))]

    def _attention(self, length: int) -> Attention:
        """Room for keys and values; each lane keeps what it used last."""
        kept: tuple[int, Attention] | None = getattr(self._local, "kept", None)
        if kept is None or kept[0] != length:
            assert self._body is not None
            kept = self._local.kept = (length, self._body.attention(length, self._model.dtype))
        return kept[1]

    def _losses(
        self, hidden: list[torch.Tensor], targets: list[list[torch.Tensor]], beat: Beat
    ) -> list[list[torch.Tensor]]:
        """The head tile by tile, as the layers are: each tile is packed once for all rows."""
        layer = self._layers.module.get_output_embeddings()
        found: list[list[Parts]] = [[] for _ in hidden]
        wanted = [laid_out(states, some) for states, some in zip(hidden, targets, strict=True)]
        for first, tile in _tiles(layer):
            head = Head(tile, self._shape, first)

            def work(i: int, head: Head = head) -> Parts:
                with torch.inference_mode():
                    return head.parts(hidden[i], wanted[i])

            for i, parts in enumerate(lanes.each(work, range(len(hidden)), beat)):
                found[i].append(parts)
        return [by_row(combined(joined(parts)), some) for parts, some in zip(found, targets, strict=True)]

    # ---------------------------------------------------------------- batch by batch, on any device

    def _batches(self, rows: list[Row], budget: Budget, beat: Beat, extra: scoring.Extra | None) -> list[Losses]:
        if not self._model.split:
            # The seam is unknown: the whole module runs, and fetches each layer for each batch.
            return scoring.score(self._model, rows, budget, beat, extra)
        members: list[list[int]] = []
        for group in scoring.by_shape(rows):
            size = 1 if self._model.alone else budget.rows(len(rows[group[0]].inputs))
            members += [group[start : start + size] for start in range(0, len(group), size)]
        each = _on_lanes if self._model.alone else _in_turn
        with lanes.one_thread() if self._model.alone else nullcontext(), torch.inference_mode():
            inputs = [scoring.tensors(self._model, [rows[i] for i in batch]) for batch in members]
            passages = [_Passage(self._layers, ids) for ids, _ in inputs]
        for number, layer in self._layers.visits():
            each(partial(_Passage.advance, number=number, layer=layer), passages, beat)
            del layer
        with lanes.one_thread() if self._model.alone else nullcontext(), torch.inference_mode():
            hidden = [passage.leave() for passage in passages]

        def work(k: int) -> tuple[list[Losses], scoring.Extra | None]:
            sums = None if extra is None else scoring.Extra()
            ready = replace(self._model, hidden=partial(_given, hidden[k]))
            found = scoring.losses_of(ready, *inputs[k], sums)
            return [Losses(*scoring.on_grid(losses)) for losses in found], sums

        results: dict[int, Losses] = {}
        for batch, (found, sums) in zip(members, each(work, range(len(members)), beat), strict=True):
            results.update(zip(batch, found, strict=True))
            if extra is not None and sums is not None:
                extra.take(sums)
        return [results[i] for i in range(len(rows))]


def _on_lanes(work: Callable[[Item], Result], items: Sequence[Item], beat: Beat) -> list[Result]:
    """Do each item for itself, on the lanes."""
    return lanes.each(torch.inference_mode()(work), items, beat)


def _in_turn(work: Callable[[Item], Result], items: Sequence[Item], beat: Beat) -> list[Result]:
    """Do one item after the other, each on all that the device has."""
    results = []
    for item in items:
        with torch.inference_mode():
            results.append(work(item))
        beat()
    return results


class _Passage:
    """One batch on its way through the layers, called as transformers calls them."""

    def __init__(self, layers: Layers, ids: torch.Tensor) -> None:
        """Run what comes before the layers, and note how each of them is called."""
        self._layers, self._ids = layers, ids
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._run([_Recorder(layers.bare(number), self._calls) for number in range(len(layers))])
        if len(self._calls) != len(layers):
            raise LayoutUnsupported(
                "parallel: this model's layers are not each called once, in order: they cannot be streamed; "
                "use a node where it fits"
            )
        args, kwargs = self._calls[0]
        self._states: torch.Tensor = args[0] if args else kwargs["hidden_states"]

    def advance(self, number: int, layer: Any) -> None:
        """Go through a layer."""
        args, kwargs = self._calls[number]
        if args:
            out = layer(self._states, *args[1:], **kwargs)
        else:
            out = layer(**{**kwargs, "hidden_states": self._states})
        self._states = out[0] if isinstance(out, tuple) else out

    def leave(self) -> torch.Tensor:
        """Run what comes after the layers; return the last hidden states."""
        count = len(self._layers)
        passing: list[Any] = [_Answer(self._layers.bare(number), None) for number in range(count - 1)]
        hidden: torch.Tensor = self._run([*passing, _Answer(self._layers.bare(count - 1), self._states)])
        return hidden

    def _run(self, stand_ins: list[Any]) -> torch.Tensor:
        body = self._layers.module.base_model
        with self._layers.standing(stand_ins):
            hidden: torch.Tensor = body(input_ids=self._ids, use_cache=False).last_hidden_state
        return hidden


class _StandIn(torch.nn.Module):
    """Has the attributes of a layer, and none of its weights."""

    def __init__(self, bare: Any) -> None:
        super().__init__()
        self.__dict__["bare"] = bare

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["bare"], name)


class _Recorder(_StandIn):
    """Notes how it is called, and passes the hidden states on."""

    def __init__(self, bare: Any, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(bare)
        self.__dict__["calls"] = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["calls"].append((args, kwargs))
        return args[0] if args else kwargs["hidden_states"]


class _Answer(_StandIn):
    """Passes the hidden states on, or answers with given ones."""

    def __init__(self, bare: Any, states: torch.Tensor | None) -> None:
        super().__init__(bare)
        self.__dict__["states"] = states

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        states = self.__dict__["states"]
        return states if states is not None else args[0] if args else kwargs["hidden_states"]


def _given(hidden: torch.Tensor, _ids: torch.Tensor) -> torch.Tensor:
    return hidden


def joined(parts: list[Parts]) -> Parts:
    """Put the parts of consecutive tiles together."""
    tops, sums, picked = zip(*parts, strict=True)
    target = picked[0]
    for other in picked[1:]:
        target = torch.where(torch.isnan(target), other, target)
    return torch.cat(tops), torch.cat(sums), target


def _tiles(layer: Any) -> Any:
    """Yield (first output, kernel) of a head, each made when its turn comes."""
    if isinstance(layer, torch.nn.Linear):
        for start in range(0, layer.out_features, kernels.TILE):
            part = slice(start, start + kernels.TILE)
            yield start, kernels.linear(layer.weight[part], None if layer.bias is None else layer.bias[part])
    else:
        first = 0
        for tile in kernels.tiles_of(layer):
            yield first, tile
            first += int(getattr(tile, "out_features", 0))
