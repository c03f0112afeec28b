"""What goes into the scheduler and what comes out of a call: plain frozen data. Reading is left to views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from coordinator.core.facts import Facts
from coordinator.core.states import Role
from eval_kernel.errors import ConfigError, RequestInvalid
from eval_kernel.plan import Manifest, ShardPlan

#: The ``shard`` of a holding that is the planning of a job.
PLANNING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How patient the scheduler is. Durations are seconds. Raises ``ConfigError``."""

    lease_seconds: float = 30.0
    heartbeat_seconds: float = 5.0  # how often agents are told to renew
    suspect_after_seconds: float = 15.0  # silence that makes a node SUSPECT; after a whole lease it is LOST
    max_tries: int = 3  # failures of a shard, or of planning a job; twice as many expiries
    target_seconds: float = 10.0  # the longest duration of one assignment: what a lost node costs at most
    max_jobs_per_node: int = 2  # whose shards a node may hold at a time: one being scored, one to follow
    ageing_seconds: float = 600.0  # an age of so much counts like one more of priority
    switch_seconds: float = 60.0  # seconds of nodes by which a submitter may be ahead for the sake of a loaded model
    access_retry_seconds: float = 60.0  # how long a node that cannot run a job is not asked again
    audit_share: float = 0.0  # of the shards, to be scored a second time by another node
    audit_salt: str = ""  # makes the choice of those shards unpredictable for agents
    audit_patience_seconds: float = 300.0  # after all else is done, how long an audit waits for a second node
    canary: bool = False  # whether a node that is new to a model first repeats a shard that another has done
    reuse: bool = False  # whether a job takes over what an equal one before it had accepted

    def __post_init__(self) -> None:
        """Check that the durations make sense together."""
        if not 0 <= self.audit_share <= 1:
            raise ConfigError(f"audit_share is {self.audit_share}; it must be 0 to 1")
        for name in self.__slots__:
            if name not in ("audit_share", "audit_salt", "canary", "reuse") and not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be more than 0")
        if not self.heartbeat_seconds < self.suspect_after_seconds <= self.lease_seconds:
            raise ConfigError(
                f"heartbeat_seconds ({self.heartbeat_seconds}) must be below suspect_after_seconds "
                f"({self.suspect_after_seconds}), and that at most lease_seconds ({self.lease_seconds})"
            )


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What an agent says of itself when it registers."""

    agent: str
    incarnation: str  # random, new for every start of the agent
    site: str
    roles: frozenset[Role]
    version: str
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    pack_address: str = ""  # where it serves packs to its site; empty: it does not


@dataclass(frozen=True, slots=True)
class Holding:
    """Work an agent may do: a shard of a job, or its planning (``shard`` is ``PLANNING``)."""

    job: str
    shard: int


#: Bounds of what a submitter may ask for.
MAX_PRIORITY, MAX_NODES = 100, 1_000_000


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """How a job is queued; nothing of it changes its result. Raises ``RequestInvalid``."""

    submitter: str = ""  # whose fair share it is charged to
    priority: int = 0  # higher goes first; waiting raises it
    max_nodes: int = 0  # that may work on it at a time; 0: any number
    fresh: bool = False  # score everything, even what an equal job of before has scored

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise RequestInvalid(f"priority is {self.priority}; allowed: -{MAX_PRIORITY} to {MAX_PRIORITY}")
        if not 0 <= self.max_nodes <= MAX_NODES:
            raise RequestInvalid(f"max_nodes is {self.max_nodes}; it must be 0 (any number) to {MAX_NODES}")
        if len(self.submitter) > 100:
            raise RequestInvalid(f"submitter has {len(self.submitter)} characters; at most 100 are allowed")


#: What a job is submitted with unless something else is said.
DEFAULT_OPTIONS = SubmitOptions()


@dataclass(frozen=True, slots=True)
class Submitted:
    """The job of a client's key. ``existed``: it was made by an earlier call."""

    job: str
    existed: bool
    facts: Facts


@dataclass(frozen=True, slots=True)
class PlanWork:
    """Index this job's data."""

    job: str
    spec_json: str


@dataclass(frozen=True, slots=True)
class ScoreWork:
    """Score these shards, in this order."""

    job: str
    spec_json: str
    manifest: Manifest
    shards: tuple[ShardPlan, ...]


@dataclass(frozen=True, slots=True)
class RenewAnswer:
    """What has become of an agent's holdings."""

    lost: tuple[Holding, ...]  # another agent's, done, or given up
    settled_jobs: tuple[str, ...]  # settled or unknown: drop all work on them
    drain: bool  # nothing new will be given
    done: tuple[Holding, ...] = ()  # of those lost: running, yet committed by another agent; to go on is no use


class Verdict(Enum):
    """What became of a result."""

    ACCEPTED = "ACCEPTED"
    DUPLICATE = "DUPLICATE"  #: the same result is there already
    DIVERGENT = "DIVERGENT"  #: another result was first; this one is kept for the report
    UNWANTED = "UNWANTED"  #: the job is settled, or unknown
    REFUSED = "REFUSED"  #: it breaks a rule; ``detail`` says which


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a result, one line of detail for people, and what must be journaled before it is told.

    A verdict without facts may still rest on facts of an earlier call (a DUPLICATE of a commit that is being
    written): it may be told only once everything returned before it is durable.
    """

    verdict: Verdict
    detail: str = ""
    facts: Facts = ()
