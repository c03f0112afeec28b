"""The life of a coordinator process: replay, listen, serve, stop. What happens between is the runtime's and rpc's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from coordinator.config import ServeConfig
from coordinator.core.scheduler import Scheduler
from coordinator.journal import Journal, open_journal
from coordinator.rpc.server import Server, probe
from coordinator.runtime import Runtime
from coordinator.security.names import Names
from coordinator.security.security import Security
from eval_kernel.errors import DirectoryUnusable

#: File in the data directory that holds the address of a coordinator that is listening.
ADDRESS_FILE = "address"
#: How long the join string of ``serve --invite`` is good.
INVITE_SECONDS = 3600.0
_MAX_FILES = 65_536

_log = structlog.get_logger("coordinator")


async def serve(
    config: ServeConfig,
    ready: Callable[[str], None] = lambda address: None,
    *,
    invite: str = "",
    invited: Callable[[str], None] = lambda invitation: None,
) -> None:
    """Serve until SIGTERM or SIGINT; call ``ready`` with the real address once listening.

    With ``invite``, a site, ``invited`` is then called with a join string for an agent of that site.

    Raises ``PortTaken``, ``DirectoryLocked``, ``DirectoryUnusable``, ``JournalNewer``, ``JournalCorrupt``, and
    whatever makes going on impossible later. A second signal ends the process at once, as a crash would.
    """
    probe(config.listen)
    _allow_connections()
    journal = open_journal(config.data_dir)
    try:
        names = Names.of(config.listen, config.advertise) if config.secure else None
        security = Security(config.data_dir, names, config.certificate_life)
    except BaseException:
        journal.close()
        raise
    try:
        runtime, server = _prepare(config, journal, security)
        stop = _signals()
        await server.start(config.listen, config.enrolment_address)
        address_file = config.data_dir / ADDRESS_FILE
        _write_whole(address_file, server.address)
        _log.info("listening", address=server.address, data_dir=str(config.data_dir), pid=os.getpid())
        ready(server.address)
        if server.enrolment_address:
            _log.info("nodes may join", address=server.enrolment_address, ca=security.pin)
        if invite:
            made = await security.create_token(invite, ("forward", "preprocess"), (), INVITE_SECONDS, "serve --invite")
            invited(made.text())
        await server.serving(True)
        running = asyncio.create_task(runtime.run(), name="runtime")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await server.stop(None)
                running.result()  # raises the error that ended it: going on could break a promise
            await _drain(runtime, server, config)
        finally:
            for task in (running, stopped):
                task.cancel()
            await asyncio.wait((running, stopped))
            runtime.shutdown()
            with contextlib.suppress(FileNotFoundError):
                address_file.unlink()
    finally:
        security.close()
        journal.close()


def _allow_connections() -> None:
    """Use all the file descriptors that this process may have: each agent needs one, and so does who only knocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _prepare(config: ServeConfig, journal: Journal, security: Security) -> tuple[Runtime, Server]:
    """Replay the journal and put the parts together."""
    begin = time.perf_counter()
    scheduler = Scheduler(config.scheduler)
    scheduler.replay(journal.facts())
    jobs = scheduler.jobs()
    _log.info(
        "journal replayed",
        jobs=len(jobs),
        unsettled=sum(not job.state.settled for job in jobs),
        facts=journal.count,
        seconds=round(time.perf_counter() - begin, 3),
    )
    tasks: set[asyncio.Task[None]] = set()

    def serving(yes: bool) -> None:
        task = asyncio.get_running_loop().create_task(server.serving(yes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    runtime = Runtime(scheduler, journal, config.timings, on_serving=serving)
    server = Server(runtime, config.scheduler, journal.identity, security)
    return runtime, server


async def _drain(runtime: Runtime, server: Server, config: ServeConfig) -> None:
    """Stop leasing, write what was decided, end the calls, stop listening."""
    _log.info("stopping")
    runtime.stop()
    stopping = asyncio.create_task(server.stop(config.timings.grace))
    if not await runtime.close():
        _log.error("stopped with facts unwritten: nobody was told of them, agents will send them again")
    await stopping
    _log.info("stopped")


def _signals() -> asyncio.Event:
    """Return the event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)  # as safe as kill -9, which is safe
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


def _write_whole(path: Path, text: str) -> None:
    """Write a small file so that readers see all of it or none."""
    temporary = path.with_suffix(".new")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise DirectoryUnusable(
            f"cannot write {path} ({error.strerror}); name another directory with --data-dir"
        ) from None
