"""One event loop owns the scheduler: record, then reply. Clock and waiting are here; deciding is the scheduler's.

Whatever was decided is visible to nobody outside before it is durable: every reply waits at a barrier for
everything decided so far, reads included. After a crash the journal therefore holds at least what anyone was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import structlog

from coordinator.committer import Appendable, Committer
from coordinator.config import Timings
from coordinator.core.calls import Outcome, Submitted
from coordinator.core.facts import Facts, ShardCommitted
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState, NodeState
from eval_kernel.errors import JournalPaused, Unavailable

_T = TypeVar("_T")
_log = structlog.get_logger("coordinator")

#: Facts that are worth a line of the log when they are decided, and what of them is.
_LOGGED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "job_submitted": lambda fact: {"name": fact.name},
    "job_planned": lambda fact: {"agent": fact.agent, "shards": len(fact.plan.shards)},
    "job_failed": lambda fact: {"code": fact.code, "reason": fact.message},
    "job_cancelled": lambda fact: {"reason": fact.reason},
    "shard_expired": lambda fact: {"agent": fact.agent, "shard": fact.shard},
    "plan_expired": lambda fact: {"agent": fact.agent},
    "shard_diverged": lambda fact: {"agent": fact.agent, "shard": fact.shard},
}


def anchored_clock() -> Callable[[], float]:
    """Return a clock that shows wall time at its making and runs steadily from there, whatever the wall clock does."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Runtime:
    """The scheduler, its journal and those who wait for either.

    ``serving`` is false while the journal cannot be written or the coordinator stops; ``on_serving`` hears of changes.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        journal: Appendable,
        timings: Timings,
        *,
        clock: Callable[[], float] | None = None,
        on_serving: Callable[[bool], None] = lambda serving: None,
    ) -> None:
        """Take over a scheduler that has replayed the journal."""
        self.scheduler = scheduler
        self.timings = timings
        self.now = clock or anchored_clock()
        self.stopping = asyncio.Event()
        self._on_serving = on_serving
        self._committer = Committer(
            journal,
            retry_seconds=timings.journal_retry,
            barrier_seconds=timings.barrier,
            on_trouble=self._journal_trouble,
        )
        self._changed = asyncio.Event()
        self._asking: dict[str, asyncio.Event] = {}  # agents that wait for work
        self._offers = scheduler.offers

    # ------------------------------------------------------------ deciding

    @property
    def serving(self) -> bool:
        """Whether calls can be answered."""
        return self._committer.trouble is None and not self.stopping.is_set()

    @property
    def decided(self) -> int:
        """Number of the last fact decided."""
        return self._committer.decided

    async def room(self) -> None:
        """Wait until more may be decided. Raises ``Unavailable`` when stopping, or when it takes too long."""
        self._raise_if_stopping()
        await self._committer.room()

    def record(self, facts: Facts) -> int:
        """Have facts written and wake whoever waits; return the last one's number."""
        for fact in facts:
            if fact.kind in _LOGGED:
                _log.info(fact.kind.replace("_", " "), job=fact.job, **_LOGGED[fact.kind](fact))
            if isinstance(fact, ShardCommitted) and self.scheduler.state(fact.job) is JobState.SUCCEEDED:
                _log.info("job succeeded", job=fact.job)
        number = self._committer.put(facts)
        self.touch()
        return number

    def touch(self) -> None:
        """After a call of the scheduler: wake those who watch, and if it has something new to offer, those who ask."""
        _pulse(self._changed)
        wakes = self.scheduler.wakes()
        if self.scheduler.offers != self._offers:
            self._offers = self.scheduler.offers
            self._wake(self._asking)
        else:
            self._wake(wakes)

    async def submit(self, job: str, key: str, spec_json: str, name: str) -> Submitted:
        """Submit and wait until it is durable."""
        await self.room()
        made = self.scheduler.submit(job, key, spec_json, name, self.now())
        self.record(made.facts)
        await self.barrier()
        return made

    async def cancel(self, job: str, reason: str) -> str:
        """Cancel and wait until it is durable; return the job's whole id."""
        await self.room()
        view = self.scheduler.job(job)
        self.record(self.scheduler.cancel(view.job, reason, self.now()))
        await self.barrier()
        return view.job

    def dismiss(self, agent: str) -> None:
        """Give what an agent holds to others, as if it had said good-bye: it is not let in any more."""
        for node in self.scheduler.nodes(self.now()):
            if node.agent == agent and node.state in (NodeState.ACTIVE, NodeState.SUSPECT, NodeState.DRAINING):
                self.scheduler.renew(agent, node.incarnation, (), "revoked", None, True, True, self.now())
        self.touch()

    async def outcome(self, decide: Callable[[Scheduler, float], Outcome]) -> tuple[Outcome, int]:
        """Let the scheduler judge a result; return the outcome and the number to wait for before telling it."""
        await self.room()
        outcome = decide(self.scheduler, self.now())
        return outcome, self.record(outcome.facts)

    # ------------------------------------------------------------ waiting

    async def barrier(self, number: int | None = None, *, patient: bool = False) -> None:
        """Wait until everything decided so far (or up to ``number``) is durable; raises ``Unavailable``."""
        await self._committer.barrier(number, patient=patient)

    async def read(self, look: Callable[[Scheduler, float], _T]) -> _T:
        """Return what the scheduler shows now, once that is durable."""
        seen = look(self.scheduler, self.now())
        await self.barrier()
        return seen

    async def change(self, timeout: float) -> None:
        """Wait for a change of anything, for ``timeout`` seconds at most. Raises ``Unavailable`` when stopping."""
        await self._wait(self._changed, timeout)

    async def work(self, agent: str, timeout: float) -> None:
        """Wait until there may be something new for an agent to do, for ``timeout`` seconds at most."""
        await self._wait(self._asking.setdefault(agent, asyncio.Event()), timeout)

    def _wake(self, agents: Iterable[str]) -> None:
        """Have agents that wait for work ask again."""
        for agent in list(agents):
            event = self._asking.pop(agent, None)
            if event is not None:
                event.set()

    async def _wait(self, event: asyncio.Event, timeout: float) -> None:
        self._raise_if_stopping()
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass
        self._raise_if_stopping()

    def _raise_if_stopping(self) -> None:
        if self.stopping.is_set():
            raise Unavailable("the coordinator is stopping; repeat the call once it is back")

    # ------------------------------------------------------------ living

    async def run(self) -> None:
        """Write and tick until cancelled. Raises what makes going on impossible, the journal's errors first of all."""
        await asyncio.gather(self._committer.run(), self._ticks())

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self.timings.tick)
            if self._committer.crowded:
                continue  # overdue leases can wait for the disk; what they decide could not be written
            self.record(self.scheduler.tick(self.now()))

    def stop(self) -> None:
        """Give out no more work and end those who wait.

        The agents are not asked to drain: they keep what they hold, and knock until the coordinator is back.
        """
        self.stopping.set()
        self._on_serving(False)
        _pulse(self._changed)
        self._wake(self._asking)

    async def close(self) -> bool:
        """Write what was decided, as far as the time for that goes; return whether everything is durable."""
        return await self._committer.close(self.timings.drain)

    def shutdown(self) -> None:
        """Let the journal go, once ``run`` has been cancelled: it may be closed then."""
        self._committer.shutdown()

    def _journal_trouble(self, error: JournalPaused | None) -> None:
        if error is None:
            _log.info("journal writable again", facts=self._committer.decided)
        else:
            _log.error("journal not writable: nothing is acknowledged until it is", code=error.code, reason=str(error))
        self._on_serving(self.serving)


def _pulse(event: asyncio.Event) -> None:
    """Wake all who wait now, and nobody who comes later."""
    event.set()
    event.clear()
