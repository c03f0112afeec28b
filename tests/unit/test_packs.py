"""Packs between agents: the store, the service and the fetcher, over real gRPC on loopback; the packer is a fake."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from agent.executor import Executor
from agent.logs import make_logger
from agent.packs import service
from agent.packs.fetching import PackFetcher
from agent.packs.service import AHEAD, PackServer
from agent.packs.store import PackStore
from agent.work import JobPlan, Work
from eval_kernel.errors import DatasetNotFound, FedevalError, Overloaded, WorkerCrashed
from eval_kernel.plan import ShardPlan
from tests.support.core_cases import make_plan
from tests.support.processes import until

LOG = make_logger(as_json=True)
SHARDS = 40


class FakePacker:
    """Writes packs of a few bytes; ``held`` makes it wait, ``error`` fail."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.calls = 0
        self.error: FedevalError | None = None
        self.held = asyncio.Event()
        self.held.set()

    async def pack(self, work: Work, ahead: int, directory: Path, made: Callable[[ShardPlan, str, int], None]) -> None:
        assert work.shard is not None
        self.calls += 1
        await self.held.wait()
        if self.error is not None:
            raise self.error
        for shard in make_plan(SHARDS).shards[work.shard.index : work.shard.index + ahead + 1]:
            data = content(shard.index)
            name = hashlib.sha256(data).hexdigest()
            (directory / name).write_bytes(data)
            self.made.append(shard.index)
            made(shard, name, len(data))

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to end."""


def content(index: int) -> bytes:
    """What the fake packer makes of a shard: some of several chunks, some empty."""
    return bytes([index]) * (index * 300_000)


def work_of(index: int, job: str = "j") -> Work:
    """A shard to score."""
    return Work(job, "{}", f'"{job}"', make_plan(SHARDS).shards[index])


@asynccontextmanager
async def serving(directory: Path, most_bytes: int = 1 << 30) -> AsyncIterator[tuple[PackServer, FakePacker]]:
    """A pack service with a fake packer."""
    packer = FakePacker()
    server = PackServer("127.0.0.1:0", PackStore(directory / "packs", most_bytes), cast(Executor, packer), LOG)
    async with running(server.run()):
        yield server, packer


@asynccontextmanager
async def fetching(directory: Path, *addresses: str, queue: list[Work] | None = None) -> AsyncIterator[PackFetcher]:
    """A fetcher that knows these addresses; ``queue`` holds what it fetches ahead."""
    fetcher = PackFetcher(directory / "fetched", LOG)
    fetcher.enabled = True
    fetcher.found(addresses)
    never = asyncio.Event()

    async def pulse() -> None:
        await never.wait()

    async with running(fetcher.run(lambda most: (queue or [])[:most], pulse)):
        yield fetcher


@asynccontextmanager
async def running(what: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a loop until the context is left."""
    task = asyncio.create_task(what)
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_the_store_keeps_to_its_share_of_the_disk(tmp_path: Path) -> None:
    """The least recently used packs go first; a file that two shards share stays while one of them does."""
    store = PackStore(tmp_path, 25)
    for key, name in ((1, "a"), (2, "b"), (3, "a")):
        (tmp_path / name).write_bytes(name.encode() * 10)
        store.add(key, name, 10)

    assert 1 not in store
    assert {"a", "b"} == {path.name for path in tmp_path.iterdir()}
    assert b"a" * 10 == (store.read(3) or (None, b""))[1]
    (tmp_path / "b").unlink()
    assert None is store.read(2), "a file that is gone is made again"
    assert 10 == store.bytes


def test_a_pack_arrives_whole_and_the_next_ones_are_made_before_they_are_asked_for(tmp_path: Path) -> None:
    """The window stays bounded, each pack is made once, and goes on when half of those made ahead are used."""

    async def main() -> None:
        async with serving(tmp_path) as (server, packer), fetching(tmp_path, server.address) as fetcher:
            for index in (0, 1, 2):
                path = await fetcher.of(work_of(index))
                assert path is not None
                assert content(index) == path.read_bytes()
            assert list(range(AHEAD + 1)) == packer.made
            assert await fetcher.of(work_of(AHEAD // 2 + 1)) is not None
            await until(lambda: max(packer.made) == 2 * AHEAD)
            assert 2 == packer.calls
            assert 4 == fetcher.fetched == server.served

    asyncio.run(main())


def test_packing_begins_with_the_plan_of_a_job(tmp_path: Path) -> None:
    """Whoever writes the manifest's JSON in another way means the same packs."""

    async def main() -> None:
        async with serving(tmp_path) as (server, packer):
            plan = make_plan(SHARDS)
            server.planned(Work("j", "{}"), JobPlan('{"a":1,"b":2}', plan.shards))
            await until(lambda: AHEAD in packer.made)
            assert content(3) == (await server.pack(Work("j", " {}", '{"b": 2, "a": 1}', plan.shards[3])))[1]
            assert 1 == packer.calls

    asyncio.run(main())


def test_packs_of_the_queue_are_there_when_their_shards_begin(tmp_path: Path) -> None:
    """They are fetched while another shard is scored."""

    async def main() -> None:
        queue = [work_of(1), work_of(2)]
        async with serving(tmp_path) as (server, _), fetching(tmp_path, server.address, queue=queue) as fetcher:
            await until(lambda: fetcher.fetched == 2)
            server_calls = server.served
            path = await fetcher.of(queue[0])
            assert path is not None
            assert content(1) == path.read_bytes()
            assert server_calls == server.served

    asyncio.run(main())


def test_a_damaged_pack_is_not_used(tmp_path: Path) -> None:
    """Bytes that changed on the other node's disk do not have the digest that names them."""

    async def main() -> None:
        async with serving(tmp_path) as (server, _), fetching(tmp_path, server.address) as fetcher:
            (await fetcher.of(work_of(1)) or tmp_path).unlink()
            stored = tmp_path / "packs" / hashlib.sha256(content(2)).hexdigest()
            stored.write_bytes(b"x" + content(2)[1:])
            assert None is await fetcher.of(work_of(2))
            assert 1 == fetcher.fetched

    asyncio.run(main())


@pytest.mark.parametrize("gone", [True, False])
def test_without_an_agent_that_packs_nothing_is_waited_for(tmp_path: Path, gone: bool) -> None:
    """Where nobody listens, or nobody is known, the shard is scored without a pack."""

    async def main() -> None:
        async with fetching(tmp_path, *(["127.0.0.1:9"] if gone else [])) as fetcher:
            assert None is await fetcher.of(work_of(0))
            assert None is await fetcher.of(work_of(1)), "the address is left alone for a while"

    asyncio.run(main())


def test_a_job_that_cannot_be_packed_there_is_not_asked_for_again(tmp_path: Path) -> None:
    """The text is not on that node: no further call; a worker's crash may pass, and is asked for later."""

    async def main() -> None:
        async with serving(tmp_path) as (server, packer), fetching(tmp_path, server.address) as fetcher:
            packer.error = DatasetNotFound("no text here")
            assert None is await fetcher.of(work_of(0))
            packer.error = None
            assert None is await fetcher.of(work_of(1))
            assert 1 == packer.calls
            assert await fetcher.of(work_of(1, "other")) is not None
            packer.error = WorkerCrashed("died")
            assert None is await fetcher.of(work_of(SHARDS - 1, "other"))

    asyncio.run(main())


def test_a_pack_of_another_shard_ends_the_use_of_packs_for_that_job(tmp_path: Path) -> None:
    """The worker says so; the shard was scored from the node's own text."""

    async def main() -> None:
        async with serving(tmp_path) as (server, _), fetching(tmp_path, server.address) as fetcher:
            path = await fetcher.of(work_of(1))
            assert path is not None
            fetcher.done(work_of(1), path, "its tokens are not the plan's")
            assert not path.exists()
            assert None is await fetcher.of(work_of(2))
            assert 1 == server.served

    asyncio.run(main())


def test_too_many_at_a_time_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller makes its pack itself instead of waiting in a long queue."""
    monkeypatch.setattr(service, "MAX_WAITING", 1)

    async def main() -> None:
        async with serving(tmp_path) as (server, packer):
            packer.held.clear()
            first = asyncio.create_task(server.pack(work_of(0)))
            await until(lambda: packer.calls == 1)
            with pytest.raises(Overloaded):
                await server.pack(work_of(1))
            packer.held.set()
            assert content(0) == (await first)[1]

    asyncio.run(main())
