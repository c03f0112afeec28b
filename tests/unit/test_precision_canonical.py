"""Quantised weights: the same bytes on any number of threads, errors within half a step, nothing lost in packing."""

from __future__ import annotations

import pytest
import torch

from eval_kernel.precision import canonical, search
from eval_kernel.precision.formats import FORMATS, Format, Kind
from eval_kernel.precision.modules import QuantisedEmbedding, QuantisedLinear, rounded_activations

pytestmark = pytest.mark.torch

QUANTISED = [f for f in FORMATS.values() if f.quantised]
INTEGERS = [f for f in QUANTISED if f.kind is Kind.INTEGER]


def matrix(rows: int = 66, columns: int = 256, seed: int = 0) -> torch.Tensor:
    """Weights with a few outliers, a row of zeros, and rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 1, rows).unsqueeze(1)
    w[:, 7] *= 8
    w[3] = 0
    return w


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_bytes_do_not_depend_on_threads(form: Format, method: str) -> None:
    """One, two and five threads give one digest, and the parts have the sizes that the plan counts."""
    w, before, digests = matrix(512, 1024), torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made = search.quantise(w, form, method)
            digests.add(made.digest())
    finally:
        torch.set_num_threads(before)

    assert 1 == len(digests)
    assert form.value_bytes(512, 1024) + form.scale_bytes(512, 1024) == made.nbytes


@pytest.mark.parametrize("form", INTEGERS, ids=lambda f: f.name)
def test_plain_rounding_is_off_by_half_a_step_at_most(form: Format) -> None:
    """Clipping at the ends may double it where the integers reach further on one side; zeros stay zero."""
    w = matrix()
    made = search.quantise(w, form, "rtn")
    error = canonical.grouped(canonical.dequantised(made) - w, form).abs()
    steps = made.scales.float().abs().unsqueeze(-1)

    assert bool((error <= 1.01 * steps).all())
    assert 0.0 == float(canonical.dequantised(made)[3].abs().max())


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_least_squares_is_never_worse_than_plain_rounding(form: Format) -> None:
    """Group by group, in squared error."""
    w = matrix()
    errors = [
        canonical.grouped((canonical.dequantised(search.quantise(w, form, method)) - w).double() ** 2, form).sum(-1)
        for method in ("rtn", "mse")
    ]

    assert bool((errors[1] <= errors[0] * (1 + 1e-6)).all())


@pytest.mark.parametrize("form", [f for f in INTEGERS if f.bits == 4], ids=lambda f: f.name)
def test_least_squares_gains_where_bits_are_few(form: Format) -> None:
    """At least a tenth of the squared error of 4 bits."""
    w = matrix()
    plain, least = (
        float(((canonical.dequantised(search.quantise(w, form, method)) - w) ** 2).sum()) for method in ("rtn", "mse")
    )

    assert least < (0.9 if form.symmetric else 0.97) * plain


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_packing_loses_nothing(form: Format) -> None:
    """Quantising what was dequantised with the same scales gives the same bytes; so do any ranges of rows."""
    made = search.quantise(matrix(), form, "rtn")
    whole = canonical.dequantised(made)
    parts = [canonical.dequantised(made.row_range(a, b)) for a, b in ((0, 2), (2, 40), (40, 66))]

    assert torch.equal(whole, torch.cat(parts))
    if form.kind is Kind.INTEGER:
        values, zeros = canonical.unpacked(made)
        q = values.float() + (form.minimum if form.bits == 4 else 0)
        zero = None if zeros is None else zeros.float()
        again = canonical.pack(q, made.scales.float(), zero, form)
        assert all(torch.equal(part, again[key]) for key, part in made.tensors().items())


def test_a_value_is_what_the_definition_says() -> None:
    """(value - zero) x scale, worked by hand for one group of four-bit integers."""
    form = FORMATS["int4-g32"]
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1], w[0, 16] = 7.5, -7.5, 3.2
    made = search.quantise(w, form, "rtn")

    assert [1.0] == made.scales.flatten().tolist()
    # 7.5 rounds to 8 and is clipped to 7: code 15; -7.5 to -8: code 0; 3.2 to 3: code 11, in the high half of byte 0.
    assert [15 | 11 << 4, 0 | 8 << 4] == made.values[0, :2].tolist()
    assert [7.0, -8.0, 3.0] == [float(canonical.dequantised(made)[0, k]) for k in (0, 1, 16)]


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_what_is_dequantised(form: Format, dtype: torch.dtype) -> None:
    """Piece by piece or at once: the same, with and without a bias."""
    made = search.quantise(matrix(5000, 256), form, "rtn")
    bias = torch.linspace(-1, 1, 5000).to(dtype)
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = QuantisedLinear(made, bias)(x)
    seen = rounded_activations(x) if form.dynamic else x
    expected = torch.nn.functional.linear(seen.double(), canonical.dequantised(made, dtype).double(), bias.double())

    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((got.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
def test_an_embedding_looks_up_what_is_dequantised(form: Format) -> None:
    """Any rows, in any order, also one alone."""
    made = search.quantise(matrix(33, 128), form, "mse")
    table, layer = canonical.dequantised(made), QuantisedEmbedding(made, torch.float32)

    for ids in (torch.tensor([[3, 32, 0], [1, 1, 7]]), torch.tensor([31])):
        assert torch.equal(table[ids], layer(ids))


def test_activations_are_rounded_by_token() -> None:
    """Each token has a scale of its own: the largest becomes 127 steps."""
    x = torch.tensor([[1.0, -0.5, 0.004], [0.0, 0.0, 0.0], [127.0, 0.4, 0.6]])
    expected = torch.tensor([[1.0, -64 / 127, 1 / 127], [0.0, 0.0, 0.0], [127.0, 0.0, 1.0]])

    assert torch.allclose(expected, rounded_activations(x), atol=1e-7)


def test_sums_are_added_in_one_order() -> None:
    """Halving adds up any length, and agrees with float64 up to float32 rounding."""
    for size in (1, 2, 3, 31, 64, 577):
        x = torch.randn(4, size, generator=torch.Generator().manual_seed(size))

        assert torch.allclose(x.double().sum(-1), search.ordered_sum(x).double(), atol=1e-5)
