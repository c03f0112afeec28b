"""Which layout a model gets on a node: what the job says, else the fastest one whose weights fit. Pure arithmetic.

The order is that of speed: whole models on every rank need nothing of each other; sharded layers are gathered once a
shard, behind the computing; streamed ones come from the disk. Tensor parallelism talks in every layer of every batch,
so it is never chosen for a job that does not ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eval_kernel.parallel.dims import ParallelDims
from eval_kernel.parallel.layers import sizes
from eval_kernel.parallel.memory import SLOTS, Sizes, fraction_for
from eval_kernel.precision.plan import PrecisionPlan
from eval_kernel.spec import ParallelSpec

Wanted = Literal["auto"] | ParallelSpec


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout, the share of layers that is streamed, and why, in a line."""

    dims: ParallelDims
    streaming_fraction: float
    why: str

    def __str__(self) -> str:
        """What people read."""
        return f"{self.form}: {self.why}"

    @property
    def form(self) -> str:
        """The layout in words, such as ``sharded over 2 ranks``."""
        dims = self.dims
        forms = [f"{dims.dp_replicate} replicas"] if dims.dp_replicate > 1 else []
        forms += [f"sharded over {dims.dp_shard} ranks"] if dims.dp_shard > 1 else []
        forms += [f"tensor parallel over {dims.tp} ranks"] if dims.tp > 1 else []
        forms += [f"{self.streaming_fraction:.0%} of the layers streamed"] if self.streaming_fraction else []
        return ", ".join(forms) or "whole on one rank"


def alone(plan: PrecisionPlan, wanted: Wanted, room: int) -> Choice:
    """Choose for one rank; see ``choose``."""
    return choose(sizes(plan), wanted, 1, room)


def choose(sized: Sizes, wanted: Wanted, world: int, room: int) -> Choice:
    """Return the layout for ``world`` ranks, each with ``room`` bytes for weights.

    Raises ``LayoutUnsupported`` where the job's degrees are not those of the group.
    """
    if wanted != "auto" and not wanted.automatic:
        dims = ParallelDims(world_size=world, **wanted.degrees())
        dims.check_offered()
        fraction = wanted.streaming_fraction or 0.0
        return Choice(dims, fraction if dims.tp == dims.dp_shard == 1 else 0.0, "as the job says")
    replicas = ParallelDims(dp_replicate=world, world_size=world)
    if wanted != "auto" and wanted.streaming_fraction is not None:
        return Choice(replicas, wanted.streaming_fraction, "as the job says")
    need, have = f"{sized.total / 1e6:.0f} MB of weights", f"{room / 1e6:.0f} MB"
    if sized.total <= room:
        return Choice(replicas, 0.0, f"{need} fit into {have} on every rank")
    layers = sum(sized.layers)
    if world > 1 and sized.outside + layers // world + SLOTS * max(sized.layers) <= room:
        dims = ParallelDims(dp_shard=world, world_size=world)
        return Choice(dims, 0.0, f"{need} do not fit into {have}, 1/{world} of the layers does")
    fraction = fraction_for(sized, room)
    return Choice(replicas, fraction, f"{need} do not fit into {have}")
