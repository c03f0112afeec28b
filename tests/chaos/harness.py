"""What every chaos test needs: a job that tells how often each shard was scored, and what must hold when it is over."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.core.facts import ShardCommitted
from coordinator.journal import open_journal
from eval_kernel.spec import JobSpec
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_tally

AGENTS = ("one", "two", "three", "four")


@dataclass
class Trial:
    """One job of ``shards`` shards on a cluster in ``directory``."""

    directory: Path
    shards: int
    delay: float
    spec: JobSpec = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.told = self.directory / "scored"
        self.spec = fake_spec("chaos", shards=self.shards, delay=self.delay, span=5, seed=7, tell=str(self.told))

    @property
    def scored(self) -> Counter[int]:
        """How often each shard was scored to its end."""
        return Counter(map(int, self.told.read_text("ascii").split())) if self.told.exists() else Counter()

    @property
    def again(self) -> int:
        """How many times a shard was scored that had been scored before."""
        scored = self.scored
        return scored.total() - len(scored)

    def exact(self, report: dict[str, Any], data: Path) -> None:
        """Assert that every bit is right, each shard is counted once, and no healthy shard was given up.

        Only once the coordinator has ended: the journal is read from its directory.
        """
        commits = commits_of(data)
        assert report["complete"], report
        assert reference_tally(self.spec).digest() == report["totals"]["digest"]
        assert self.shards == report["accounting"]["accepted"] == sum(node["shards"] for node in report["nodes"])
        assert [] == report["accounting"]["divergent"]
        assert dict.fromkeys(range(self.shards), 1) == commits
        assert set(range(self.shards)) == set(self.scored)


def commits_of(data: Path) -> Counter[int]:
    """Return how often the journal commits each shard."""
    journal = open_journal(data)
    try:
        return Counter(fact.shard for fact in journal.facts() if isinstance(fact, ShardCommitted))
    finally:
        journal.close()


def seeded() -> random.Random:
    """Return a generator whose seed is printed."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: put it in place of SystemRandom to repeat the choices")
    return random.Random(seed)


def with_agents(cluster: Cluster, names: tuple[str, ...] = AGENTS, *options: str, address: str | None = None) -> None:
    """Start agents."""
    for name in names:
        cluster.start_agent(name, *options, address=address)
