"""One job: what its facts come to (durable), and who works on it (soft). Decides nothing; that is the scheduler's.

``apply`` is the only way durable state changes, while running and in replay alike, so both come to the same.
"""

from __future__ import annotations

import copy
import hashlib
import heapq
import json
from collections.abc import Callable
from typing import Any

from coordinator.core import facts as f
from coordinator.core.nodes import Lease
from coordinator.core.states import (
    JOB_TABLE,
    SHARD_TABLE,
    JobEvent,
    JobState,
    ShardEvent,
    ShardState,
    advance,
)
from coordinator.core.throughput import identity, work_key
from coordinator.core.trust import Audit, AuditOutcome, Audits, Opinion, precision_class
from coordinator.core.views import Commit, Failure
from eval_kernel.errors import IllegalTransition
from eval_kernel.partial import Partial
from eval_kernel.plan import Plan, ShardPlan
from eval_kernel.precision.section import LAYOUT
from eval_kernel.tally import Tally

#: The code and, where nobody gave a reason, the text of a cancelled job's failure.
CANCELLED, NO_REASON = "CANCELLED", "no reason was given"


class Shard:
    """One shard: its state, its tries by kind, and who holds it."""

    __slots__ = ("expiries", "failed_on", "failure", "failures", "granted", "leases", "plan", "state")

    def __init__(self, plan: ShardPlan) -> None:
        """Begin as WAITING."""
        self.plan = plan
        self.state = ShardState.WAITING
        self.failures = 0
        self.expiries = 0
        self.failure: Failure | None = None  # the last failure or expiry
        self.failed_on: frozenset[str] = frozenset()
        # Soft: who holds leases (at most two), and who was given one and has not failed since.
        self.leases: tuple[Lease, ...] = ()
        self.granted: frozenset[str] = frozenset()


class Job:
    """One job. States move by ``JOB_TABLE`` and ``SHARD_TABLE`` only."""

    def __init__(self, fact: f.JobSubmitted, number: int) -> None:
        """Begin as PLANNING; ``number`` orders jobs by age."""
        self.submitted = fact
        self.number = number
        self.key = work_key(fact.spec_json)  # what a node's speed on it depends on
        self.identity = identity(fact.spec_json)
        self.submitter, self.priority, self.max_nodes = fact.submitter, fact.priority, fact.max_nodes
        self.state = JobState.PLANNING
        self.failure: Failure | None = None
        self.settled_at: float | None = None
        self.plan: Plan | None = None
        self.plan_digest = ""
        self.planned_by: str | None = None
        self.plan_failures = 0
        self.plan_expiries = 0
        self.plan_failure: Failure | None = None  # the last one
        self.shard_failures = 0
        self.shard_expiries = 0
        self.shards: list[Shard] = []
        self.counts = dict.fromkeys(ShardState, 0)
        self.cost = dict.fromkeys(ShardState, 0)  # input tokens, by state
        self.tally = Tally()
        self.commits: dict[int, Commit] = {}
        self.input_tokens_done = 0
        self.done_by: dict[str, tuple[int, int]] = {}  # agent -> shards, input tokens
        self.layouts: dict[str, str] = {}  # agent -> how the model lay on its ranks for its last accepted shard
        self.divergents: list[f.ShardDiverged] = []
        self.divergent_values: set[tuple[int, str, str]] = set()  # shard, agent, digest
        self.partials: dict[int, bytes] = {}  # as JSON: for adding up anew when some are withdrawn
        self.withdrawn: set[int] = set()  # shards whose first partial was withdrawn
        self.audits = Audits()
        self.reused: tuple[str, int] | None = None  # the job and the number of shards taken over from it
        # Soft.
        self.plan_lease: Lease | None = None
        self.plan_granted: set[str] = set()
        self.holders: dict[str, int] = {}  # agent -> shards it holds
        self.duplicates = 0
        self.refused = 0
        self.changed = 1
        # Indices of WAITING shards as a heap; others may linger in it and are skipped when they surface.
        self._waiting: list[int] = []

    @property
    def id(self) -> str:
        """The job's id."""
        return self.submitted.job

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self.state.settled

    @property
    def exhausted(self) -> bool:
        """Whether nothing is left that could still be done: shards, or second opinions where no shard lacks."""
        left = self.counts[ShardState.WAITING] + self.counts[ShardState.SCORING]
        return not left and (self.counts[ShardState.QUARANTINED] > 0 or not self.audits.open)

    # ------------------------------------------------------------ durable

    def apply(self, fact: f.Fact) -> None:
        """Make a fact true, or raise and change nothing: ``IllegalTransition``, ``IndexError``, ``ValueError``."""
        if self.settled and not isinstance(fact, f.ShardDiverged):
            raise IllegalTransition(f"job {self.id} is {self.state.name}: {fact.kind} cannot follow")
        match fact:
            case f.JobPlanned():
                digest = fact.plan.digest  # what can fail comes before what changes
                self._advance(JobEvent.PLAN)
                self.plan, self.plan_digest, self.planned_by = fact.plan, digest, fact.agent
                self.shards = [Shard(plan) for plan in fact.plan.shards]
                self.counts[ShardState.WAITING] = len(self.shards)
                self.cost[ShardState.WAITING] = sum(shard.plan.input_tokens for shard in self.shards)
                self._waiting = list(range(len(self.shards)))
            case f.ShardCommitted():
                self._commit(fact)
            case f.ShardsWithdrawn():
                self._withdraw(fact)
            case f.AuditOpened():
                for index in fact.shards:
                    self.audits.want(self.shards[index].plan.index)
            case f.AuditOpinion():
                opinion = Opinion.of(fact.scored.partial, fact.scored.execution)
                self.audits.hear(fact.shard, fact.agent, opinion, self.opinion(fact.shard))
            case f.AuditClosed():
                self.audits.close(fact.shard, AuditOutcome(fact.outcome))
                self._complete(fact.at)
            case f.ShardDiverged():
                value = (fact.shard, fact.agent, partial_digest(fact.scored.partial))
                self.divergents.append(fact)
                self.divergent_values.add(value)
            case f.ShardFailed():
                shard = self.shards[fact.shard]
                if fact.gives_up:
                    self._move(shard, ShardEvent.GIVE_UP)
                shard.failures += 1
                self.shard_failures += 1
                shard.failed_on |= {fact.agent}
                shard.failure = Failure(fact.code, f"agent {fact.agent}: {fact.message}")
            case f.ShardExpired():
                shard = self.shards[fact.shard]
                if fact.gives_up:
                    self._move(shard, ShardEvent.GIVE_UP)
                shard.expiries += 1
                self.shard_expiries += 1
                shard.failure = Failure("SHARD_FAILED", f"agent {fact.agent} fell silent while it ran the shard")
            case f.PlanFailed():
                self.plan_failures += 1
                self.plan_failure = Failure(fact.code, f"agent {fact.agent}: {fact.message}")
            case f.PlanExpired():
                self.plan_expiries += 1
                self.plan_failure = Failure("SHARD_FAILED", f"agent {fact.agent} fell silent while it planned the job")
            case f.JobFailed():
                self._advance(JobEvent.FAIL)
                self.failure, self.settled_at = Failure(fact.code, fact.message), fact.at
            case f.JobCancelled():
                self._advance(JobEvent.CANCEL)
                self.failure, self.settled_at = Failure(CANCELLED, fact.reason or NO_REASON), fact.at
            case _:
                raise ValueError(f"{type(fact).__name__} is no fact of a job that exists")
        self.changed += 1

    def _commit(self, fact: f.ShardCommitted) -> None:
        partial, shard = fact.scored.partial, self.shards[fact.shard]
        digest, text = _encoded(partial)
        self.tally.add(partial)  # refuses a second commit before anything is changed
        self._move(shard, ShardEvent.COMMIT)
        self.commits[partial.shard] = Commit(
            partial.shard, fact.agent, partial.steps, partial.tokens, fact.scored.execution, digest, partial.nonfinite
        )
        self.partials[partial.shard] = text
        self._count(shard, fact.agent, +1)
        self.layouts[fact.agent] = fact.scored.execution.precision.get(LAYOUT, "")
        shard.granted = frozenset()
        self._complete(fact.at)

    def _count(self, shard: Shard, agent: str, one: int) -> None:
        """Count a committed shard for its agent, or (-1) no more."""
        self.input_tokens_done += one * shard.plan.input_tokens
        shards, tokens = self.done_by.get(agent, (0, 0))
        self.done_by[agent] = shards + one, tokens + one * shard.plan.input_tokens
        if not self.done_by[agent][0]:
            del self.done_by[agent]

    def _complete(self, at: float) -> None:
        """Succeed if every shard is committed and every audit closed."""
        if len(self.commits) == len(self.shards) and not self.audits.open:
            self._advance(JobEvent.COMPLETE)
            self.settled_at = at
            self.partials.clear()  # nothing can be withdrawn any more

    def _withdraw(self, fact: f.ShardsWithdrawn) -> None:
        """Let an agent's shards wait again, and add the others up anew."""
        if any(self.commits[index].agent != fact.agent for index in fact.shards):
            raise ValueError(f"a shard of {fact.shards} was not committed by agent {fact.agent}")
        queued = set(self._waiting)
        for index in fact.shards:
            shard = self.shards[index]
            self._move(shard, ShardEvent.WITHDRAW)
            del self.commits[index], self.partials[index]
            self._count(shard, fact.agent, -1)
            self.withdrawn.add(index)
            if index not in queued:
                heapq.heappush(self._waiting, index)
        gone = set(fact.shards)
        self.divergents = [other for other in self.divergents if other.shard not in gone]
        self.divergent_values = {value for value in self.divergent_values if value[0] not in gone}
        self.audits.withdraw(fact.agent)
        self.tally = Tally()
        for text in self.partials.values():
            self.tally.add(Partial.from_json(json.loads(text)))

    def reuse(self, source: Job, at: float) -> None:
        """Take over what an equal job had accepted; this one was just planned and has nothing of its own."""
        if self.commits or self.plan_digest != source.plan_digest:
            raise IllegalTransition(f"job {self.id} cannot take over the shards of job {source.id}")
        self.reused = source.id, len(source.commits)
        self.tally = copy.deepcopy(source.tally)
        self.commits, self.partials = dict(source.commits), dict(source.partials)
        for index, commit in self.commits.items():
            self._move(self.shards[index], ShardEvent.COMMIT)
            self._count(self.shards[index], commit.agent, +1)
        self.changed += 1
        self._complete(at)

    def wants(self, audit: Audit, agent: str) -> bool:
        """Whether an agent may be asked about a shard: it has not spoken on it, and nobody is at it."""
        commit = self.commits.get(audit.shard)
        asked = agent in audit.opinions or agent in audit.declined
        return commit is not None and commit.agent != agent and audit.lease is None and not asked

    def opinion(self, shard: int) -> Opinion | None:
        """Return the committed value of a shard as an opinion; ``None`` where there is none."""
        commit = self.commits.get(shard)
        if commit is None:
            return None
        e = commit.execution
        return Opinion(commit.steps, commit.nonfinite, e.device, e.dtype, precision_class(e))

    def durable(self) -> dict[str, Any]:
        """Return what facts came to, and nothing soft, as a canonical JSON-ready dict: equal after every restart."""
        return {
            "submitted": self.submitted.to_json(),
            "state": self.state.name,
            "failure": _failure_json(self.failure),
            "settled_at": self.settled_at,
            "plan": [self.plan_digest, self.planned_by, self.plan_failures, self.plan_expiries],
            "plan_failure": _failure_json(self.plan_failure),
            "shards": [
                [
                    # A lease is soft: a shard that someone holds is, to a restart, one that waits.
                    "WAITING" if shard.state is ShardState.SCORING else shard.state.name,
                    shard.failures,
                    shard.expiries,
                    sorted(shard.failed_on),
                    _failure_json(shard.failure),
                ]
                for shard in self.shards
            ],
            "tally": self.tally.digest(),
            "commits": [[c.shard, c.agent, c.digest, c.execution.to_json()] for _, c in sorted(self.commits.items())],
            "done": [self.input_tokens_done, sorted(self.done_by.items())],
            "divergents": [[d.agent, d.to_json()] for d in self.divergents],
            "audits": self.audits.durable(),
            "withdrawn": sorted(self.withdrawn),
            "reused": self.reused,
        }

    # ------------------------------------------------------------ soft

    def lease_shard(self, shard: Shard, lease: Lease) -> None:
        """Give a shard to the lease's agent: a WAITING one, or one that another agent holds already."""
        self._move(shard, ShardEvent.SHARE if shard.leases else ShardEvent.LEASE)
        shard.leases += (lease,)
        shard.granted |= {lease.agent}
        self.holders[lease.agent] = self.holders.get(lease.agent, 0) + 1
        self.changed += 1

    def return_shard(self, shard: Shard, lease: Lease) -> None:
        """End a lease on a SCORING shard: with the last one it waits to be given out again."""
        self._move(shard, ShardEvent.UNSHARE if len(shard.leases) > 1 else ShardEvent.RETURN)
        self.end_lease(shard, lease)
        if not shard.leases:
            heapq.heappush(self._waiting, shard.plan.index)
        self.changed += 1

    def end_lease(self, shard: Shard, lease: Lease) -> None:
        """Forget a lease; the shard's state is the caller's affair."""
        shard.leases = tuple(other for other in shard.leases if other is not lease)
        left = self.holders[lease.agent] - 1
        if left:
            self.holders[lease.agent] = left
        else:
            del self.holders[lease.agent]

    def take(self, count: int, tokens: float, avoid: Callable[[Shard], bool]) -> list[Shard]:
        """Remove the first WAITING shards from the queue: at most ``count``, about ``tokens`` input tokens, at least 1.

        Shards for which ``avoid`` is true stay in the queue.
        """
        taken: list[Shard] = []
        kept: list[int] = []
        total = 0
        while self._waiting and len(taken) < count:
            index = heapq.heappop(self._waiting)
            shard = self.shards[index]
            if shard.state is not ShardState.WAITING:
                continue
            total += shard.plan.input_tokens
            if avoid(shard):
                kept.append(index)
                total -= shard.plan.input_tokens
            elif taken and total > tokens:
                kept.append(index)
                break
            else:
                taken.append(shard)
        for index in kept:
            heapq.heappush(self._waiting, index)
        return taken

    def queued(self) -> set[int]:
        """Indices of the WAITING shards that the queue holds; for ``check``."""
        return {i for i in self._waiting if self.shards[i].state is ShardState.WAITING}

    def adopt(self, shard: Shard) -> None:
        """Remove one WAITING shard from the queue, whatever its place in it."""
        self._waiting.remove(shard.plan.index)
        heapq.heapify(self._waiting)

    # ------------------------------------------------------------ transitions

    def _advance(self, event: JobEvent) -> None:
        self.state = advance(JOB_TABLE, self.state, event)

    def _move(self, shard: Shard, event: ShardEvent) -> None:
        state = advance(SHARD_TABLE, shard.state, event)
        self.counts[shard.state] -= 1
        self.counts[state] += 1
        self.cost[shard.state] -= shard.plan.input_tokens
        self.cost[state] += shard.plan.input_tokens
        shard.state = state


def partial_digest(partial: Partial) -> str:
    """Return the digest of a partial: two partials of a shard are equal exactly when theirs are."""
    return _encoded(partial)[0]


def _encoded(partial: Partial) -> tuple[str, bytes]:
    """The digest of a partial (as ``digest_json`` makes it), and the text that it is of."""
    text = json.dumps(partial.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return "sha256:" + hashlib.sha256(text).hexdigest(), text


def _failure_json(failure: Failure | None) -> list[str] | None:
    return None if failure is None else [failure.code, failure.message]
