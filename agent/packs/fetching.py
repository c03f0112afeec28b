"""Packs for the shards that this agent scores: fetched ahead from agents of its site, checked, or else done without.

A pack that is missing, late, damaged or another shard's costs time only: the worker then uses this node's own text.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio
from fedeval.v1 import packs_pb2, packs_pb2_grpc
from fedeval.wire.channel import Channel, open_channel
from fedeval.wire.messages import shard_to_message
from fedeval.wire.status import from_rpc

from agent.logs import Logger
from agent.work import Held, Work
from eval_kernel.errors import Blame, DataChanged, FedevalError, Unreachable

#: Packs that are fetched before their shards are begun.
AHEAD = 4
#: Seconds that one pack may take, the first one's tokenising included; how long an address that failed is left alone.
FETCH_SECONDS, AVOID_SECONDS = 30.0, 5.0
#: A pack above this is refused.
MAX_PACK_BYTES = 256 << 20


class PackFetcher:
    """The packs of one agent that scores."""

    def __init__(self, directory: Path, log: Logger) -> None:
        """``directory`` holds the packs of the next few shards."""
        self._directory, self._log = directory, log
        self._addresses: tuple[str, ...] = ()
        self._channels: dict[str, Channel] = {}
        self._avoid: dict[str, float] = {}  # address -> until when
        self._packless: set[str] = set()  # jobs of which there are no packs
        self._fetching: dict[Held, asyncio.Task[Path | None]] = {}
        self.enabled = False  #: whether this node's engine takes packs
        self.fetched = 0
        self.waited_seconds = 0.0  #: that shards waited for their packs

    def found(self, addresses: Sequence[str]) -> None:
        """Take the addresses at which agents of this site serve packs."""
        if tuple(addresses) != self._addresses:
            self._log.info("packs come from", addresses=list(addresses))
        self._addresses = tuple(addresses)

    async def run(self, upcoming: Callable[[int], list[Work]], pulse: Callable[[], Awaitable[None]]) -> None:
        """Fetch the packs of upcoming shards until cancelled; ``pulse`` returns when there may be others."""
        shutil.rmtree(self._directory, ignore_errors=True)  # of a life before
        try:
            while True:
                works = upcoming(AHEAD)
                for work in works:
                    self._start(work)
                wanted = {work.held for work in works}
                for held in [held for held in self._fetching if held not in wanted]:
                    self._drop(held)
                await pulse()
        finally:
            tasks = list(self._fetching.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for channel in self._channels.values():
                await channel.close(grace=None)

    async def of(self, work: Work) -> Path | None:
        """Return the file with a shard's pack, which is then the caller's; ``None``: do without."""
        self._start(work)
        task = self._fetching.pop(work.held, None)
        if task is None:
            return None
        begun = time.monotonic()
        try:
            return await task
        finally:
            self.waited_seconds += time.monotonic() - begun

    def done(self, work: Work, pack: Path | None, problem: str) -> None:
        """A shard's pack is not needed any more; ``problem``: it was no use, and those of its job may be no better."""
        if pack is None:
            return
        pack.unlink(missing_ok=True)
        if not problem:
            return
        self._log.warning("a pack is no use: the shard was scored from this node's text", job=work.job, reason=problem)
        self._packless.add(work.job)

    def _start(self, work: Work) -> None:
        wanted = self.enabled and work.shard is not None and work.job not in self._packless
        if wanted and work.held not in self._fetching and self._source() is not None:
            self._fetching[work.held] = asyncio.create_task(self._fetch(work))

    def _drop(self, held: Held) -> None:
        """Forget a pack that is not wanted any more."""

        def remove(task: asyncio.Task[Path | None]) -> None:
            if not task.cancelled() and (path := task.result()) is not None:
                path.unlink(missing_ok=True)

        task = self._fetching.pop(held)
        task.cancel()
        task.add_done_callback(remove)

    def _source(self) -> str | None:
        now = time.monotonic()
        return next((address for address in self._addresses if self._avoid.get(address, 0.0) <= now), None)

    async def _fetch(self, work: Work) -> Path | None:
        address = self._source()
        if address is None:
            return None
        try:
            data = await self._download(address, work)
            path = self._directory / hashlib.sha256(f"{work.job} {work.held[1]}".encode()).hexdigest()
            await asyncio.to_thread(self._write, path, data)
        except (FedevalError, OSError) as error:
            # What is wrong with the job or its files there is so for all its packs; anything else may pass.
            lasting = isinstance(error, FedevalError) and error.blame in (Blame.JOB, Blame.NODE)
            if lasting and not isinstance(error, DataChanged):
                self._packless.add(work.job)
            else:
                self._avoid[address] = time.monotonic() + AVOID_SECONDS
            self._log.info("no pack", job=work.job, shard=work.held[1], address=address, reason=str(error))
            return None
        self.fetched += 1
        return path

    def _write(self, path: Path, data: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    async def _download(self, address: str, work: Work) -> bytes:
        """Return a pack's bytes. Raises ``DataChanged`` for wrong ones, and the errors of calls."""
        assert work.shard is not None, "only shards have packs"
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        stub: packs_pb2_grpc.PackServiceAsyncStub = packs_pb2_grpc.PackServiceStub(self._channels[address])
        request = packs_pb2.FetchRequest(
            job=work.job,
            spec_json=work.spec_json,
            manifest_json=work.manifest_json,
            shard=shard_to_message(work.shard),
        )
        data, size, digest = bytearray(), -1, ""
        call = stub.Fetch(request, timeout=FETCH_SECONDS)
        try:
            async for part in call:
                if size < 0:
                    size, digest = part.size, part.sha256
                fits = part.offset == len(data) and len(data) + len(part.data) <= min(size, MAX_PACK_BYTES)
                if not fits:
                    raise DataChanged(f"the pack from {address} is not what it says: its parts do not fit")
                data += part.data
        except grpc.aio.AioRpcError as error:
            found = from_rpc(error, address)
            if isinstance(found, Unreachable):
                found = Unreachable(f"no agent serves packs at {address}")
            raise found from None
        finally:
            call.cancel()
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise DataChanged(f"the pack from {address} was damaged on its way")
        return bytes(data)
