"""The grid on which losses are summed: multiples of 2^-30 nat. Rounding happens once, per token; sums are exact.

A float64 holds every multiple of 2^-30 below 2^23 exactly, so sums below that bound do not depend on order.
Beyond it, and for a whole job, sums are integers: numbers of grid steps. This file does that conversion and
refuses what is not on the grid; it does not know what is being summed.
"""

from __future__ import annotations

import math

#: Binary exponent of the grid: one step is 2^-30 nat (9.3e-10 nat).
GRID_BITS = 30
#: Steps in one nat.
STEPS_PER_NAT = 1 << GRID_BITS
#: Sums of grid values below this many nats are exact in float64, in any order.
MAX_EXACT_NATS = float(1 << (53 - GRID_BITS))
#: Scored tokens a shard may hold: at an average loss of 64 nats per token its sum still stays exact in float64.
MAX_SHARD_TOKENS = 1 << 17


def to_steps(nats: float) -> int:
    """Return the number of grid steps in ``nats``.

    Raises ``ValueError`` when the value is not finite, negative, off the grid, or not below 2^23 nats.
    """
    if not math.isfinite(nats):
        raise ValueError(f"{nats} is not finite")
    if not 0.0 <= nats < MAX_EXACT_NATS:
        raise ValueError(f"{nats!r} nats is outside [0, 2^23)")
    steps = nats * STEPS_PER_NAT
    if steps != math.floor(steps):
        raise ValueError(f"{nats!r} nats is not a multiple of 2^-{GRID_BITS}")
    return int(steps)


def to_nats(steps: int) -> float:
    """Return ``steps`` grid steps in nats: exact below 2^53 steps, correctly rounded beyond."""
    return steps / STEPS_PER_NAT


def exact_decimal(steps: int) -> str:
    """Return ``steps`` grid steps as a decimal string with every digit: the sum without any rounding."""
    whole, rest = divmod(abs(steps), STEPS_PER_NAT)
    # 2^-30 has exactly 30 decimal places: rest / 2^30 = rest * 5^30 / 10^30.
    digits = str(rest * 5**GRID_BITS).zfill(GRID_BITS).rstrip("0")
    return ("-" if steps < 0 else "") + str(whole) + ("." + digits if digits else "")
