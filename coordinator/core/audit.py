"""Who is asked for second opinions, and what follows from them. What opinions say together is decided in trust.

Audited shards are chosen when a job is planned. A node that is new to a model, while others have results of the job,
first repeats one of theirs (a canary). Both look to the agent like any other shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable

from coordinator.core import facts as f
from coordinator.core.board import Board
from coordinator.core.calls import Outcome, SchedulerConfig, Verdict
from coordinator.core.facts import Facts
from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Node
from coordinator.core.states import JobState, ShardState
from coordinator.core.throughput import may_score
from coordinator.core.trust import AuditOutcome, Decision, Opinion, agree, decide
from eval_kernel.partial import ScoredShard


def sample(job: str, shards: Collection[int], share: float, salt: str) -> tuple[int, ...]:
    """Return the shards of a job to be audited: a share of them, at random as far as agents can tell, in order."""
    wanted = math.ceil(share * len(shards))
    ranked = sorted(shards, key=lambda shard: hashlib.sha256(f"{salt}/{job}/{shard}".encode()).digest())
    return tuple(sorted(ranked[:wanted]))


def audit_for(node: Node, jobs: Iterable[Job], now: float, *, loaded_only: bool) -> tuple[Job, Shard] | None:
    """Return a shard on which this node should give its opinion now."""
    for job in jobs:
        if job.audits.open and may_score(node, job.id, now) and (not loaded_only or job.key == node.working):
            for index, audit in job.audits.open.items():
                if job.wants(audit, node.agent):
                    return job, job.shards[index]
    return None


def canary_for(node: Node, job: Job, quarantined: Collection[str]) -> Shard | None:
    """Return a shard that another agent has done, if the node has done nothing with the job's model yet."""
    if node.rate(job.key) > 0 or job.key in node.proven or not job.commits:
        return None
    if any(lease.audit and lease.holding.job == job.id for lease in node.leases.values()):
        return None
    for index, commit in job.commits.items():
        audit = job.audits.of.get(index)
        if commit.agent != node.agent and (audit is None or job.wants(audit, node.agent)):
            return job.shards[index]
    return None


class Auditor:
    """The part of the scheduler that compares results, and draws the consequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Begin with nothing."""
        self._config = config
        self._board = Board(config.lease_seconds)

    def _open_audits(self, job: Job) -> Facts:
        """Choose the shards of a job that was just planned."""
        if not self._config.audit_share or job.state is not JobState.RUNNING:
            return ()
        left = [shard.plan.index for shard in job.shards if shard.state is ShardState.WAITING]
        chosen = sample(job.id, left, self._config.audit_share, self._config.audit_salt)
        return self._board.record(f.AuditOpened(job.id, chosen)) if chosen else ()

    def _opinion(self, node: Node, job: Job, scored: ScoredShard, now: float) -> Outcome | None:
        """Take a result of a committed shard as a second opinion; ``None`` where none is wanted of this agent."""
        index = scored.partial.shard
        audit, commit = job.audits.of.get(index), job.commits[index]
        if audit is None or commit.agent == node.agent or node.agent in audit.opinions:
            return None
        asked = audit.lease is not None and audit.lease.agent == node.agent
        if index not in job.audits.open and not asked:
            return None
        if asked and audit.lease is not None:
            self._board.give_back(audit.lease)
        mine, theirs = Opinion.of(scored.partial, scored.execution), job.opinion(index)
        assert theirs is not None, "the shard is committed"
        facts: Facts = ()
        if index not in job.audits.open:
            if agree(mine, theirs):
                node.proven.add(job.key)
            else:
                # A canary that died: the job must know who is right before it is complete.
                facts += self._board.record(f.AuditOpened(job.id, (index,)))
        facts += self._board.record(f.AuditOpinion(job.id, node.agent, scored, now))
        facts += self._judge(job, index, now)
        return Outcome(Verdict.ACCEPTED, "compared with another agent's result of this shard", facts)

    def _judge(self, job: Job, index: int, now: float) -> Facts:
        """Close a shard's audit if its opinions suffice, and act on outliers."""
        if index not in job.audits.open or job.state is not JobState.RUNNING:
            return ()
        committed = job.opinion(index)
        if committed is None:
            return ()
        opinions = {**job.audits.of[index].opinions, job.commits[index].agent: committed}
        decision = decide(opinions)
        facts: Facts = ()
        for agent in decision.outliers:
            facts += self._quarantine(agent, job, index, opinions, decision, now)
        if decision.outcome is None:
            self._board.offers += 1  # another agent is needed
            return facts
        if decision.outcome is AuditOutcome.AGREED:
            for agent in opinions:
                if agent in self._board.nodes:
                    self._board.nodes[agent].proven.add(job.key)
        return facts + self._board.record(f.AuditClosed(job.id, index, decision.outcome.value, now))

    def _quarantine(
        self, agent: str, job: Job, index: int, opinions: dict[str, Opinion], decision: Decision, now: float
    ) -> Facts:
        """Give an agent nothing more, and withdraw what it has scored of every job that is not settled."""
        if agent in self._board.quarantined:
            return ()
        others = sorted(name for name in opinions if name not in decision.outliers)
        off = opinions[agent].steps / opinions[others[0]].steps - 1 if opinions[others[0]].steps else float("inf")
        text = f"on shard {index} of job {job.id} its loss is {off:+.3%} from that of {' and '.join(others)}, who agree"
        facts = self._board.record(f.AgentQuarantined(job.id, agent, text, now))
        for other in list(self._board.open.values()):
            theirs = tuple(sorted(i for i, commit in other.commits.items() if commit.agent == agent))
            if other.state is JobState.RUNNING and theirs:
                facts += self._board.record(f.ShardsWithdrawn(other.id, agent, theirs))
        return facts

    def _close_audits(self, job: Job, now: float) -> Facts:
        """Where only audits are outstanding: close those that nobody is left for, or that nobody took up in time."""
        if job.state is not JobState.RUNNING or len(job.commits) < len(job.shards):
            job.audits.all_done_at = None
            return ()
        if job.audits.all_done_at is None:
            job.audits.all_done_at = now
            self._board.offers += 1
        late = now >= job.audits.all_done_at + self._config.audit_patience_seconds
        able = [node.agent for node in self._board.nodes.values() if may_score(node, job.id, now)]
        facts: Facts = ()
        for index, audit in list(job.audits.open.items()):
            if audit.lease is not None or (not late and any(job.wants(audit, agent) for agent in able)):
                continue
            outcome = AuditOutcome.DISPUTED if audit.opinions else AuditOutcome.WAIVED
            facts += self._board.record(f.AuditClosed(job.id, index, outcome.value, now))
        return facts
