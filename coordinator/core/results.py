"""What becomes of results, failures and expiries: who is believed, what counts as a try, when a job has failed.

The half of the scheduler that judges; giving out work and watching nodes is in scheduler.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.core import facts as f
from coordinator.core.acceptance import contradiction, difference, unusable
from coordinator.core.audit import Auditor
from coordinator.core.calls import PLANNING, Holding, Outcome, Verdict
from coordinator.core.explain import incomplete
from coordinator.core.facts import Facts
from coordinator.core.jobs import Job, Shard, partial_digest
from coordinator.core.nodes import Node, Refusal
from coordinator.core.states import JobState, ShardState
from coordinator.core.views import Commit
from eval_kernel.errors import Blame, JobIncomplete, PartialRefused, by_code
from eval_kernel.partial import ScoredShard
from eval_kernel.plan import Plan

#: Unequal values of one shard that are kept for the report; beyond these they are only told apart.
MAX_DIVERGENTS_PER_SHARD = 16
#: An expiry says less about the shard than a failure does: so many times as many are borne.
EXPIRIES_PER_TRY = 2
#: Characters of an agent's message that are kept.
MAX_TEXT = 1000


class Results(Auditor):
    """Judges what agents report. Begins with nothing; a restarted coordinator calls ``replay`` next."""

    def scored(self, agent: str, incarnation: str, job: str, scored: ScoredShard, now: float) -> Outcome:
        """Judge a partial, whoever sends it and whether or not it holds a lease; the first one of a shard wins.

        A refused one counts as a failure of the shard on this agent. Raises ``StaleIncarnation``, ``NotRegistered``.
        """
        node = self._board.node(agent, incarnation, now, may_have_left=True)
        found = self._board.jobs.get(job)
        if found is None or found.state in (JobState.FAILED, JobState.CANCELLED):
            return _unwanted(job, found)
        index = scored.partial.shard
        if not 0 <= index < len(found.shards):
            return Outcome(Verdict.REFUSED, f"job {job} has no shard {index}: it has {len(found.shards)} shards")
        shard = found.shards[index]
        problem = contradiction(shard.plan, scored)
        commit = found.commits.get(index)
        if agent in self._board.quarantined:
            return Outcome(Verdict.REFUSED, f"agent {agent} is quarantined: {self._board.quarantined[agent]}")
        if commit is not None and problem is None and (outcome := self._opinion(node, found, scored, now)) is not None:
            self._measured(node, found, shard, scored, now)
            return replace(outcome, facts=outcome.facts + self._close_audits(found, now))
        if commit is not None and commit.digest == partial_digest(scored.partial):
            found.duplicates += 1
            self._measured(node, found, shard, scored, now)
            return Outcome(Verdict.DUPLICATE, f"shard {index} has this result from agent {commit.agent}")
        if problem is not None:
            found.refused += 1
            facts = self._try_failed(node, found, shard, PartialRefused.code, problem, now)
            return Outcome(Verdict.REFUSED, problem, facts)
        if commit is not None:
            return self._diverged(agent, found, commit, scored, now)
        self._measured(node, found, shard, scored, now)
        node.shards_done += 1
        fact = f.ShardRecommitted if index in found.withdrawn else f.ShardCommitted
        facts = self._board.record(fact(job, agent, scored, now))
        facts += self._judge(found, index, now) + self._close_audits(found, now)
        return Outcome(Verdict.ACCEPTED, "", facts + self._fail_if_exhausted(found, now))

    def shard_failed(
        self, agent: str, incarnation: str, job: str, shard: int, code: str, message: str, now: float
    ) -> Outcome:
        """Take note that a shard failed on an agent; what follows depends on whose fault the code names.

        Raises ``StaleIncarnation``, ``NotRegistered``.
        """
        node = self._board.node(agent, incarnation, now, may_have_left=True)
        found = self._board.jobs.get(job)
        if found is None or found.settled:
            return _unwanted(job, found)
        if not 0 <= shard < len(found.shards):
            return Outcome(Verdict.REFUSED, f"job {job} has no shard {shard}: it has {len(found.shards)} shards")
        blame = by_code(code).blame
        # Wrong for everyone, or not at all: once shards have been scored, what is wrong is this node's copy.
        if blame is Blame.JOB and not found.commits:
            text = f"shard {shard} on agent {agent}: {one_line(message)}"
            return Outcome(Verdict.ACCEPTED, "", self._board.record(f.JobFailed(job, code, text, now)))
        if blame in (Blame.JOB, Blame.NODE):
            return self._refuse(node, found, code, message, now)
        audit = found.audits.of.get(shard)
        asked = audit is not None and audit.lease is not None and audit.lease.agent == agent
        if not asked and agent not in found.shards[shard].granted:
            return Outcome(Verdict.DUPLICATE, f"agent {agent} holds no lease on shard {shard}: nothing to count")
        return Outcome(Verdict.ACCEPTED, "", self._try_failed(node, found, found.shards[shard], code, message, now))

    def planned(self, agent: str, incarnation: str, job: str, plan: Plan, now: float) -> Outcome:
        """Judge a plan: the first one wins. Raises ``StaleIncarnation``, ``NotRegistered``."""
        node = self._board.node(agent, incarnation, now, may_have_left=True)
        found = self._board.jobs.get(job)
        if found is not None and found.plan is not None:
            if plan.digest == found.plan_digest:
                return Outcome(Verdict.DUPLICATE, f"job {job} has this plan from agent {found.planned_by}")
            if not found.settled:
                what = difference(found.plan.manifest, plan.manifest)
                text = f"job {job} was planned otherwise by agent {found.planned_by}: {what}; make the data equal"
                return Outcome(Verdict.REFUSED, text)
        if found is None or found.settled:
            return _unwanted(job, found)
        problem = unusable(plan)
        if agent in self._board.quarantined:
            return Outcome(Verdict.REFUSED, f"agent {agent} is quarantined: {self._board.quarantined[agent]}")
        if problem is not None:
            return Outcome(Verdict.REFUSED, problem, self._plan_failed(node, found, "REFUSED", problem, now))
        facts = self._board.record(f.JobPlanned(job, agent, plan, now))
        return Outcome(Verdict.ACCEPTED, "", facts + self._reuse(found, now) + self._open_audits(found))

    def plan_failed(self, agent: str, incarnation: str, job: str, code: str, message: str, now: float) -> Outcome:
        """Take note that planning failed on an agent. Raises ``StaleIncarnation``, ``NotRegistered``."""
        node = self._board.node(agent, incarnation, now, may_have_left=True)
        found = self._board.jobs.get(job)
        if found is None or found.settled:
            return _unwanted(job, found)
        if found.state is not JobState.PLANNING:
            return Outcome(Verdict.DUPLICATE, f"job {job} was planned by agent {found.planned_by}")
        blame = by_code(code).blame
        if blame is Blame.JOB:
            text = f"planning on agent {agent}: {one_line(message)}"
            return Outcome(Verdict.ACCEPTED, "", self._board.record(f.JobFailed(job, code, text, now)))
        if blame is Blame.NODE:
            return self._refuse(node, found, code, message, now)
        if agent not in found.plan_granted:
            return Outcome(Verdict.DUPLICATE, f"agent {agent} was not planning job {job}: nothing to count")
        return Outcome(Verdict.ACCEPTED, "", self._plan_failed(node, found, code, message, now))

    # ------------------------------------------------------------ what follows from a call

    def _reuse(self, job: Job, now: float) -> Facts:
        """Take over what an equal job has accepted; the one that has most."""
        if job.submitted.fresh or not self._config.reuse:
            return ()
        equal = [
            other
            for other in self._board.jobs.values()
            if other is not job
            and other.commits
            and other.plan_digest == job.plan_digest
            and other.identity == job.identity
            and not any(commit.agent in self._board.quarantined for commit in other.commits.values())
        ]
        source = max(equal, key=lambda other: len(other.commits), default=None)
        return () if source is None else self._board.record(f.JobReused(job.id, source.id, now))

    def _measured(self, node: Node, job: Job, shard: Shard, scored: ScoredShard, now: float) -> None:
        """Learn from a result how fast its node is, and charge the submitter for it."""
        seconds = scored.execution.seconds
        if job.key != node.last_key:
            self._board.shares.loaded(job.key, max(0.0, now - node.busy_since - seconds))
        node.measured(job.key, shard.plan.input_tokens, seconds, now)
        self._board.shares.use(job, seconds)
        self._board.freed(node)

    def _diverged(self, agent: str, job: Job, commit: Commit, scored: ScoredShard, now: float) -> Outcome:
        """Keep a partial that differs from the committed one; the same value from the same agent once only."""
        text = f"shard {commit.shard} has another result from agent {commit.agent}; this one is kept for the report"
        value = (commit.shard, agent, partial_digest(scored.partial))
        of_shard = sum(shard == commit.shard for shard, _, _ in job.divergent_values)
        if value in job.divergent_values or of_shard >= MAX_DIVERGENTS_PER_SHARD:
            return Outcome(Verdict.DIVERGENT, text)
        return Outcome(Verdict.DIVERGENT, text, self._board.record(f.ShardDiverged(job.id, agent, scored, now)))

    def _refuse(self, node: Node, job: Job, code: str, message: str, now: float) -> Outcome:
        """Keep a job from a node that cannot run it for a while; what it holds of it returns, no try is counted."""
        node.refusals[job.id] = Refusal(now + self._config.access_retry_seconds, code, one_line(message))
        self._board.return_job(job, [node])
        job.changed += 1
        return Outcome(Verdict.ACCEPTED)

    def _try_failed(self, node: Node, job: Job, shard: Shard, code: str, message: str, now: float) -> Facts:
        """Count a failure of a shard if this agent was given it and has not failed it since; else nothing."""
        audit = job.audits.of.get(shard.plan.index)
        if audit is not None and audit.lease is not None and audit.lease.agent == node.agent:
            audit.declined.add(node.agent)
            self._board.give_back(audit.lease)
        if node.agent not in shard.granted or shard.state in (ShardState.COMMITTED, ShardState.QUARANTINED):
            return ()
        shard.granted -= {node.agent}
        for lease in shard.leases:
            if lease.agent == node.agent:
                self._board.give_back(lease)
        node.busy_since = now
        self._board.freed(node)
        gives_up = shard.failures + 1 >= self._config.max_tries
        fact = f.ShardFailed(job.id, shard.plan.index, node.agent, code, one_line(message), gives_up)
        return self._board.record(fact) + self._fail_if_exhausted(job, now)

    def _plan_failed(self, node: Node, job: Job, code: str, message: str, now: float) -> Facts:
        """Count a failure of planning if this agent was given it and has not failed it since; else nothing."""
        if node.agent not in job.plan_granted:
            return ()
        job.plan_granted.discard(node.agent)
        if job.plan_lease is not None and job.plan_lease.agent == node.agent:
            self._board.give_back(job.plan_lease)
        facts = self._board.record(f.PlanFailed(job.id, node.agent, code, one_line(message)))
        if job.plan_failures < self._config.max_tries:
            return facts
        text = f"planning failed {job.plan_failures} times, last on agent {node.agent}: {one_line(message)}"
        return facts + self._board.record(f.JobFailed(job.id, code, text, now))

    def _expired(self, agent: str, holding: Holding, now: float) -> Facts:
        """Count an expiry of what an agent was running when it fell silent or died; its leases have ended."""
        job, borne = self._board.jobs[holding.job], EXPIRIES_PER_TRY * self._config.max_tries
        if holding.shard != PLANNING:
            gives_up = job.shards[holding.shard].expiries + 1 >= borne
            facts = self._board.record(f.ShardExpired(job.id, holding.shard, agent, gives_up))
            return facts + self._fail_if_exhausted(job, now)
        facts = self._board.record(f.PlanExpired(job.id, agent))
        if job.plan_expiries < borne:
            return facts
        text = f"agents fell silent {job.plan_expiries} times while they planned the job, last agent {agent}"
        return facts + self._board.record(f.JobFailed(job.id, JobIncomplete.code, text, now))

    def _fail_if_exhausted(self, job: Job, now: float) -> Facts:
        """Fail a running job of which nothing is left but shards that were given up."""
        if job.state is not JobState.RUNNING or not job.exhausted:
            return ()
        return self._board.record(f.JobFailed(job.id, JobIncomplete.code, incomplete(job), now))


def _unwanted(job: str, found: Job | None) -> Outcome:
    text = f"job {job} is unknown here" if found is None else f"job {job} is {found.state.name}"
    return Outcome(Verdict.UNWANTED, text)


def one_line(text: str) -> str:
    """One line of at most MAX_TEXT characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 3] + "..."
