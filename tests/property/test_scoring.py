"""However rows are batched, each is scored once; when memory runs out, only what did not fit is tried again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval_kernel import scoring
from eval_kernel.budget import Budget
from eval_kernel.model import Model
from eval_kernel.scoring import Row, by_shape

pytestmark = pytest.mark.torch

VOCABULARY = 8
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Rows of few different lengths."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 99)), max_size=40))
    found = []
    for length, scored, seed in shapes:
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, length + 1).astype(np.int32)
        found.append(Row(tokens[:-1], tokens[1:][-min(length, scored) :]))
    return found


def small_memory(most: int, calls: list[tuple[int, ...]]) -> Model:
    """A model whose logits after token i are row i of a table, and whose memory holds ``most`` rows of any length."""

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        distinct = len({tuple(row) for row in ids.tolist()})
        if distinct > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        calls.append(tuple(ids.shape))
        return torch.nn.functional.one_hot(ids, VOCABULARY).to(TABLE.dtype)

    def whole(ids: torch.Tensor, keep: int) -> torch.Tensor:
        return TABLE[ids][:, -keep:]

    return Model(torch.device("cpu"), TABLE.dtype, VOCABULARY, True, hidden, lambda states: states @ TABLE, whole)


@given(rows())
def test_groups_hold_every_row_once(all_rows: list[Row]) -> None:
    """And each has one shape, the longest first."""
    found = by_shape(all_rows)

    assert sorted(i for group in found for i in group) == list(range(len(all_rows)))
    lengths = [len(all_rows[group[0]].inputs) for group in found]
    assert sorted(lengths, reverse=True) == lengths
    for group in found:
        assert 1 == len({(len(all_rows[i].inputs), len(all_rows[i].targets)) for i in group})


@given(rows(), st.integers(1, 50), st.integers(1, 50), st.integers(1, 4))
def test_neither_the_budget_nor_lack_of_memory_changes_a_loss(
    all_rows: list[Row], budget: int, other: int, most: int
) -> None:
    """Losses are equal to the bit for two budgets, one of them on a device that holds few rows."""
    wide: list[tuple[int, ...]] = []
    expected = scoring.score(small_memory(99, wide), all_rows, budget, lambda: None)
    got = scoring.score(small_memory(most, []), all_rows, other, lambda: None)

    assert [x.steps.tolist() for x in expected] == [x.steps.tolist() for x in got]


@given(rows(), st.integers(1, 4))
def test_what_fits_is_scored_once(all_rows: list[Row], most: int) -> None:
    """A batch that did not fit is halved; rows that were done are not done again."""
    calls: list[tuple[int, ...]] = []
    beats: list[int] = []
    budget = Budget(1000)
    scoring.score(small_memory(most, calls), all_rows, budget, lambda: beats.append(1))

    assert len(calls) == len(beats)
    assert budget.tokens >= 1


@given(rows(), st.integers(1, 3))
def test_sums_for_calibration_are_those_of_batches_that_fit(all_rows: list[Row], most: int) -> None:
    """What a batch added before it ran out of memory does not count."""
    expected, got = scoring.Extra(), scoring.Extra()
    scoring.score(small_memory(99, []), all_rows, 50, lambda: None, expected)
    scoring.score(small_memory(most, []), all_rows, 50, lambda: None, got)

    assert expected == got


def test_a_row_that_does_not_fit_alone_is_an_error() -> None:
    """There is nothing left to halve."""
    one = Row(np.zeros(2, np.int32), np.zeros(2, np.int32))
    with pytest.raises(torch.OutOfMemoryError):
        scoring.score(small_memory(0, []), [one], 100, lambda: None)
