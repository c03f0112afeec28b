"""The allocation against brute force: it fits, it is near the best, and no choice comes below the bound."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from eval_kernel.precision.allocate import Option, hull, solve

OPTIONS = st.lists(st.builds(Option, st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=4)
GROUPS = st.lists(OPTIONS, min_size=1, max_size=5)


def brute(groups: list[list[Option]], capacity: int) -> int | None:
    """The least value of any choice that fits."""
    values = [
        sum(o.value for o in choice)
        for choice in itertools.product(*groups)
        if sum(o.weight for o in choice) <= capacity
    ]
    return min(values, default=None)


@given(GROUPS, st.integers(0, 160))
@settings(max_examples=400, deadline=None)
def test_solutions_fit_and_are_near_the_best(groups: list[list[Option]], capacity: int) -> None:
    """Bound <= best <= found; what is lost is less than the largest step of any group."""
    best, found = brute(groups, capacity), solve(groups, capacity)

    assert (best is None) == (found is None)
    if found is None or best is None:
        return
    assert found.weight == sum(g[k].weight for g, k in zip(groups, found.picks, strict=True))
    assert found.value == sum(g[k].value for g, k in zip(groups, found.picks, strict=True))
    assert found.weight <= capacity
    assert found.bound <= best <= found.value
    largest = max(max(o.value for o in g) - min(o.value for o in g) for g in groups)
    assert found.value - best <= largest


@given(GROUPS, st.integers(0, 160), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_solutions_are_no_worse_than_what_they_start_from(
    groups: list[list[Option]], capacity: int, draw: random.Random
) -> None:
    """Wherever the start fits."""
    start = [draw.randrange(len(g)) for g in groups]
    found = solve(groups, capacity, [start])
    if found is not None and sum(g[k].weight for g, k in zip(groups, start, strict=True)) <= capacity:
        assert found.value <= sum(g[k].value for g, k in zip(groups, start, strict=True))


@given(OPTIONS)
def test_hulls_are_convex_and_hold_the_extremes(options: list[Option]) -> None:
    """Weights rise, values fall by ever less per weight; the lightest and the best are in."""
    found = [options[k] for k in hull(options)]
    steps = [(a.value - b.value, b.weight - a.weight) for a, b in itertools.pairwise(found)]

    assert all(gain > 0 and weight > 0 for gain, weight in steps)
    assert all(a[0] * b[1] > b[0] * a[1] for a, b in itertools.pairwise(steps))
    assert min(o.weight for o in options) == found[0].weight
    assert min(o.value for o in options) == found[-1].value


def test_a_model_of_many_groups_is_solved_within_a_percent_of_the_bound() -> None:
    """225 groups of 6 options, as in a model of 80 layers."""
    draw = random.Random(4)
    groups = []
    for _ in range(225):
        size, sensitivity = draw.randint(1, 12) * 10**6, draw.expovariate(1.0)
        groups.append(
            [Option(size * bits // 8, int(10**9 * sensitivity * 4.0 ** (4 - bits))) for bits in (4, 5, 6, 8, 12, 16)]
        )
    low = sum(g[0].weight for g in groups)
    for share in (1.02, 1.3, 2.0, 4.0):
        found = solve(groups, int(low * share))

        assert found is not None
        assert 0.0 <= found.gap <= 0.01
