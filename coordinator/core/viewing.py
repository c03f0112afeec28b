"""How a view is made from what the scheduler keeps. What a view holds is said in views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Node
from coordinator.core.states import NodeState, ShardState
from coordinator.core.trust import AuditOutcome
from coordinator.core.views import JobView, Missing, NodeProgress, NodeView


def job_view(job: Job, nodes: Mapping[str, Node], changed: int) -> JobView:
    """Return a job as it is now."""
    manifest = None if job.plan is None else job.plan.manifest
    working = [node for node in nodes.values() if _held(node, job)]
    names = sorted(job.done_by.keys() | {node.agent for node in working})
    return JobView(
        job=job.id,
        key=job.submitted.key,
        name=job.submitted.name,
        spec_json=job.submitted.spec_json,
        state=job.state,
        failure=job.failure,
        submitted_at=job.submitted.at,
        settled_at=job.settled_at,
        manifest=manifest,
        plan_digest=job.plan_digest if job.plan else None,
        planned_by=job.planned_by,
        tally=job.tally,
        shards=len(job.shards),
        shards_done=job.counts[ShardState.COMMITTED],
        shards_held=job.counts[ShardState.SCORING],
        shards_quarantined=job.counts[ShardState.QUARANTINED],
        input_tokens=0 if manifest is None else manifest.input_tokens,
        input_tokens_done=job.input_tokens_done,
        scored_tokens_done=job.tally.tokens,
        quarantined=_quarantined(job),
        nodes=tuple(_progress(name, job, nodes.get(name)) for name in names),
        tokens_per_second=sum(node.rate(job.key) for node in working if node.state is NodeState.ACTIVE),
        accepted=len(job.commits),
        duplicates=job.duplicates,
        refused=job.refused,
        divergents=tuple(job.divergents),
        audits=_audits(job),
        reused=job.reused,
        failures=job.shard_failures + job.plan_failures,
        expiries=job.shard_expiries + job.plan_expiries,
        changed=changed,
    )


def node_view(node: Node, now: float, quarantined: str | None = None) -> NodeView:
    """Return a node as it is now; ``quarantined`` is why it is given nothing, where it is."""
    refusals = {job: node.refuses(job, now) for job in sorted(node.refusals)}
    return NodeView(
        agent=node.agent,
        incarnation=node.info.incarnation,
        site=node.info.site,
        roles=node.info.roles,
        version=node.info.version,
        capabilities=node.info.capabilities,
        state=node.state,
        silence_seconds=now - node.heard,
        activity=node.activity if quarantined is None else f"quarantined: {quarantined}",
        shards_done=node.shards_done,
        tokens_per_second=node.rate(node.last_key),
        held=tuple(sorted(node.leases, key=lambda holding: (holding.job, holding.shard))),
        refusals=tuple(f"{job}: {refusal.message}" for job, refusal in refusals.items() if refusal),
    )


def missing(job: Job) -> tuple[Missing, ...]:
    """Return the shards without a partial, in order."""
    return tuple(_missing(shard) for shard in job.shards if shard.state is not ShardState.COMMITTED)


def _quarantined(job: Job) -> tuple[Missing, ...]:
    if not job.counts[ShardState.QUARANTINED]:
        return ()
    return tuple(_missing(shard) for shard in job.shards if shard.state is ShardState.QUARANTINED)


def _missing(shard: Shard) -> Missing:
    given_up = shard.state is ShardState.QUARANTINED
    return Missing(shard.plan, given_up, shard.failures, shard.expiries, shard.failure)


def _audits(job: Job) -> dict[str, Any] | None:
    if not job.audits.of:
        return None
    counts = {outcome.name.lower(): job.audits.count(outcome) for outcome in AuditOutcome}
    spread = [
        {"devices": list(pair), "comparisons": int(seen), "largest_relative_difference": largest}
        for pair, (seen, largest) in sorted(job.audits.spread.items())
    ]
    return {**counts, "open": len(job.audits.open), "scored_anew": len(job.withdrawn), "spread": spread}


def _held(node: Node, job: Job) -> int:
    return sum(holding.job == job.id for holding in node.leases)


def _progress(agent: str, job: Job, node: Node | None) -> NodeProgress:
    shards, tokens = job.done_by.get(agent, (0, 0))
    return NodeProgress(
        agent=agent,
        state=None if node is None else node.state,
        shards_done=shards,
        input_tokens_done=tokens,
        tokens_per_second=0.0 if node is None else node.rate(job.key),
        shards_held=0 if node is None else _held(node, job),
        activity="" if node is None else node.activity,
        layout=job.layouts.get(agent, ""),
    )
