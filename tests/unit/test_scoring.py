"""The arithmetic of a loss, apart from any model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from eval_kernel import scoring
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.model import Model

pytestmark = pytest.mark.torch

VOCABULARY = 8


def of_table(table: torch.Tensor, calls: list[int] | None = None) -> Model:
    """A model whose logits after token i are row i of a table."""

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        if calls is not None:
            calls.append(ids.numel())
        return torch.nn.functional.one_hot(ids, VOCABULARY).to(table.dtype)

    def whole(ids: torch.Tensor, keep: int) -> torch.Tensor:
        return table[ids][:, -keep:]

    return Model(torch.device("cpu"), table.dtype, VOCABULARY, True, hidden, lambda states: states @ table, whole)


def row(inputs: list[int], targets: list[int]) -> scoring.Row:
    """A row of these tokens."""
    return scoring.Row(np.array(inputs, dtype=np.int32), np.array(targets, dtype=np.int32))


def test_the_last_positions_predict_the_targets() -> None:
    """Position i predicts what follows it; inputs before the first scored one are context."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    (loss,) = scoring.score(of_table(table), [row([5, 1, 2, 3], [3, 4])], 100, lambda: None)
    expected = -torch.log_softmax(table.double(), -1)

    assert [expected[2, 3].item(), expected[3, 4].item()] == pytest.approx(
        (loss.steps / STEPS_PER_NAT).tolist(), abs=1e-6
    )


@pytest.mark.parametrize(("logit", "kind"), [(math.nan, "nan"), (math.inf, "nan"), (-math.inf, "inf")])
def test_what_is_no_number_is_flagged_and_zero(logit: float, kind: str) -> None:
    """A NaN or infinite logit of the target makes NaN, minus infinity makes an infinite loss; neither enters a sum."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[2, 3] = logit
    model = of_table(table)
    direct = Model(model.device, model.dtype, VOCABULARY, False, model.hidden, model.logits, model.whole)
    (loss,) = scoring.score(direct, [row([1, 2], [4, 3])], 100, lambda: None)

    assert [True, False] == loss.finite.tolist()
    assert [False, kind == "nan"] == loss.nan.tolist()
    assert 0 == loss.steps[1]
    assert round(math.log(VOCABULARY) * 2**20) == round(loss.steps[0] / 2**10)


def test_no_loss_is_below_zero() -> None:
    """A token that is certain costs nothing, not the rounding error of a logarithm."""
    table = torch.full((VOCABULARY, VOCABULARY), -1e4)
    table.fill_diagonal_(1e4)
    (loss,) = scoring.score(of_table(table), [row([3, 3], [3, 3])], 100, lambda: None)

    assert [0, 0] == loss.steps.tolist()


def test_losses_far_beyond_exp_are_exact() -> None:
    """710 nats and more have no probability in float64; they have a loss."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[1, 0] = 20_000.0
    (loss,) = scoring.score(of_table(table), [row([1], [2])], 100, lambda: None)

    assert 20_000 * STEPS_PER_NAT == loss.steps[0]


@pytest.mark.parametrize("rows", [1, 3, 60])
def test_no_product_has_few_rows(rows: int) -> None:
    """Short rows go together, and a batch too small holds its rows more than once; results are one per row."""
    calls: list[int] = []
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1))
    losses = scoring.score(of_table(table, calls), [row([1, 2, 3], [2, 3, 4])] * rows, 4096, lambda: None)

    assert rows == len(losses)
    assert scoring.MIN_ROWS <= min(calls)
    assert 1 == len({tuple(loss.steps.tolist()) for loss in losses})


def test_bfloat16_logits_are_summed_in_float32() -> None:
    """The log-softmax of half-precision logits is not itself half-precise."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)).bfloat16()
    (loss,) = scoring.score(of_table(table), [row([1], [2])], 100, lambda: None)
    expected = -torch.log_softmax(table[1].double(), -1)[2].item()

    assert expected == pytest.approx(loss.steps[0] / STEPS_PER_NAT, abs=1e-6)


def test_nothing_to_score_gives_nothing() -> None:
    """No rows, no batches, no losses."""
    assert [] == scoring.score(of_table(torch.zeros(VOCABULARY, VOCABULARY)), [], 100, lambda: None)
