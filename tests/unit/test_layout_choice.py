"""Which layout a model gets: what the job says, else the fastest whose weights fit; and how that is said."""

from __future__ import annotations

import pytest

from coordinator.core.trust import precision_class
from eval_kernel.errors import LayoutUnsupported
from eval_kernel.parallel.choose import choose
from eval_kernel.parallel.memory import Sizes
from eval_kernel.partial import Execution
from eval_kernel.precision.section import LAYOUT
from eval_kernel.spec import ParallelSpec

#: SmolLM2-135M in float32: 30 layers, and the embedding that is the head too.
SMOLLM2 = Sizes((14_159_616,) * 30, 113_301_504)


@pytest.mark.parametrize(
    ("world", "room", "text"),
    [
        (1, 10**9, "whole on one rank: 538 MB of weights fit into 1000 MB on every rank"),
        (2, 10**9, "2 replicas: 538 MB of weights fit into 1000 MB on every rank"),
        (
            2,
            400 * 10**6,
            "sharded over 2 ranks: 538 MB of weights do not fit into 400 MB, 1/2 of the layers does",
        ),
        (1, 150 * 10**6, "100% of the layers streamed: 538 MB of weights do not fit into 150 MB"),
        (2, 150 * 10**6, "2 replicas, 100% of the layers streamed: 538 MB of weights do not fit into 150 MB"),
        (1, 300 * 10**6, "63% of the layers streamed: 538 MB of weights do not fit into 300 MB"),
    ],
)
def test_the_fastest_layout_that_fits_is_chosen_and_explained(world: int, room: int, text: str) -> None:
    """Whole models where they fit, shares of layers where those fit, streamed ones else."""
    assert text == str(choose(SMOLLM2, "auto", world, room))


@pytest.mark.parametrize(
    ("wanted", "world", "text"),
    [
        ({"tp": 2}, 2, "tensor parallel over 2 ranks: as the job says"),
        ({"dp_replicate": 2, "tp": -1}, 4, "2 replicas, tensor parallel over 2 ranks: as the job says"),
        ({"dp_shard": -1}, 4, "sharded over 4 ranks: as the job says"),
        ({"streaming_fraction": 0.5}, 1, "50% of the layers streamed: as the job says"),
    ],
)
def test_what_the_job_says_is_done(wanted: dict[str, float], world: int, text: str) -> None:
    """Whatever would fit."""
    assert text == str(choose(SMOLLM2, ParallelSpec.model_validate(wanted), world, 10**9))


def test_degrees_that_are_not_the_groups_are_refused() -> None:
    """The message says what to write."""
    with pytest.raises(LayoutUnsupported, match="tp=3 makes 3 ranks, but the group has 2"):
        choose(SMOLLM2, ParallelSpec(tp=3), 2, 10**9)


def test_how_a_model_lies_says_nothing_of_its_precision() -> None:
    """Words of the layout are not taken for number formats: float32 on two ranks is as exact as on one."""
    layout = str(choose(SMOLLM2, "auto", 2, 10**9))

    assert "full" == precision_class(Execution(dtype="float32", precision={"mlp": "fp32", LAYOUT: layout}))
    assert "quantised" == precision_class(Execution(dtype="float32", precision={"mlp": "int8", LAYOUT: layout}))
