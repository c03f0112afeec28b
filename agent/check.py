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

from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN

from agent.client import AgentClient
from agent.config import AgentConfig
from agent.executor import Executor
from agent.logs import Logger, WorkerLog
from agent.probe import Capabilities, free_bytes
from agent.work import Heartbeat
from eval_kernel.errors import FedevalError

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
    """One thing that was looked at; ``remedy`` says what to do where it is not ``ok``."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


async def findings(config: AgentConfig, capabilities: Capabilities, log: Logger) -> AsyncIterator[Finding]:
    """Yield what is found, quick things first; the worker takes some seconds to start."""
    yield Finding(
        "python",
        sys.version_info >= (3, 11),
        f"{platform.python_version()} at {sys.executable}",
        "use Python 3.11 or newer",
    )
    yield libraries(capabilities.libraries)
    yield Finding(
        "memory",
        capabilities.memory_available >= MEMORY_BYTES,
        f"{_size(capabilities.memory_available)} free of {_size(capabilities.memory_total)}",
        "close other programs: models do not fit",
    )
    yield Finding(
        "devices",
        not capabilities.degraded,
        "; ".join(capabilities.degraded)
        or ", ".join(f"{d.kind}:{d.index} {d.name} ({_size(d.memory_total)})" for d in capabilities.devices)
        or f"no accelerator; {capabilities.cpus} processors ({capabilities.cpu_model})",
        "repair the driver, or the agent works on the processor only",
    )
    yield directory("state directory", config.state, STATE_BYTES, "--state")
    yield directory("cache directory", config.cache, CACHE_BYTES, "--cache")
    unreadable = [str(root) for root in config.roots if not os.access(root, os.R_OK | os.X_OK)]
    yield Finding(
        "roots",
        not unreadable,
        f"not readable: {', '.join(unreadable)}" if unreadable else ", ".join(map(str, config.roots)),
        "name directories that exist and that this user may read with --root",
    )
    now = time.time()
    yield Finding(
        "clock",
        now > CLOCK_SANE,
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        "set the clock: results do not depend on it, log files do",
    )
    yield await coordinator(config, capabilities)
    yield await engine(config, log)


def libraries(installed: dict[str, str]) -> Finding:
    """Look for what the engine needs."""
    missing = [name for name in NEEDED if name not in installed]
    have = ", ".join(f"{name} {version}" for name, version in installed.items())
    detail = f"missing: {', '.join(missing)}" if missing else have
    return Finding("libraries", not missing, detail, "pip install 'fedeval[agent]'")


def directory(name: str, path: Path, least: int, option: str) -> Finding:
    """Try to write, flush and remove a file."""
    remedy = f"give this user the right to write there and {_size(least)} of space, or name another with {option}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path, prefix="check-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = free_bytes(path)
    except OSError as error:
        return Finding(name, False, f"{path}: {error.strerror}", remedy)
    return Finding(name, free >= least, f"{path}, {_size(free)} free", remedy)


async def coordinator(config: AgentConfig, capabilities: Capabilities) -> Finding:
    """Register under a name that is used once, and leave."""
    client = AgentClient(config, f"check-{secrets.token_hex(6)}", secrets.token_hex(16))
    try:
        answer = await client.register(capabilities.to_json())
        await client.renew(Heartbeat((), None, True, 0), "checking", leaving=True)
    except FedevalError as error:
        remedy = "start `eval-coordinator serve`, or name its address with --coordinator"
        return Finding("coordinator", False, str(error), remedy)
    finally:
        await client.close()
    spoken = f"protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}"
    return Finding("coordinator", True, f"{config.coordinator} is {answer.coordinator} ({spoken})")


async def engine(config: AgentConfig, log: Logger) -> Finding:
    """Start a worker and ask its engine what really works here."""
    executor = Executor(config, WorkerLog(None), log)
    try:
        facts = await executor.probe()
    except FedevalError as error:
        return Finding("engine", False, str(error), "pip install 'fedeval[agent]', then look at the lines above")
    finally:
        await executor.close()
    dtypes = facts.get("dtypes", [])
    detail = f"{facts.get('device')}, dtypes that work: {', '.join(dtypes) or 'none'}, {facts.get('threads')} threads"
    return Finding("engine", bool(dtypes), detail, "no dtype multiplies on this device: choose another with --device")


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
