"""A fast path through decoder-only transformers of the Llama kind: one row, one thread, block by block in the cache.

What the model is stays transformers' business: its norms, its rotary tables and its activation are called or read,
and ``build`` returns None for any module with a part that it does not know. Whether the path computes what the model
does is proved by ``model``'s self-test before it is used.

A row is cut into blocks of ``BLOCK`` tokens from its start, so what a row yields depends on that row alone: not on
the batch, the order or the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval_kernel.attention import Attention
from eval_kernel.kernels import FUSED, Int8Linear, PackedLinear, quantise

#: Tokens that go through a layer's products together.
BLOCK = 256
#: Rotary tables that depend on the length of the row are left to transformers.
ROPES = {"default", "linear", "llama3", "yarn"}


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

    def states(self, ids: torch.Tensor, scored: int) -> torch.Tensor:
        """Return the hidden states of the last ``scored`` positions of one row of token ids, normed for the head."""
        x = self.embedding(ids)
        tables, attention = self.tables(len(ids)), self.attention(len(ids), x.dtype)
        for number, layer in enumerate(self.layers):
            # In the last layer only what is scored needs more than keys and values.
            needed = len(ids) - scored if number == len(self.layers) - 1 else 0
            self.advance(layer, x, tables, attention, needed)
        return self.norm(x[len(ids) - scored :])

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary tables [1, length, width] of a row: cosines and sines."""
        cos, sin = self.rotary(torch.empty(0), torch.arange(length).unsqueeze(0))
        return cos, sin

    def attention(self, length: int, dtype: torch.dtype) -> Attention:
        """Return room for the keys and values of one row, which all its layers use in turn."""
        first = self.layers[0]
        heads, shared = (layer.out_features // self.width for layer in (first.queries, first.keys))
        return Attention(heads, shared, length, self.width, dtype)

    def advance(
        self,
        layer: Layer,
        x: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        needed: int,
    ) -> None:
        """Take one row's states [length, width] through a layer, in place; before ``needed`` they end useless."""
        length = len(x)
        for start in range(0, length, BLOCK):
            part = slice(start, min(length, start + BLOCK))
            cos, sin = (table[0, part] for table in tables)
            h = layer.norm(x[part])
            if part.stop <= needed:
                keys, values = project(h, (layer.keys, layer.values))
            else:
                queries, keys, values = project(h, (layer.queries, layer.keys, layer.values))
            keys = self._heads(keys, layer.key_norm)
            attention.put(start, rotate(keys, cos, sin), self._heads(values, None))
            if part.stop > needed:
                queries = self._heads(queries, layer.query_norm)
                mixed = attention.attend(start, rotate(queries, cos * layer.scaling, sin * layer.scaling))
                x[part] = self._mlp(layer, plus(layer.output, mixed, x[part]))

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
