"""What must hold after every step of the scheduler, as assertions that tell a story. Run by tests and the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from coordinator.core.calls import PLANNING, Holding
from coordinator.core.jobs import Job
from coordinator.core.nodes import Lease, Node
from coordinator.core.states import JobState, NodeState, ShardState


def check(jobs: Mapping[str, Job], keys: Mapping[str, str], nodes: Mapping[str, Node]) -> None:
    """Raise ``AssertionError`` naming the first invariant that does not hold."""
    assert {job.submitted.key: name for name, job in jobs.items()} == keys, (
        f"keys {keys} do not name the jobs one to one"
    )
    for job in jobs.values():
        _job(job)
        _shards(job)
        _sums(job)
    _leases(jobs, nodes)


def _job(job: Job) -> None:
    who = f"job {job.id} ({job.state.name})"
    planned = job.plan is not None
    if job.state is JobState.PLANNING:
        assert not planned, f"{who} has a plan"
    if job.state in (JobState.RUNNING, JobState.SUCCEEDED):
        assert planned, f"{who} has no plan"
    if job.state is JobState.RUNNING:
        assert not job.exhausted, f"{who} has nothing left to do and is not settled: {job.counts}"
        assert job.plan_lease is None, f"{who} is still leased for planning"
    done = planned and job.counts[ShardState.COMMITTED] == len(job.shards) and not job.audits.open
    if job.state not in (JobState.FAILED, JobState.CANCELLED):
        assert done == (job.state is JobState.SUCCEEDED), f"{who}: all committed and no audit open is {done}"
    failed = job.state in (JobState.FAILED, JobState.CANCELLED)
    assert failed == (job.failure is not None), f"{who} has the failure {job.failure}"
    assert job.settled == (job.settled_at is not None), f"{who} was settled at {job.settled_at}"


def _shards(job: Job) -> None:
    recount = dict.fromkeys(ShardState, 0)
    for shard in job.shards:
        who = f"shard {job.id}/{shard.plan.index} ({shard.state.name})"
        recount[shard.state] += 1
        holders = [lease.agent for lease in shard.leases]
        assert (shard.state is ShardState.SCORING) == bool(holders), f"{who} is held by {holders}"
        assert len(holders) <= 2, f"{who} is held by {holders}"
        assert len(holders) == len(set(holders)), f"{who} is held by {holders}"
        committed = shard.plan.index in job.commits
        assert (shard.state is ShardState.COMMITTED) == committed, f"{who} is committed: {committed}"
        assert committed == job.tally.has(shard.plan.index), f"{who} is in the tally: {not committed}"
        if shard.state is ShardState.QUARANTINED:
            assert shard.failure is not None, f"{who} has no reason"
        assert (shard.failure is None) == (shard.failures + shard.expiries == 0), f"{who} has tries without a reason"
    assert recount == job.counts, f"job {job.id} counts {job.counts}, its shards are {recount}"
    cost = dict.fromkeys(ShardState, 0)
    for shard in job.shards:
        cost[shard.state] += shard.plan.input_tokens
    assert cost == job.cost, f"job {job.id} has input tokens {job.cost}, its shards {cost}"
    waiting = {shard.plan.index for shard in job.shards if shard.state is ShardState.WAITING}
    assert waiting == job.queued(), f"job {job.id}: waiting shards {waiting ^ job.queued()} are not the queue's"
    if job.settled:
        held = job.counts[ShardState.SCORING]
        assert not held, f"job {job.id} is {job.state.name}, yet {held} shards are leased"
        assert job.plan_lease is None, f"job {job.id} is {job.state.name}, yet leased for planning"


def _sums(job: Job) -> None:
    commits = job.commits.values()
    assert job.tally.shards == len(commits), f"job {job.id}: {job.tally.shards} shards added, {len(commits)} committed"
    for name, total in (("steps", job.tally.steps), ("tokens", job.tally.tokens)):
        added = sum(getattr(commit, name) for commit in commits)
        assert total == added, f"job {job.id}: the tally has {total} {name}, the commits add up to {added}"
    cost = sum(job.shards[commit.shard].plan.input_tokens for commit in commits)
    assert job.input_tokens_done == cost, f"job {job.id}: {job.input_tokens_done} input tokens done, {cost} committed"
    by_node = [sum(column) for column in zip(*job.done_by.values(), strict=True)] or [0, 0]
    assert by_node == [len(commits), cost], f"job {job.id}: nodes have done {by_node}, {[len(commits), cost]} committed"
    if job.state is JobState.SUCCEEDED and job.plan is not None:
        m, t = job.plan.manifest, job.tally
        got, wanted = (t.tokens, t.bytes, t.words), (m.scored_tokens, m.scored_bytes, m.scored_words)
        assert got == wanted, f"job {job.id} succeeded with (tokens, bytes, words) {got}, its manifest says {wanted}"
    for shard, agent, _ in job.divergent_values:
        assert shard in job.commits, f"job {job.id}: agent {agent} diverged from shard {shard}, which is not committed"


def _leases(jobs: Mapping[str, Job], nodes: Mapping[str, Node]) -> None:
    ours: dict[tuple[str, Holding], Lease] = {}
    for job in jobs.values():
        if job.plan_lease is not None:
            ours[job.plan_lease.agent, Holding(job.id, PLANNING)] = job.plan_lease
        held = {(lease.agent, Holding(job.id, s.plan.index)): lease for s in job.shards for lease in s.leases}
        ours |= held
        ours |= {
            (audit.lease.agent, Holding(job.id, index)): audit.lease
            for index, audit in job.audits.of.items()
            if audit.lease is not None
        }
        for index, audit in job.audits.open.items():
            assert audit.outcome is None, f"job {job.id}: the audit of shard {index} is open and {audit.outcome}"
        if job.state is not JobState.SUCCEEDED:
            assert job.partials.keys() == job.commits.keys(), f"job {job.id} does not keep the partials it has"
        holders = Counter(agent for agent, _ in held)
        assert holders == job.holders, f"job {job.id} is held by {holders}, it says by {job.holders}"
    theirs: dict[tuple[str, Holding], Lease] = {}
    for name, node in nodes.items():
        assert node.agent == name, f"node {name} calls itself {node.agent}"
        for holding, lease in node.leases.items():
            assert lease.agent == name, f"node {name} holds {holding}, leased to {lease.agent}"
            assert holding == lease.holding, f"node {name} holds {holding} by a lease on {lease.holding}"
            theirs[name, holding] = lease
        if node.state in (NodeState.LOST, NodeState.LEFT):
            assert not node.leases, f"node {name} is {node.state.name} and holds {list(node.leases)}"
    assert ours == theirs, f"jobs know leases {ours.keys() - theirs.keys()}, nodes {theirs.keys() - ours.keys()}"
