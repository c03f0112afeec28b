"""Batches hold every row once, rows of one length together, and no more than the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.scoring import Row, batches

pytestmark = pytest.mark.torch


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows of few different lengths."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=40))
    return [Row(np.zeros(length, np.int32), np.zeros(min(length, scored), np.int32)) for length, scored in shapes]


@given(rows(), st.integers(1, 50))
def test_batches_hold_every_row_once(all_rows: list[Row], budget: int) -> None:
    """And each batch has one shape, within the budget unless it is a single row."""
    found = list(batches(all_rows, budget))

    assert sorted(i for batch in found for i in batch) == list(range(len(all_rows)))
    for batch in found:
        assert 1 == len({(len(all_rows[i].inputs), len(all_rows[i].targets)) for i in batch})
        assert len(batch) == 1 or sum(len(all_rows[i].inputs) for i in batch) <= budget


@given(rows(), st.integers(1, 50))
def test_long_rows_come_first(all_rows: list[Row], budget: int) -> None:
    """What needs most memory fails first."""
    lengths = [len(all_rows[batch[0]].inputs) for batch in batches(all_rows, budget)]

    assert sorted(lengths, reverse=True) == lengths
