"""What a node that asks is given: planning, then waiting shards, then what others hold too long. Changes nothing.

The order of jobs is queueing's, the amount leasing's, taking over from others speculation's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from coordinator.core.audit import audit_for, canary_for
from coordinator.core.board import Board
from coordinator.core.calls import PLANNING, SchedulerConfig
from coordinator.core.jobs import Job, Shard
from coordinator.core.leasing import better_elsewhere, lot
from coordinator.core.nodes import Node
from coordinator.core.queueing import offers, within_limits
from coordinator.core.states import JobState, NodeState, Role, ShardState
from coordinator.core.throughput import may_score


@dataclass(frozen=True, slots=True)
class Choice:
    """Shards of one job for a node, and why. ``stolen`` are taken from who holds them, the others are not."""

    job: Job
    shards: tuple[Shard, ...]
    why: str
    stolen: frozenset[int] = frozenset()


def job_to_plan(node: Node, jobs: Iterable[Job], now: float) -> Job | None:
    """Return the job that waits to be planned and that this node may plan: the most urgent, then the oldest.

    Planning goes before scoring: it is short, and it opens a job to all nodes. A node plans one job at a time.
    """
    if any(holding.shard == PLANNING for holding in node.leases):
        return None
    able = [job for job in jobs if job.state is JobState.PLANNING and job.plan_lease is None and _may(node, job, now)]
    return min(able, key=lambda job: (-job.priority, job.number), default=None)


def shards_to_score(
    node: Node, board: Board, config: SchedulerConfig, max_shards: int, loaded_job: str, now: float
) -> Choice | None:
    """Take shards for the node from the queue of one job, or choose some that others hold; ``None``: none now."""
    running = [job for job in board.open.values() if job.state is JobState.RUNNING]
    nodes, held_back = board.nodes, False
    if node.agent in board.quarantined:
        return None
    found = audit_for(node, running, now, loaded_only=True)
    if found is not None:
        return Choice(found[0], (found[1],), "a second opinion on another agent's shard")
    for offer in offers(node, running, nodes, board.shares, config, loaded_job, now):
        job = offer.job
        if held_back and job.key != node.working:
            break  # it has enough for the end of what it works at: to load another model meanwhile is no gain
        canary = canary_for(node, job, board.quarantined) if config.canary else None
        if canary is not None:
            return Choice(job, (canary,), "it repeats a shard that another agent has done, being new to the model")
        much = lot(node, job, board.fleet(job, now), config, max_shards)
        if much is None:
            held_back = held_back or job.key == node.working
            continue
        avoid = partial(better_elsewhere, node=node, job=job, nodes=nodes.values(), now=now)
        shards = job.take(min(max_shards, much.shards), much.tokens, avoid)
        if shards:
            return Choice(job, tuple(shards), offer.why)
    found = audit_for(node, running, now, loaded_only=False)
    if found is not None:
        return Choice(found[0], (found[1],), "a second opinion on another agent's shard")
    if node.leases:
        return None  # what others hold is for those who have nothing
    for job in sorted(running, key=lambda job: (job.key != node.loaded, -job.priority, job.number)):
        if job.counts[ShardState.SCORING] and may_score(node, job.id, now) and within_limits(node, job, config):
            fleet, load = board.fleet(job, now), board.shares.load_seconds(job.key)
            taken = board.tails.takeovers(node, job, nodes, fleet, load, max_shards, now)
            if taken:
                stolen = frozenset(item.shard.plan.index for item in taken if item.steal)
                holders = ", ".join(sorted({item.holder for item in taken}))
                return Choice(
                    job, tuple(item.shard for item in taken), f"it will be done sooner than {holders}", stolen
                )
    return None


def _may(node: Node, job: Job, now: float) -> bool:
    return node.state is NodeState.ACTIVE and node.has(Role.PREPROCESS) and node.refuses(job.id, now) is None
