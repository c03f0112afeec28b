"""A fast path through decoder-only transformers of the Llama kind: one row, one thread, block by block in the cache.

What the model is stays transformers' business: its norms, its rotary tables and its activation are called or read,
and ``build`` returns None for any module with a part that it does not know. Whether the path computes what the model
does is proved by ``model``'s self-test before it is used.

A row is cut into blocks of ``BLOCK`` tokens from its start; short rows share a block, which is always full. So what a
row yields depends on that row alone, not on the batch or the order: the bits of a product of so many rows may depend on
how many there are, but not on where among them a row stands, nor on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch

from eval_kernel import head
from eval_kernel.attention import Attention
from eval_kernel.kernels import FUSED, Int8Linear, PackedLinear, opened, quantise

#: Tokens that go through a layer's products together.
BLOCK = 256
#: Rows of at most so many tokens share blocks: alone, they would be slower by the time it takes to read the weights.
SHORT = 128
#: A layer whose quantised weights would take more bytes than this as floats stays as it is: each lane opens its own.
OPEN_BYTES = 256 << 20
#: Rotary tables that depend on the length of the row are left to transformers.
ROPES = {"default", "linear", "llama3", "yarn"}


#: Where each row of a strip begins and ends.
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of token ids that go through the layers together, end to end: one long row, or short ones and a filler."""

    ids: torch.Tensor
    spans: Spans
    room: int  # of the keys and values; one number for short rows, so that their memory looks the same in any company

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> Strip:
        """Lay out rows that ``gathered`` put together."""
        lengths = [len(row) for row in rows]
        if lengths[0] > SHORT:
            (ids,) = rows
            return cls(ids, ((0, len(ids)),), len(ids))
        ends = list(accumulate(lengths))
        ids = torch.zeros(BLOCK, dtype=torch.int64)
        ids[: ends[-1]] = torch.cat(list(rows))
        return cls(ids, tuple(zip([0, *ends], ends, strict=False)), SHORT)

    @property
    def single(self) -> bool:
        """Whether this is one long row."""
        return self.room > SHORT

    def unneeded(self, scored: Sequence[int]) -> int:
        """The positions from the start whose last states nobody wants."""
        return len(self.ids) - scored[0] if self.single else 0


def gathered(lengths: Sequence[int]) -> list[list[int]]:
    """Put rows together, by their indices: long ones each for itself, then short ones, as many as a block has room for.

    What takes longest comes first.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = [[i] for i in order if lengths[i] > SHORT]
    short = [i for i in order if lengths[i] <= SHORT]
    while short:
        left, members, rest = BLOCK, [], []
        for i in short:
            if lengths[i] <= left:
                members.append(i)
                left -= lengths[i]
            else:
                rest.append(i)
        found.append(members)
        short = rest
    return found


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's parts."""

    norm: torch.nn.Module
    queries: torch.nn.Module
    keys: torch.nn.Module
    values: torch.nn.Module
    query_norm: torch.nn.Module | None
    key_norm: torch.nn.Module | None
    output: torch.nn.Module
    mlp_norm: torch.nn.Module
    gate: torch.nn.Module
    up: torch.nn.Module
    down: torch.nn.Module
    activation: torch.nn.Module
    scaling: float

    def opened(self, dtype: torch.dtype) -> Layer:
        """Return the layer with its stored-small weights dequantised: once for a row, not once for each block."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        small = {name: part for name, part in found.items() if hasattr(part, "dense")}
        size = sum(part.in_features * part.out_features for part in small.values()) * dtype.itemsize
        if not small or size > OPEN_BYTES:
            return self
        return replace(self, **{name: opened(part, dtype) for name, part in small.items()})


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoder of one model. ``longest`` is the longest row it may be used for, None means any."""

    embedding: torch.nn.Module
    layers: tuple[Layer, ...]
    norm: torch.nn.Module
    rotary: torch.nn.Module
    width: int  # of one head
    activation: str
    longest: int | None

    def states(self, strip: Strip, scored: Sequence[int]) -> torch.Tensor:
        """Return what ``ending`` does, from token ids."""
        x = self.embedding(strip.ids)
        tables, attention = self.tables(strip), self.attention(strip.room, x.dtype)
        for number, layer in enumerate(self.layers):
            # In the last layer only what is scored needs more than keys and values.
            needed = strip.unneeded(scored) if number == len(self.layers) - 1 else 0
            self.advance(layer, x, strip.spans, tables, attention, needed)
        return self.ending(x, strip, scored)

    def tables(self, strip: Strip) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables [1, tokens, width] of a strip: cosines and sines. Each row begins at position 0."""
        positions = torch.zeros(len(strip.ids), dtype=torch.int64)
        for start, end in strip.spans:
            positions[start:end] = torch.arange(end - start)
        cos, sin = self.rotary(torch.empty(0), positions.unsqueeze(0))
        return cos, sin

    def attention(self, room: int, dtype: torch.dtype) -> Attention:
        """Return room for the keys and values of one row, which all layers, and all rows of a strip, use in turn."""
        first = self.layers[0]
        heads, shared = (layer.out_features // self.width for layer in (first.queries, first.keys))
        return Attention(heads, shared, room, self.width, dtype)

    def advance(
        self,
        layer: Layer,
        x: torch.Tensor,
        spans: Spans,
        tables: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        needed: int,
    ) -> None:
        """Take a strip's states [tokens, width] through a layer, in place; before ``needed`` they end useless."""
        length, layer = len(x), layer.opened(x.dtype)
        for start in range(0, length, BLOCK):
            part = slice(start, min(length, start + BLOCK))
            cos, sin = (table[0, part] for table in tables)
            h = layer.norm(x[part])
            queries = None
            if part.stop <= needed:
                keys, values = project(h, (layer.keys, layer.values))
            else:
                queries, keys, values = project(h, (layer.queries, layer.keys, layer.values))
                queries = rotate(self._heads(queries, layer.query_norm), cos * layer.scaling, sin * layer.scaling)
            keys, values = rotate(self._heads(keys, layer.key_norm), cos, sin), self._heads(values, None)
            mixed = _attended(attention, spans, part, queries, keys, values)
            if mixed is not None:
                x[part] = self._mlp(layer, plus(layer.output, mixed, x[part]))

    def ending(self, x: torch.Tensor, strip: Strip, scored: Sequence[int]) -> torch.Tensor:
        """Return the hidden states that predict each row's last ``scored`` targets, row after row, normed for the head.

        Behind those of short rows are some that mean nothing, so that the head sees full blocks.
        """
        if strip.single:
            return self.norm(x[len(x) - scored[0] :])
        wanted = [torch.arange(end - count, end) for (_, end), count in zip(strip.spans, scored, strict=True)]
        size = sum(scored)
        filler = torch.zeros(-size % head.BLOCK, dtype=torch.int64)
        return self.norm(x[torch.cat([*wanted, filler])])

    def _heads(self, x: torch.Tensor, norm: torch.nn.Module | None) -> torch.Tensor:
        x = x.view(x.shape[0], -1, self.width)
        return x if norm is None else norm(x)

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        h = layer.mlp_norm(x)
        gate, up = layer.gate, layer.up
        if isinstance(gate, PackedLinear) and isinstance(up, PackedLinear) and self.activation in FUSED:
            inner = up.times(h, gate.activated(h, self.activation))
        else:
            a, b = project(h, (gate, up))
            inner = layer.activation(a).mul_(b)
        return plus(layer.down, inner, x)


def _attended(
    attention: Attention,
    spans: Spans,
    part: slice,
    queries: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor | None:
    """Keep a block's keys and values and let each row's queries attend to its own; [positions, heads * width]."""
    if len(spans) == 1 and spans[0][1] >= part.stop:
        attention.put(part.start, keys, values)
        return None if queries is None else attention.attend(part.start, queries)
    assert queries is not None, "only single rows leave queries out"
    mixed = torch.zeros(queries.shape[1], queries.shape[0] * queries.shape[2], dtype=values.dtype)
    for start, end in spans:
        row = slice(start - part.start, end - part.start)
        attention.put(0, keys[:, row], values[row])
        mixed[row] = attention.attend(0, queries[:, row])
    return mixed


def project(x: torch.Tensor, layers: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Multiply the same rows by several layers; those in int8 share the rounding of ``x``."""
    if all(isinstance(layer, Int8Linear) for layer in layers):
        values, scales = quantise(x)
        return [layer.product(values, scales) for layer in layers]
    return [layer(x) for layer in layers]


def plus(layer: torch.nn.Module, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """``layer(x) + term`` in the dtype of ``term``. May overwrite ``x``."""
    if isinstance(layer, PackedLinear):
        return layer.plus(x.to(term.dtype), term)
    if isinstance(layer, Int8Linear):
        return layer.product(*quantise(x, spend=True)).add_(term).to(term.dtype)
    return layer(x.to(term.dtype)) + term


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [positions, heads, width] by rotary tables [positions, width]; float32 [heads, positions, width].

    The second half of a head turns against the first: (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    turned = torch.empty(x.shape[1], x.shape[0], x.shape[2])
    turned.copy_(x.transpose(0, 1))
    half = x.shape[2] // 2
    other = torch.roll(turned, half, -1)
    other[..., :half].neg_()
    return turned.mul_(cos).addcmul_(other, sin)


# ---------------------------------------------------------------- reading a module


def build(body: Any, config: Any) -> Decoder | None:
    """Return the fast path of a transformers base model on a CPU, or None where a part of it is unknown here."""
    parts = _children(body)
    if set(parts) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    rope = getattr(parts["rotary_emb"], "rope_type", None)  # a dictionary where layers differ in it
    if not isinstance(rope, str) or rope not in ROPES:
        return None
    layers = [parts_of(layer) for layer in parts["layers"]]
    known = [layer for layer in layers if layer is not None]
    if len(known) != len(layers) or not known:
        return None
    width = int(parts["layers"][0].self_attn.head_dim)
    longest = getattr(config, "sliding_window", None)
    activation = str(getattr(config, "hidden_act", ""))
    return Decoder(parts["embed_tokens"], tuple(known), parts["norm"], parts["rotary_emb"], width, activation, longest)


def parts_of(module: Any) -> Layer | None:
    """Return the parts of one transformers decoder layer, or None where one is unknown here."""
    parts = _children(module)
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    attention, mlp = _children(parts["self_attn"]), _children(parts["mlp"])
    if set(attention) - {"q_norm", "k_norm"} != {"q_proj", "k_proj", "v_proj", "o_proj"}:
        return None
    if set(mlp) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    scaling = getattr(parts["self_attn"], "scaling", None)
    if not isinstance(scaling, float):
        return None
    return Layer(
        norm=parts["input_layernorm"],
        queries=attention["q_proj"],
        keys=attention["k_proj"],
        values=attention["v_proj"],
        query_norm=attention.get("q_norm"),
        key_norm=attention.get("k_norm"),
        output=attention["o_proj"],
        mlp_norm=parts["post_attention_layernorm"],
        gate=mlp["gate_proj"],
        up=mlp["up_proj"],
        down=mlp["down_proj"],
        activation=mlp["act_fn"],
        scaling=scaling,
    )


def _children(module: Any) -> dict[str, Any]:
    return dict(module.named_children())
