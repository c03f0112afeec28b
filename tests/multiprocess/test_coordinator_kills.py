"""SIGKILL at random instants: the totals keep their bits, each shard is counted once, and no process is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.facts import ShardCommitted
from coordinator.journal import open_journal
from eval_kernel.report import comparable
from eval_kernel.spec import JobSpec
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_tally

AGENTS = ("one", "two", "three")


async def undisturbed(directory: Path, spec: JobSpec) -> dict[str, Any]:
    """Return the report of a run in which nothing fails."""
    async with Cluster(directory) as cluster:
        cluster.start_agent("alone")
        return await cluster.report(await cluster.submit(spec))


async def disturbed(directory: Path, spec: JobSpec, shards: int, kills: list[str], seed: int) -> dict[str, Any]:
    """Kill the coordinator or an agent, in the order of ``kills``, each at a random number of shards done."""
    chance = random.Random(seed)
    instants = sorted(chance.sample(range(1, shards), len(kills)))
    async with Cluster(directory) as cluster:
        for name in AGENTS:
            cluster.start_agent(name)
        job = await cluster.submit(spec)
        for instant, victim in zip(instants, kills, strict=True):
            await cluster.reach(job, instant)
            # The instant itself is random too: a shard is being scored, reported, written or acknowledged.
            await asyncio.sleep(chance.uniform(0, 0.05))
            if victim == "coordinator":
                cluster.kill_coordinator()
                await cluster.start_coordinator()
            else:
                cluster.kill_agent(victim)
                cluster.start_agent(victim)
        return await cluster.report(job, 240)


def commits(directory: Path) -> Counter[int]:
    """Return how often the journal commits each shard."""
    journal = open_journal(directory / "coordinator")
    try:
        return Counter(fact.shard for fact in journal.facts() if isinstance(fact, ShardCommitted))
    finally:
        journal.close()


def check(tmp_path: Path, *, shards: int, coordinators: int, agents: int, delay: float) -> None:
    """Compare a run with that many kills of each with an undisturbed one."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: put it in place of SystemRandom to repeat the choice of instants and victims")
    chance = random.Random(seed)
    kills = ["coordinator"] * coordinators + [chance.choice(AGENTS) for _ in range(agents)]
    chance.shuffle(kills)
    spec = fake_spec("killed", shards=shards, delay=delay, span=5, seed=7)
    calm = asyncio.run(undisturbed(tmp_path / "calm", fake_spec("killed", shards=shards, span=5, seed=7)))
    rough = asyncio.run(disturbed(tmp_path / "rough", spec, shards, kills, seed))

    assert rough["complete"]
    assert reference_tally(spec).digest() == rough["totals"]["digest"]
    assert calm["totals"] == rough["totals"]
    assert calm["metrics"] == rough["metrics"]
    assert {**comparable(calm), "spec": None} == {**comparable(rough), "spec": None}
    assert shards == rough["accounting"]["accepted"] == sum(node["shards"] for node in rough["nodes"])
    assert [] == rough["accounting"]["divergent"]
    assert dict.fromkeys(range(shards), 1) == commits(tmp_path / "rough")


def test_a_few_kills_change_no_bit(tmp_path: Path) -> None:
    """Three kills of the coordinator and three of agents."""
    check(tmp_path, shards=80, coordinators=3, agents=3, delay=0.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_of_each_change_no_bit(tmp_path: Path) -> None:
    """Twenty kills of the coordinator and twenty of agents during 240 shards."""
    check(tmp_path, shards=240, coordinators=20, agents=20, delay=0.1)
