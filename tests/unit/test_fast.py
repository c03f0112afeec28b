"""The fast path computes what transformers does, row by row, to the same bits however it is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from eval_kernel import decoder, model, scoring
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.head import Head, Shape
from eval_kernel.kernels import Int8Linear, replace
from eval_kernel.precision import search
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.modules import QuantisedLinear
from tests.support.llamas import random_model, tokens

pytestmark = pytest.mark.torch

LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("llama", {"num_key_value_heads": 6, "rope_parameters": LLAMA_ROPE}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]


def prepared(module: Any) -> model.Model:
    """A model ready to score with."""
    return model.prepare(module, torch.device("cpu"), module.dtype, "test")


def expected(module: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses in float64 from transformers' own logits, in full."""
    with torch.inference_mode():
        logits = module(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, -len(targets) :].double()
    return torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def row(length: int, scored: int, seed: int = 0) -> scoring.Row:
    """A row of random tokens."""
    ids = tokens(length + 1, seed).numpy().astype(np.int32)
    return scoring.Row(ids[:-1], ids[-scored:])


@pytest.mark.parametrize(("family", "options"), FAMILIES)
@pytest.mark.parametrize(("length", "scored"), [(45, 45), (128, 128), (300, 300), (300, 17), (257, 129)])
def test_it_equals_transformers(family: str, options: dict[str, Any], length: int, scored: int) -> None:
    """In float32 the losses are those of full logits in float64, to the rounding of float32."""
    module = random_model(family, **options)
    ids = tokens(length + 1)
    wanted = expected(module, ids[:-1], ids[-scored:])
    path = prepared(module).rows
    assert path is not None
    got = path.losses([ids[:-1]], [ids[-scored:]])[0]

    assert torch.float64 == got.dtype
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)
    assert float(wanted.sum()) == pytest.approx(float(got.sum()), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_near_transformers(family: str) -> None:
    """Sums differ by rounding alone: the fast path rounds less often."""
    module = random_model(family, torch.bfloat16)
    ids = tokens(301)
    wanted = float(expected(module, ids[:-1], ids[1:]).sum())
    path = prepared(module).rows
    assert path is not None

    assert wanted == pytest.approx(float(path.losses([ids[:-1]], [ids[1:]])[0].sum()), rel=2e-3)


def test_int8_layers_go_the_fast_way_too() -> None:
    """The module with int8 layers is the reference for the path with int8 layers."""
    module = random_model("llama", torch.bfloat16)
    replace(module.model, lambda name, layer: Int8Linear(layer.weight, layer.bias))
    ids = tokens(301)
    wanted = float(expected(module, ids[:-1], ids[1:]).sum())
    ready = prepared(module)
    assert ready.rows is not None

    assert wanted == pytest.approx(float(ready.rows.losses([ids[:-1]], [ids[1:]])[0].sum()), rel=1e-2)


#: So wide that the bits of bfloat16 products depend on the number of rows and threads on a CPU with AMX.
WIDE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


def of_kind(kind: str) -> Any:
    """A Llama, or a Gemma that stays with transformers, in float32, in bfloat16 or with quantised weights."""
    dtype = torch.float32 if "float32" in kind else torch.bfloat16
    if kind.startswith("gemma2"):
        return random_model("gemma2", dtype)
    module = random_model("llama", dtype, **WIDE)
    if kind == "int8 products":
        replace(module.model, lambda name, layer: Int8Linear(layer.weight, layer.bias))
    elif kind in FORMATS:
        replace(
            module,
            lambda name, layer: QuantisedLinear(
                search.quantise(layer.weight.float(), FORMATS[kind], "mse"), layer.bias
            ),
        )
    return module


@pytest.mark.parametrize(
    "kind",
    ["float32", "bfloat16", "int8 products", "int8", "int4-g64", "8da4w", "gemma2 float32", "gemma2 bfloat16"],
)
def test_bits_do_not_depend_on_batch_order_or_threads(kind: str) -> None:
    """Rows of any length come to the same steps alone and together, in any order, on one lane or three."""
    ready = prepared(of_kind(kind))
    assert kind.startswith("gemma2") == (ready.rows is None)
    lengths = [1, 2, 17, 30, 40, 41, 300, 128, 128, 129, 77, 512, 5]
    rows = [row(length, min(length, 100), seed) for seed, length in enumerate(lengths)]
    threads = torch.get_num_threads()
    found: dict[str, list[bytes]] = {}
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            together = scoring.score(ready, rows, 4096, lambda: None)
            backwards = scoring.score(ready, rows[::-1], 1, lambda: None)[::-1]
            alone = [scoring.score(ready, [one], 64, lambda: None)[0] for one in rows]
            for name, losses in (("together", together), ("backwards", backwards), ("alone", alone)):
                found[f"{name}, {count} threads"] = [loss.steps.tobytes() for loss in losses]
            assert count == torch.get_num_threads()
    finally:
        torch.set_num_threads(threads)
    first = next(iter(found.values()))

    assert [] == [name for name, losses in found.items() if losses != first]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_short_rows_in_one_block_are_those_of_transformers(kind: str) -> None:
    """Each begins at position 0 and sees itself alone."""
    module = random_model("llama", getattr(torch, kind))
    pairs = [
        (ids[:-1], ids[-min(7, length) :]) for length in (1, 6, 50, 128, 90) for ids in [tokens(length + 1, length)]
    ]
    wanted = [float(expected(module, *pair).sum()) for pair in pairs]
    rows = [scoring.Row(*(part.numpy().astype(np.int32) for part in pair)) for pair in pairs]
    got = [
        float(found.steps.sum() / STEPS_PER_NAT) for found in scoring.score(prepared(module), rows, 64, lambda: None)
    ]

    assert pytest.approx(wanted, rel=2e-6 if kind == "float32" else 2e-2) == got


def test_rows_are_gathered_into_full_blocks() -> None:
    """Long rows alone and first; short ones by first fit, the longest first; nobody is left out."""
    lengths = [100, 128, 300, 129, 128, 60, 90, 1, 70]

    assert [[2], [3], [1, 4], [0, 6, 5, 7], [8]] == decoder.gathered(lengths)
    assert [] == decoder.gathered([])


def test_rows_beyond_a_sliding_window_go_through_transformers() -> None:
    """The fast path attends to all that came before; a row longer than the window must not take it."""
    module = random_model("mistral", sliding_window=128)
    wanted = {length: float(expected(module, *_pair(length)).sum()) for length in (128, 200)}
    ready = prepared(module)
    assert ready.rows is not None
    got = {}
    for length in wanted:
        ids, targets = _pair(length)
        one = scoring.Row(ids.numpy().astype(np.int32), targets.numpy().astype(np.int32))
        (loss,) = scoring.score(ready, [one], 4096, lambda: None)
        got[length] = float(loss.steps.sum() / STEPS_PER_NAT)

    assert 128 == ready.rows.longest
    assert pytest.approx(wanted, rel=1e-6) == got


def _pair(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(length + 1)
    return ids[:-1], ids[1:]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma2", {}),
        ("olmo2", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
        ("gpt2", {"n_embd": 96, "n_head": 6, "n_layer": 2}),
    ],
)
def test_other_models_stay_with_transformers(family: str, options: dict[str, Any]) -> None:
    """And the kernel's name says so."""
    ready = prepared(random_model(family, **options))

    assert ready.rows is None
    assert "transformers (no fast path for layers of this kind)" == ready.kernel


def test_a_model_that_computes_otherwise_fails_the_self_test() -> None:
    """Granite is built like Llama, but scales its residuals: the self-test finds out and the report can say so."""
    module = random_model("granite", residual_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=2.0)
    ids = tokens(301)
    wanted = expected(module, ids[:-1], ids[1:])
    ready = prepared(module)
    one = scoring.Row(ids[:-1].numpy().astype(np.int32), ids[1:].numpy().astype(np.int32))
    (loss,) = scoring.score(ready, [one], 4096, lambda: None)

    assert ready.rows is None
    assert ready.kernel.startswith("transformers (the fast path's self-test was off by")
    assert float(wanted.sum()) == pytest.approx(float(loss.steps.sum() / STEPS_PER_NAT), rel=1e-6)


def test_a_head_in_tiles_is_exact_against_float64() -> None:
    """Against the log-softmax in float64 of the same logits, sums are right to 1e-8."""
    layer = torch.nn.Linear(96, 49152, bias=False).requires_grad_(False)
    states = torch.randn(200, 96, generator=torch.Generator().manual_seed(1)) * 4
    targets = torch.randint(0, 49152, (200,), generator=torch.Generator().manual_seed(2))
    head = Head(layer, Shape())
    with torch.inference_mode():
        got = head.losses(states, targets)
        exact = -torch.log_softmax(head.logits(states).double(), -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    assert float(exact.sum()) == pytest.approx(float(got.sum()), rel=1e-8)
    torch.testing.assert_close(got, exact, rtol=0, atol=2e-6)


def test_logits_are_shaped_as_the_model_does() -> None:
    """Scaled, then capped."""
    layer = torch.nn.Linear(16, 3000, bias=True).requires_grad_(False)
    states, targets = torch.randn(50, 16) * 5, torch.arange(50)
    with torch.inference_mode():
        logits = torch.tanh(layer(states).double() * 0.5 / 3.0) * 3.0
        wanted = -torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        got = Head(layer, Shape(factor=0.5, cap=3.0)).losses(states, targets)

    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_out_as_nan(bad: float) -> None:
    """A state with a NaN or an infinity spoils its own position and no other."""
    layer = torch.nn.Linear(16, 3000, bias=False).requires_grad_(False)
    states, targets = torch.randn(50, 16), torch.arange(50)
    states[7, 3] = bad
    with torch.inference_mode():
        losses = Head(layer, Shape()).losses(states, targets)

    assert [7] == torch.isnan(losses).nonzero().flatten().tolist()


def test_certain_tokens_cost_nothing() -> None:
    """Losses never round below zero."""
    layer = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.eye(8) * 1e4)
    with torch.inference_mode():
        losses = Head(layer, Shape()).losses(torch.eye(8), torch.arange(8))

    assert [0.0] * 8 == losses.tolist()


def test_unscored_positions_are_skipped_in_the_last_layer_alone() -> None:
    """States of the scored end are the same bits, whether or not what comes before is scored."""
    module = random_model("llama")
    prepared(module)
    body = decoder.build(module.model, module.config)
    assert body is not None
    ids = tokens(384)
    with torch.inference_mode():
        strip = decoder.Strip.of([ids])
        assert torch.equal(body.states(strip, [384])[-100:], body.states(strip, [100]))
