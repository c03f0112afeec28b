"""How fast nodes are: input tokens a second by node and model, what loading a model takes, and what a fleet does.

Everything here is measured by accepted results. What was not measured yet counts as the mean of what was. Nothing here
decides; leasing, speculation and queueing ask.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from coordinator.core.nodes import Node
from coordinator.core.states import NodeState, Role
from eval_kernel.plan import digest_json

#: Seconds for which the sum over a fleet is kept; before anything was measured, much shorter.
KEEP_SECONDS, KEEP_UNMEASURED_SECONDS = 1.0, 0.05
#: What is left of something that takes longer than expected: so much of the time it has taken already.
OVERDUE_SHARE = 0.5


def work_key(spec_json: str) -> str:
    """Return what speed depends on: equal for jobs with the same model in the same precision."""
    try:
        spec = json.loads(spec_json)
    except ValueError:
        return digest_json(spec_json)
    if not isinstance(spec, dict):
        return digest_json(spec_json)
    return digest_json([spec.get("model"), spec.get("precision")])


def identity(spec_json: str) -> str:
    """Return what two jobs with equal plans must have in common to have equal results: all but name and paths.

    Model, tokenizer and data are compared by their digests, which are in the plan, as is the version of the kernel.
    """
    try:
        spec = json.loads(spec_json)
    except ValueError:
        return spec_json
    if not isinstance(spec, dict):
        return spec_json
    return digest_json({name: value for name, value in spec.items() if name not in ("name", "model", "dataset")})


@dataclass(frozen=True, slots=True)
class Fleet:
    """The nodes that may score a job now, those left out that are at work with another model."""

    nodes: int
    rate: float  # input tokens a second, all together; 0.0 when none was measured
    mean: float  # of those that were measured


def may_score(node: Node, job: str, now: float) -> bool:
    """Whether new shards of a job may go to a node, as far as the node itself is concerned."""
    return node.state is NodeState.ACTIVE and node.has(Role.FORWARD) and node.refuses(job, now) is None


class Fleets:
    """The fleet of each job, summed up at most once a second: asked for with every lease."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[str, tuple[int, float, Fleet]] = {}

    def of(self, job: str, key: str, nodes: Iterable[Node], members: int, now: float) -> Fleet:
        """Return the nodes that may score ``job``; ``members`` is a number that grows when nodes come or go."""
        kept = self._kept.get(job)
        if kept is not None and kept[0] == members and now < kept[1]:
            return kept[2]
        free = [node for node in nodes if node.working in (key, "") or not node.leases]
        fleet = _summed([node.rate(key) for node in free if may_score(node, job, now)])
        until = now + (KEEP_SECONDS if fleet.rate > 0 else KEEP_UNMEASURED_SECONDS)
        self._kept[job] = members, until, fleet
        return fleet

    def forget(self, job: str) -> None:
        """Drop what was kept for a job that is settled."""
        self._kept.pop(job, None)


def _summed(rates: Collection[float]) -> Fleet:
    measured = [rate for rate in rates if rate > 0]
    mean = sum(measured) / len(measured) if measured else 0.0
    return Fleet(len(rates), mean * len(rates), mean)


def remaining(expected: float, elapsed: float) -> float:
    """Return how many seconds more something is likely to take that was to take ``expected`` and has run so long."""
    return max(expected - elapsed, OVERDUE_SHARE * elapsed if elapsed > expected else 0.0)
