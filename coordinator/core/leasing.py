"""How many shards one lease is: guided self-scheduling in seconds, not in shards. Whose job it is was decided before.

A lease takes about the same time on every node: half of the time in which all nodes together would do what waits, so
leases are large first and small last. ``target_seconds`` bounds what the loss of a node costs. The first lease of a
node on a model is one shard, which measures it. Near the end a node that holds enough already is given nothing, since
others will be free before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.core.calls import SchedulerConfig
from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Node
from coordinator.core.states import ShardState
from coordinator.core.throughput import Fleet, may_score, remaining

#: Of the time in which all nodes together would do what waits, so much goes into one lease.
SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Lot:
    """The most of one lease."""

    shards: int
    tokens: float  # input tokens


def lot(node: Node, job: Job, fleet: Fleet, config: SchedulerConfig, max_shards: int) -> Lot | None:
    """Return how much of a job a node is given now; ``None``: nothing, because it holds enough for the end."""
    rate = node.rate(job.key)
    waiting = job.counts[ShardState.WAITING]
    if rate <= 0:
        return Lot(1, 0.0) if not node.leases or not _scarce(waiting, fleet) else None
    total = max(fleet.rate, rate)
    if node.leases and waiting:
        one = job.cost[ShardState.WAITING] / waiting
        left = (job.cost[ShardState.WAITING] + job.cost[ShardState.SCORING]) / total
        if held_seconds(node, rate) + one / rate > left + one / total:
            return None
    seconds = min(config.target_seconds, SHARE * job.cost[ShardState.WAITING] / total)
    return Lot(max_shards, rate * seconds)


def _scarce(waiting: int, fleet: Fleet) -> bool:
    """Whether fewer shards wait than there are nodes for them."""
    return waiting < fleet.nodes


def held_seconds(node: Node, rate: float) -> float:
    """Return how long a node takes for what it holds; ``rate`` is in input tokens a second."""
    return node.held_cost() / rate


def elapsed(node: Node, now: float) -> float:
    """Return how long the node has been at what it does now, as far as is known."""
    return max(0.0, now - node.busy_since)


def front_seconds(node: Node, cost: int, rate: float, load: float, now: float) -> float:
    """Return how long the first of its shards, of ``cost`` input tokens, will go on."""
    return remaining(cost / rate + load, elapsed(node, now))


def better_elsewhere(shard: Shard, node: Node, job: Job, nodes: Iterable[Node], now: float) -> bool:
    """Whether the shard failed on this node and a node that is able to take it has not tried it yet."""
    if node.agent not in shard.failed_on:
        return False
    return any(other.agent not in shard.failed_on for other in nodes if may_score(other, job.id, now))
