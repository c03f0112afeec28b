"""The grid of 2^-30 nat: what is on it, what is refused, what is printed."""

from __future__ import annotations

import math

import pytest

from eval_kernel.gridsum import GRID_BITS, MAX_EXACT_NATS, MAX_SHARD_TOKENS, exact_decimal, to_nats, to_steps


def test_the_largest_sum_is_exact_and_the_bound_is_refused() -> None:
    """The last grid value below 2^23 nats converts; 2^23 itself does not."""
    last = math.nextafter(MAX_EXACT_NATS, 0.0)

    assert 2**53 - 1 == to_steps(last)
    with pytest.raises(ValueError, match=r"outside \[0, 2\^23\)"):
        to_steps(MAX_EXACT_NATS)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(value: float) -> None:
    """NaN and the infinities are no sums."""
    with pytest.raises(ValueError, match="not finite"):
        to_steps(value)


@pytest.mark.parametrize("value", [0.1, 2.0**-31, 1.0 + 2.0**-40, math.nextafter(1.0, 2.0), 5e-324])
def test_a_value_off_the_grid_is_refused(value: float) -> None:
    """A value between two grid points was never rounded."""
    with pytest.raises(ValueError, match=r"not a multiple of 2\^-30"):
        to_steps(value)


def test_a_negative_value_is_refused() -> None:
    """A loss cannot be negative, not even by one step."""
    with pytest.raises(ValueError, match="outside"):
        to_steps(-(2.0**-GRID_BITS))


def test_the_exact_decimal_has_every_digit() -> None:
    """One step is 2^-30, which has thirty decimal places."""
    assert "0.000000000931322574615478515625" == exact_decimal(1)
    assert "1.5" == exact_decimal(3 << 29)
    assert "0" == exact_decimal(0)
    assert "-2.25" == exact_decimal(-(9 << 28))
    assert "1099511627776" == exact_decimal(1 << 70)


def test_a_full_shard_stays_below_the_bound() -> None:
    """The most tokens a shard may hold, at 63 nats each, still sum exactly."""
    steps = MAX_SHARD_TOKENS * to_steps(63.0)

    assert steps == to_steps(to_nats(steps))
