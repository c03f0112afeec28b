"""Student's t against closed forms and published values; the ratio's standard error against its definition."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.intervals import ratio_interval, t_quantile, t_tails


def closed_form(probability: float, df: int) -> float:
    """The t quantile for 1, 2 and 4 degrees of freedom, where it is elementary (Shaw 2006, section 4.2)."""
    if df == 1:
        return math.tan(math.pi * (probability - 0.5))
    alpha = 4.0 * probability * (1.0 - probability)
    if df == 2:
        return (2.0 * probability - 1.0) * math.sqrt(2.0 / alpha)
    root = math.sqrt(alpha)
    return 2.0 * math.sqrt(math.cos(math.acos(root) / 3.0) / root - 1.0)


@pytest.mark.parametrize("df", [1, 2, 4])
@pytest.mark.parametrize("probability", [0.51, 0.6, 0.75, 0.9, 0.975, 0.995, 0.9999])
def test_t_quantiles_equal_their_closed_forms(df: int, probability: float) -> None:
    """For few degrees of freedom the quantile is elementary."""
    assert t_quantile(probability, df) == pytest.approx(closed_form(probability, df), rel=1e-10)


@pytest.mark.parametrize(
    ("df", "expected"),
    [
        (3, 3.182446305284263),
        (5, 2.570581835636314),
        (10, 2.2281388519649385),
        (30, 2.0422724563012373),
        (61, 1.9996235849949393),
        (100, 1.9839715184496334),
    ],
)
def test_t_quantiles_equal_published_values(df: int, expected: float) -> None:
    """The 97.5 % quantiles of statistical tables, with the digits that libraries give."""
    assert t_quantile(0.975, df) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("df", [999, 1000, 5000, 10**6])
def test_both_ways_to_the_quantile_agree(df: int) -> None:
    """Where the expansion takes over, the tail of its quantile is what was asked for."""
    assert t_tails(t_quantile(0.975, df), df) == pytest.approx(0.05, rel=1e-9)


def test_t_quantiles_are_symmetric() -> None:
    """The median is zero and the lower tail mirrors the upper."""
    assert t_quantile(0.5, 7) == 0.0
    assert -t_quantile(0.975, 7) == pytest.approx(t_quantile(0.025, 7), rel=1e-12)


@pytest.mark.parametrize(("probability", "df"), [(0.0, 3), (1.0, 3), (0.9, 0), (math.nan, 3)])
def test_quantiles_that_do_not_exist_are_refused(probability: float, df: int) -> None:
    """No probability of 0 or 1, no degrees of freedom below one."""
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, df)


def test_the_k_corpus_in_bits_has_its_known_error() -> None:
    """Two bits per token with a standard error of exactly 0.625."""
    interval = ratio_interval([(8, 8), (6, 2), (6, 2), (6, 2), (6, 2)])

    assert (2.0, 0.625, 5) == (interval.value, interval.se, interval.clusters)
    assert interval.high == pytest.approx(2.0 + 2.7764451051977987 * 0.625, rel=1e-12)
    assert interval.low == pytest.approx(2.0 - 2.7764451051977987 * 0.625, rel=1e-12)


def test_one_cluster_has_a_value_and_no_error() -> None:
    """A single document tells nothing about the spread between documents."""
    interval = ratio_interval([(7, 2)])

    assert (3.5, None, None, None) == (interval.value, interval.se, interval.low, interval.high)
    assert "at least two documents" in interval.reason


def test_nothing_to_divide_by_is_no_value() -> None:
    """No division by zero, no NaN."""
    for pairs in ([], [(0, 0)], [(5, 0), (3, 0)]):
        assert ratio_interval(pairs).value is None


def test_equal_clusters_have_no_spread() -> None:
    """Huge equal clusters give a standard error of exactly zero, where a one-pass formula gives noise."""
    interval = ratio_interval([(10**17 + 1, 10**8)] * 50)

    assert interval.se == 0.0
    assert interval.low == interval.value == interval.high


def test_the_interval_is_cut_at_zero() -> None:
    """Losses cannot be negative, so neither can their mean."""
    assert ratio_interval([(1, 1), (100, 1)]).low == 0.0


@given(st.lists(st.tuples(st.integers(0, 2**60), st.integers(1, 2**20)), min_size=2, max_size=40), st.integers(0, 99))
def test_the_error_is_its_definition_in_any_order(pairs: list[tuple[int, int]], seed: int) -> None:
    """Equal to the formula in rational numbers, and the same bits after a shuffle."""
    size = sum(n for _, n in pairs)
    r = Fraction(sum(s for s, _ in pairs), size)
    variance = Fraction(len(pairs), len(pairs) - 1) * sum((s - r * n) ** 2 for s, n in pairs) / size**2
    shuffled = pairs[:]
    random.Random(seed).shuffle(shuffled)
    interval = ratio_interval(pairs)

    assert interval.se == pytest.approx(math.sqrt(variance), rel=1e-14)
    assert ratio_interval(shuffled) == interval, f"seed {seed}"
