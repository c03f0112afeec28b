"""What a caller shows to prove who it is, and the files that hold it; knows no channel and no server.

One JSON file for each way to be known, with mode 0600: what a coordinator or relay publishes for its own user on its
own machine (``local_path``), and what joining a coordinator has given a node or a person.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval_kernel.errors import ConfigError, DirectoryUnusable

#: Environment variable with an API token, for every command.
TOKEN_VARIABLE = "FEDEVAL_TOKEN"
#: Metadata key under which a token travels, and what stands before it.
TOKEN_KEY, TOKEN_PREFIX = "authorization", "Bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """A token, and for TLS the trusted roots with this caller's certificate and key (PEM). All empty: nobody."""

    token: str = ""
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""

    def to_json(self) -> dict[str, str]:
        """Return what a file holds."""
        texts = {"ca": self.ca.decode(), "certificate": self.certificate.decode(), "key": self.key.decode()}
        return {name: text for name, text in {"token": self.token, **texts}.items() if text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Credentials:
        """Return what a file held. Raises ``ValueError``."""
        texts = {name: value.get(name, "") for name in cls.__slots__}
        if not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("a token or a PEM block is no text")
        return cls(texts.pop("token"), **{name: text.encode() for name, text in texts.items()})


#: Says what to show now: asked before each call, so that what was renewed takes effect by itself.
Source = Callable[[], Credentials]
NOBODY = Credentials()


def state_home() -> Path:
    """Return the XDG state home's ``fedeval`` directory."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedeval"


def local_path(address: str) -> Path:
    """Return the file in which whoever listens on ``host:port`` puts what its own user shows."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]").lower()
    host = {"localhost": "127.0.0.1", "0.0.0.0": "any", "::": "any"}.get(host, host)
    return state_home() / "listening" / f"{host.replace(':', '.')}_{port}.json"


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only this user reads: durably, and whole or not at all. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory durable. Raises ``OSError``."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of credentials. Raises ``OSError``."""
    write_private(path, json.dumps(value).encode())


def publish(address: str, credentials: Credentials) -> None:
    """Let this user's own agents and commands on this machine in. Raises ``DirectoryUnusable``."""
    path = local_path(address)
    try:
        write(path, credentials.to_json())
    except OSError as error:
        raise DirectoryUnusable(
            f"cannot write {path} ({error.strerror}), by which agents and commands of this user are let in; "
            "set XDG_STATE_HOME to a directory that this user can write"
        ) from None


def withdraw(address: str) -> None:
    """Take back what was published."""
    with suppress(OSError):  # what is left behind opens nothing: the next one who listens makes a new token
        local_path(address).unlink()


class FileSource:
    """Credentials in the first of some files that is there, read again whenever it has changed."""

    def __init__(self, *paths: Path) -> None:
        """Nothing is read yet."""
        self._paths = paths
        self._seen: tuple[Path, int, int] | None = None
        self._read = NOBODY

    def __call__(self) -> Credentials:
        """Return what the file holds now; what was read last where there is none. Raises ``ConfigError``."""
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                continue
            seen = (path, status.st_ino, status.st_mtime_ns)
            if seen != self._seen:
                self._read = Credentials.from_json(read(path))
                self._seen = seen
            break
        return self._read


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of credentials. Raises ``ConfigError`` if others can read it, or it is none."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(1 << 20)
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror})") from None
    private(path, mode)
    try:
        value = json.loads(data)
        Credentials.from_json(value)
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{path} holds no credentials; remove it, and join or start again") from None
    return dict(value)


def private(path: Path, mode: int) -> None:
    """Raise ``ConfigError`` for a file that other users can read or write."""
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path} holds a secret and is open to other users; run: chmod 600 {path}")


def local_source(address: str) -> FileSource:
    """Return the source of what was published for an address by its listener."""
    port = address.rpartition(":")[2]
    return FileSource(local_path(address), local_path(f"0.0.0.0:{port}"))


def joined_path(address: str) -> Path:
    """Return the file with a person's membership in the coordinator at an address."""
    return state_home() / "joined" / local_path(address).name


def token_path() -> Path:
    """Return the file with a person's API token."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "fedeval" / "token"


def user_source(address: str) -> Source:
    """Return the source of what a person's commands show.

    The token of the environment, else what the listener published for its own user, else the token file. The source
    raises ``ConfigError`` for a file that other users can read.
    """
    port = address.rpartition(":")[2]
    files = FileSource(local_path(address), local_path(f"0.0.0.0:{port}"), joined_path(address))

    def shown() -> Credentials:
        found = files()
        token = os.environ.get(TOKEN_VARIABLE, "").strip() or found.token or _token_file()
        return replace(found, token=token)

    return shown


def _token_file() -> str:
    path = token_path()
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    private(path, mode)
    return text.strip()
