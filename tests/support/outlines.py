"""Outlines of models for precision plans: names and shapes alone. No torch, no weights."""

from __future__ import annotations

from collections.abc import Callable

from eval_kernel.precision.plan import Outline, Weight


def linear(name: str, role: str, rows: int, columns: int) -> Weight:
    """A linear layer's matrix."""
    return Weight(f"{name}.weight", name, role, "matrix", rows, columns)


def norm(name: str, size: int) -> Weight:
    """A norm's vector."""
    return Weight(f"{name}.weight", name, "vector", "vector", 1, size)


def llama(
    *,
    layers: int = 2,
    hidden: int = 64,
    wide: int = 128,
    vocabulary: int = 96,
    tied: bool = True,
    dtype: str = "float32",
    change: Callable[[Weight], Weight] = lambda w: w,
) -> Outline:
    """An outline with the names of a Llama."""
    weights = [Weight("model.embed_tokens.weight", "model.embed_tokens", "embedding", "table", vocabulary, hidden)]
    for i in range(layers):
        layer = f"model.layers.{i}"
        weights += [linear(f"{layer}.self_attn.{p}_proj", "attention", hidden, hidden) for p in "qkvo"]
        weights += [linear(f"{layer}.mlp.{p}_proj", "mlp", wide, hidden) for p in ("gate", "up")]
        weights += [linear(f"{layer}.mlp.down_proj", "mlp", hidden, wide), norm(f"{layer}.input_layernorm", hidden)]
    weights.append(norm("model.norm", hidden))
    if not tied:
        weights.append(linear("lm_head", "head", vocabulary, hidden))
    return Outline(tuple(change(w) for w in weights), dtype, "model.embed_tokens", "lm_head", tied)
