"""A coordinator with mutual TLS in this process, nodes that join it, and proxies that record and replay bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from fedeval.wire.credentials import Credentials, FileSource, local_source
from fedeval.wire.invitation import Invitation
from fedeval.wire.joining import join
from fedeval.wire.pki import Key

from agent.client import AgentClient
from agent.config import AgentConfig, Role
from agent.membership import Joined, load, path_in, store
from coordinator.admin import AdminClient
from coordinator.core.calls import SchedulerConfig
from coordinator.core.scheduler import Scheduler
from coordinator.journal import MemoryJournal
from coordinator.rpc.server import Server
from coordinator.runtime import Runtime
from coordinator.security.names import Names
from coordinator.security.security import CERTIFICATE_LIFE, Security
from eval_kernel.errors import FedevalError
from tests.support.served import TIMINGS

#: A loopback address for coordinators that are to believe that others call them.
LISTEN = "127.0.0.2:0"


@dataclass
class Secured:
    """A running coordinator. ``admin`` calls as the user who runs it."""

    directory: Path
    runtime: Runtime
    server: Server
    security: Security
    admin: AdminClient
    journal: MemoryJournal

    async def invitation(self, site: str = "lab", *roles: str, seconds: float = 60.0) -> Invitation:
        """Make a join string."""
        roles = roles or ("forward", "preprocess")
        hosts = ("127.0.0.1",) if "aggregate" in roles else ()
        return Invitation.parse(await self.admin.create_token(site, roles, hosts, seconds))

    async def joined(self, name: str, site: str = "lab", *roles: str, key: Key | None = None) -> Path:
        """Have a node join; return the file with its membership."""
        path = path_in(self.directory / name)
        store(path, await join(await self.invitation(site, *roles), name, key))
        return path

    def agent(self, path: Path, name: str = "", incarnation: str = "1") -> AgentClient:
        """Return the client of a node that has joined; it may call itself by another name."""
        member = membership(path).membership
        config = AgentConfig(
            coordinator=member.address,
            membership=path,
            site=member.owner.site,
            roles=tuple(role for role in Role if role.value in member.roles),
        )
        return AgentClient(config, name or member.owner.name, incarnation)


def membership(path: Path) -> Joined:
    """Return what a node got by joining."""
    joined = load(path)
    assert joined is not None
    return joined


def shown(path: Path) -> Credentials:
    """Return what a node shows."""
    return FileSource(path)()


@asynccontextmanager
async def secured(
    directory: Path,
    *,
    life: timedelta = CERTIFICATE_LIFE,
    config: SchedulerConfig | None = None,
    listen: str = LISTEN,
    names: Names | None = None,
    plain: bool = False,
) -> AsyncIterator[Secured]:
    """Serve with mutual TLS until the context is left; a directory that was used before is used again.

    ``plain``: without TLS, as on loopback.
    """
    config = config or SchedulerConfig()
    data = directory / "coordinator"
    data.mkdir(exist_ok=True, parents=True)
    journal = MemoryJournal("secured")
    runtime = Runtime(Scheduler(config), journal, TIMINGS)
    security = Security(data, None if plain else names or Names.of(listen, ()), life)
    server = Server(runtime, config, journal.identity, security)
    host = listen.rpartition(":")[0]
    await server.start(listen, f"{host}:0")
    await server.serving(True)
    running = asyncio.create_task(runtime.run())
    try:
        async with AdminClient(server.address) as admin:
            yield Secured(directory, runtime, server, security, admin, journal)
    finally:
        runtime.stop()
        await server.stop(0.2)
        running.cancel()
        with suppress(asyncio.CancelledError, FedevalError):
            await running
        runtime.shutdown()
        security.close()


class Recorder:
    """A TCP proxy that keeps what is sent through it, by direction: ``async with Recorder(target) as recorder``."""

    def __init__(self, target: str, host: str = "127.0.0.2") -> None:
        """Pass everything on to ``target``; listen on ``host``, so that certificates still fit."""
        self.address = ""
        self.up, self.down = bytearray(), bytearray()
        self._listen = host
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Recorder:
        self._server = await asyncio.start_server(self._serve, self._listen, 0)
        self.address = f"{self._listen}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, sink, kept in ((reader, far_writer, self.up), (far_reader, writer, self.down)):
            task = asyncio.create_task(self._pump(source, sink, kept))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, kept: bytearray) -> None:
        try:
            while data := await source.read(1 << 16):
                kept += data
                sink.write(data)
                await sink.drain()
        except ConnectionError:
            pass  # one side has gone: so does the other
        finally:
            sink.close()


def local(address: str) -> Credentials:
    """Return what the user who runs a coordinator shows."""
    return local_source(address)()
