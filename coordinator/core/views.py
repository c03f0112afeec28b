"""What readers see of jobs and nodes at one moment: frozen data. Why something waits is told in explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.core.calls import Holding
from coordinator.core.facts import ShardDiverged
from coordinator.core.states import JobState, NodeState, Role
from eval_kernel.partial import Execution
from eval_kernel.plan import Manifest, ShardPlan
from eval_kernel.tally import Tally


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: a code of ``eval_kernel.errors`` and one line for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Who scored an accepted partial, and how. The sums are in the job's tally."""

    shard: int
    agent: str
    steps: int
    tokens: int
    execution: Execution
    digest: str  # of the partial: another one of the shard is a duplicate exactly when its digest is equal
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class Missing:
    """A shard without a partial, and why it has none."""

    plan: ShardPlan
    quarantined: bool
    failures: int
    expiries: int
    failure: Failure | None  # the last one, if any


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """What one node has done, and does, for one job."""

    agent: str
    state: NodeState | None  # None: not seen since the coordinator started
    shards_done: int
    input_tokens_done: int
    tokens_per_second: float  # input tokens, recent; 0.0 before the first accepted shard of this life
    shards_held: int
    activity: str
    layout: str  # how a model lies on several ranks, or is streamed, and why; empty on one rank, and before a result


@dataclass(frozen=True, slots=True)
class JobView:
    """A job at one moment; ``tally`` is the live one: read it at once, change it never."""

    job: str
    key: str
    name: str
    spec_json: str
    state: JobState
    failure: Failure | None  # FAILED and CANCELLED: why
    submitted_at: float  # seconds, on the clock the scheduler was given as `now`
    settled_at: float | None
    manifest: Manifest | None  # None until planned
    plan_digest: str | None
    planned_by: str | None
    tally: Tally
    shards: int
    shards_done: int
    shards_held: int
    shards_quarantined: int
    input_tokens: int
    input_tokens_done: int
    scored_tokens_done: int
    quarantined: tuple[Missing, ...]  # what else has no partial: Scheduler.missing
    nodes: tuple[NodeProgress, ...]
    tokens_per_second: float  # input tokens, all nodes that work on it now
    accepted: int
    duplicates: int  # equal partials that arrived again since the coordinator started
    refused: int  # partials that broke a rule, since the coordinator started
    divergents: tuple[ShardDiverged, ...]
    audits: Mapping[str, Any] | None  # second opinions: how many ended how, and the spread; None: none were asked for
    reused: tuple[str, int] | None  # the equal job, and how many of its shards were taken over
    failures: int  # of shards and of planning
    expiries: int
    changed: int  # grows with every change that a watcher would want to see


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node at one moment."""

    agent: str
    incarnation: str
    site: str
    roles: frozenset[Role]
    version: str
    capabilities: Mapping[str, Any]
    state: NodeState
    silence_seconds: float
    activity: str
    shards_done: int  # since the coordinator started
    tokens_per_second: float  # input tokens, recent, of the job it last finished a shard of
    held: tuple[Holding, ...]
    refusals: tuple[str, ...]  # jobs it is not given now, and why
