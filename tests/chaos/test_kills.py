"""SIGKILL, SIGSTOP and restart loops over real processes: exact, each shard counts once, little is done again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.chaos.harness import AGENTS, Trial, seeded, with_agents
from tests.chaos.sabotaged import command
from tests.support.cluster import COORDINATOR, Cluster
from tests.support.processes import children

#: Seconds that a coordinator stands still, that a worker does (three leases), and between two looks.
FROZEN, PAUSE, LOOK = 10.0, 4.5, 0.1
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KILLS = 50


async def coordinator_killed(
    trial: Trial, kills: int, coordinator: tuple[str, ...] = COORDINATOR
) -> tuple[dict[str, object], list[str]]:
    """Kill the coordinator at random instants; return the report, and what was told and is gone after a restart."""
    chance = seeded()
    instants = sorted(chance.sample(range(1, trial.shards - len(AGENTS)), kills))
    gone = []
    async with Cluster(trial.directory, coordinator=coordinator) as cluster:
        with_agents(cluster)
        job = await cluster.submit(trial.spec)
        for instant in instants:
            await cluster.reach(job, instant)
            await asyncio.sleep(chance.uniform(0, 0.1))  # the instant itself is random too
            told = await cluster.done(job)
            cluster.kill_coordinator()
            await asyncio.sleep(chance.choice((0, 0, 0.5)))
            await cluster.start_coordinator()
            known = await cluster.done(job)
            if known < told:
                gone.append(f"{told} shards were told to be done, {known} are after the restart")
        return await cluster.report(job, 240), gone


def test_fifty_kills_of_the_coordinator_change_no_bit_and_lose_nothing_that_was_told(tmp_path: Path) -> None:
    """What was told to a watcher is there after each restart; no more is scored again than was in flight."""
    trial = Trial(tmp_path / "t", shards=500, delay=0.1)
    report, gone = asyncio.run(coordinator_killed(trial, KILLS))
    print(f"{KILLS} kills of the coordinator: {trial.again} of {trial.shards} shards scored again")

    assert [] == gone
    trial.exact(report, trial.directory / "coordinator")
    assert trial.again <= len(AGENTS) * (KILLS + 1)


def test_without_record_then_reply_kills_lose_what_was_told(tmp_path: Path) -> None:
    """The control: a coordinator that answers before it has written is caught by the same test."""
    trial = Trial(tmp_path / "t", shards=120, delay=0.1)
    _, gone = asyncio.run(coordinator_killed(trial, 8, command("told-before-written")))

    assert gone


async def agents_killed(trial: Trial, kills: int) -> dict[str, object]:
    """Kill an agent at random instants and start it again."""
    chance = seeded()
    instants = sorted(chance.sample(range(1, trial.shards - len(AGENTS)), kills))
    async with Cluster(trial.directory) as cluster:
        with_agents(cluster)
        job = await cluster.submit(trial.spec)
        for instant in instants:
            await cluster.reach(job, instant)
            await asyncio.sleep(chance.uniform(0, 0.1))
            victim = chance.choice(AGENTS)
            cluster.kill_agent(victim)
            cluster.start_agent(victim)
        return await cluster.report(job, 240)


def test_fifty_kills_of_agents_change_no_bit(tmp_path: Path) -> None:
    """A killed agent costs the shard it was scoring, and no shard is given up."""
    trial = Trial(tmp_path / "t", shards=500, delay=0.1)
    report = asyncio.run(agents_killed(trial, KILLS))
    print(f"{KILLS} kills of agents: {trial.again} of {trial.shards} shards scored again to their end")

    trial.exact(report, trial.directory / "coordinator")
    assert trial.again <= KILLS + len(AGENTS)


def test_killed_workers_cost_their_shard_only(tmp_path: Path) -> None:
    """The child that scores is killed twenty times, as by the out-of-memory killer: the daemons stay, all is exact."""
    trial = Trial(tmp_path / "t", shards=200, delay=0.1)

    async def body() -> dict[str, object]:
        chance = seeded()
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            for instant in sorted(chance.sample(range(1, 150), 20)):
                await cluster.reach(job, instant)
                daemon = cluster.agents[chance.choice(AGENTS)]
                workers = children(daemon.pid)
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
            report = await cluster.report(job, 240)
            assert all(agent.code is None for agent in cluster.agents.values())
            return report

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")


def test_a_coordinator_that_starts_twenty_times_in_a_row_comes_to_the_same(tmp_path: Path) -> None:
    """Killed as soon as it listens, again and again, with results on their way to it."""
    trial = Trial(tmp_path / "t", shards=200, delay=0.05)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 20)
            for _ in range(20):
                cluster.kill_coordinator()
                await cluster.start_coordinator()
            return await cluster.report(job, 240)

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")


def test_a_stopped_agent_loses_its_leases_and_its_late_results_count_once(tmp_path: Path) -> None:
    """SIGSTOP for three leases, worker and all, then SIGCONT: others do its shards, its late reports do no harm."""
    trial = Trial(tmp_path / "t", shards=200, delay=0.1)

    async def body() -> dict[str, object]:
        chance = seeded()
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            for victim in chance.sample(AGENTS, 2):
                before = await cluster.done(job)
                stopped = [cluster.agents[victim].pid, *children(cluster.agents[victim].pid)]
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(PAUSE)
                assert await cluster.done(job) > before, "the others went on"
                for pid in reversed(stopped):
                    os.kill(pid, signal.SIGCONT)
            return await cluster.report(job, 240)

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")


def test_a_stopped_coordinator_is_waited_for(tmp_path: Path) -> None:
    """SIGSTOP for ten seconds, which is longer than every lease: nobody ends, nothing is lost."""
    trial = Trial(tmp_path / "t", shards=200, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 40)
            assert cluster.coordinator is not None
            os.kill(cluster.coordinator.pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN)
            os.kill(cluster.coordinator.pid, signal.SIGCONT)
            report = await cluster.report(job, 240)
            assert all(agent.code is None for agent in cluster.agents.values())
            return report

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")


def test_a_job_without_any_agent_waits_with_the_reason_and_goes_on_when_one_comes(tmp_path: Path) -> None:
    """All agents killed in the middle of a job: it is not lost, it says what it waits for."""
    trial = Trial(tmp_path / "t", shards=40, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster, ("one", "two"))
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 5)
            cluster.kill_agent("one")
            cluster.kill_agent("two")
            async with asyncio.timeout(20):
                while not any("no agent" in line for line in (await cluster.status(job)).waiting):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK)  # the condition is in another process
            assert await cluster.done(job) >= 5
            cluster.start_agent("three")
            return await cluster.report(job, 120)

    report = asyncio.run(body())

    trial.exact(report, trial.directory / "coordinator")
