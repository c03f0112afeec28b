"""One choice per group so that the sum of values is least and the sum of weights fits: a multiple-choice knapsack.

Greedy along each group's convex hull, then exchanges; beside it stands the Lagrangian bound, below which no choice can
come, so the gap says what optimality may cost. Integers only: nothing depends on rounding or on order. Pure.

Sources: Kellerer, Pferschy, Pisinger, *Knapsack Problems*, chapter 11 (hull, greedy, bound).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

#: Pairs of groups are exchanged while there are at most so many pairs of options to look at.
MAX_EXCHANGES = 4_000_000


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a group: what it weighs against the capacity, and what it costs."""

    weight: int
    value: int


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen option of each group, their sums, and the bound: no choice that fits has a smaller value."""

    picks: tuple[int, ...]
    weight: int
    value: int
    bound: Fraction

    @property
    def gap(self) -> float:
        """How far the value may be above the best possible, relative to the bound (0 where both are 0)."""
        if self.value == self.bound:
            return 0.0
        return float((self.value - self.bound) / self.bound) if self.bound > 0 else float("inf")


def solve(groups: Sequence[Sequence[Option]], capacity: int, starts: Sequence[Sequence[int]] = ()) -> Solution | None:
    """Choose one option per group; None where even the lightest ones do not fit.

    ``starts``: choices that the result must not be worse than, where they fit (a user's own plans, say).
    """
    hulls = [hull(options) for options in groups]
    lightest = [h[0] for h in hulls]
    weight = sum(groups[g][k].weight for g, k in enumerate(lightest))
    if weight > capacity:
        return None
    picks, bound = _greedy(groups, hulls, capacity)
    candidates = [picks]
    for start in starts:
        if sum(groups[g][k].weight for g, k in enumerate(start)) <= capacity:
            candidates.append(list(start))
    improved = [_improve(groups, list(candidate), capacity) for candidate in candidates]
    best = min(improved, key=lambda p: (_sum(groups, p, "value"), _sum(groups, p, "weight"), p))
    return Solution(tuple(best), _sum(groups, best, "weight"), _sum(groups, best, "value"), bound)


def hull(options: Sequence[Option]) -> list[int]:
    """Indices of the options on the lower convex hull, from the lightest on: weights rise, values fall, ever less."""
    order = sorted(range(len(options)), key=lambda k: (options[k].weight, options[k].value, k))
    found: list[int] = []
    for k in order:
        if found and options[k].value >= options[found[-1]].value:
            continue  # heavier and no better
        while len(found) > 1 and not _convex(options[found[-2]], options[found[-1]], options[k]):
            found.pop()
        found.append(k)
    return found


def _convex(a: Option, b: Option, c: Option) -> bool:
    """Whether the step from a to b gains more per weight than the step from b to c."""
    return (a.value - b.value) * (c.weight - b.weight) > (b.value - c.value) * (b.weight - a.weight)


def _greedy(groups: Sequence[Sequence[Option]], hulls: list[list[int]], capacity: int) -> tuple[list[int], Fraction]:
    """Take the steps that gain most per weight while they fit; the first that does not gives the bound."""
    place = [0] * len(groups)
    weight = sum(groups[g][h[0]].weight for g, h in enumerate(hulls))
    value = sum(groups[g][h[0]].value for g, h in enumerate(hulls))
    steps: list[tuple[Fraction, int]] = []

    def offer(g: int) -> None:
        h, k = hulls[g], place[g]
        if k + 1 < len(h):
            a, b = groups[g][h[k]], groups[g][h[k + 1]]
            heapq.heappush(steps, (-Fraction(a.value - b.value, b.weight - a.weight), g))

    for g in range(len(groups)):
        offer(g)
    bound: Fraction | None = None
    while steps:
        slope, g = heapq.heappop(steps)
        h, k = hulls[g], place[g]
        a, b = groups[g][h[k]], groups[g][h[k + 1]]
        if weight + b.weight - a.weight > capacity:
            if bound is None:
                bound = value + slope * (capacity - weight)  # a part of this step would fill the capacity
            continue  # later steps of this group are worse, and start where this one ends
        place[g] = k + 1
        weight, value = weight + b.weight - a.weight, value + b.value - a.value
        offer(g)
    return [h[k] for h, k in zip(hulls, place, strict=True)], Fraction(value) if bound is None else bound


def _improve(groups: Sequence[Sequence[Option]], picks: list[int], capacity: int) -> list[int]:
    """Change single groups, then pairs, as long as the value falls (or stays, and the weight falls)."""
    sizes = sum(len(options) for options in groups)
    pairs = sizes * sizes <= MAX_EXCHANGES
    while _single(groups, picks, capacity) or (pairs and _pair(groups, picks, capacity)):
        pass
    return picks


def _single(groups: Sequence[Sequence[Option]], picks: list[int], capacity: int) -> bool:
    """Make the best change of one group; return whether there was one."""
    slack = capacity - _sum(groups, picks, "weight")
    best: tuple[int, int, int, int] | None = None
    for g, options in enumerate(groups):
        now = options[picks[g]]
        for k, option in enumerate(options):
            change = (option.value - now.value, option.weight - now.weight)
            if change < (0, 0) and change[1] <= slack and (best is None or (*change, g, k) < best):
                best = (*change, g, k)
    if best is None:
        return False
    picks[best[2]] = best[3]
    return True


def _pair(groups: Sequence[Sequence[Option]], picks: list[int], capacity: int) -> bool:
    """Make the best change of two groups together; return whether there was one."""
    slack = capacity - _sum(groups, picks, "weight")
    moves = [
        (option.value - options[picks[g]].value, option.weight - options[picks[g]].weight, g, k)
        for g, options in enumerate(groups)
        for k, option in enumerate(options)
        if k != picks[g]
    ]
    gains = sorted(m for m in moves if m[0] < 0)
    frees = sorted((m for m in moves if m[1] < 0), key=lambda m: (m[0], m[1], m[2], m[3]))
    best: tuple[int, int] | None = None
    chosen: tuple[tuple[int, int, int, int], tuple[int, int, int, int]] | None = None
    for gain in gains:
        for free in frees:
            if gain[0] + free[0] >= (0 if best is None else best[0]):
                break  # frees are in order of value: what follows is no better
            total = (gain[0] + free[0], gain[1] + free[1])
            if gain[2] != free[2] and total[1] <= slack and (best is None or total < best):
                best, chosen = total, (gain, free)
    if chosen is None:
        return False
    for _, _, g, k in chosen:
        picks[g] = k
    return True


def _sum(groups: Sequence[Sequence[Option]], picks: Sequence[int], what: str) -> int:
    return sum(int(getattr(groups[g][k], what)) for g, k in enumerate(picks))
