"""Bad networks between agents and coordinator, made by a proxy of our own: exact, and nobody needs a restart."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agent.session import HOLD_SECONDS
from tests.chaos.harness import AGENTS, Trial, seeded, with_agents
from tests.support.cluster import Cluster
from tests.support.proxy import DOWN, UP, FaultProxy, fault_proxy

SECOND = 1.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

LEASE = 1.5
#: Keep-alive finds a dead connection within 20 + 10 seconds (wire/channel.py).
KEEPALIVE = 30.0

Disturb = Callable[[Cluster, FaultProxy, str, random.Random], Awaitable[None]]


def through(tmp_path: Path, disturb: Disturb, *, shards: int = 200, delay: float = 0.1) -> tuple[Trial, FaultProxy]:
    """Run a job whose agents all come through one proxy that ``disturb`` plays with; assert that it is exact."""
    trial = Trial(tmp_path / "t", shards=shards, delay=delay)
    proxies: list[FaultProxy] = []

    async def body() -> dict[str, object]:
        chance = seeded()
        async with Cluster(trial.directory, lease=LEASE) as cluster, fault_proxy(cluster.address) as proxy:
            proxies.append(proxy)
            with_agents(cluster, address=proxy.address)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 5)
            await disturb(cluster, proxy, job, chance)
            report = await cluster.report(job, 240)
            assert all(agent.code is None for agent in cluster.agents.values()), cluster.logs()
            return report

    report = asyncio.run(body())
    trial.exact(report, trial.directory / "coordinator")
    return trial, proxies[0]


def test_twenty_resets_at_random_moments(tmp_path: Path) -> None:
    """RST on every connection, twenty times: agents connect again, results that were on their way come again."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        for _ in range(20):
            await asyncio.sleep(chance.uniform(0.2, 0.6))
            proxy.reset()

    trial, proxy = through(tmp_path, disturb)

    assert proxy.struck["reset"] >= 20
    assert trial.again <= len(AGENTS) * 3, "a lost connection is no reason to score anything again"


def test_frames_cut_in_the_middle(tmp_path: Path) -> None:
    """Connections end after a few more bytes, so within a frame, twenty times, in one direction or the other."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        for _ in range(20):
            await asyncio.sleep(chance.uniform(0.2, 0.6))
            proxy.truncate(chance.choice((UP, DOWN)), chance.randrange(1, 200))

    _, proxy = through(tmp_path, disturb)

    assert proxy.struck["truncate"] >= 20


def test_a_slow_and_narrow_line(tmp_path: Path) -> None:
    """A quarter of a second each way and 16 KiB a second: slower, and the same."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        proxy.delay, proxy.rate = 0.25, 16 * 1024.0

    through(tmp_path, disturb, shards=100)


@pytest.mark.parametrize("way", [UP, DOWN])
def test_a_line_that_is_cut_in_one_direction(way: str, tmp_path: Path) -> None:
    """For five leases nothing goes through in one direction; nobody ends, and it goes on by itself."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        proxy.hold(way)
        await asyncio.sleep(5 * LEASE)
        proxy.release()

    through(tmp_path, disturb)


def test_a_flapping_line(tmp_path: Path) -> None:
    """Cut for one second in every two, for twenty seconds: exact, and no connection or handler is left over."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        for _ in range(10):
            proxy.hold()
            await asyncio.sleep(SECOND)
            proxy.release()
            await asyncio.sleep(SECOND)
        assert proxy.connections <= 2 * len(AGENTS), "connections pile up"

    through(tmp_path, disturb, shards=300)


def test_connections_that_fall_silent_are_found_out(tmp_path: Path) -> None:
    """A middlebox forgets all connections for five leases: agents notice by themselves and connect again."""
    took = 0.0

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        nonlocal took
        begun = time.monotonic()
        proxy.forget()
        await asyncio.sleep(5 * LEASE)
        done = await cluster.done(job)
        proxy.remember()
        await cluster.reach(job, done + 1, 120)
        took = time.monotonic() - begun
        print(f"results came again after {took:.1f} s")

    through(tmp_path, disturb, shards=60)

    assert took < KEEPALIVE + 5, f"it took {took:.0f} s"


def test_two_of_four_agents_behind_a_dead_line_are_replaced_by_the_others(tmp_path: Path) -> None:
    """The job ends while they are cut off, without waiting for them."""
    trial = Trial(tmp_path / "t", shards=60, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory, lease=LEASE) as cluster, fault_proxy(cluster.address) as proxy:
            with_agents(cluster, AGENTS[:2])
            with_agents(cluster, AGENTS[2:], address=proxy.address)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 10)
            proxy.forget()
            report = await cluster.report(job, 60)
            proxy.remember()
            return report

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")
    held = 1 + math.ceil(HOLD_SECONDS / trial.delay)  # by one agent, at most
    assert trial.again <= 2 * held, "what the silent ones held is scored again, no more"


def test_idle_connections_that_are_forgotten_cost_nothing(tmp_path: Path) -> None:
    """An address translator drops what is idle for a second; heartbeats keep the agents' connections known to it."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        proxy.idle = 1.0

    _, proxy = through(tmp_path, disturb, shards=100)

    assert 0 == proxy.struck["idle"], "a heartbeat of 0.2 s leaves no connection idle"


def test_garbage_and_idle_connections_harm_nobody(tmp_path: Path) -> None:
    """Three hundred connections that say nothing and a hundred that say rubbish, at the coordinator itself."""

    async def disturb(cluster: Cluster, proxy: FaultProxy, job: str, chance: random.Random) -> None:
        host, _, port = cluster.address.rpartition(":")
        writers = []
        try:
            for number in range(400):
                _, writer = await asyncio.open_connection(host, int(port))
                writers.append(writer)
                if number % 4 == 0:
                    writer.write(chance.randbytes(500))
            await cluster.reach(job, 100, 60)
        finally:
            for writer in writers:
                writer.transport.abort()

    through(tmp_path, disturb)
