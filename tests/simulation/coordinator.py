"""The coordinator of a simulated world: the real scheduler and a journal whose unwritten end can be lost.

In place of runtime, committer and rpc there is as little as possible: facts are queued, written in batches, and each
answer waits until everything decided before it is written. (test_runtime_simulation runs the real ones.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from coordinator.core import facts as f
from coordinator.core.calls import Holding, PlanWork, SchedulerConfig, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.journal import MemoryJournal
from eval_kernel.errors import CallError, JobKeyConflict, JournalFull, by_code
from eval_kernel.plan import Plan
from tests.simulation.checks import Witness
from tests.simulation.world import World
from tests.support.core_cases import info, make_plan

TICK, WRITE, RETRY = 1.0, 0.004, 0.5
BATCH = 64
#: Tries before a shard is given up: few where one shard is poison, else so many that chaos never reaches them.
FEW_TRIES, MANY_TRIES = 2, 1_000_000


def config(poison: bool) -> SchedulerConfig:
    """Return how patient the coordinator is: leases are short, so that a run is."""
    return SchedulerConfig(
        lease_seconds=5.0,
        heartbeat_seconds=1.5,
        suspect_after_seconds=3.5,
        max_tries=FEW_TRIES if poison else MANY_TRIES,
        access_retry_seconds=4.0,
        target_seconds=4.0,
    )


@lru_cache(maxsize=64)
def plan_of(shards: int) -> Plan:
    """Return the plan that every agent makes of a job of so many shards."""
    return make_plan(shards)


class Coordinator:
    """One coordinator, through all its lives."""

    def __init__(self, world: World, witness: Witness) -> None:
        """Begin with an empty journal."""
        self._world = world
        self._witness = witness
        self._config = config("poison" in world.scenario.faults)
        self.journal = MemoryJournal("m")
        self.offset = 0.0  # of the coordinator's clock
        self.life = 0
        self.alive = False
        self._stalled_until = 0.0
        self.start()

    @property
    def now(self) -> float:
        """What the coordinator's clock says."""
        return self._world.now + self.offset

    @property
    def idle(self) -> bool:
        """Whether all that was decided is durable."""
        return self._decided == self._durable

    # ------------------------------------------------------------ its life

    def start(self) -> None:
        """Replay the journal and begin to serve."""
        self.life += 1
        self.alive = True
        self.scheduler = Scheduler(self._config)
        self.scheduler.replay(self.journal.facts())
        self._witness.restarted(self.scheduler)
        self._queue: deque[f.Facts] = deque()
        self._flying: list[f.Fact] = []  # handed to the disk
        self._decided = self._durable = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._world.say(f"the coordinator lives ({self.journal.count} facts)")
        self._later(TICK, self._tick)

    def kill(self, down: float, written: bool) -> None:
        """Die. What was queued is gone; what the disk was given is there if ``written``, though nobody was told."""
        if not self.alive:
            return
        self.alive = False
        self._world.say(f"the coordinator dies: {sum(map(len, self._queue))} facts lost, {self._flying} in flight")
        if written and self._flying:
            try:
                self.journal.append(self._flying)
            except JournalFull:
                pass  # then it was not written after all
            else:
                self._witness.written(self._flying)
        self._world.at(down, self.start)

    def stall(self, seconds: float) -> None:
        """Do nothing for a while."""
        self._world.say(f"the coordinator stops for {seconds:.1f} s")
        self._stalled_until = max(self._stalled_until, self._world.now + seconds)

    def fill(self, seconds: float) -> None:
        """Have no space for a while."""
        self._world.say(f"the journal is full for {seconds:.1f} s")
        self.journal.room = self.journal.count
        self._world.at(seconds, self._free)

    def _free(self) -> None:
        self.journal.room = None

    def _later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Have something called in this life, and not while it is stopped."""
        self._world.at(delay, self._when_alive, self.life, call, args)

    def _when_alive(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or life != self.life:
            return
        if self._world.now < self._stalled_until:
            self._world.at(self._stalled_until - self._world.now, self._when_alive, life, call, args)
            return
        call(*args)

    # ------------------------------------------------------------ record, then reply

    def record(self, facts: f.Facts) -> int:
        """Queue facts for the journal; return the number of the last one decided."""
        if facts:
            self._witness.decided(facts)
            self._queue.append(facts)
            self._decided += len(facts)
            if not self._flying:
                self._write()
        return self._decided

    def tell(self, number: int, answer: Callable[[], None]) -> None:
        """Answer once fact ``number`` is durable."""
        if number <= self._durable:
            answer()
        else:
            self._waiting.append((number, answer))

    def _write(self) -> None:
        self._flying = []
        while self._queue and len(self._flying) < BATCH:
            self._flying += self._queue.popleft()
        delay = WRITE
        if self._world.strikes("slow_disk"):
            delay += self._world.network.uniform(0.0, 3.0)
        self._later(delay, self._append)

    def _append(self) -> None:
        try:
            self.journal.append(self._flying)
        except JournalFull:
            self._later(RETRY, self._append)
            return
        self._witness.written(self._flying)
        self._durable += len(self._flying)
        self._flying = []
        if self._queue:
            self._write()
        while self._waiting and self._waiting[0][0] <= self._durable:
            self._waiting.popleft()[1]()

    def _tick(self) -> None:
        self.record(self.scheduler.tick(self.now))
        self.scheduler.check()
        self._later(TICK, self._tick)

    # ------------------------------------------------------------ calls

    def receive(self, life: int, kind: str, request: dict[str, Any], reply: Callable[[Any], None]) -> None:
        """Take a call from the network; ``reply`` gets the answer or a ``CallError``, or nothing at all.

        ``life`` is the one that the caller was connected to: no connection outlives its process.
        """
        if not self.alive or life != self.life:
            return
        if self._world.now < self._stalled_until:
            self._world.at(self._stalled_until - self._world.now, self.receive, life, kind, request, reply)
            return
        try:
            answer, number = getattr(self, f"_{kind}")(**request)
        except JobKeyConflict:
            raise
        except CallError as error:
            answer, number = error, self._decided
        self.scheduler.check()

        def answered() -> None:
            if life == self.life:
                self._witness.told(kind, request, answer)
                reply(answer)

        self.tell(number, answered)

    def _register(self, agent: str, incarnation: str) -> tuple[Any, int]:
        facts = self.scheduler.register(info(agent, incarnation), self.now)
        self._witness.registered(agent, incarnation)
        self.record(facts)
        return self.journal.identity, self._decided

    def _acquire(self, agent: str, incarnation: str, count: int, loaded: str) -> tuple[Any, int]:
        work = self.scheduler.acquire(agent, incarnation, count, loaded, self.now)
        self._witness.served(agent, incarnation)
        if work is None:
            return None, self._decided
        shards = () if isinstance(work, PlanWork) else work.shards
        self._witness.granted(agent, work.job, (shard.index for shard in shards))
        return (work.job, work.spec_json, shards), self._decided

    def _renew(
        self,
        agent: str,
        incarnation: str,
        held: tuple[tuple[str, int], ...],
        running: tuple[str, int] | None,
        draining: bool,
        leaving: bool,
    ) -> tuple[Any, int]:
        claimed = None if running is None else Holding(*running)
        holdings = [Holding(*item) for item in held]
        before = self._held(agent)
        answer = self.scheduler.renew(agent, incarnation, holdings, "", claimed, draining, leaving, self.now)
        self._witness.served(agent, incarnation)
        for holding in self._held(agent) - before:
            self._witness.granted(agent, holding.job, [holding.shard])
        self._witness.claims(agent, running)
        return ([(h.job, h.shard) for h in answer.lost], answer.settled_jobs, answer.drain), self._decided

    def _held(self, agent: str) -> set[Holding]:
        return {holding for node in self.scheduler.nodes(self.now) if node.agent == agent for holding in node.held}

    def _scored(self, agent: str, incarnation: str, job: str, scored: Any, wrong: bool) -> tuple[Any, int]:
        outcome = self.scheduler.scored(agent, incarnation, job, scored, self.now)
        self._witness.served(agent, incarnation)
        self._witness.judged(self.scheduler, job, scored.partial, outcome.verdict, wrong)
        return outcome.verdict, self.record(outcome.facts)

    def _failed(self, agent: str, incarnation: str, job: str, shard: int, code: str) -> tuple[Any, int]:
        name = by_code(code).code
        if shard < 0:
            outcome = self.scheduler.plan_failed(agent, incarnation, job, name, "it fails", self.now)
        else:
            outcome = self.scheduler.shard_failed(agent, incarnation, job, shard, name, "it fails", self.now)
        self._witness.served(agent, incarnation)
        return outcome.verdict, self.record(outcome.facts)

    def _planned(self, agent: str, incarnation: str, job: str, shards: int) -> tuple[Any, int]:
        outcome = self.scheduler.planned(agent, incarnation, job, plan_of(shards), self.now)
        self._witness.served(agent, incarnation)
        assert outcome.verdict is not Verdict.REFUSED, f"the plan of {job} was refused: {outcome.detail}"
        return outcome.verdict, self.record(outcome.facts)

    def _submit(self, job: str) -> tuple[Any, int]:
        made = self.scheduler.submit(f"{job}.{self.life}", f"key-{job}", job, job, self.now)
        self.record(made.facts)
        return made.job, self._decided

    def _cancel(self, job: str) -> tuple[Any, int]:
        self.record(self.scheduler.cancel(job, "enough", self.now))
        return job, self._decided
