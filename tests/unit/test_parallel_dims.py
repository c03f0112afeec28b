"""What degrees of parallelism may be, and what a user is told of those that may not."""

from __future__ import annotations

import pytest

from eval_kernel.errors import LayoutUnsupported, SpecError
from eval_kernel.parallel.dims import AXES, ParallelDims, divisors, filled


def test_the_product_of_the_degrees_is_the_world() -> None:
    """Degrees that multiply to the number of ranks are taken as they are."""
    dims = ParallelDims(dp_replicate=2, tp=3, world_size=6)
    assert dims.degrees() == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 3}
    assert dims.label == "dp_replicate=2,tp=3"


@pytest.mark.parametrize("axis", AXES)
def test_minus_one_is_what_the_others_leave(axis: str) -> None:
    """Any one degree may be -1 and becomes the world divided by the rest."""
    other = "tp" if axis != "tp" else "dp_shard"
    dims = ParallelDims(**{axis: -1, other: 2, "world_size": 8})
    assert getattr(dims, axis) == 4


def test_an_aggregator_is_no_rank() -> None:
    """Two data-parallel ranks "and one aggregator" in a world of three: what an aggregator is, and what to write."""
    with pytest.raises(LayoutUnsupported) as caught:
        ParallelDims(dp_replicate=1, dp_shard=2, tp=1, cp=1, world_size=3)
    text = str(caught.value)
    assert "dp_shard=2 makes 2 ranks, but the group has 3" in text
    assert "an agent of role AGGREGATE" in text
    assert "not a rank" in text
    assert "write a group of 2, or dp_shard=3" in text


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"tp": 2, "world_size": 4}, r"tp=2 makes 2 ranks, but the group has 4; write a group of 2, or dp_replicate=2"),
        ({"tp": 3, "dp_shard": -1, "world_size": 4}, r"4 ranks are no multiple of 3; write a group of 3, or tp=4"),
        ({"world_size": 2}, r"all degrees 1 makes 1 ranks, but the group has 2"),
    ],
)
def test_a_wrong_product_names_layouts_that_work(degrees: dict[str, int], match: str) -> None:
    """The message states the product, the world, and the nearest layouts."""
    with pytest.raises(LayoutUnsupported, match=match):
        ParallelDims(**degrees)


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"tp": 0}, r"parallel.tp is 0; write 1 or more, or -1"),
        ({"dp_shard": -2}, r"parallel.dp_shard is -2"),
        ({"tp": -1, "dp_shard": -1, "world_size": 4}, r"dp_shard and tp are both -1"),
        ({"world_size": 0}, r"world_size is 0"),
    ],
)
def test_degrees_that_cannot_be(degrees: dict[str, int], match: str) -> None:
    """Zero, negative and twice -1 are refused by name."""
    with pytest.raises(SpecError, match=match):
        ParallelDims(**degrees)


@pytest.mark.parametrize(
    ("degrees", "match"),
    [
        ({"cp": 2}, r"parallel.cp is 2, which is not offered: a window"),
        ({"pp": 2}, r"parallel.pp is 2, which is not offered: its stages wait"),
        ({"dp_shard": 2, "tp": 2}, r"would shard the weights twice"),
    ],
)
def test_what_evaluation_has_no_use_for_is_refused_with_the_reason(degrees: dict[str, int], match: str) -> None:
    """Context and pipeline parallelism, and sharding twice, are valid dims that are not offered."""
    world = 1
    for degree in degrees.values():
        world *= degree
    with pytest.raises(LayoutUnsupported, match=match):
        ParallelDims(**degrees, world_size=world).check_offered()


def test_every_rank_has_its_own_place() -> None:
    """Coordinates are all different, tp neighbours are neighbours in rank, and tp groups share their windows."""
    dims = ParallelDims(dp_replicate=2, dp_shard=3, tp=2, world_size=12)
    places = [tuple(dims.coordinates(rank).values()) for rank in range(12)]
    assert len(set(places)) == 12
    assert [dims.coordinates(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert [dims.row_rank(rank) for rank in range(12)] == [k for k in range(6) for _ in range(2)]


def test_a_mapping_is_filled_in_for_a_world() -> None:
    """Axes that a mapping does not name are 1; an unknown one is refused by name."""
    assert filled({"tp": 2, "dp_replicate": -1}, 6).dp_replicate == 3
    assert filled({}, 1) == ParallelDims()
    with pytest.raises(SpecError, match="unknown axis 'ep'"):
        filled({"ep": 2}, 2)


def test_divisors_divide_all() -> None:
    """The degrees possible for 9 heads on 3 key-value heads are 1 and 3."""
    assert divisors(9, 3) == [1, 3]
