"""Runs a scenario to its end, makes a failing one smaller, and says how to repeat it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from coordinator.core.scheduler import Scheduler
from eval_kernel.tally import Tally
from tests.simulation.agent import PATIENCE, Agent
from tests.simulation.checks import Witness
from tests.simulation.coordinator import Coordinator, config
from tests.simulation.scenario import Scenario
from tests.simulation.world import World
from tests.support.core_cases import make_partial

#: Virtual seconds after the last fault within which everything must be over.
CALM_SECONDS = 150.0
#: Runs spent on making a failing scenario smaller.
SHRINK_RUNS = 150


class Failure(AssertionError):
    """A scenario that broke a promise; the text names what, and the command that repeats it."""


class Client:
    """Submits the jobs until it is told, and perhaps cancels the last one."""

    def __init__(self, world: World, jobs: list[str]) -> None:
        self._world = world
        self._open = dict.fromkeys(jobs)  # spec -> None: not told yet
        self.told: dict[str, str] = {}
        self._cancel = ""
        for job in jobs:
            self._call("submit", job)
        luck = world.luck("cancel")
        if luck is not None:
            world.at(luck.uniform(0.5, world.scenario.chaos), self._give_up, jobs[-1])

    @property
    def done(self) -> bool:
        """Whether every call was answered."""
        return not self._open and not self._cancel

    def _call(self, kind: str, job: str) -> None:
        if (kind == "submit" and job in self.told) or (kind == "cancel" and not self._cancel):
            return
        coordinator = self._world.coordinator

        def reply(answer: Any) -> None:
            self._world.send("client", False, self._take, kind, job, answer)

        request = {"job": self._cancel if kind == "cancel" else job}
        self._world.send("client", True, coordinator.receive, coordinator.life, kind, request, reply)
        self._world.at(PATIENCE, self._call, kind, job)

    def _take(self, kind: str, job: str, answer: Any) -> None:
        if isinstance(answer, Exception):
            raise answer
        if kind == "submit":
            assert self.told.setdefault(job, answer) == answer, f"{job} became {answer} and {self.told[job]}"
            self._open.pop(job, None)
        else:
            self._cancel = ""

    def _give_up(self, job: str) -> None:
        if job in self.told:
            self._world.happened["cancel"] += 1
            self._cancel = self.told[job]
            self._call("cancel", job)


def run(scenario: Scenario, trace: Callable[[str], None] | None = None) -> World:
    """Run a scenario; raises ``AssertionError``, or whatever the code under test raises."""
    world = World(scenario, trace)
    witness = world.witness = Witness(Scheduler(config("poison" in scenario.faults)))
    coordinator = world.coordinator = Coordinator(world, witness)
    shards = {f"j{number}": count for number, count in enumerate(scenario.jobs)}
    speeds = [world.network.choice((0.15, 0.5, 1.2, 1.2, 7.0)) for _ in range(scenario.agents)]
    world.agents = [Agent(world, witness, f"a{number}", shards, speed) for number, speed in enumerate(speeds)]
    client = Client(world, list(shards))
    world.unleash()
    over = 0.0
    while True:
        world.step()
        if world.now < over:
            continue
        over = world.now + 0.5  # it is no use to look after each event
        if not world.chaotic and client.done and coordinator.alive and all(agent.calm for agent in world.agents):
            views = coordinator.scheduler.jobs()
            if all(view.state.settled for view in views) and coordinator.idle:
                break
        assert world.now < scenario.chaos + CALM_SECONDS, _stuck(world)
    witness.over(coordinator.scheduler, shards, scenario.faults, config("poison" in scenario.faults).max_tries)
    if not scenario.faults:
        scored = sum((agent.scored for agent in world.agents), Counter())
        most = 1 if scenario.agents == 1 else 2  # an idle agent may take over what another one will not do in time
        assert max(scored.values()) <= most, f"nothing went wrong, yet shards were scored again: {scored}"
        assert not witness.tries, f"nothing went wrong, yet tries were counted: {witness.tries}"
    replayed = Scheduler(config(False))
    replayed.replay(coordinator.journal.facts())
    assert replayed.durable() == coordinator.scheduler.durable(), "a restart would come to something else"
    if not {"diverge", "poison", "cancel"} & set(scenario.faults):
        for view in replayed.jobs():
            assert reference(shards[view.spec_json]) == view.tally.digest(), f"{view.job} has another total"
    return world


def reference(shards: int) -> str:
    """Return the digest of what one process would add up, in order."""
    tally = Tally()
    for shard in range(shards):
        tally.add(make_partial(shard))
    return tally.digest()


def _stuck(world: World) -> str:
    scheduler = world.coordinator.scheduler
    reasons = {view.job: (view.state.name, scheduler.waiting(view.job, world.now)) for view in scheduler.jobs()}
    agents = [(agent.name, agent.alive, agent.session, len(agent.disk)) for agent in world.agents]
    return f"not over {CALM_SECONDS:g} s after the last fault: {reasons}, {agents}"


def failure(scenario: Scenario) -> BaseException | None:
    """Return what goes wrong in a scenario; ``None`` where all promises are kept."""
    try:
        run(scenario)
    except Exception as error:  # noqa: BLE001 - whatever the code under test raises is a failure of the scenario
        return error
    return None


def shrink(scenario: Scenario, runs: int = SHRINK_RUNS) -> Scenario:
    """Return a smaller scenario that fails too; not in the same way of necessity."""
    left = runs
    while True:
        for smaller in scenario.smaller():
            if left == 0:
                return scenario
            left -= 1
            if failure(smaller) is not None:
                scenario = smaller
                break
        else:
            return scenario


def check(seed: int) -> World:
    """Run the scenario of a seed. Raises ``Failure`` with a small scenario and the command that repeats it."""
    scenario = Scenario.of(seed)
    try:
        return run(scenario)
    except Exception as error:  # noqa: BLE001 - see failure()
        small = shrink(scenario)
        why = failure(small) or error
        raise Failure(f"{type(why).__name__}: {why}\nrepeat with: {small.command}\n(seed {seed})") from why
