"""Why a job, or a part of it, waits: one line each, for people. Reads everything, changes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Node
from coordinator.core.states import JobState, NodeState, Role, ShardState

#: How a node's words about what it does begin where it can go no further by itself.
PAUSED = "paused"
#: What a node cannot do, by the code of its failure.
CANNOT = {
    "DATASET_NOT_FOUND": "cannot read the dataset",
    "MODEL_NOT_FOUND": "cannot read the model",
    "PRECISION_UNSUPPORTED": "does not support the precision",
    "DATA_CHANGED": "has other data than the job was planned with",
    "PATH_REFUSED": "may not read a path of the job",
}


def reasons(job: Job, nodes: Collection[Node], draining: bool, now: float) -> list[str]:
    """Return why nothing, or not everything, of a job is being worked on; empty when it is settled or all goes well.

    Never empty while the job is not settled and nobody works on it.
    """
    if job.settled:
        return []
    planning = job.state is JobState.PLANNING
    lines: list[str] = []
    if job.plan_lease is not None:
        lines.append(f"planning on agent {job.plan_lease.agent}")
    if planning and job.plan_failure is not None:
        tries = job.plan_failures + job.plan_expiries
        lines.append(f"planning failed {_times(tries)}, last: {job.plan_failure.message}")
    lines += _trouble(job, nodes, now)
    if job.max_nodes and len(job.holders) >= job.max_nodes and job.counts[ShardState.WAITING]:
        lines.append(f"as many agents work on it as its limit (--max-nodes {job.max_nodes}) allows")
    if job.counts[ShardState.QUARANTINED]:
        lines.append(f"{_shards(job.counts[ShardState.QUARANTINED])} tried too often and given up")
    if draining:
        lines.append("the coordinator is draining and gives nothing out")
    if job.plan_lease is None and not job.counts[ShardState.SCORING]:
        lines += _idle(job, nodes, Role.PREPROCESS if planning else Role.FORWARD, now)
    return lines


def incomplete(job: Job) -> str:
    """Return what a job that ends without a number lacks: how many shards and documents, and the first one's reason."""
    given_up = [shard for shard in job.shards if shard.state is ShardState.QUARANTINED]
    first = given_up[0]
    reason = f"{first.failure.code}: {first.failure.message}" if first.failure else "no reason is known"
    return (
        f"{len(given_up)} of {len(job.shards)} shards with {documents(given_up)} documents could not be scored; "
        f"first shard {first.plan.index}: {reason}"
    )


def documents(shards: Iterable[Shard]) -> int:
    """Return how many documents lie, wholly or in part, in shards that are in order of their index."""
    count, end = 0, 0
    for shard in shards:
        count += max(0, shard.plan.end_document - max(end, shard.plan.first_document))
        end = max(end, shard.plan.end_document)
    return count


def _trouble(job: Job, nodes: Collection[Node], now: float) -> list[str]:
    """Nodes that would work on the job but cannot, or have gone quiet while they do."""
    lines = []
    for node in nodes:
        refusal = node.refuses(job.id, now)
        if node.connected and refusal is not None:
            what = CANNOT.get(refusal.code, "cannot run this job")
            wait = math.ceil(refusal.until - now)
            lines.append(f"agent {node.agent} {what}: {refusal.message} (next try in {wait} s)")
        holds = any(holding.job == job.id for holding in node.leases)
        if node.state is NodeState.SUSPECT and holds:
            lines.append(f"agent {node.agent} has been silent for {now - node.heard:.0f} s")
        elif node.connected and node.activity.startswith(PAUSED) and holds:
            lines.append(f"agent {node.agent}, which holds {_held(job, node)}, is {node.activity}")
    return lines


def _held(job: Job, node: Node) -> str:
    shards = sum(holding.job == job.id for holding in node.leases)
    return "the planning" if job.state is JobState.PLANNING else "1 shard" if shards == 1 else f"{shards} shards"


def _idle(job: Job, nodes: Collection[Node], role: Role, now: float) -> list[str]:
    """Why nobody works on the job at all; at least one line unless a refusal has said it."""
    connected = [node for node in nodes if node.connected]
    if not connected:
        return ["no agent is connected"]
    able = [node for node in connected if node.has(role)]
    if not able:
        return [f"no agent with the role {role.value} is connected"]
    lines = []
    for node in able:
        if node.refuses(job.id, now) is not None:
            continue
        if node.state is NodeState.DRAINING:
            lines.append(f"agent {node.agent} is draining")
        elif node.state is NodeState.SUSPECT:
            lines.append(f"agent {node.agent} has been silent for {now - node.heard:.0f} s")
        elif node.leases:
            others = sorted({holding.job for holding in node.leases})
            lines.append(f"agent {node.agent} is busy with job {', '.join(others)}")
        else:
            lines.append(_free(node))
    return lines


def _free(node: Node) -> str:
    """What is known of an active node that holds nothing."""
    if node.activity in ("", "idle"):
        return f"agent {node.agent} has not asked for work yet"
    if node.activity.startswith(PAUSED):
        return f"agent {node.agent} is {node.activity}"
    return f"agent {node.agent} is busy ({node.activity})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _shards(count: int) -> str:
    return "1 shard was" if count == 1 else f"{count} shards were"
