"""Whole jobs under seeded chaos: agents die, pause and come back, messages are lost, doubled and late, the coordinator
crashes with facts unwritten. Whatever happens, the total is the one that a single process would have added up.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from coordinator.core import facts as f
from coordinator.core.calls import PLANNING, Holding, PlanWork, SchedulerConfig, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from coordinator.journal import MemoryJournal
from eval_kernel.errors import NotRegistered
from eval_kernel.tally import Tally
from tests.support.core_cases import info, make_partial, make_plan, make_scored

#: Tries without end: chaos must not be taken for a shard that cannot be scored.
CONFIG = SchedulerConfig(lease_seconds=10.0, heartbeat_seconds=2.0, suspect_after_seconds=5.0, max_tries=1_000_000)
CHAOS_SECONDS, TICK = 60.0, 0.5
#: Simulated seconds after the chaos within which every job must be over: leases run out, then work goes on.
CALM_SECONDS = 120.0


@dataclass
class Agent:
    """An agent as the coordinator sees one: it holds work, spools results until they are acknowledged, and may die."""

    name: str
    speed: float  # shards a second
    life: int = 0
    registered: bool = False
    held: list[Holding] = field(default_factory=list)
    spool: dict[Holding, int] = field(default_factory=dict)  # result -> how often it was sent
    paused_until: float = 0.0
    progress: float = 0.0

    @property
    def who(self) -> tuple[str, str]:
        """Name and incarnation."""
        return self.name, f"{self.name}.{self.life}"


class World:
    """A coordinator with its journal, agents, and a network between them."""

    def __init__(self, seed: int, agents: int, shards: dict[str, int]) -> None:
        """Submit all jobs at time 0."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.shards = shards
        self.journal = MemoryJournal("m")
        self.pending: list[f.Facts] = []
        self.acks: list[tuple[Agent, int, Holding]] = []  # to be told once the journal is written
        self.scheduler = Scheduler(CONFIG)
        self.agents = [Agent(f"a{i}", self.random.choice([1.0, 2.0, 4.0])) for i in range(agents)]
        self.chaos = True
        self.verdicts = dict.fromkeys(Verdict, 0)
        self.crashes = 0

    def unlucky(self, chance: float) -> bool:
        """Whether something bad happens now."""
        return self.chaos and self.random.random() < chance

    # ------------------------------------------------------------ the coordinator

    def submit(self) -> None:
        """Submit what is not known (yet, or any more: it was never acknowledged)."""
        for job in self.shards:
            self.pending.append(self.scheduler.submit(job, job, "{}", job, self.now).facts)

    def write(self) -> None:
        """Group commit, then the acknowledgements, of which some get lost."""
        self.journal.append([fact for facts in self.pending for fact in facts])
        self.pending.clear()
        for agent, life, result in self.acks:
            if agent.life == life and not self.unlucky(0.2):
                agent.spool.pop(result, None)
        self.acks.clear()

    def crash(self) -> None:
        """Lose what was not written and begin again from the journal."""
        self.crashes += 1
        self.pending.clear()
        self.acks.clear()
        self.scheduler = Scheduler(CONFIG)
        self.scheduler.replay(self.journal.facts())
        self.submit()

    # ------------------------------------------------------------ agents

    def step(self, agent: Agent) -> None:
        """Half a second in the life of an agent."""
        if self.now < agent.paused_until:
            return
        if self.unlucky(0.01):
            agent.life += 1
            agent.registered = False
            agent.held.clear()  # memory is gone, the spool is on disk
        if self.unlucky(0.01):
            agent.paused_until = self.now + self.random.uniform(1.0, 30.0)
            return
        try:
            self.talk(agent)
        except NotRegistered:
            agent.registered = False
        self.work(agent)

    def talk(self, agent: Agent) -> None:
        """Register, renew, acquire, report."""
        if not agent.registered:
            self.pending.append(self.scheduler.register(info(*agent.who), self.now))
            agent.registered = True
        if not self.unlucky(0.3):
            running = agent.held[0] if agent.held else None
            answer = self.scheduler.renew(*agent.who, agent.held, "", running, False, False, self.now)
            agent.held = [h for h in agent.held if h not in answer.lost and h.job not in answer.settled_jobs]
        if len(agent.held) < 2:
            loaded = agent.held[0].job if agent.held else ""
            work = self.scheduler.acquire(*agent.who, 4, loaded, self.now)
            if work is not None and not self.unlucky(0.1):
                numbers = [PLANNING] if isinstance(work, PlanWork) else [shard.index for shard in work.shards]
                agent.held += [Holding(work.job, number) for number in numbers]
        results = list(agent.spool)
        self.random.shuffle(results)
        for result in results[: self.random.randint(0, 8)]:
            self.report(agent, result)

    def work(self, agent: Agent) -> None:
        """Compute a little; results go to the spool. Sometimes a shard fails."""
        agent.progress += agent.speed * TICK
        while agent.held and agent.progress >= 1.0:
            agent.progress -= 1.0
            done = agent.held.pop(0)
            if done.shard != PLANNING and self.unlucky(0.05):
                self.fail(agent, done)
            else:
                agent.spool[done] = 0

    def fail(self, agent: Agent, shard: Holding) -> None:
        """Report a failure once: it is not spooled, so it is lost where the coordinator does not know the agent."""
        try:
            failed = self.scheduler.shard_failed(*agent.who, shard.job, shard.shard, "WORKER_CRASHED", "9", self.now)
            self.pending.append(failed.facts)
        except NotRegistered:
            agent.registered = False

    def report(self, agent: Agent, result: Holding) -> None:
        """Send one result: it may be lost, or arrive twice."""
        if self.unlucky(0.2):
            return
        agent.spool[result] += 1
        for _ in range(2 if self.unlucky(0.2) else 1):
            if result.shard == PLANNING:
                plan = make_plan(self.shards[result.job])
                outcome = self.scheduler.planned(*agent.who, result.job, plan, self.now)
            else:
                scored = make_scored(result.shard, seconds=1 / agent.speed)
                outcome = self.scheduler.scored(*agent.who, result.job, scored, self.now)
            self.verdicts[outcome.verdict] += 1
            self.pending.append(outcome.facts)
            self.acks.append((agent, agent.life, result))

    # ------------------------------------------------------------ time

    def settled(self) -> bool:
        """Whether all jobs are over, and that is durable."""
        views = self.scheduler.jobs()
        return len(views) == len(self.shards) and all(v.state.settled for v in views) and not any(self.pending)

    def run(self) -> None:
        """Chaos for a while, then calm until all is done."""
        self.submit()
        while not (self.settled() and not self.chaos):
            self.now += TICK
            self.chaos = self.now < CHAOS_SECONDS
            self.random.shuffle(self.agents)
            for agent in self.agents:
                self.step(agent)
            self.pending.append(self.scheduler.tick(self.now))
            if self.random.random() < 0.7:
                self.write()
            if self.unlucky(0.03):
                self.crash()
            self.scheduler.check()
            stuck = {view.job: self.scheduler.waiting(view.job, self.now) for view in self.scheduler.jobs()}
            assert self.now < CHAOS_SECONDS + CALM_SECONDS, f"not over after {self.now} s: {stuck}"


def reference(shards: int) -> str:
    """The digest of what one process would add up, in order."""
    tally = Tally()
    for shard in range(shards):
        tally.add(make_partial(shard))
    return tally.digest()


@pytest.mark.parametrize("seed", range(40))
def test_chaos_changes_no_bit_of_any_total(seed: int) -> None:
    """Each job succeeds, each shard is counted once, and the tally equals the single-process sum bit for bit."""
    shards = {"j1": 60, "j2": 1 + seed % 7}
    world = World(seed, agents=1 + seed % 5, shards=shards)
    world.run()
    replayed = Scheduler(CONFIG)
    replayed.replay(world.journal.facts())
    commits = [(x.job, x.shard) for x in world.journal.facts() if isinstance(x, f.ShardCommitted)]

    assert world.scheduler.durable() == replayed.durable(), f"seed {seed}"
    assert len(set(commits)) == len(commits) == sum(shards.values()), f"seed {seed}"
    for view in replayed.jobs():
        assert JobState.SUCCEEDED is view.state, f"seed {seed}: {view.failure}"
        assert reference(shards[view.job]) == view.tally.digest(), f"seed {seed}"


def test_the_simulation_does_what_it_says() -> None:
    """Over its seeds the chaos really crashes coordinators and repeats reports: else it would prove nothing."""
    worlds = [World(seed, agents=3, shards={"j1": 60}) for seed in range(8)]
    for world in worlds:
        world.run()

    assert sum(world.crashes for world in worlds) >= 8
    assert sum(world.verdicts[Verdict.DUPLICATE] for world in worlds) >= 50
    assert 0 == sum(world.verdicts[verdict] for world in worlds for verdict in (Verdict.DIVERGENT, Verdict.REFUSED))
