"""Disks that are full, read-only or gone, under a coordinator and under agents: nothing is told that is not safe."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import pytest
from fedeval.wire.channel import open_channel
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.journal.upkeep import verify
from eval_kernel.errors import DirectoryUnusable
from tests.chaos.harness import AGENTS, Trial, with_agents
from tests.support.cluster import Cluster
from tests.support.processes import until

LOOK = 0.1  # seconds between two looks
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FULL_SECONDS = 20.0


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small file system, and let go of it afterwards."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system (root, or CAP_SYS_ADMIN)")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


async def remount(place: Path, how: str) -> None:
    """Make a mounted file system read-only (``ro``) or writable again (``rw``), once no file there is being written."""
    command = ["mount", "-o", f"remount,{how}", str(place)]
    await until(lambda: not subprocess.run(command, capture_output=True, check=False).returncode, 20)


def fill(place: Path) -> Path:
    """Take every byte that is free."""
    filler = place / "filler"
    with filler.open("ab", buffering=0) as file:
        for piece in (1 << 16, 1 << 9, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * piece)
    return filler


async def serving(address: str) -> bool:
    """Whether the coordinator says that it serves."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def becomes(address: str, wanted: bool, seconds: float) -> float:
    """Wait until the coordinator serves, or does no longer; return how long that took."""
    begun = time.monotonic()
    while await serving(address) is not wanted:
        assert time.monotonic() - begun < seconds, f"still not {'serving' if wanted else 'refusing'} after {seconds} s"
        await asyncio.sleep(LOOK)
    return time.monotonic() - begun


def spooled(cluster: Cluster) -> int:
    """Return how many results lie in the agents' spools."""
    return sum(len(list((cluster.directory / name).rglob("*.json"))) for name in AGENTS)


def test_a_journal_without_space_for_twenty_seconds(tmp_path: Path) -> None:
    """Nothing is written or acknowledged meanwhile, health says so, agents keep their results; then all goes on."""
    trial = Trial(tmp_path / "t", shards=400, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 40)
            filler = fill(cluster.data)
            # The WAL has room for some more facts; each commit takes a page or two of it.
            refused_after = await becomes(cluster.address, False, 30)
            facts, begun = verify(cluster.data).facts, time.monotonic()
            kept = spooled(cluster)
            while time.monotonic() - begun < FULL_SECONDS:
                assert facts == verify(cluster.data).facts, "facts were written although there is no space"
                assert spooled(cluster) >= kept, "a result was deleted although it was not acknowledged"
                kept = spooled(cluster)
                await asyncio.sleep(5 * LOOK)
            assert not await serving(cluster.address)
            filler.unlink()
            resumed = await becomes(cluster.address, True, 5)
            print(f"refused {refused_after:.1f} s after the disk was full, served {resumed:.1f} s after it was not")
            report = await cluster.report(job, 120)
            assert cluster.coordinator is not None
            assert cluster.coordinator.code is None
            return report

    with small_disk(trial.directory / "coordinator", 12):
        report = asyncio.run(body())
        trial.exact(report, trial.directory / "coordinator")
    assert trial.again <= len(AGENTS) * 2


def test_spools_without_space_for_twenty_seconds(tmp_path: Path) -> None:
    """Agents whose spools are full send nothing and say why; once there is space they go on by themselves."""
    trial = Trial(tmp_path / "t", shards=200, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 20)
            fillers = [fill(cluster.directory / name) for name in AGENTS]
            # What was in a spool already is still sent.
            await until(lambda: all("No space left" in log(cluster, name) for name in AGENTS), 30)
            await until(lambda: spooled(cluster) == 0, 10)
            done, begun = await cluster.done(job), time.monotonic()
            while time.monotonic() - begun < FULL_SECONDS:
                assert done == await cluster.done(job), "a result was told that is in no spool"
                await asyncio.sleep(5 * LOOK)
            for filler in fillers:
                filler.unlink()
            report = await cluster.report(job, 120)
            assert all(agent.code is None for agent in cluster.agents.values())
            return report

    with contextlib.ExitStack() as stack:
        for name in AGENTS:
            stack.enter_context(small_disk(trial.directory / name, 1))
        report = asyncio.run(body())
    trial.exact(report, trial.directory / "coordinator")


def log(cluster: Cluster, name: str) -> str:
    """What a process of the cluster has logged."""
    return (cluster.directory / f"{name}.log").read_text(errors="replace")


def test_a_spool_that_is_read_only_for_a_while(tmp_path: Path) -> None:
    """The agent says so and goes on once it is writable; others take its shards meanwhile."""
    trial = Trial(tmp_path / "t", shards=150, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 20)
            await remount(cluster.directory / "one" / "spool", "ro")
            await until(lambda: "Read-only file system" in log(cluster, "one"), 20)
            await cluster.reach(job, 100)
            await remount(cluster.directory / "one" / "spool", "rw")
            report = await cluster.report(job, 120)
            assert cluster.agents["one"].code is None
            return report

    with small_disk(trial.directory / "one" / "spool", 1):
        report = asyncio.run(body())
    trial.exact(report, trial.directory / "coordinator")


def test_a_spool_that_vanishes(tmp_path: Path) -> None:
    """The directory is removed in the middle of the job, twice for each agent; it is made again and nothing is lost."""
    trial = Trial(tmp_path / "t", shards=150, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            for shards in (20, 60):
                await cluster.reach(job, shards)
                for name in AGENTS:
                    for spool in (cluster.directory / name).glob("spool*"):
                        shutil.rmtree(spool, ignore_errors=True)
            report = await cluster.report(job, 120)
            assert all(agent.code is None for agent in cluster.agents.values())
            return report

    report = asyncio.run(body())
    trial.exact(report, trial.directory / "coordinator")


def test_a_journal_that_is_taken_away_ends_the_coordinator_before_it_acknowledges_more(tmp_path: Path) -> None:
    """Writing to a removed file succeeds and keeps nothing: what was acknowledged after that would be lost."""
    trial = Trial(tmp_path / "t", shards=150, delay=0.1)

    async def body() -> dict[str, object]:
        async with Cluster(trial.directory) as cluster:
            with_agents(cluster)
            job = await cluster.submit(trial.spec)
            await cluster.reach(job, 40)
            coordinator = cluster.coordinator
            assert coordinator is not None
            away = cluster.directory / "away"
            cluster.data.rename(away)
            await until(lambda: coordinator.code is not None, 20)
            assert DirectoryUnusable.exit_code == coordinator.code, coordinator.last_line()
            assert "was removed or replaced" in coordinator.last_line()
            shutil.rmtree(cluster.data, ignore_errors=True)
            away.rename(cluster.data)
            await cluster.start_coordinator()
            return await cluster.report(job, 120)

    report = asyncio.run(body())
    trial.exact(report, trial.directory / "coordinator")
