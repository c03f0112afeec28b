"""Sums on the grid: whatever the order and the grouping, the same bits."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.gridsum import STEPS_PER_NAT, exact_decimal, to_nats, to_steps

LOSSES = st.lists(st.integers(0, 64 * STEPS_PER_NAT), max_size=200)


@given(st.integers(0, 2**53 - 1))
def test_steps_and_nats_convert_both_ways(steps: int) -> None:
    """Every grid value below the bound is a float64, so the round trip changes nothing."""
    assert steps == to_steps(to_nats(steps))


@given(LOSSES, st.integers(0, 2**32))
def test_float64_sums_do_not_depend_on_order_or_grouping(steps: list[int], seed: int) -> None:
    """Left to right, shuffled, in two parts or exactly: one and the same float64."""
    nats = [to_nats(s) for s in steps]
    exact = sum((Fraction(x) for x in nats), Fraction(0))
    shuffled = nats[:]
    random.Random(seed).shuffle(shuffled)
    half = len(nats) // 2

    assert exact == Fraction(sum(nats, 0.0))
    assert exact == Fraction(sum(shuffled, 0.0)), f"seed {seed}"
    assert exact == Fraction(sum(nats[:half], 0.0) + sum(nats[half:], 0.0))
    assert Fraction(sum(steps), STEPS_PER_NAT) == exact


@given(st.floats(0.0, 88.0))
def test_rounding_a_loss_to_the_grid_moves_it_by_half_a_step_at_most(loss: float) -> None:
    """Rounding happens once per token and costs at most 2^-31 nat."""
    snapped = round(loss * STEPS_PER_NAT) / STEPS_PER_NAT

    assert abs(Fraction(snapped) - Fraction(loss)) <= Fraction(1, 2 * STEPS_PER_NAT)
    assert math.isfinite(snapped)


@given(st.integers(-(2**80), 2**80))
def test_the_exact_decimal_is_the_sum_itself(steps: int) -> None:
    """The printed decimal, read back, is the rational number that was summed."""
    with localcontext() as context:
        context.prec = 100

        assert Fraction(steps, STEPS_PER_NAT) == Fraction(Decimal(exact_decimal(steps)))
