"""What `eval-coordinator serve` was told: checked at birth, frozen ever after. Reads no file and opens no port."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from fedeval.wire.channel import is_loopback

from coordinator.core.calls import SchedulerConfig
from eval_kernel.errors import ConfigError

#: Where the coordinator listens, and where its clients look for it, unless told otherwise.
DEFAULT_ADDRESS = "127.0.0.1:50051"
#: Environment variable with the coordinator's address, for every client command.
ADDRESS_VARIABLE = "FEDEVAL_COORDINATOR"
#: How long the certificates of those who join are good, unless told otherwise.
CERTIFICATE_LIFE = timedelta(days=7)
_HOST = re.compile(r"[A-Za-z0-9:._-]{1,253}")
#: Environment variable with the journal's URL: unlike the option, it is not seen in a list of processes.
JOURNAL_VARIABLE = "FEDEVAL_JOURNAL"
#: What ``default_data_dir`` says, for people.
DATA_DIR_TEXT = "fedeval in $XDG_DATA_HOME, or in ~/.local/share"


def default_data_dir() -> Path:
    """Return the XDG data home's ``fedeval`` directory."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "fedeval"


def checked_address(address: str, *, listening: bool) -> str:
    """Return ``address`` if it is ``host:port``, with port 0 only for ``listening``. Raises ``ConfigError``."""
    host, colon, port = address.rpartition(":")
    if not colon or not host.strip("[]") or not port.isascii() or not port.isdigit():
        raise ConfigError(f"the address {address!r} is not HOST:PORT; write for example {DEFAULT_ADDRESS}")
    lowest = 0 if listening else 1
    if not lowest <= int(port) <= 65535:
        raise ConfigError(f"the port of {address!r} is outside {lowest} to 65535")
    return address


def checked_journal(url: str) -> str:
    """Return ``url`` if it is one of PostgreSQL; the text of the ``ConfigError`` never repeats it."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            "the journal's URL does not begin with postgresql://; write postgresql://USER@HOST:PORT/DATABASE, or leave "
            "--journal out for a file in --data-dir"
        )
    return url


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The runtime's durations, in seconds. Raises ``ConfigError`` for one that is not positive."""

    tick: float = 0.5  # how often overdue heartbeats and leases are looked for
    barrier: float = 5.0  # how long an RPC waits for the journal before it answers UNAVAILABLE
    journal_retry: float = 0.5  # between attempts while the journal has no space
    watch_interval: float = 0.25  # least time between two messages of one watch
    long_poll: float = 30.0  # the longest an Acquire may wait
    grace: float = 2.0  # for calls in flight, when stopping
    drain: float = 2.0  # for facts not yet written, when stopping

    def __post_init__(self) -> None:
        """Check each duration."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value < 3600:
                raise ConfigError(f"{name} is {value} seconds; it must be above 0 and below 3600")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How one coordinator serves. Raises ``ConfigError`` for what makes no sense."""

    listen: str = DEFAULT_ADDRESS
    enrolment: str = ""  # where nodes join, with TLS; "": on the same host, one port higher
    advertise: tuple[str, ...] = ()  # names and addresses by which others call this machine
    tls: str = "auto"  # auto: off this machine; always; never
    certificate_life: timedelta = CERTIFICATE_LIFE
    data_dir: Path = field(default_factory=default_data_dir)
    journal: str | None = field(
        default=None, repr=False
    )  # a PostgreSQL URL, perhaps with a password; None: in data_dir
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    timings: Timings = field(default_factory=Timings)

    def __post_init__(self) -> None:
        """Check the address and the directory; the other parts have checked themselves."""
        checked_address(self.listen, listening=True)
        if self.tls not in ("auto", "always", "never"):
            raise ConfigError(f"--tls {self.tls}: use auto, always or never")
        if self.tls == "never" and not is_loopback(self.listen):
            port = self.listen.rpartition(":")[2]
            raise ConfigError(
                f"{self.listen} is not a loopback address: listening beyond this machine needs mutual TLS; leave out "
                f"--tls never, or use 127.0.0.1:{port}"
            )
        checked_address(self.enrolment_address, listening=True)
        for host in self.advertise:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--advertise {host}: a host name or an IP address is wanted, without a port")
        if not timedelta(seconds=1) <= self.certificate_life <= timedelta(days=398):
            raise ConfigError("a certificate is good for 1 second to 398 days")
        if self.data_dir.exists() and not self.data_dir.is_dir():
            raise ConfigError(f"the data directory {self.data_dir} is a file; name a directory with --data-dir")
        if self.journal is not None:
            checked_journal(self.journal)

    @property
    def secure(self) -> bool:
        """Whether it asks for certificates."""
        return self.tls == "always" or (self.tls == "auto" and not is_loopback(self.listen))

    @property
    def enrolment_address(self) -> str:
        """Where nodes join."""
        host, _, port = self.listen.rpartition(":")
        return self.enrolment or f"{host}:{int(port) and int(port) + 1}"


def scheduler_config(heartbeat_seconds: float, lease_seconds: float) -> SchedulerConfig:
    """Return the scheduler's configuration for a heartbeat and a lease; raises ``ConfigError``."""
    if not 0.05 <= heartbeat_seconds <= 600:
        raise ConfigError(f"heartbeat is {heartbeat_seconds:g} seconds; allowed: 0.05 to 600")
    if not 2 * heartbeat_seconds <= lease_seconds <= 86_400:
        raise ConfigError(
            f"lease is {lease_seconds:g} seconds; it must be at least twice the heartbeat ({heartbeat_seconds:g} s) "
            f"and at most a day, or healthy agents lose their work"
        )
    return SchedulerConfig(
        heartbeat_seconds=heartbeat_seconds,
        lease_seconds=lease_seconds,
        suspect_after_seconds=min(3 * heartbeat_seconds, lease_seconds),
    )
