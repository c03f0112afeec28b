"""What `eval-agent` was told: checked at birth, frozen ever after. Touches no disk and opens no port."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from fedeval.wire.channel import is_loopback

from eval_kernel.errors import ConfigError

#: Where the coordinator is looked for unless told otherwise, and the environment variable that tells.
DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "FEDEVAL_COORDINATOR"
#: Where a relay listens for its site unless told otherwise.
DEFAULT_LISTEN = "127.0.0.1:50052"
#: Where an agent that prepares packs for its site serves them (port 0: any free one), and the disk that it may use.
DEFAULT_PACK_LISTEN, DEFAULT_PACK_DISK_BYTES = "127.0.0.1:0", 1 << 30
#: The engine that makes packs.
PACK_ENGINE = "eval_kernel.packer:Packer"
#: The worker's engine: import path and class.
DEFAULT_ENGINE = "eval_kernel.engine:Engine"
#: The engine of a node that scores with several ranks at once.
GROUP_ENGINE = "eval_kernel.parallel.group:GroupEngine"

#: Ranks give a sign of life every second; a busy machine may delay one.
LEAST_WATCHDOG_SECONDS = 3.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class Role(Enum):
    """What an agent may be asked to do."""

    FORWARD = "forward"
    PREPROCESS = "preprocess"
    AGGREGATE = "aggregate"


def usable_cpus() -> int:
    """Return the number of processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_state(name: str | None) -> Path:
    """Return the XDG state home's directory for an agent; each named agent has its own."""
    base = os.environ.get("XDG_STATE_HOME")
    root = (Path(base) if base else Path.home() / ".local" / "state") / "fedeval"
    return root / ("agent" if name is None else f"agent-{name}")


def default_cache() -> Path:
    """Return the XDG cache home's ``fedeval`` directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedeval"


def default_roots() -> tuple[Path, ...]:
    """Return the directories jobs may read from unless told otherwise: the home and the working directory."""
    return tuple(dict.fromkeys((Path.home(), Path.cwd())))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How one agent runs. Raises ``ConfigError`` for what makes no sense.

    ``state`` holds the spool, the name and the lock, and belongs to one agent; ``cache`` may be shared.
    ``name`` is ``None`` for "host name and a few random characters, kept in the state directory".
    """

    coordinator: str = DEFAULT_ADDRESS
    name: str | None = None
    site: str = "default"
    roles: tuple[Role, ...] = (Role.FORWARD, Role.PREPROCESS)
    membership: Path | None = None  # the file that joining made; None: the coordinator is this user's, on this machine
    listen: str = DEFAULT_LISTEN  # where an agent with the role AGGREGATE is called by its site; port 0: any free one
    pack_listen: str = DEFAULT_PACK_LISTEN  # where an agent that prepares packs for others serves them
    pack_disk_bytes: int = DEFAULT_PACK_DISK_BYTES  # that it may use for them
    state: Path = field(default_factory=lambda: default_state(None))
    cache: Path = field(default_factory=default_cache)
    roots: tuple[Path, ...] = field(default_factory=default_roots)
    device: str = "auto"
    threads: int = field(default_factory=usable_cpus)
    ranks: int = 1  # processes that score one shard together: one a GPU, or a share of the threads each
    watchdog_seconds: float = 10.0  # silence of one of several ranks after which the group is dissolved
    hang_seconds: float = 300.0  # silence of a busy worker after which it counts as hung
    drain_seconds: float = 30.0  # what the running shard gets to end when the agent is asked to stop
    give_up_after: float | None = None  # seconds without an answer from the coordinator; None: knock for ever
    engine: str = DEFAULT_ENGINE

    def __post_init__(self) -> None:
        """Check every value."""
        joined = self.membership is not None
        _check_address(self.coordinator, "the coordinator's address", joined)
        _check_address(self.listen, "the relay's address", joined, lowest=0)
        _check_address(self.pack_listen, "the address for packs", False, lowest=0)
        if self.pack_disk_bytes < 1 << 20:
            raise ConfigError(f"pack-disk-mb is {self.pack_disk_bytes >> 20}; it must be 1 or more")
        for what, value in (("name", self.name), ("site", self.site)):
            if value is not None and not _NAME.fullmatch(value):
                raise ConfigError(
                    f"the {what} {value!r} is not allowed; use 1 to 100 letters, digits, '.', '_' or '-', "
                    f"beginning with a letter or digit"
                )
        if not self.roles:
            raise ConfigError(f"an agent needs a role; allowed: {', '.join(role.value for role in Role)}")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"the device {self.device!r} is unknown; allowed: auto, cpu, cuda, cuda:N")
        if not 1 <= self.threads <= 4096:
            raise ConfigError(f"threads is {self.threads}; allowed: 1 to 4096")
        if not 1 <= self.ranks <= self.threads:
            raise ConfigError(
                f"ranks is {self.ranks}; allowed: 1 to {self.threads}, the number of threads, since each needs one"
            )
        if self.watchdog_seconds < LEAST_WATCHDOG_SECONDS:
            raise ConfigError(
                f"watchdog-seconds is {self.watchdog_seconds}; it must be {LEAST_WATCHDOG_SECONDS:g} or more, since "
                "a rank gives a sign of life every second"
            )
        for option, seconds in (
            ("watchdog-seconds", self.watchdog_seconds),
            ("hang-seconds", self.hang_seconds),
            ("drain-seconds", self.drain_seconds),
            ("give-up-after", self.give_up_after),
        ):
            if seconds is not None and not 0 < seconds <= 86_400 * 30:
                raise ConfigError(f"{option} is {seconds}; it must be above 0 and at most 30 days")
        module, colon, name = self.engine.partition(":")
        if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
            raise ConfigError(f"the engine {self.engine!r} is not MODULE:CLASS; the default is {DEFAULT_ENGINE}")
        for what, path in (("state", self.state), ("cache", self.cache)):
            if path.exists() and not path.is_dir():
                raise ConfigError(f"the {what} directory {path} is a file; name a directory with --{what}")

    @property
    def serves_packs(self) -> bool:
        """Whether this agent prepares packs for others: one that scores makes what it needs itself."""
        return Role.PREPROCESS in self.roles and Role.FORWARD not in self.roles

    @property
    def worker_engine(self) -> str:
        """The engine that a worker runs: that of groups where there are several ranks."""
        return GROUP_ENGINE if self.ranks > 1 and self.engine == DEFAULT_ENGINE else self.engine


def _check_address(address: str, what: str, joined: bool, lowest: int = 1) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host.strip("[]") or not port.isascii() or not port.isdigit():
        raise ConfigError(f"{what} {address!r} is not HOST:PORT; write for example {DEFAULT_ADDRESS}")
    if not lowest <= int(port) <= 65535:
        raise ConfigError(f"the port of {address!r} is outside {lowest} to 65535")
    if not joined and not is_loopback(address):
        raise ConfigError(
            f"{address} is not a loopback address, and this node has joined no coordinator; run `eval-agent join` "
            f"with a join string from `eval-coordinator token create`, or use 127.0.0.1:{port}"
        )
