"""The life of a coordinator process: stand by, replay, listen, serve, stop.

What happens while it serves is the runtime's and rpc's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import structlog

from coordinator.config import ServeConfig
from coordinator.core.scheduler import Scheduler
from coordinator.journal import Journal, open_journal
from coordinator.journal.directory import Directory
from coordinator.rpc.server import Server, probe
from coordinator.runtime import Runtime
from coordinator.security.names import Names
from coordinator.security.security import Security
from coordinator.standby import POLL_SECONDS, stand_by
from eval_kernel.errors import DirectoryUnusable, PortTaken

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
    With a journal in PostgreSQL that another coordinator leads, stand by first: then nothing is listened to.

    Raises ``PortTaken``, ``DirectoryLocked``, ``DirectoryUnusable``, ``JournalNewer``, ``JournalCorrupt``, and
    whatever makes going on impossible later. A second signal ends the process at once, as a crash would.
    """
    _allow_connections()

    async def told(server: Server, security: Security) -> None:
        ready(server.address)
        if server.enrolment_address:
            _log.info("nodes may join", address=server.enrolment_address, ca=security.pin)
        if invite:
            made = await security.create_token(invite, ("forward", "preprocess"), (), INVITE_SECONDS, "serve --invite")
            invited(made.text())

    if config.journal is None:
        probe(config.listen)
        journal = open_journal(config.data_dir)
        try:
            await _serve(config, journal, asyncio.get_running_loop().create_future(), told)
        finally:
            journal.close()
        return
    directory = Directory(config.data_dir)  # two coordinators on one machine have a directory each
    try:
        with _signals() as stop:
            shared, waited = await stand_by(config.journal, stop)
        if shared is not None:
            lost = asyncio.wrap_future(shared.leadership.lost)
            try:
                await _serve(config, shared, lost, told, patient=waited)
            finally:
                shared.close()
    finally:
        directory.close()


async def _serve(
    config: ServeConfig,
    journal: Journal,
    lost: asyncio.Future[NoReturn],
    ready: Callable[[Server, Security], Awaitable[None]],
    *,
    patient: bool = False,
) -> None:
    """Replay the journal and serve. ``lost`` gets an error when the journal is another coordinator's.

    ``patient``: wait for an address that is in use, as by a predecessor that is about to end.
    """
    names = Names.of(config.listen, config.advertise) if config.secure else None
    with _signals() as stop, contextlib.closing(Security(config.data_dir, names, config.certificate_life)) as security:
        runtime, server = _prepare(config, journal, security)
        stopped = asyncio.create_task(stop.wait(), name="stop")
        running: asyncio.Task[None] | None = None
        address_file = config.data_dir / ADDRESS_FILE
        try:
            if not await _listen(server, config, (stopped, lost), patient=patient):
                return
            _write_whole(address_file, server.address)
            _log.info("listening", address=server.address, data_dir=str(config.data_dir), pid=os.getpid())
            await ready(server, security)
            await server.serving(True)
            running = asyncio.create_task(runtime.run(), name="runtime")
            await asyncio.wait((running, stopped, lost), return_when=asyncio.FIRST_COMPLETED)
            for ended in (running, lost):
                if ended.done():
                    await server.stop(None)
                    ended.result()  # raises the error that ended it: going on could break a promise
            await _drain(runtime, server, config)
        finally:
            tasks = [task for task in (running, stopped, lost) if task is not None]
            for task in tasks:
                task.cancel()
            # An error that came after the one raised here says no more than that.
            await asyncio.gather(*tasks, return_exceptions=True)
            runtime.shutdown()
            if server.address:
                with contextlib.suppress(FileNotFoundError):
                    address_file.unlink()


async def _listen(
    server: Server, config: ServeConfig, ending: tuple[asyncio.Future[Any], ...], *, patient: bool
) -> bool:
    """Listen; return false if one of ``ending`` comes first, which raises its error if it has one."""
    told = False
    while True:
        try:
            await server.start(config.listen, config.enrolment_address)
            return True
        except PortTaken as error:
            if not patient:
                raise
            if not told:
                _log.warning("waiting for the address", reason=str(error))
            told = True
        done, _ = await asyncio.wait(ending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            ended.result()
            return False


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


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """Yield the event that the first SIGTERM or SIGINT sets; the second one ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)  # as safe as kill -9, which is safe
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


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
