"""The scheduler: every decision of the coordinator, as methods in and facts out. Clock, disk and wire are the runtime's.

(signatures only for the moment)
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.core.calls import (
    Holding,
    NodeInfo,
    Outcome,
    PlanWork,
    RenewAnswer,
    SchedulerConfig,
    ScoreWork,
    Submitted,
)
from coordinator.core.facts import Fact, Facts
from coordinator.core.views import Commit, JobView, NodeView
from eval_kernel.partial import ScoredShard
from eval_kernel.plan import Plan


class Scheduler:
    """State changes at once in memory; returned facts must be durable before the caller replies to anyone."""

    def __init__(self, config: SchedulerConfig) -> None: ...

    # ------------------------------------------------------------ restart
    def replay(self, facts: Iterable[Fact]) -> None:
        """Apply a journal's facts in order; raises JournalCorrupt."""
        raise NotImplementedError

    def apply(self, fact: Fact) -> None:
        """Apply one fact."""
        raise NotImplementedError

    # ------------------------------------------------------------ clients
    def submit(self, job: str, key: str, spec_json: str, name: str, now: float) -> Submitted:
        """Raises JobKeyConflict; ValueError when the id ``job`` is taken."""
        raise NotImplementedError

    def cancel(self, job: str, reason: str, now: float) -> Facts:
        """Job id or prefix; settled jobs stay settled: (). Raises UnknownJob."""
        raise NotImplementedError

    # ------------------------------------------------------------ agents (all raise StaleIncarnation, NotRegistered)
    def register(self, info: NodeInfo, now: float) -> Facts:
        """Raises StaleIncarnation only."""
        raise NotImplementedError

    def acquire(
        self, agent: str, incarnation: str, max_shards: int, loaded_job: str, now: float
    ) -> PlanWork | ScoreWork | None:
        """loaded_job may be empty."""
        raise NotImplementedError

    def renew(
        self,
        agent: str,
        incarnation: str,
        holdings: Iterable[Holding],
        activity: str,
        running: Holding | None,
        draining: bool,
        leaving: bool,
        now: float,
    ) -> RenewAnswer:
        """No facts: expiry is tick's."""
        raise NotImplementedError

    def scored(self, agent: str, incarnation: str, job: str, scored: ScoredShard, now: float) -> Outcome:
        raise NotImplementedError

    def shard_failed(
        self, agent: str, incarnation: str, job: str, shard: int, code: str, message: str, now: float
    ) -> Outcome:
        raise NotImplementedError

    def planned(self, agent: str, incarnation: str, job: str, plan: Plan, now: float) -> Outcome:
        raise NotImplementedError

    def plan_failed(
        self, agent: str, incarnation: str, job: str, code: str, message: str, now: float
    ) -> Outcome:
        raise NotImplementedError

    # ------------------------------------------------------------ time
    def drain(self) -> None:
        raise NotImplementedError

    def tick(self, now: float) -> Facts:
        """Call about once a second."""
        raise NotImplementedError

    # ------------------------------------------------------------ readers
    def job(self, prefix: str) -> JobView:
        """Raises UnknownJob (also for an ambiguous prefix)."""
        raise NotImplementedError

    def jobs(self) -> tuple[JobView, ...]:
        """Newest first."""
        raise NotImplementedError

    def commits(self, job: str) -> tuple[Commit, ...]:
        """Who scored each accepted shard and how, in order of shards (for the report)."""
        raise NotImplementedError

    def nodes(self, now: float) -> tuple[NodeView, ...]:
        raise NotImplementedError

    def waiting(self, job: str, now: float) -> list[str]:
        raise NotImplementedError

    def changed(self, job: str) -> int:
        """Grows with every change of the job, or of a node, that a watcher would want to see."""
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError
