"""`eval-coordinator check`: proves that a coordinator can run here, or that one answers; a remedy for each failure.

It reads no model and no data: `eval-agent check` does that where they are. It starts nothing and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from glob import has_magic
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN

from coordinator.client import Client
from coordinator.config import ServeConfig
from eval_kernel.errors import FedevalError, Unreachable
from eval_kernel.spec import JobSpec, is_remote, load_spec

LIBRARIES = (
    "cryptography",
    "grpcio",
    "grpcio-health-checking",
    "grpcio-reflection",
    "protobuf",
    "pydantic",
    "typer",
    "rich",
    "structlog",
)
#: Oldest SQLite with the write-ahead log behaviour the journal relies on.
MIN_SQLITE = (3, 35)
#: Free space below which a journal is likely to fill its disk during a job of a million shards.
MIN_FREE_BYTES = 200 << 20
#: Wall clocks before this date are certainly wrong: 2025-01-01.
MIN_WALL_SECONDS = 1_735_689_600


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``remedy`` is empty when ``ok``."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


async def examine(config: ServeConfig, job_file: Path | None) -> list[Finding]:
    """Look at everything; never raises for what it finds."""
    found = [python(), libraries(), sqlite(), directory(config.data_dir), clock()]
    if config.journal is not None:
        found.append(await asyncio.to_thread(database, config.journal))
    found.append(await address(config.listen))
    if job_file is not None:
        found += job(job_file)
    return found


def python() -> Finding:
    """Is this Python new enough?"""
    detail = f"{platform.python_version()} at {sys.executable}"
    ok = sys.version_info >= (3, 11)
    return Finding("python", ok, detail, "" if ok else "use Python 3.11 or newer")


def libraries() -> Finding:
    """Is every library installed?"""
    have, missing = [], []
    for name in LIBRARIES:
        try:
            have.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    return Finding("libraries", not missing, ", ".join(have) or "none", remedy)


def sqlite() -> Finding:
    """Is SQLite new enough for the journal?"""
    ok = sqlite3.sqlite_version_info >= MIN_SQLITE
    remedy = "" if ok else "use a Python built with SQLite 3.35 or newer"
    return Finding("sqlite", ok, sqlite3.sqlite_version, remedy)


def directory(data_dir: Path) -> Finding:
    """Can the journal be written, durably, with space left?"""
    place = data_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            took = time.perf_counter() - begin
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(
            "data directory",
            False,
            f"{place} cannot be written ({error.strerror})",
            "give the coordinator a directory of its own with --data-dir",
        )
    named = f"{data_dir}" if place == data_dir else f"{data_dir} (to be made)"
    detail = f"{named}: {free >> 20:,} MiB free, sync in {took * 1e3:.1f} ms"
    if free < MIN_FREE_BYTES:
        return Finding(
            "data directory",
            False,
            detail,
            f"free at least {MIN_FREE_BYTES >> 20} MiB there, or choose another --data-dir",
        )
    return Finding("data directory", True, detail)


def database(url: str) -> Finding:
    """Can a journal be kept in this database, and who leads on it?"""
    try:
        from coordinator.journal import postgres_upkeep  # only here: its driver is an extra

        return Finding("journal", True, postgres_upkeep.look(url))
    except FedevalError as error:
        return Finding("journal", False, str(error), "name a database that works, with --journal or FEDEVAL_JOURNAL")


def clock() -> Finding:
    """Does the wall clock show a possible date, and does it run with the steady clock?"""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    drift = abs((time.time() - wall) - (time.monotonic() - steady))
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))
    if wall < MIN_WALL_SECONDS:
        return Finding(
            "clock", False, shown, "set the clock (for instance with an NTP service); reports would carry this date"
        )
    if drift > 0.02:
        return Finding(
            "clock",
            False,
            f"{shown}; it jumped by {drift:.3f} s while watched",
            "let an NTP service slew the clock, not step it",
        )
    return Finding("clock", True, shown)


async def address(listen: str) -> Finding:
    """Is the address free, or does a coordinator we can talk to answer there?"""
    reason = unbindable(listen)
    if reason is None:
        return Finding("address", True, f"{listen} is free")
    try:
        async with Client(listen, timeout=3.0) as client:
            info = await client.info()
    except Unreachable:
        return Finding(
            "address",
            False,
            f"{listen} cannot be listened on ({reason}), and no coordinator answers there",
            "choose another port with --listen, or end the program that uses this one",
        )
    except FedevalError as error:
        return Finding("address", False, str(error), "look into the log of the coordinator that answers there")
    detail = f"coordinator {info.coordinator} version {info.version} answers at {listen}"
    if info.protocol_min > PROTOCOL_MAX or info.protocol_max < PROTOCOL_MIN:
        return Finding(
            "address",
            False,
            f"{detail}, but speaks protocol {info.protocol_min} to {info.protocol_max}, "
            f"not {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            "install the same version of fedeval on both sides",
        )
    return Finding("address", True, detail)


def unbindable(listen: str) -> str | None:
    """Return why ``listen`` cannot be listened on now, or ``None``. Nothing stays bound."""
    host, _, port = listen.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error.strerror or str(error)
    reason: str | None = None
    for family, kind, protocol, _name, place in resolved:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(place)
                probe.listen(1)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                if family == socket.AF_INET:
                    return None
    return reason


def job(job_file: Path) -> list[Finding]:
    """Is the job file valid, and are its local paths here? That they are elsewhere only is no failure."""
    try:
        spec = load_spec(job_file)
    except FedevalError as error:
        return [Finding("job file", False, str(error), "correct the file; examples/job.yaml is an annotated one")]
    found = [Finding("job file", True, f"{job_file}: {spec.window.policy} windows, precision {spec.precision}")]
    for source in local_sources(spec):
        where = "on this machine" if _is_here(source) else "not on this machine: the agents must have it"
        found.append(Finding("path", True, f"{source} is {where}"))
    return found


def local_sources(spec: JobSpec) -> list[str]:
    """Return the local paths and globs a job names."""
    named = [spec.model.source, *((spec.model.tokenizer,) if spec.model.tokenizer else ()), *spec.dataset.source]
    return [source for source in named if not is_remote(source)]


def _is_here(source: str) -> bool:
    path = Path(source)
    if has_magic(source):
        root = Path(path.anchor)
        return next(iter(root.glob(str(path.relative_to(root)))), None) is not None
    return path.exists()


def exit_code(findings: list[Finding]) -> int:
    """0 when all is well, 1 otherwise."""
    return int(not all(finding.ok for finding in findings))


def lines(findings: list[Finding], write: Callable[[str], None]) -> None:
    """Write one line per finding, and a remedy line under each failure."""
    for finding in findings:
        write(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.detail}")
        if finding.remedy:
            write(f"     remedy: {finding.remedy}")
