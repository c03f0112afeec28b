"""`eval-agent check`: proves that an agent can work here, one finding after the other, each with its remedy."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fedeval.wire.diagnosis import own_certificate
from fedeval.wire.pki import date

from agent.client import AgentClient
from agent.config import AgentConfig
from agent.executor import Executor
from agent.logs import Logger, WorkerLog
from agent.membership import load
from agent.probe import Capabilities, free_bytes
from agent.spool import remedy
from agent.work import INSTALL
from eval_kernel.errors import AccessError, ConfigError, FedevalError, Unreachable, VersionRefused, WorkerUnusable

#: Free space below which a check fails, in bytes: results are small, packs and downloaded models are not.
STATE_BYTES, CACHE_BYTES = 100 << 20, 1 << 30
#: Free memory below which no useful model loads, in bytes.
MEMORY_BYTES = 512 << 20
#: A clock before this was never set (2025-01-01, seconds since the epoch); log times would mislead.
CLOCK_SANE = 1_735_689_600
#: Libraries without which the default engine does not start.
NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "datasets", "numpy")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; ``remedy`` says what to do, and is empty where all is well."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, str | bool]:
        """Return what `--json` prints; ``remedy`` is there only where something is to be done."""
        shown: dict[str, str | bool] = {"name": self.name, "ok": self.ok, "detail": self.detail}
        return shown if self.ok else {**shown, "remedy": self.remedy}


def judge(name: str, ok: bool, detail: str, remedy: str) -> Finding:
    """Return the finding, with the remedy only if it is needed."""
    return Finding(name, ok, detail, "" if ok else remedy)


async def findings(config: AgentConfig, capabilities: Capabilities, log: Logger) -> AsyncIterator[Finding]:
    """Yield what is found, quick things first; the worker takes some seconds to start."""
    yield judge(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} at {sys.executable}",
        "use Python 3.11 or newer",
    )
    yield libraries(capabilities.libraries)
    yield judge(
        "memory",
        capabilities.memory_available >= MEMORY_BYTES,
        f"{_size(capabilities.memory_available)} free of {_size(capabilities.memory_total)}",
        "close other programs: models do not fit",
    )
    yield judge(
        "devices",
        not capabilities.degraded,
        "; ".join(capabilities.degraded)
        or ", ".join(f"{d.kind}:{d.index} {d.name} ({_size(d.memory_total)})" for d in capabilities.devices)
        or f"no accelerator; {capabilities.cpus} processors ({capabilities.cpu_model})",
        "do what the line says; until then only the processor is used",
    )
    yield directory("state directory", config.state, STATE_BYTES, "--state")
    yield directory("cache directory", config.cache, CACHE_BYTES, "--cache")
    unreadable = [str(root) for root in config.roots if not os.access(root, os.R_OK | os.X_OK)]
    yield judge(
        "roots",
        not unreadable,
        f"not readable: {', '.join(unreadable)}" if unreadable else ", ".join(map(str, config.roots)),
        "name directories that exist and that this user may read with --root",
    )
    now = time.time()
    yield judge(
        "clock",
        now > CLOCK_SANE,
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        "set the clock: results do not depend on it, log files do",
    )
    if config.membership is not None:
        yield certificate(config.membership)
    yield await coordinator(config)
    yield await engine(config, log)


def libraries(installed: dict[str, str]) -> Finding:
    """Look for what the engine needs."""
    missing = [name for name in NEEDED if name not in installed]
    have = ", ".join(f"{name} {version}" for name, version in installed.items())
    detail = f"missing: {', '.join(missing)}" if missing else have
    return judge("libraries", not missing, detail, INSTALL)


def directory(name: str, path: Path, least: int, option: str) -> Finding:
    """Try to write, flush and remove a file."""
    other = f", or name another directory with {option}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix="check-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = free_bytes(path)
    except OSError as error:
        return Finding(name, False, f"{path}: {error.strerror}", remedy(error) + other)
    room = f"free space: {_size(least)} are needed{other}"
    return judge(name, free >= least, f"{path}, {_size(free)} free", room)


async def coordinator(config: AgentConfig) -> Finding:
    """Ask who is there and which protocol is spoken; the coordinator does not come to know of a node by it."""
    client = AgentClient(config, f"check-{secrets.token_hex(6)}", secrets.token_hex(16))
    try:
        answer = await client.greet()
    except VersionRefused as error:
        return Finding("coordinator", False, str(error), "install the same version of fedeval on both sides")
    except Unreachable as error:
        start = "start `eval-coordinator serve`, or name its address with --coordinator"
        cause = await client.diagnosis()
        return Finding("coordinator", False, str(error), start) if cause is None else _access(cause)
    except AccessError as error:
        return _access(error)
    except FedevalError as error:
        return Finding("coordinator", False, str(error), "look at the coordinator's own log")
    finally:
        await client.close()
    spoken = f"version {answer.version}, protocol {answer.protocol_min} to {answer.protocol_max}"
    return Finding("coordinator", True, f"{config.coordinator} is {answer.coordinator} ({spoken})")


def _access(error: FedevalError) -> Finding:
    """What keeps an agent out says itself what to do about it."""
    return Finding("coordinator", False, str(error), "do what the line says; README.md, A second node over the network")


def certificate(path: Path) -> Finding:
    """Read what joining gave, and look at its dates."""
    try:
        joined = load(path)
    except ConfigError as error:
        return Finding("certificate", False, str(error), "join again with a new join string")
    assert joined is not None, "the configuration names it because it is there"
    member = joined.membership
    wrong = own_certificate(member.credentials)
    if wrong is not None:
        return Finding("certificate", False, str(wrong), "set the clock, or join again with a new join string")
    return Finding("certificate", True, f"{member.owner}, good until {date(member.certificate.expires)}")


async def engine(config: AgentConfig, log: Logger) -> Finding:
    """Start a worker and ask its engine what really works here."""
    executor = Executor(config, WorkerLog(None), log)
    try:
        facts = await executor.probe()
    except ConfigError as error:
        return Finding("engine", False, str(error), "name a device that is there, or --device auto")
    except WorkerUnusable as error:
        return Finding("engine", False, str(error), f"{INSTALL}, or look at the lines above for what is broken")
    except FedevalError as error:
        return Finding("engine", False, str(error), "look at the lines above for what the worker ended with")
    finally:
        await executor.close()
    dtypes = facts.get("dtypes", [])
    detail = f"{facts.get('device')}, dtypes that work: {', '.join(dtypes) or 'none'}, {facts.get('threads')} threads"
    return judge("engine", bool(dtypes), detail, "no dtype multiplies on this device: choose another with --device")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
