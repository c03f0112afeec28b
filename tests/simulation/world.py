"""Virtual time, a faulty network, and the faults of a scenario. What coordinator and agents are is in their modules."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

from tests.simulation.scenario import FAULTS, Scenario

#: Seconds between two happenings of a fault that strikes now and then, on average.
EVERY = {
    "partition": 7.0,
    "pause": 8.0,
    "stall": 10.0,
    "kill_agent": 7.0,
    "kill_coordinator": 7.0,
    "journal_full": 9.0,
    "spool_full": 8.0,
    "churn": 9.0,
    "twin": 9.0,
}
#: A message's least and most time on its way.
LATENCY = (0.002, 0.02)


class World:
    """The clock, the heap of events to come, and the luck of each fault.

    Each fault draws from a generator of its own, so that leaving one out changes as little as possible of the rest.
    """

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        """Begin at time 0 with nothing to happen."""
        self.scenario = scenario
        self.now = 0.0
        self.events = 0
        self.happened = dict.fromkeys(FAULTS, 0)  # how often each fault struck
        self.agents: list[Any] = []
        self.coordinator: Any = None
        self.witness: Any = None
        self.network = random.Random(scenario.seed)
        self._luck = {name: random.Random(f"{scenario.seed}/{name}") for name in scenario.faults}
        self._rates = {name: luck.uniform(0.02, 0.25) for name, luck in self._luck.items()}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._serial = itertools.count()
        self._cuts: dict[tuple[str, str], float] = {}  # (agent, direction) -> until
        self._trace = trace

    def say(self, text: str) -> None:
        """Write a line of the story, where someone listens."""
        if self._trace is not None:
            self._trace(f"{self.now:9.3f}  {text}")

    @property
    def chaotic(self) -> bool:
        """Whether faults still happen."""
        return self.now < self.scenario.chaos

    def luck(self, fault: str) -> random.Random | None:
        """Return the generator of a fault that belongs to the scenario, while faults happen."""
        return self._luck.get(fault) if self.chaotic else None

    def strikes(self, fault: str) -> bool:
        """Whether a fault that may strike at each occasion does so now."""
        luck = self.luck(fault)
        if luck is None or luck.random() >= self._rates[fault]:
            return False
        self.happened[fault] += 1
        return True

    def serial(self) -> int:
        """Return another number each time."""
        return next(self._serial)

    # ------------------------------------------------------------ time

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        """Have something called ``delay`` seconds from now."""
        heapq.heappush(self._heap, (self.now + delay, next(self._order), call, args))

    def step(self) -> None:
        """Let the next event happen."""
        self.now, _, call, args = heapq.heappop(self._heap)
        self.events += 1
        call(*args)

    # ------------------------------------------------------------ the network

    def send(self, agent: str, upward: bool, deliver: Callable[..., None], *args: Any) -> bool:
        """Send a message to (``upward``) or from the coordinator; return whether it will arrive at all."""
        if self._cut(agent, upward) or self.strikes("drop"):
            self.say(f"a message {'from' if upward else 'to'} {agent} is lost: {args}")
            return False
        for _ in range(2 if self.strikes("duplicate") else 1):
            delay = self.network.uniform(*LATENCY)
            if self.strikes("delay"):
                delay += self._luck["delay"].uniform(0.0, 4.0)
            self.at(delay, deliver, *args)
        return True

    def _cut(self, agent: str, upward: bool) -> bool:
        return self.now < self._cuts.get((agent, "up" if upward else "down"), 0.0)

    # ------------------------------------------------------------ faults that come now and then

    def unleash(self) -> None:
        """Let every fault of the scenario that comes now and then begin."""
        for fault in self.scenario.faults:
            if fault in EVERY:
                self.at(self._luck[fault].expovariate(1 / EVERY[fault]), self._strike, fault)

    def _strike(self, fault: str) -> None:
        luck = self.luck(fault)
        if luck is None:
            return
        self.happened[fault] += 1
        getattr(self, f"_{fault}")(luck)
        self.at(luck.expovariate(1 / EVERY[fault]), self._strike, fault)

    def _partition(self, luck: random.Random) -> None:
        agent, way, seconds = luck.choice(self.agents), luck.choice(("up", "down", "both")), luck.uniform(0.5, 12.0)
        self.say(f"{agent.name} is cut off ({way}) for {seconds:.1f} s")
        for direction in ("up", "down") if way == "both" else (way,):
            self._cuts[agent.name, direction] = min(self.now + seconds, self.scenario.chaos)

    def _pause(self, luck: random.Random) -> None:
        luck.choice(self.agents).pause(luck.uniform(0.5, 12.0))

    def _stall(self, luck: random.Random) -> None:
        self.coordinator.stall(luck.uniform(0.5, 9.0))

    def _kill_agent(self, luck: random.Random) -> None:
        luck.choice(self.agents).kill(luck.uniform(0.1, 6.0))

    def _kill_coordinator(self, luck: random.Random) -> None:
        self.coordinator.kill(luck.uniform(0.1, 4.0), written=luck.random() < 0.5)
        if self.luck("clock") is not None:
            self.happened["clock"] += 1
            self.coordinator.offset = self._luck["clock"].choice((-4e7, -3600.0, 0.0, 3600.0, 4e7)) - self.now

    def _journal_full(self, luck: random.Random) -> None:
        self.coordinator.fill(luck.uniform(0.5, 6.0))

    def _spool_full(self, luck: random.Random) -> None:
        luck.choice(self.agents).fill(luck.uniform(0.5, 8.0))

    def _churn(self, luck: random.Random) -> None:
        luck.choice(self.agents).leave(luck.uniform(0.5, 8.0))

    def _twin(self, luck: random.Random) -> None:
        self.agents[0].double()
