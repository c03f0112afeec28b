"""What is journaled: one frozen class a kind of fact, JSON in and out. Storing them is left to coordinator.journal.

A coordinator that replays these comes to the same jobs, tallies and tries. Whatever was decided when a fact was
made (that a shard is given up, for instance) is in the fact, so that another configuration replays it alike. Times
(``at``) are seconds of the clock that the caller passed in as ``now``: for people, nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from eval_kernel.partial import Execution, Partial, ScoredShard
from eval_kernel.plan import Manifest, Plan, ShardPlan


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that happened to a job. ``kind`` names the class in the journal; its meaning never changes."""

    kind: ClassVar[str]
    job: str

    def to_json(self) -> dict[str, Any]:
        """Return all but ``job`` as a JSON-ready dict that ``from_json`` turns back into an equal fact."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "job"}

    @classmethod
    def from_json(cls, job: str, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s dict; ``TypeError``, ``KeyError`` or ``ValueError`` for another one."""
        return cls(job=job, **data)


#: What one call of the scheduler made true, in order; journaled together or not at all.
Facts = tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class JobSubmitted(Fact):
    """A job was accepted under a client's key. What has its default is not written."""

    kind = "job_submitted"
    key: str
    name: str
    spec_json: str
    at: float
    submitter: str = ""  # whose fair share it is charged to
    priority: int = 0  # higher goes first
    max_nodes: int = 0  # that may work on it at a time; 0: any number
    fresh: bool = False  # nothing is taken from an equal job of before

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict: one that an older version reads too, where nothing newer was asked for."""
        optional = ("submitter", "priority", "max_nodes", "fresh")
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "job"}
        return {name: value for name, value in kept.items() if value or name not in optional}


@dataclass(frozen=True, slots=True)
class JobPlanned(Fact):
    """The first plan of a job was accepted; the job runs."""

    kind = "job_planned"
    agent: str
    plan: Plan
    at: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the manifest, and one row a shard."""
        rows = [shard.to_row() for shard in self.plan.shards]
        return {"agent": self.agent, "manifest": self.plan.manifest.to_json(), "shards": rows, "at": self.at}

    @classmethod
    def from_json(cls, job: str, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s dict."""
        plan = Plan(Manifest.from_json(data["manifest"]), tuple(ShardPlan.from_row(row) for row in data["shards"]))
        return cls(job, data["agent"], plan, data["at"])


@dataclass(frozen=True, slots=True)
class _Scored(Fact):
    """Who scored a shard, what came out, and how."""

    agent: str
    scored: ScoredShard
    at: float

    @property
    def shard(self) -> int:
        """Index of the shard."""
        return self.scored.partial.shard

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; sums are integers in it."""
        partial, execution = self.scored.partial.to_json(), self.scored.execution.to_json()
        return {"agent": self.agent, "partial": partial, "execution": execution, "at": self.at}

    @classmethod
    def from_json(cls, job: str, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s dict."""
        scored = ScoredShard(Partial.from_json(data["partial"]), Execution.from_json(data["execution"]))
        return cls(job, data["agent"], scored, data["at"])


@dataclass(frozen=True, slots=True)
class ShardCommitted(_Scored):
    """The first partial of a shard was accepted. The last one of a job makes it SUCCEEDED."""

    kind = "shard_committed"


@dataclass(frozen=True, slots=True)
class ShardRecommitted(ShardCommitted):
    """A partial was accepted for a shard whose first one was withdrawn: its agent is quarantined."""

    kind = "shard_recommitted"


@dataclass(frozen=True, slots=True)
class ShardDiverged(_Scored):
    """A partial that differs from the committed one arrived: kept for the report, never added."""

    kind = "shard_diverged"


@dataclass(frozen=True, slots=True)
class ShardFailed(Fact):
    """Running a shard failed: one of its tries. ``gives_up`` says that it was the last one."""

    kind = "shard_failed"
    shard: int
    agent: str
    code: str
    message: str
    gives_up: bool


@dataclass(frozen=True, slots=True)
class ShardExpired(Fact):
    """An agent fell silent, or died, while it ran a shard. Counted apart from failures."""

    kind = "shard_expired"
    shard: int
    agent: str
    gives_up: bool


@dataclass(frozen=True, slots=True)
class JobReused(Fact):
    """A job that was just planned takes over all that an equal one, ``source``, had accepted up to this fact."""

    kind = "job_reused"
    source: str
    at: float


@dataclass(frozen=True, slots=True)
class AuditOpened(Fact):
    """These shards need a second opinion before the job is complete."""

    kind = "audit_opened"
    shards: tuple[int, ...]

    @classmethod
    def from_json(cls, job: str, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s dict."""
        return cls(job, tuple(data["shards"]))


@dataclass(frozen=True, slots=True)
class AuditOpinion(_Scored):
    """Another agent's result of a committed shard: compared, never added."""

    kind = "audit_opinion"


@dataclass(frozen=True, slots=True)
class AuditClosed(Fact):
    """An audit is over: ``outcome`` is the name of an ``AuditOutcome``."""

    kind = "audit_closed"
    shard: int
    outcome: str
    at: float


@dataclass(frozen=True, slots=True)
class AgentQuarantined(Fact):
    """An agent computes otherwise than others do; ``job`` is where that was seen. It is given nothing more."""

    kind = "agent_quarantined"
    agent: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class ShardsWithdrawn(Fact):
    """What a quarantined agent has scored of a job that is not settled counts no more: these shards wait again."""

    kind = "shards_withdrawn"
    agent: str
    shards: tuple[int, ...]

    @classmethod
    def from_json(cls, job: str, data: Mapping[str, Any]) -> Self:
        """Build from ``to_json``'s dict."""
        return cls(job, data["agent"], tuple(data["shards"]))


@dataclass(frozen=True, slots=True)
class PlanFailed(Fact):
    """Planning a job failed on an agent: one of its tries. The last one is followed by ``JobFailed``."""

    kind = "plan_failed"
    agent: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class PlanExpired(Fact):
    """An agent fell silent, or died, while it planned a job. Counted apart from failures."""

    kind = "plan_expired"
    agent: str


@dataclass(frozen=True, slots=True)
class JobFailed(Fact):
    """The job ended without a number; ``code`` and ``message`` say why."""

    kind = "job_failed"
    code: str
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class JobCancelled(Fact):
    """Someone cancelled the job."""

    kind = "job_cancelled"
    reason: str
    at: float


KINDS: Mapping[str, type[Fact]] = {
    cls.kind: cls
    for cls in (
        JobSubmitted,
        JobPlanned,
        ShardCommitted,
        ShardRecommitted,
        ShardDiverged,
        ShardFailed,
        ShardExpired,
        JobReused,
        AuditOpened,
        AuditOpinion,
        AuditClosed,
        AgentQuarantined,
        ShardsWithdrawn,
        PlanFailed,
        PlanExpired,
        JobFailed,
        JobCancelled,
    )
}
