"""Who is given what: the order of jobs for a node, and how many shards at once. Changes nothing but queues.

An assignment should take about ``target_seconds`` at the node's measured speed on this job; the first one is a single
shard. Near the end assignments shrink (guided self-scheduling: at most a node's half share of what is left), so that
no node sits on work that others could do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from coordinator.core.calls import PLANNING, SchedulerConfig
from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Node
from coordinator.core.states import JobState, NodeState, Role, ShardState


def may_take(node: Node, job: Job, role: Role, now: float) -> bool:
    """Whether new work of a job may go to a node."""
    return node.state is NodeState.ACTIVE and node.has(role) and node.refuses(job.id, now) is None


def job_to_plan(node: Node, jobs: Iterable[Job], now: float) -> Job | None:
    """Return the oldest job that waits to be planned and that this node may plan.

    Planning goes before scoring: it is short, and it opens a job to all nodes. A node plans one job at a time.
    """
    if any(holding.shard == PLANNING for holding in node.leases):
        return None
    for job in jobs:
        if job.state is JobState.PLANNING and job.plan_lease is None and may_take(node, job, Role.PREPROCESS, now):
            return job
    return None


def shards_to_score(
    node: Node,
    jobs: Iterable[Job],
    nodes: Collection[Node],
    config: SchedulerConfig,
    max_shards: int,
    loaded_job: str,
    now: float,
) -> tuple[Job, list[Shard]] | None:
    """Take shards for the node from the queue of one job: the loaded one if it has any, else the oldest."""
    open_jobs = [job for job in jobs if job.state is JobState.RUNNING and job.counts[ShardState.WAITING]]
    for job in sorted(open_jobs, key=lambda job: (job.id != loaded_job, job.number)):
        if not may_take(node, job, Role.FORWARD, now):
            continue
        able = [other for other in nodes if may_take(other, job, Role.FORWARD, now)]
        rate = node.rate(job.id)
        count = min(max_shards, guided(job, len(able))) if rate > 0 else 1
        shards = job.take(count, rate * config.target_seconds, partial(better_elsewhere, node=node, able=able))
        if shards:
            return job, shards
    return None


def guided(job: Job, able: int) -> int:
    """Return the most shards of one assignment with ``able`` nodes at work: half a share of what waits, or one."""
    return max(1, job.counts[ShardState.WAITING] // (2 * max(1, able)))


def better_elsewhere(shard: Shard, node: Node, able: Iterable[Node]) -> bool:
    """Whether the shard failed on this node and a node that is able to take it has not tried it yet."""
    if node.agent not in shard.failed_on:
        return False
    return any(other.agent not in shard.failed_on for other in able)
