"""The daemon against a coordinator in this process, with real workers: what it survives, and what it says."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig
from agent.daemon import Daemon
from agent.logs import make_logger
from agent.probe import probe
from agent.spool import ResultKey, Spool, SpoolEntry, StateDirectory
from eval_kernel.errors import StaleIncarnation, Unreachable, VersionRefused, WorkerUnusable
from eval_kernel.partial import Execution, ScoredShard
from tests.support.fake_coordinator import FakeCoordinator, activities, beats_of
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan
from tests.support.processes import alive, until

ENGINE = "tests.support.fake_engine:FakeEngine"


@contextmanager
def a_daemon(
    coordinator: FakeCoordinator, path: Path, name: str = "a1", engine: str = ENGINE, **options: Any
) -> Iterator[Daemon]:
    """Give a daemon that does not run yet."""
    config = AgentConfig(
        coordinator=coordinator.address,
        name=name,
        state=path / name,
        cache=path / "cache",
        roots=(path,),
        threads=1,
        engine=engine,
        **options,
    )
    with StateDirectory(config.state) as state, (path / f"{name}.log").open("a") as stream:
        yield Daemon(config, state, probe(config.cache), make_logger(as_json=True, stream=stream))


@asynccontextmanager
async def an_agent(coordinator: FakeCoordinator, path: Path, name: str = "a1", **options: Any) -> AsyncIterator[Daemon]:
    """Run a daemon beside the test; a daemon that failed fails the test."""
    with a_daemon(coordinator, path, name, **options) as daemon:
        running = asyncio.create_task(daemon.run())
        try:
            yield daemon
        finally:
            await asyncio.wait([running], timeout=10 if daemon.stopping else 0)
            ended = running.done()
            running.cancel()
            results = await asyncio.gather(running, return_exceptions=True)
            if ended and isinstance(results[0], BaseException):
                raise results[0]


def run(body: Callable[[FakeCoordinator], Awaitable[None]], **options: Any) -> None:
    """Run ``body`` with a listening coordinator in an event loop of its own."""

    async def scenario() -> None:
        async with FakeCoordinator(**options) as coordinator:
            await asyncio.wait_for(body(coordinator), 90)

    asyncio.run(scenario())


def spool_of(path: Path, name: str = "a1") -> list[SpoolEntry]:
    """Return what lies in the spool of an agent that has ended."""
    return Spool(path / name / "spool").load()[0]


def owners(path: Path) -> list[str]:
    """Return the coordinator of each entry in the spool of the running agent a1."""
    found = []
    for file in (path / "a1" / "spool").glob("*.json"):
        try:
            found.append(json.loads(file.read_bytes())["body"]["coordinator"])
        except FileNotFoundError:
            continue  # acknowledged meanwhile
    return found


def test_a_job_is_planned_and_scored(tmp_path: Path) -> None:
    """An agent plans a job in parts, scores every shard, and leaves an empty spool."""
    spec = fake_spec(shards=10_050, tokens=4)
    small = fake_spec(shards=50, seed=3)

    async def body(coordinator: FakeCoordinator) -> None:
        large = coordinator.add_job("large", spec)
        coordinator.add_job("small", small)
        async with an_agent(coordinator, tmp_path):
            await until(lambda: large.plan is not None)
            large.settled = True
            partials = await coordinator.completed("small")
            await until(lambda: not owners(tmp_path))

        assert reference_plan(spec) == large.plan
        assert [10_000, 50] == coordinator.part_sizes[:2]
        assert reference_partials(small) == partials
        assert set(coordinator.jobs["small"].arrivals.values()) == {1}

    run(body)


def test_two_agents_share_a_job(tmp_path: Path) -> None:
    """Every shard is scored exactly once by one of two agents."""
    spec = fake_spec(shards=60, delay=0.02)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path, "a1"), an_agent(coordinator, tmp_path, "a2"):
            partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        assert {1} == set(job.arrivals.values())

    run(body)


def test_heartbeats_go_on_while_the_worker_is_busy_or_hangs(tmp_path: Path) -> None:
    """The daemon renews in time whatever its worker does, and names the running shard."""
    spec = fake_spec(shards=2, hang="0")

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            await until(lambda: "scoring" in activities(coordinator)["a1"])
            seen = len(coordinator.renewals)
            await until(lambda: len(coordinator.renewals) > seen + 15)
            _, last = coordinator.renewals[-1]
            gaps = sorted(beats_of(coordinator)[seen:])

        assert (last.running.job, last.running.shard) == ("job", 0)
        assert {("job", 0), ("job", 1)} == {(h.job, h.shard) for h in last.holdings}
        assert gaps[len(gaps) // 2] < 0.3

    run(body)


def test_lost_answers_are_sent_again_and_counted_once(tmp_path: Path) -> None:
    """Streams that break before each acknowledgement cost repetitions, never results."""
    spec = fake_spec(shards=12)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        coordinator.hold_acks = True
        coordinator.break_streams_after = 4
        async with an_agent(coordinator, tmp_path):
            await until(lambda: max(job.arrivals.values(), default=0) >= 2)
            kept = len(owners(tmp_path))
            coordinator.hold_acks = False
            coordinator.break_streams_after = None
            partials = await coordinator.completed("job")
            await until(lambda: not owners(tmp_path))

        assert kept >= 1
        assert reference_partials(spec) == partials

    run(body)


def test_the_credit_is_kept(tmp_path: Path) -> None:
    """No more than 64 results are unacknowledged at a time."""
    spec = fake_spec(shards=150)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        coordinator.hold_acks = True
        async with an_agent(coordinator, tmp_path):
            await until(lambda: len(job.arrivals) == 64)
            await until(lambda: len(owners(tmp_path)) > 64)
            coordinator.hold_acks = False
            await coordinator.stop()
            await coordinator.start()
            partials = await coordinator.completed("job")

        assert 64 == coordinator.max_unacknowledged
        assert reference_partials(spec) == partials

    run(body)


def test_a_forgotten_agent_registers_again(tmp_path: Path) -> None:
    """NOT_REGISTERED on any call leads to a new registration under the same incarnation, and the job ends exactly."""
    spec = fake_spec(shards=40, delay=0.02)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            for enough in (5, 15, 25):
                await until(lambda n=enough: len(job.partials) >= n)
                coordinator.forget_agents()
            partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        assert 1 == len({request.incarnation for request in coordinator.registrations})
        assert len(coordinator.registrations) >= 4

    run(body)


def test_a_restarted_coordinator_is_found_again(tmp_path: Path) -> None:
    """A coordinator that dies and comes back on its port, twice, loses nothing."""
    spec = fake_spec(shards=60, delay=0.02)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            for enough in (10, 30):
                await until(lambda n=enough: len(job.partials) >= n)
                await coordinator.stop()
                await coordinator.start()
            partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        log = (tmp_path / "a1.log").read_text()
        assert 1 <= log.count('"trying again"') <= 4

    run(body)


def test_failures_are_charged_to_the_running_shard(tmp_path: Path) -> None:
    """A crash, an out-of-memory kill and a bug each fail one shard, by name; the others are scored."""
    spec = fake_spec(shards=12, crash="2", kill="5", bug="8")

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.retry_failures = False
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            await until(lambda: len(job.partials) == 9 and len(job.failures) == 3)

        codes = sorted((shard, code) for shard, code, _ in job.failures)
        assert [(2, "WORKER_CRASHED"), (5, "WORKER_CRASHED"), (8, "SHARD_FAILED")] == codes

    run(body)


def test_a_failed_shard_can_be_given_again(tmp_path: Path) -> None:
    """A shard that crashed once and is assigned again to the same agent is scored."""
    spec = fake_spec(shards=6, crash="1x1,4x2")

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        assert [1, 4, 4] == sorted(shard for shard, _, _ in job.failures)

    run(body)


def test_a_node_that_cannot_says_so_for_each_shard_at_once(tmp_path: Path) -> None:
    """A model that this node lacks fails every held shard with that reason, without a second attempt."""
    spec = fake_spec(shards=2, open_fails="MODEL_NOT_FOUND", load_delay=0.3)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.retry_failures = False
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            await until(lambda: len(job.failures) == 2)

        assert [(0, "MODEL_NOT_FOUND"), (1, "MODEL_NOT_FOUND")] == sorted(f[:2] for f in job.failures)

    run(body)


def test_a_planning_failure_is_reported(tmp_path: Path) -> None:
    """A dataset that cannot be read arrives as a plan failure with its code and text; the log calls it planning."""
    spec = fake_spec(plan_fails="DATASET_NOT_FOUND")

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.retry_failures = False
        job = coordinator.add_job("job", spec)
        async with an_agent(coordinator, tmp_path):
            await until(lambda: job.failures)

        expected = (-1, "DATASET_NOT_FOUND", "planning fails with DATASET_NOT_FOUND, as asked for")
        assert [expected] == job.failures
        (line,) = [x for x in map(json.loads, (tmp_path / "a1.log").read_text().splitlines()) if x["event"] == "failed"]
        assert ("planning", None) == (line["doing"], line.get("shard"))

    run(body)


def test_settled_jobs_are_dropped(tmp_path: Path) -> None:
    """When a job is settled its running shard is called off, and the next job begins with the same worker."""
    endless, short = fake_spec(shards=3, delay=600.0), fake_spec(shards=3)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("endless", endless, reference_plan(endless))
        async with an_agent(coordinator, tmp_path):
            await until(lambda: "scoring" in activities(coordinator)["a1"])
            job.settled = True
            coordinator.add_job("short", short, reference_plan(short))
            partials = await coordinator.completed("short", 20)

        assert reference_partials(short) == partials
        assert not job.partials
        assert not job.failures

    run(body)


def test_a_drained_agent_takes_nothing_new_until_released(tmp_path: Path) -> None:
    """The coordinator's wish to drain holds for as long as it is repeated."""
    spec = fake_spec(shards=4)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.drain_agents = True
        async with an_agent(coordinator, tmp_path):
            await until(lambda: len(coordinator.renewals) > 2)
            coordinator.add_job("job", spec, reference_plan(spec))
            seen = len(coordinator.renewals)
            await until(lambda: len(coordinator.renewals) > seen + 3)
            held = len(coordinator.renewals[-1][1].holdings)
            coordinator.drain_agents = False
            partials = await coordinator.completed("job")

        assert 0 == held
        assert reference_partials(spec) == partials

    run(body)


def test_leftovers_go_to_their_own_coordinator(tmp_path: Path) -> None:
    """Results of an earlier life are sent after registration; those of another coordinator are kept and named."""
    spec = fake_spec(shards=3)
    mine, other = reference_partials(spec)[:2]
    spool = Spool(tmp_path / "a1" / "spool")
    foreign = SpoolEntry(ResultKey("coordinator-2", "job", 1), ScoredShard(other, Execution()))
    spool.put([SpoolEntry(ResultKey("coordinator-1", "job", 0), ScoredShard(mine, Execution())), foreign])

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec)
        job.planning_given = True  # nothing to do but to receive
        async with an_agent(coordinator, tmp_path):
            await until(lambda: owners(tmp_path) == ["coordinator-2"])

        assert {0: mine} == job.partials
        assert [foreign] == spool_of(tmp_path)
        assert "coordinator-2" in (tmp_path / "a1.log").read_text()

    run(body)


def test_a_damaged_leftover_is_reported_and_not_sent(tmp_path: Path) -> None:
    """An entry with a wrong checksum is moved aside with a line in the log."""
    spec = fake_spec(shards=2)
    spool = Spool(tmp_path / "a1" / "spool")
    spool.put([SpoolEntry(ResultKey("coordinator-1", "job", 0), ScoredShard(reference_partials(spec)[0], Execution()))])
    file = next(spool.directory.iterdir())
    file.write_text(file.read_text().replace('"shard":0', '"shard":1'))

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            partials = await coordinator.completed("job")
            # What was acknowledged is removed after the acknowledgement has come back.
            await until(lambda: [".corrupt"] == [p.suffix for p in spool.directory.iterdir()])

        assert reference_partials(spec) == partials
        assert {1} == set(job.arrivals.values())

    run(body)

    assert "a spooled result is damaged" in (tmp_path / "a1.log").read_text()


def test_another_coordinator_on_the_port_gets_nothing_of_the_first_one_s(tmp_path: Path) -> None:
    """When the identity behind the address changes, old results stay on disk and old work stops."""
    first, second = fake_spec(shards=30, delay=0.05), fake_spec(shards=3, seed=1)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", first, reference_plan(first))
        coordinator.hold_acks = True
        async with an_agent(coordinator, tmp_path):
            await until(lambda: len(job.partials) >= 2)
            await coordinator.stop()
            coordinator.identity = "coordinator-2"
            coordinator.jobs.clear()
            coordinator.hold_acks = False
            coordinator.add_job("job", second, reference_plan(second))
            await coordinator.start()
            partials = await coordinator.completed("job")
            await until(lambda: set(owners(tmp_path)) == {"coordinator-1"})

        assert reference_partials(second) == partials
        expected = reference_partials(first)
        kept = spool_of(tmp_path)
        assert [expected[e.key.shard] for e in kept] == [e.scored.partial for e in kept]

    run(body)


def test_a_full_disk_pauses_work_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the spool cannot be written nothing is sent or begun, the reason is told, and afterwards all goes on."""
    spec = fake_spec(shards=20)
    real, full = Spool.put, asyncio.Event()

    def put(self: Spool, entries: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, entries)

    monkeypatch.setattr(Spool, "put", put)
    monkeypatch.setattr("agent.daemon.STORE_PAUSE_SECONDS", 0.05)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        full.set()
        async with an_agent(coordinator, tmp_path):
            await until(lambda: any("No space left" in a for a in activities(coordinator)["a1"]))
            seen = len(coordinator.renewals)
            await until(lambda: len(coordinator.renewals) > seen + 3)
            arrived = len(job.arrivals)
            full.clear()
            partials = await coordinator.completed("job")

        assert 0 == arrived
        assert reference_partials(spec) == partials

    run(body)


def test_an_agent_without_a_disk_leaves_the_job_to_a_healthy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent's spool refuses for ever: the other one completes the job, the stuck shard included."""
    spec = fake_spec(shards=20, delay=0.02)
    real = Spool.put

    def put(self: Spool, entries: Any) -> None:
        if self.directory.parent.name == "a1":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(self, entries)

    monkeypatch.setattr(Spool, "put", put)
    monkeypatch.setattr("agent.daemon.STORE_PAUSE_SECONDS", 0.1)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path):
            await until(lambda: any("Read-only" in a for a in activities(coordinator)["a1"]))
            async with an_agent(coordinator, tmp_path, "a2"):
                partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        assert {1} == set(job.arrivals.values())
        assert "mount that disk writable" in (tmp_path / "a1.log").read_text()

    run(body)


def test_stopping_finishes_the_running_shard(tmp_path: Path) -> None:
    """A stop lets the running shard end and be acknowledged, gives the rest back, and says good-bye."""
    spec = fake_spec(shards=4, delay=1.0)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path) as daemon:
            await until(lambda: daemon.activity == "scoring")
            daemon.stop()
            await until(lambda: coordinator.left)
            drained = [request for _, request in coordinator.renewals if request.draining]

        assert ["a1"] == coordinator.left
        assert [0] == list(job.partials)
        assert [("job", 0)] == [(h.job, h.shard) for h in drained[0].holdings]
        assert not spool_of(tmp_path)

    run(body, lease=30.0)


def test_stopping_waits_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An acknowledged result is off the disk before the agent says good-bye, however slowly its disk removes files."""
    remove, left = Spool.remove, threading.Event()

    def slowly(spool: Spool, keys: Iterable[ResultKey]) -> None:
        keys = list(keys)
        if keys:
            left.wait(0.5)  # a good-bye said too early cuts this short
        remove(spool, [] if left.is_set() else keys)

    monkeypatch.setattr(Spool, "remove", slowly)
    spec = fake_spec(shards=2, delay=0.5)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path) as daemon:
            await until(lambda: daemon.activity == "scoring")
            daemon.stop()
            await until(lambda: coordinator.left)
            left.set()
        assert not spool_of(tmp_path)

    run(body, lease=30.0)


def test_stopping_has_a_limit(tmp_path: Path) -> None:
    """A shard that outlasts the time to drain is given up without being reported as failed."""
    spec = fake_spec(shards=2, hang="0")

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path, drain_seconds=0.3) as daemon:
            await until(lambda: daemon.activity == "scoring")
            pid = daemon.worker_pid
            assert pid is not None
            daemon.stop()
            await until(lambda: coordinator.left)

        assert not job.failures
        assert not alive(pid)

    run(body)


def test_a_killed_worker_costs_one_try(tmp_path: Path) -> None:
    """SIGKILL of the worker from outside in mid-shard fails that shard only, and the job ends exactly."""
    spec = fake_spec(shards=10, delay=0.2)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with an_agent(coordinator, tmp_path) as daemon:
            await until(lambda: len(job.partials) >= 2 and daemon.activity == "scoring")
            assert daemon.worker_pid is not None
            os.kill(daemon.worker_pid, signal.SIGKILL)
            partials = await coordinator.completed("job")

        assert reference_partials(spec) == partials
        assert ["WORKER_CRASHED"] == [code for _, code, _ in job.failures]

    run(body)


def test_a_refused_version_ends_the_agent(tmp_path: Path) -> None:
    """VERSION_REFUSED is final and carries the coordinator's words."""

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.refuse_versions = True
        with a_daemon(coordinator, tmp_path) as daemon, pytest.raises(VersionRefused, match="protocol 7 to 9"):
            await daemon.run()

    run(body)


def test_a_later_life_ends_the_earlier_one(tmp_path: Path) -> None:
    """STALE_INCARNATION stops the agent with the remedy."""

    async def body(coordinator: FakeCoordinator) -> None:
        async def take_its_name() -> None:
            await until(lambda: len(coordinator.registrations) == 2)
            coordinator.agents["a1"] = "a later life"

        taking = asyncio.create_task(take_its_name())
        with a_daemon(coordinator, tmp_path) as daemon, pytest.raises(StaleIncarnation, match="--name"):
            await daemon.run()
        await taking

    run(body)


def test_giving_up_on_a_silent_coordinator(tmp_path: Path) -> None:
    """With a limit, an agent that nobody answers ends with UNREACHABLE, having said so once before."""

    async def body(coordinator: FakeCoordinator) -> None:
        await coordinator.stop()
        with (
            a_daemon(coordinator, tmp_path, give_up_after=1.0) as daemon,
            pytest.raises(Unreachable, match="given up after"),
        ):
            await daemon.run()

    run(body)

    assert 1 == (tmp_path / "a1.log").read_text().count("trying again")


def test_an_unusable_worker_ends_the_agent(tmp_path: Path) -> None:
    """An agent whose engine cannot start does not pretend to be one."""

    async def body(coordinator: FakeCoordinator) -> None:
        with (
            a_daemon(coordinator, tmp_path, engine="no_such_engine:Engine") as daemon,
            pytest.raises(WorkerUnusable),
        ):
            await daemon.run()

    run(body)
