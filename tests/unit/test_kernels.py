"""Linear kernels compute what they say, and a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eval_kernel import kernels, lanes
from eval_kernel.errors import PrecisionUnsupported

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16]
#: Outputs and inputs as real models have them: not powers of two, more and fewer outputs than inputs.
SHAPES = [(192, 576), (1536, 576), (576, 1536)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of a fixed seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def packed(dtype: torch.dtype, outputs: int, inputs: int) -> kernels.PackedLinear:
    """A packed layer with a bias, where this machine packs."""
    if not kernels.packs("cpu", dtype):
        pytest.skip(f"oneDNN does not pack {dtype} here")
    return kernels.PackedLinear((normal(outputs, inputs) * 0.05).to(dtype), normal(outputs, seed=1).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_products_and_fusions_are_the_plain_ones(dtype: torch.dtype) -> None:
    """Fused results are rounded once: they are at least as near to the exact ones as the plain ones are."""
    layer = packed(dtype, 160, 96)
    weight, bias = (normal(160, 96) * 0.05).to(dtype).double(), normal(160, seed=1).to(dtype).double()
    x, other = normal(50, 96, seed=2).to(dtype), normal(50, 160, seed=3).to(dtype)
    exact = F.linear(x.double(), weight, bias)
    room = 2e-6 if dtype == torch.float32 else 8e-3
    pairs = {
        "product": (layer(x), exact),
        "silu": (layer.activated(x, "silu"), F.silu(exact)),
        "gelu": (layer.activated(x, "gelu_pytorch_tanh"), F.gelu(exact, approximate="tanh")),
        "times": (layer.times(x, other), exact * other.double()),
        "plus": (layer.plus(x, other), exact + other.double()),
        "more dimensions": (layer(x.view(5, 10, 96)).view(50, 160), exact),
    }
    worst = {
        name: float((got.double() - wanted).abs().max() / wanted.abs().max()) for name, (got, wanted) in pairs.items()
    }

    assert {} == {name: error for name, error in worst.items() if error > room}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packed_bits_do_not_depend_on_the_run(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """On one thread, the same block of rows comes to the same bits, in memory of its own and as a part of more."""
    layer, x = packed(dtype, outputs, inputs), normal(600, inputs, seed=5).to(dtype)
    with lanes.one_thread():
        expected = layer(x[100:356])
        again = [layer(x[100:356].clone()), layer(torch.cat([x[:7], x[100:356]])[7:])]

    assert [True, True] == [torch.equal(got, expected) for got in again]


def test_int8_products_are_exact_integers() -> None:
    """Whatever route this machine takes, the sums are those of the integers, at the extremes too."""
    values = torch.randint(-127, 128, (50, 1536), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = torch.randint(-127, 128, (64, 1536), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    values[0], weight[0], weight[1] = 127, 127, -127
    layer = kernels.Int8Linear.from_integers(weight, torch.ones(64))
    expected = (values.to(torch.int64) @ weight.to(torch.int64).t()).to(torch.float32)

    assert torch.equal(expected, layer.product(values, torch.ones(50, 1)))
    assert torch.equal(expected, kernels.exact_product(values, weight))


def test_int8_equals_its_dequantised_matmul() -> None:
    """Dequantised activations times dequantised weights, in float64, is what int8 comes to."""
    weight, bias, x = normal(96, 200) * 0.05, normal(96, seed=1), normal(70, 200, seed=2) * 3
    layer = kernels.Int8Linear(weight, bias)
    scales = weight.abs().amax(1, keepdim=True) / 127
    values, steps = kernels.quantise(x)
    dequantised = (weight / scales).round().double() * scales.double()
    expected = (values.double() * steps.double()) @ dequantised.t() + bias.double()

    assert float((layer(x).double() - expected).abs().max()) <= 1e-6 * float(expected.abs().max())
    assert torch.bfloat16 == layer(x.bfloat16()).dtype


def test_int8_bits_depend_on_the_row_alone() -> None:
    """Activations have a scale per row, and integer sums have no order."""
    layer, x = kernels.Int8Linear(normal(96, 200), None), normal(300, 200, seed=3)
    whole = layer(x)

    assert [True] * 4 == [torch.equal(layer(x[:rows]), whole[:rows]) for rows in (1, 2, 40, 129)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_int8_keeps_what_is_not_finite(bad: float) -> None:
    """A NaN or an infinity cannot hide in an integer: no output of that row is finite, and other rows are untouched."""
    x = normal(50, 64)
    layer = kernels.Int8Linear(normal(48, 64), None)
    expected = layer(x)[1:]
    x[0, 5] = bad
    got = layer(x)

    assert not bool(torch.isfinite(got[0]).any())
    assert torch.equal(expected, got[1:])


def test_a_row_of_zeros_is_zero_in_int8() -> None:
    """There is nothing to take a scale from, and no division by zero."""
    layer = kernels.Int8Linear(torch.zeros(48, 64), None)

    assert 0.0 == float(layer(torch.zeros(50, 64)).abs().max())


def test_layers_are_replaced_where_the_choice_says_so() -> None:
    """By name; the others stay, and what was replaced keeps no weights of its own."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    count = kernels.replace(model, lambda name, layer: kernels.Int8Linear(layer.weight, None) if name == "2" else None)

    assert 1 == count
    assert [torch.nn.Linear, torch.nn.ReLU, kernels.Int8Linear] == [type(layer) for layer in model]
    assert ["0.weight", "0.bias"] == [name for name, _ in model.named_parameters()]


def test_a_layer_cut_by_outputs_is_the_layer() -> None:
    """The tiles' outputs, side by side, are the layer's."""
    layer = torch.nn.Linear(64, 4500)
    x = normal(50, 64)
    with torch.no_grad():
        tiles = kernels.tiles_of(layer)
        got, expected = torch.cat([tile(x) for tile in tiles], -1), layer(x)

    assert 3 == len(tiles)
    torch.testing.assert_close(got, expected)


def test_an_int8_layer_in_tiles_is_the_layer() -> None:
    """The same integers and scales, bit for bit, whole and cut."""
    weight, bias, x = normal(4500, 64), normal(4500, seed=1), normal(50, 64, seed=2)
    layer = kernels.Int8Linear(weight, bias)
    tiles = kernels.tiles_of(layer)
    plain = [kernels.Int8Linear(weight[part], bias[part]) for part in (slice(0, 2000), slice(2000, 4500))]

    assert 3 == len(tiles)
    assert torch.equal(layer(x), torch.cat([tile(x) for tile in tiles], -1))
    assert torch.equal(layer(x), torch.cat([part(x) for part in plain], -1))


def test_int8_is_refused_where_it_would_be_emulated() -> None:
    """A device without int8 products gets a line that says what to write instead."""
    with pytest.raises(PrecisionUnsupported, match="slower than fp32; write precision: bf16 or fp32"):
        kernels.check_int8(torch.device("meta"))
