"""A job's report from what the scheduler shows of it. The figures themselves are computed in ``eval_kernel.report``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from coordinator.core.facts import ShardDiverged
from coordinator.core.scheduler import Scheduler
from coordinator.core.views import Commit, JobView, Missing
from eval_kernel.errors import JobIncomplete
from eval_kernel.gridsum import to_nats
from eval_kernel.report import Accounting, MissingShard, NodeWork, build_report
from eval_kernel.spec import JobSpec


def report(scheduler: Scheduler, view: JobView, now: float) -> dict[str, Any]:
    """Return the report of a job as it stands. Raises ``JobIncomplete`` for one without a manifest."""
    if view.manifest is None:
        if not view.state.settled:
            raise JobIncomplete(f"job {view.job} has no report: it is not planned yet ({view.state.name})")
        why = f": {view.failure.message}" if view.failure else ""
        raise JobIncomplete(f"job {view.job} has no report: it was never planned (it is {view.state.name}{why})")
    commits = scheduler.commits(view.job)
    assert view.plan_digest is not None, "a job with a manifest has a plan"
    return build_report(
        job=view.job,
        name=view.name,
        state=view.state.name,
        failure=None if view.failure is None else (view.failure.code, view.failure.message),
        spec=JobSpec.from_canonical(view.spec_json),
        manifest=view.manifest,
        plan_digest=view.plan_digest,
        tally=view.tally,
        missing=[_missing(item) for item in scheduler.missing(view.job)],
        accounting=Accounting(
            accepted=view.accepted,
            duplicates=view.duplicates,
            divergent=tuple(_divergent(fact, commits) for fact in view.divergents),
            refused=view.refused,
            failures=view.failures,
            audits=view.audits,
            reused=view.reused,
        ),
        work=_work(view, commits),
        wall_seconds=max(0.0, (now if view.settled_at is None else view.settled_at) - view.submitted_at),
    )


def _missing(item: Missing) -> MissingShard:
    tries = f"{item.failures} failures, {item.expiries} expiries"
    if item.failure is not None:
        reason = f"{tries}; the last: {item.failure.code}: {item.failure.message}"
    elif item.failures or item.expiries:
        reason = tries
    else:
        reason = "not scored"
    plan = item.plan
    return MissingShard(plan.index, plan.first_document, plan.end_document, plan.tokens, reason)


def _divergent(fact: ShardDiverged, commits: tuple[Commit, ...]) -> dict[str, Any]:
    """Who differs from whom, on which shard, by how much."""
    accepted = next(commit for commit in commits if commit.shard == fact.shard)
    partial = fact.scored.partial
    return {
        "shard": fact.shard,
        "node": fact.agent,
        "device": fact.scored.execution.device,
        "accepted_node": accepted.agent,
        "accepted_device": accepted.execution.device,
        "difference_nats": to_nats(partial.steps - accepted.steps),
        "difference_tokens": partial.tokens - accepted.tokens,
    }


def _work(view: JobView, commits: tuple[Commit, ...]) -> list[NodeWork]:
    """One entry per node and way of computing, since a node may have changed its device between two lives."""
    tokens = {node.agent: node.input_tokens_done for node in view.nodes}
    by_agent: dict[str, list[Commit]] = defaultdict(list)
    for commit in commits:
        by_agent[commit.agent].append(commit)
    return [
        NodeWork(
            node=agent,
            shards=len(mine),
            input_tokens=tokens[agent],
            seconds=sum(commit.execution.seconds for commit in mine),
            device=_all(commit.execution.device for commit in mine),
            dtype=_all(commit.execution.dtype for commit in mine),
            software=_software(mine),
            precision=_precision(mine),
        )
        for agent, mine in sorted(by_agent.items())
    ]


def _precision(commits: list[Commit]) -> dict[str, str]:
    said: dict[str, set[str]] = defaultdict(set)
    for commit in commits:
        for key, value in commit.execution.precision.items():
            said[key].add(value)
    return {key: _all(found) for key, found in sorted(said.items())}


def _all(values: Any) -> str:
    return " and ".join(sorted(set(values)))


def _software(commits: list[Commit]) -> dict[str, str]:
    versions: dict[str, set[str]] = defaultdict(set)
    for commit in commits:
        for library, version in commit.execution.software.items():
            versions[library].add(version)
    return {library: _all(found) for library, found in sorted(versions.items())}
