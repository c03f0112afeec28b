"""What one simulated run is made of: a seed, agents, jobs, faults. Printed as the command that repeats it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

#: Every fault there is, and what it does.
FAULTS = {
    "drop": "messages are lost",
    "duplicate": "messages arrive twice",
    "delay": "messages take up to seconds, and so overtake each other",
    "partition": "an agent is cut off: both ways, or one way only",
    "pause": "an agent's process stops for a while, and then goes on as if nothing had happened",
    "stall": "the coordinator's process stops for a while; what was sent to it waits",
    "kill_agent": "an agent dies; its disk keeps what was flushed",
    "kill_coordinator": "the coordinator dies; what it had not written is gone, what it was writing perhaps",
    "slow_disk": "writing the journal takes up to seconds",
    "journal_full": "the journal's disk has no space for a while",
    "spool_full": "an agent's disk refuses for a while",
    "clock": "the coordinator's clock is another one after a restart, years before or after",
    "churn": "an agent drains, says good-bye and comes back later",
    "crash": "a worker dies while it scores",
    "refuse": "an agent cannot read the model for a while",
    "wrong": "an agent reports sums that do not fit the plan",
    "diverge": "two results of one shard are reported that differ, both plausible",
    "poison": "one shard kills every worker that touches it",
    "cancel": "a client cancels the last job",
    "twin": "a second process runs under the name of the first agent",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run. ``jobs`` is the number of shards of each job; ``chaos`` the virtual seconds in which faults happen."""

    seed: int
    agents: int
    jobs: tuple[int, ...]
    faults: tuple[str, ...]
    chaos: float

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """Return the scenario of a seed: about a third of all faults at once, in ever other company; rarely none."""
        chance = random.Random(seed)
        share = chance.choice((0.0, *[0.33] * 12))
        faults = tuple(name for name in FAULTS if chance.random() < share)
        jobs = tuple(chance.randint(1, 7) for _ in range(chance.choice((1, 1, 2))))
        return cls(seed, chance.randint(1, 3), jobs, faults, chance.choice((8.0, 14.0, 20.0)))

    @property
    def command(self) -> str:
        """The one line that repeats this run and prints what happened."""
        words = ["python -m tests.simulation", f"--seed {self.seed}", f"--agents {self.agents}"]
        words += [f"--jobs {','.join(map(str, self.jobs))}", f"--faults {','.join(self.faults) or 'none'}"]
        return " ".join([*words, f"--chaos {self.chaos:g}"])

    def smaller(self) -> Iterator[Scenario]:
        """Yield scenarios with a little less in them, the largest steps first."""
        if len(self.faults) > 3:
            half = len(self.faults) // 2
            yield replace(self, faults=self.faults[:half])
            yield replace(self, faults=self.faults[half:])
        for fault in self.faults:
            yield replace(self, faults=tuple(other for other in self.faults if other != fault))
        if len(self.jobs) > 1:
            yield replace(self, jobs=self.jobs[:1])
            yield replace(self, jobs=self.jobs[1:])
        if self.agents > 1:
            yield replace(self, agents=self.agents - 1)
        for number, shards in enumerate(self.jobs):
            if shards > 1:
                yield replace(self, jobs=_with(self.jobs, number, shards // 2))
        if self.chaos > 2.0:
            yield replace(self, chaos=float(int(self.chaos / 2)))


def _with(values: Sequence[int], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])
