"""How many ranks share what: degrees of parallelism that check themselves against a world. Pure arithmetic, no torch.

The names are torchtitan's. What each axis means in evaluation, where nothing is trained:
``dp_replicate``: ranks with the whole model, each scoring its own windows;
``dp_shard``: the same, but each rank keeps 1/n of every layer and gathers the rest layer by layer;
``tp``: ranks that compute every layer together, each with its own heads and columns.
``cp`` and ``pp`` are known so that a job that asks for them is told why not. Meshes are ``mesh``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod

from eval_kernel.errors import LayoutUnsupported, SpecError

#: The axes from the outermost to the innermost: neighbours in rank share the last one.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
#: Degrees with this value become whatever the world leaves.
FILL = -1
#: Why an axis is not offered.
NOT_OFFERED = {
    "cp": "a window of evaluation fits one rank, and torch's context parallelism lacks the CPU's attention operator; "
    "use tp, or a shorter window.context",
    "pp": "its stages wait for each other; dp_shard spreads the layers over ranks and keeps all of them busy: use that",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Degrees whose product is the number of ranks. One of them may be -1: what is left.

    Raises ``SpecError`` for a degree that none can be, ``LayoutUnsupported`` for a product that is not the world.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    world_size: int = 1

    def __post_init__(self) -> None:
        """Check, and replace -1 by the degree that fills the world."""
        if self.world_size < 1:
            raise SpecError(f"world_size is {self.world_size}; it is the number of ranks: 1 or more")
        for axis, degree in self.degrees().items():
            if degree != FILL and degree < 1:
                raise SpecError(f"parallel.{axis} is {degree}; write 1 or more, or -1 for what the others leave")
        filled = [axis for axis, degree in self.degrees().items() if degree == FILL]
        if len(filled) > 1:
            raise SpecError(
                f"parallel: {' and '.join(filled)} are both -1; only one degree can be what the others leave"
            )
        if filled:
            rest = prod(degree for degree in self.degrees().values() if degree != FILL)
            if self.world_size % rest:
                raise LayoutUnsupported(
                    f"parallel.{filled[0]} cannot fill the group: {self._product()} must be {self.world_size}, and "
                    f"{self.world_size} ranks are no multiple of {rest}; {self._suggestions()}"
                )
            object.__setattr__(self, filled[0], self.world_size // rest)
        if prod(self.degrees().values()) != self.world_size:
            raise LayoutUnsupported(self._mismatch())

    def degrees(self) -> dict[str, int]:
        """The degree of each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def label(self) -> str:
        """The axes in use, for people and for results: ``dp_replicate=2,tp=2``; ``1`` for a single rank."""
        return ",".join(f"{axis}={degree}" for axis, degree in self.degrees().items() if degree > 1) or "1"

    @property
    def row_ranks(self) -> int:
        """Over how many ranks windows are spread."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis; ``tp`` neighbours are neighbours in rank."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def row_rank(self, rank: int) -> int:
        """Which share of the windows a rank scores: 0 to ``row_ranks`` - 1. Ranks of one tp group have the same."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def check_offered(self) -> None:
        """Raise ``LayoutUnsupported`` for axes, and combinations, that evaluation has no use for."""
        for axis, why in NOT_OFFERED.items():
            if getattr(self, axis) > 1:
                raise LayoutUnsupported(f"parallel.{axis} is {getattr(self, axis)}, which is not offered: {why}")
        if self.dp_shard > 1 and self.tp > 1:
            raise LayoutUnsupported(
                f"parallel: dp_shard={self.dp_shard} with tp={self.tp} would shard the weights twice; tp has each rank "
                f"hold 1/{self.tp} of them already: write dp_replicate instead of dp_shard"
            )

    # ---------------------------------------------------------------- messages

    def _product(self) -> str:
        return (
            " x ".join(f"{axis}={degree}" for axis, degree in self.degrees().items() if degree != 1) or "all degrees 1"
        )

    def _mismatch(self) -> str:
        product, world = prod(self.degrees().values()), self.world_size
        words = f"{self._product()} makes {product} ranks, but the group has {world}"
        if world == product + 1:
            words += (
                "; one rank is over: if it was meant to aggregate, the aggregator is an agent of role AGGREGATE "
                "(eval-agent run --role aggregate), a process of its own, not a rank"
            )
        return f"{words}; {self._suggestions()}"

    def _suggestions(self) -> str:
        """The nearest layouts that work: the world that these degrees need, or one degree changed."""
        given = {axis: degree for axis, degree in self.degrees().items() if degree != FILL}
        needed = prod(given.values())
        options = [f"a group of {needed}"] if needed != self.world_size else []
        for axis in ("dp_replicate", "dp_shard", "tp"):
            rest = prod(degree for other, degree in given.items() if other != axis)
            if self.world_size % rest == 0 and self.world_size // rest != given.get(axis):
                options.append(f"{axis}={self.world_size // rest}")
        return f"write {', or '.join(options)}"


def filled(dims: dict[str, int], world_size: int) -> ParallelDims:
    """Return the dims that a mapping of axis to degree means in a world. Raises as ``ParallelDims`` does."""
    known = {field.name for field in fields(ParallelDims)}
    unknown = sorted(set(dims) - known)
    if unknown:
        raise SpecError(f"parallel: unknown axis {unknown[0]!r}; allowed: {', '.join(AXES)}")
    return replace(ParallelDims(dp_replicate=world_size, world_size=world_size), **{"dp_replicate": 1, **dims})


def divisors(*numbers: int) -> list[int]:
    """Every degree that divides all of some numbers, ascending."""
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]
