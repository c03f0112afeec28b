"""Standard error and interval of a ratio of sums over clusters. Knows nothing of losses or reports.

Sources: the linearised, cluster-robust variance of a ratio is in Cochran, *Sampling Techniques*, 3rd ed.,
section 6.4. Student's t goes through the regularised incomplete beta function, whose continued fraction (DLMF
8.17.22) is evaluated by Lentz's method (*Numerical Recipes*, section 6.4); with many degrees of freedom,
through the expansion of Abramowitz & Stegun 26.7.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

#: Probability that an interval is meant to cover.
CONFIDENCE = 0.95
#: From so many degrees of freedom on, the expansion about the normal is used: its error is below 1e-13.
_EXPAND_FROM = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, its standard error and its interval; where there is none, ``reason`` says why."""

    value: float | None
    se: float | None = None
    low: float | None = None
    high: float | None = None
    clusters: int = 0
    reason: str = ""


def ratio_interval(pairs: Sequence[tuple[int, int]], unit: int = 1) -> Interval:
    """Return sum(s) / sum(n) / ``unit`` over J clusters (s, n), with its cluster-robust SE and 95 % interval.

    SE(r) = sqrt(J/(J-1) * sum((s_j - r*n_j)^2)) / sum(n); the interval is Student's (J-1 degrees of freedom).
    All is integer arithmetic up to the last division and the square root, so the order of the clusters
    changes no bit. The s are sums of what cannot be negative, so the interval is cut at zero.
    """
    num = len(pairs)
    total, size = sum(s for s, _ in pairs), sum(n for _, n in pairs)
    if size == 0:
        return Interval(None, clusters=num, reason="there is nothing to divide by")
    value = float(Fraction(total, size * unit))
    if num < 2:
        return Interval(value, clusters=num, reason="no standard error: it takes at least two documents")
    # s_j - r*n_j = (s_j*N - S*n_j) / N, in integers.
    squares = sum((s * size - total * n) ** 2 for s, n in pairs)
    se = math.sqrt(Fraction(num * squares, (num - 1) * (size * size * unit) ** 2))
    half = t_quantile((1 + CONFIDENCE) / 2, num - 1) * se
    return Interval(value, se, max(0.0, value - half), value + half, num)


def t_quantile(probability: float, df: int) -> float:
    """Return the quantile of Student's t with ``df`` degrees of freedom, to 1e-10 relative.

    Raises ``ValueError`` unless 0 < probability < 1 and df >= 1.
    """
    if not 0.0 < probability < 1.0 or df < 1:
        raise ValueError(f"no quantile at probability {probability} with {df} degrees of freedom")
    if probability == 0.5:
        return 0.0
    if probability < 0.5:
        return -t_quantile(1.0 - probability, df)
    if df >= _EXPAND_FROM:
        return _expanded(NormalDist().inv_cdf(probability), df)
    tails = 2.0 * (1.0 - probability)
    low, high = 0.0, 1.0
    while t_tails(high, df) > tails:
        low, high = high, 2.0 * high
    t = high
    for _ in range(200):
        error = t_tails(t, df) - tails
        if error > 0:
            low = t
        else:
            high = t
        step = t + error / (2.0 * _density(t, df))
        # Newton where it stays inside the bracket, else bisection.
        after = step if low < step < high else 0.5 * (low + high)
        if abs(after - t) <= 1e-15 * t:
            return after
        t = after
    return t


def t_tails(t: float, df: int) -> float:
    """Return P(|T| > t) for Student's t with ``df`` degrees of freedom and t >= 0."""
    square = t * t
    return _incomplete_beta(df / (df + square), square / (df + square), 0.5 * df, 0.5)


def _expanded(z: float, df: int) -> float:
    """Abramowitz & Stegun 26.7.5: the t quantile from the normal one, in powers of 1/df."""
    z2 = z * z
    return z * (
        1.0
        + (z2 + 1.0) / (4.0 * df)
        + ((5.0 * z2 + 16.0) * z2 + 3.0) / (96.0 * df**2)
        + (((3.0 * z2 + 19.0) * z2 + 17.0) * z2 - 15.0) / (384.0 * df**3)
        + ((((79.0 * z2 + 776.0) * z2 + 1482.0) * z2 - 1920.0) * z2 - 945.0) / (92160.0 * df**4)
    )


def _density(t: float, df: int) -> float:
    """The density of Student's t."""
    scale = math.lgamma(0.5 * (df + 1)) - math.lgamma(0.5 * df) - 0.5 * math.log(df * math.pi)
    return math.exp(scale - 0.5 * (df + 1) * math.log1p(t * t / df))


def _incomplete_beta(x: float, y: float, a: float, b: float) -> float:
    """The regularised I_x(a, b), with ``y`` = 1 - x given apart so that neither loses digits."""
    if x <= 0.0:
        return 0.0
    if y <= 0.0:
        return 1.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(scale) * _fraction(x, a, b) / a
    return 1.0 - math.exp(scale) * _fraction(y, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of DLMF 8.17.22 by the modified Lentz method."""
    tiny = 1e-300  # stands for a denominator of exactly zero
    c, d = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1.0)) or tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        factor = 1.0
        for term in (even, odd):
            d = 1.0 / ((1.0 + term * d) or tiny)
            c = (1.0 + term / c) or tiny
            factor = c * d
            value *= factor
        if abs(factor - 1.0) < 3e-16:
            return value
    raise ArithmeticError(f"the incomplete beta function does not converge at x={x}, a={a}, b={b}")
