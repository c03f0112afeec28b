"""A TCP proxy that does to connections what networks do: delay, narrow, hold, forget, cut short, reset.

``hold`` is a partition: TCP loses nothing, so what was held arrives once it is released. ``forget`` is a middlebox that
has lost its table: the connections stay open at both ends and nothing comes through them ever again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fedeval.wire.credentials import local_path

UP, DOWN = "up", "down"
#: Bytes that are on their way at a time, in one direction of one connection.
CHUNK, IN_FLIGHT = 16 << 10, 64
#: Seconds between two looks at which connections are idle.
LOOK = 0.05


class FaultProxy:
    """Listens on a loopback port of its own and forwards to ``target``; faults are set while it runs.

    ``delay``: seconds each way; ``rate``: bytes a second each way of each connection; ``idle``: a connection on which
    nothing came for so many seconds is forgotten. ``struck`` counts the connections that each fault struck.
    """

    def __init__(self, target: str) -> None:
        """``target`` is ``host:port``; it need not be there yet."""
        self.target = target
        self.address = ""
        self.delay = 0.0
        self.rate: float | None = None
        self.idle: float | None = None
        self.struck: Counter[str] = Counter()
        self._ways = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        for way in self._ways.values():
            way.set()
        self._flows: set[_Flow] = set()
        self._dark = False

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._flows)

    def hold(self, *ways: str) -> None:
        """Let nothing through in these directions (``UP``, ``DOWN``) until ``release``."""
        for way in ways or (UP, DOWN):
            self._ways[way].clear()
        self.struck["hold"] += len(self._flows)

    def release(self) -> None:
        """Let through what was held."""
        for way in self._ways.values():
            way.set()

    def forget(self) -> None:
        """Drop in silence what comes on these connections, for ever, and on new ones until ``remember``."""
        self._dark = True
        for flow in self._flows:
            flow.forgotten = True
        self.struck["forget"] += len(self._flows)

    def remember(self) -> None:
        """Forward new connections again."""
        self._dark = False

    def reset(self) -> int:
        """End every connection with RST, at both ends; return how many there were."""
        flows = list(self._flows)
        for flow in flows:
            flow.abort()
        self.struck["reset"] += len(flows)
        return len(flows)

    def truncate(self, way: str, after: int) -> None:
        """Forward so many more bytes of each connection in a direction, then end it: in the middle of a frame."""
        for flow in self._flows:
            flow.left[way] = after
        self.struck["truncate"] += len(self._flows)

    # ------------------------------------------------------------ forwarding

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            upstream = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        flow = _Flow(writer, upstream[1], self._dark)
        self._flows.add(flow)
        pumps = [
            asyncio.create_task(self._pump(flow, UP, reader, upstream[1])),
            asyncio.create_task(self._pump(flow, DOWN, upstream[0], writer)),
        ]
        try:
            await asyncio.wait(pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._flows.discard(flow)
            flow.close()

    async def _pump(self, flow: _Flow, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
        sending = asyncio.create_task(self._send(flow, way, queue, sink))
        try:
            while not sending.done():
                data = await source.read(CHUNK if self.rate is None else max(1, min(CHUNK, int(self.rate / 20))))
                flow.heard = asyncio.get_running_loop().time()
                await queue.put((flow.heard + self.delay, data))
                if not data:
                    break
            await sending
        except (ConnectionError, OSError):
            flow.abort()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send(
        self, flow: _Flow, way: str, queue: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await queue.get()
            if (early := due - loop.time()) > 0:
                await asyncio.sleep(early)
            await self._ways[way].wait()
            if flow.forgotten:
                continue  # the end of the stream too is not told
            if not data:
                sink.write_eof()
                return
            left = flow.left.get(way)
            if left is not None:
                data = data[:left]
                flow.left[way] = left - len(data)
            sink.write(data)
            await sink.drain()
            if left is not None and flow.left[way] == 0:
                flow.close()
                return
            if self.rate is not None:
                await asyncio.sleep(len(data) / self.rate)

    async def _watch(self) -> None:
        """Forget what is idle for too long, as address translators do."""
        while True:
            await asyncio.sleep(LOOK)
            now = asyncio.get_running_loop().time()
            for flow in self._flows:
                if self.idle is not None and not flow.forgotten and now - flow.heard > self.idle:
                    flow.forgotten = True
                    self.struck["idle"] += 1


class _Flow:
    """One connection: from the client, and on to the target."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, forgotten: bool) -> None:
        self._ends = (client, server)
        self.forgotten = forgotten
        self.left: dict[str, int] = {}
        self.heard = asyncio.get_running_loop().time()

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def abort(self) -> None:
        for end in self._ends:
            sock = end.get_extra_info("socket")
            with contextlib.suppress(OSError):  # it has ended already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.transport.abort()


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
    """Run a proxy in front of ``target``; no connection outlives the context."""
    proxy = FaultProxy(target)
    handlers: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(proxy._accept(reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    watching = asyncio.create_task(proxy._watch())
    # Whoever calls here shows what the target has published, also after it has begun again.
    alias = local_path(proxy.address)
    alias.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    alias.symlink_to(local_path(target))
    try:
        yield proxy
    finally:
        alias.unlink()
        server.close()
        watching.cancel()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(watching, *handlers, return_exceptions=True)
        await server.wait_closed()
