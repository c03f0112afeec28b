"""PackService: makes packs when they are asked for, and the next few before they are. One packer process does the work.

How far ahead: ``AHEAD`` shards beyond the last that was asked for, within the disk that the store may use.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, NamedTuple

import grpc.aio
from fedeval.v1 import packs_pb2, packs_pb2_grpc
from fedeval.wire import credentials
from fedeval.wire.channel import server_options
from fedeval.wire.gate import Gate, LocalToken
from fedeval.wire.messages import shard_from_message
from fedeval.wire.status import abort

from agent.executor import Executor
from agent.logs import Logger
from agent.packs.store import PackStore, Stored
from agent.work import JobPlan, Work
from eval_kernel.errors import FedevalError, Overloaded, PortTaken, RequestInvalid, reason
from eval_kernel.plan import ShardPlan

#: Shards that are packed beyond the one that was asked for.
AHEAD = 16
#: Requests that may wait for their packs at a time.
MAX_WAITING = 64
#: A pack that others push out of the store before it is read is made so often.
MAKE_TRIES = 3
#: Jobs of which packs are made ahead.
JOBS = 16
#: Data in one message.
CHUNK_BYTES = 1 << 20
#: What calls in flight get when the server stops.
GRACE_SECONDS = 0.5

Context = grpc.aio.ServicerContext[Any, Any]


class _Job(NamedTuple):
    """What its packs depend on, in one form whoever tells it."""

    spec: str
    manifest: str


_Key = tuple[_Job, int]


@lru_cache(maxsize=64)
def _job(spec_json: str, manifest_json: str) -> _Job:
    """Raises ``RequestInvalid``."""
    try:
        spec, manifest = (json.dumps(json.loads(text), sort_keys=True) for text in (spec_json, manifest_json))
    except ValueError as error:
        raise RequestInvalid(f"spec_json or manifest_json is not JSON: {reason(error)}") from None
    return _Job(spec, manifest)


class PackServer:
    """One agent's service. ``address`` is known at once; it serves while ``run`` does."""

    def __init__(self, listen: str, store: PackStore, executor: Executor, log: Logger) -> None:
        """Take the port. Raises ``PortTaken``."""
        self._store, self._executor, self._log = store, executor, log
        self._busy = asyncio.Lock()  # the packer does one thing at a time
        self._made = asyncio.Condition()
        self._waiting = 0
        self._ahead: OrderedDict[_Job, ShardPlan] = OrderedDict()  # job -> the last shard that was packed of it
        self._tasks: set[asyncio.Task[None]] = set()
        self.served = 0  #: packs
        self._local = LocalToken()  # packs are the text: for agents of the same user only
        self._server = grpc.aio.server(options=server_options(), interceptors=[Gate(self._local)])
        packs_pb2_grpc.add_PackServiceServicer_to_server(_Servicer(self), self._server)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise PortTaken(
                f"{listen} is in use by another program; choose another address for packs with --pack-listen"
            ) from None
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    async def run(self) -> None:
        """Serve until cancelled."""
        credentials.publish(self.address, credentials.Credentials(self._local.token))
        await self._server.start()
        self._log.info("packs are served to the site", address=self.address)
        self._start(self._warm())
        try:
            await asyncio.Event().wait()
        finally:
            credentials.withdraw(self.address)
            await self._server.stop(GRACE_SECONDS)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._executor.close()

    def planned(self, work: Work, plan: JobPlan) -> None:
        """Have the first packs of a job made that this agent has just planned: they will be asked for."""
        first = Work(work.job, work.spec_json, plan.manifest_json, plan.shards[0])
        self._start(self._make((_job(work.spec_json, plan.manifest_json), first.held[1]), first))

    async def pack(self, work: Work) -> tuple[Stored, bytes]:
        """Return a shard's pack, made now if need be. Raises ``Overloaded`` and the errors of the data."""
        assert work.shard is not None, "only shards have packs"
        key = _job(work.spec_json, work.manifest_json), work.shard.index
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} packs are being waited for; make this one yourself")
        self._waiting += 1
        try:
            found = self._store.read(key)
            if found is None:
                found = await self._wait(key, work)
        finally:
            self._waiting -= 1
        self.served += 1
        self._go_ahead(work, work.shard)
        return found

    async def _wait(self, key: _Key, work: Work) -> tuple[Stored, bytes]:
        """Wait for a pack that is being made, or that nobody makes yet."""
        making = self._start(self._make(key, work))
        tries = 1
        while True:
            async with self._made:
                found = self._store.read(key)
                if found is not None:
                    return found
                if making.done():
                    making.result()  # raises what went wrong
                    tries += 1
                    if tries > MAKE_TRIES:
                        raise Overloaded("a pack is dropped before it is read: the disk for packs is too small")
                    making = self._start(self._make(key, work))
                await self._made.wait()

    def _go_ahead(self, work: Work, asked: ShardPlan) -> None:
        """Have the next shards packed when less than half of those that are packed ahead are left."""
        last = self._ahead.get(_job(work.spec_json, work.manifest_json))
        if last is not None and not self._busy.locked() and 0 <= last.index - asked.index < AHEAD // 2:
            # The packer begins with a shard whose place it is told: the last one is made once more.
            more = Work(work.job, work.spec_json, work.manifest_json, last)
            self._start(self._make(None, more))

    async def _make(self, key: _Key | None, work: Work) -> None:
        """Have a shard and those after it packed, unless that was done while this waited for its turn."""
        job = _job(work.spec_json, work.manifest_json)
        last = work.shard
        try:
            async with self._busy:
                if key is not None and key in self._store:
                    return

                def made(shard: ShardPlan, name: str, size: int) -> None:
                    nonlocal last
                    last = shard
                    self._store.add((job, shard.index), name, size)
                    self._start(self._tell())

                await self._executor.pack(work, AHEAD, self._store.directory, made)
                assert last is not None
                if job not in self._ahead or last.index > self._ahead[job].index:
                    self._ahead[job] = last
                    while len(self._ahead) > JOBS:
                        self._ahead.popitem(last=False)
        except FedevalError as error:
            self._log.warning("packing failed", job=work.job, code=error.code, reason=str(error))
            raise
        finally:
            self._start(self._tell())

    async def _warm(self) -> None:
        """Start the packer before it is needed."""
        async with self._busy:
            try:
                await self._executor.start()
            except FedevalError as error:
                self._log.warning("packs cannot be made yet", code=error.code, reason=str(error))

    async def _tell(self) -> None:
        async with self._made:
            self._made.notify_all()

    def _start(self, what: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(what)
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # logged where it happened

        task.add_done_callback(over)
        return task


class _Servicer(packs_pb2_grpc.PackServiceServicer):
    """The wire's side."""

    def __init__(self, server: PackServer) -> None:
        self._server = server

    async def Fetch(self, request: packs_pb2.FetchRequest, context: Context) -> AsyncIterator[packs_pb2.FetchResponse]:
        """Checks, makes, streams."""
        try:
            if not (request.job and request.spec_json and request.manifest_json and request.HasField("shard")):
                raise RequestInvalid("job, spec_json, manifest_json and shard must be given")
            shard = shard_from_message(request.shard)
            work = Work(request.job, request.spec_json, request.manifest_json, shard)
            stored, data = await self._server.pack(work)
        except FedevalError as error:
            await abort(context, error)
        for offset in range(0, max(len(data), 1), CHUNK_BYTES):
            message = packs_pb2.FetchResponse(offset=offset, data=data[offset : offset + CHUNK_BYTES])
            if offset == 0:
                message.size, message.sha256 = stored.size, stored.name
            yield message
