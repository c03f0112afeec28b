"""A TCP proxy for benchmarks that counts what crosses it: bytes, connections, and gRPC messages, by direction.

It reads HTTP/2 frames as they pass (RFC 9113, section 4) and the length prefix of each gRPC message within.
Not a benchmark by itself: run with --quick it counts one greeting.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field

import common
from fedeval.wire.credentials import local_path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA = 0


@dataclass
class Count:
    """What went in one direction."""

    bytes: int = 0
    messages: int = 0


@dataclass
class _Messages:
    """Finds the messages in one direction of one connection."""

    count: Count
    preface: int = 0
    held: bytearray = field(default_factory=bytearray)
    prefixes: dict[int, bytearray] = field(default_factory=dict)  # by HTTP/2 stream
    bodies: dict[int, int] = field(default_factory=dict)

    def feed(self, data: bytes) -> None:
        """Take bytes that passed."""
        self.held += data
        if self.preface:
            if len(self.held) < self.preface:
                return
            del self.held[: self.preface]
            self.preface = 0
        while len(self.held) >= 9:
            length = int.from_bytes(self.held[:3], "big")
            if len(self.held) < 9 + length:
                return
            kind, stream = self.held[3], int.from_bytes(self.held[5:9], "big") & 0x7FFFFFFF
            if kind == _DATA:
                self._data(stream, bytes(self.held[9 : 9 + length]))
            del self.held[: 9 + length]

    def _data(self, stream: int, data: bytes) -> None:
        while data:
            left = self.bodies.get(stream, 0)
            if left:
                self.bodies[stream] = left - min(left, len(data))
                data = data[left:]
                continue
            prefix = self.prefixes.setdefault(stream, bytearray())
            missing = 5 - len(prefix)
            prefix += data[:missing]
            data = data[missing:]
            if len(prefix) == 5:
                self.count.messages += 1
                self.bodies[stream] = int.from_bytes(prefix[1:], "big")
                prefix.clear()


class Tap:
    """The proxy: ``async with Tap(target) as tap``, then call ``tap.address`` instead of ``target``."""

    def __init__(self, target: str) -> None:
        """Pass everything on to ``target`` (host:port)."""
        self.address = ""
        self.up, self.down = Count(), Count()
        self.connections = 0
        self._target = target
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tap:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        # Whoever calls here shows what the target has published.
        local_path(self.address).symlink_to(local_path(self._target))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Break every connection."""
        assert self._server is not None
        self._server.close()
        local_path(self.address).unlink()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Count from zero; connections stay counted."""
        self.up.bytes = self.up.messages = self.down.bytes = self.down.messages = 0

    @property
    def bytes(self) -> int:
        """Both directions together."""
        return self.up.bytes + self.down.bytes

    @property
    def messages(self) -> int:
        """Both directions together."""
        return self.up.messages + self.down.messages

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink, count, preface in (
            (reader, far_writer, self.up, len(PREFACE)),
            (far_reader, writer, self.down, 0),
        ):
            task = asyncio.create_task(self._pump(source, sink, count, _Messages(count, preface)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pump(
        source: asyncio.StreamReader, sink: asyncio.StreamWriter, count: Count, messages: _Messages
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                count.bytes += len(data)
                messages.feed(data)
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # one side has gone: so does the other
        finally:
            sink.close()


async def greeting() -> None:
    """Count the messages of one greeting: one up, one down."""
    from coordinator.client import Client
    from coordinator.journal import MemoryJournal
    from tests.support.served import served

    async with served(MemoryJournal("bench")) as there, Tap(there.server.address) as tap:
        async with Client(tap.address) as client:
            await client.nodes()
        print(f"one call: {tap.up.messages} message up, {tap.down.messages} down, {tap.bytes} bytes in all")
        common.finish({"bench": "wire_tap", "up": tap.up.messages, "down": tap.down.messages, "bytes": tap.bytes})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same")
    parser.parse_args()
    asyncio.run(greeting())
