"""Tensor parallelism cuts weights where heads, columns and groups of scales allow it, and says so where they do not."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from eval_kernel.errors import LayoutUnsupported
from eval_kernel.parallel.tensor import Cut, cuts, part_of
from eval_kernel.precision import canonical, search
from eval_kernel.precision.formats import FORMATS, Format
from tests.support import models, ways

pytestmark = pytest.mark.torch

QUANTISED = [f for f in FORMATS.values() if f.quantised]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads on two key-value heads, hidden size 64, inner size 128."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize(
    ("precision", "degree", "by_heads"),
    [
        ("fp32", 2, True),
        ("fp32", 4, False),  # two key-value heads do not divide by four
        ("int8", 2, True),
        ("int4-g32", 2, True),
        ("int4-g64", 2, False),  # half of o_proj's 64 columns is no whole group of scales
    ],
)
def test_heads_are_cut_where_they_can_be_else_attention_stays_whole(
    llama: Path, tmp_path: Path, precision: str, degree: int, by_heads: bool
) -> None:
    """The multi-layer perceptron is cut in any case; parts of all ranks follow each other without gap or overlap."""
    made, _, _ = ways.ingredients(llama, precision, tmp_path)
    ranks = [cuts(made.source.module, made.plan, rank, degree) for rank in range(degree)]

    assert [by_heads] * degree == [attention for _, attention in ranks]
    assert by_heads == any("q_proj" in name for name in ranks[0][0])
    assert any("down_proj" in name for name in ranks[0][0])
    for name in ranks[0][0]:
        pieces = [found[name] for found, _ in ranks]
        assert 0 == pieces[0].start
        assert all(one.end == other.start for one, other in pairwise(pieces))


@pytest.mark.parametrize(
    ("precision", "degree", "possible"),
    [("fp32", 3, "possible: 1, 2, 4, 8, 16, 32, 64"), ("int4-g32", 8, "possible: 1, 2, 4")],
)
def test_a_degree_that_cuts_through_columns_or_scales_is_refused_with_those_that_do_not(
    llama: Path, tmp_path: Path, precision: str, degree: int, possible: str
) -> None:
    """Never a crash inside transformers: one line, with the degrees that work."""
    made, _, _ = ways.ingredients(llama, precision, tmp_path)
    with pytest.raises(LayoutUnsupported, match=f"parallel.tp is {degree}, .*inner size 128.*{possible}$"):
        cuts(made.source.module, made.plan, 0, degree)


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("degree", [2, 3])
def test_the_parts_of_a_quantised_weight_are_the_weight(form: Format, dim: int, degree: int) -> None:
    """Values, scales and zeros of every format are cut so that the parts together give what the whole does, bit by bit;
    so do odd numbers of rows, whose packed zeros begin in the middle of a byte."""
    unit = form.group or 8
    weight = search.quantise(
        torch.randn(21 * degree, unit * degree, generator=torch.Generator().manual_seed(1)), form, "rtn"
    )
    size = (weight.rows, weight.columns)[dim]
    parts = [part_of(weight, Cut(dim, size * k // degree, size * (k + 1) // degree)) for k in range(degree)]

    whole = canonical.dequantised(weight, torch.float32)
    assert torch.cat([canonical.dequantised(part, torch.float32) for part in parts], dim).equal(whole)
