"""What outlives the agent: its state directory (lock, name) and the spool of unacknowledged results.

One file per result, written to a temporary name, flushed, renamed, and the directory flushed: a file is whole
or absent. Whoever calls decides when; every method here blocks, and ``OSError`` means the disk refused.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_kernel.errors import DirectoryLocked, DirectoryUnusable
from eval_kernel.partial import Execution, Partial, ScoredShard
from eval_kernel.plan import digest_json

_FORMAT = 1


@dataclass(frozen=True, slots=True, order=True)
class ResultKey:
    """Names a shard's result: the coordinator (its journal's identity), the job, the shard's index."""

    coordinator: str
    job: str
    shard: int


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """A result and where it belongs."""

    key: ResultKey
    scored: ScoredShard


@dataclass(frozen=True, slots=True)
class Corrupted:
    """An entry that could not be read; it was moved to ``moved_to`` and will not be sent."""

    file: str
    reason: str
    moved_to: Path


class StateDirectory:
    """An agent's own directory, held under a lock for as long as this object is open."""

    def __init__(self, path: Path) -> None:
        """Create and lock the directory. Raises ``DirectoryUnusable`` or ``DirectoryLocked``."""
        self.path = path
        self._lock = -1
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryUnusable(
                f"the state directory {path} cannot be used ({error.strerror}); name another one with --state"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.close()
            raise DirectoryLocked(
                f"the state directory {path} belongs to the running agent with pid {owner}; "
                f"stop that one, or give this agent its own with --name or --state"
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            # A full disk must not keep the agent from sending what it has: the pid is for people only.
            pass

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> StateDirectory:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Release the lock."""
        self.close()

    def name(self) -> str:
        """Return the name kept here, made once of host name and random. Raises ``DirectoryUnusable``."""
        file = self.path / "name"
        try:
            if file.exists() and (name := file.read_text("ascii").strip()):
                return name
            host = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in socket.gethostname())
            name = f"{host.strip('-_')[:60] or 'agent'}-{secrets.token_hex(3)}"
            _write_whole(file, (name + "\n").encode())
            _flush_directory(self.path)
            return name
        except (OSError, UnicodeDecodeError) as error:
            raise DirectoryUnusable(f"{file} cannot be read or written ({error}); name the agent with --name") from None


def remedy(error: OSError) -> str:
    """Return what a person can do about a spool that cannot be written; work goes on by itself afterwards."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "free space on that disk"
        case errno.EROFS:
            return "mount that disk writable"
        case errno.EACCES | errno.EPERM:
            return "give this user the right to write in that directory"
        case errno.ENOENT | errno.ENOTDIR | errno.EEXIST:
            return "make that directory again: something on its path was removed or is no directory"
        case _:
            return "repair that disk, or restart the agent with another --state"


class Spool:
    """Results on disk, from the moment they are computed to their durable acknowledgement."""

    def __init__(self, directory: Path) -> None:
        """Create the directory. Raises ``DirectoryUnusable``."""
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DirectoryUnusable(
                f"the spool {directory} cannot be made ({error.strerror}); name another place with --state"
            ) from None

    def put(self, entries: Iterable[SpoolEntry]) -> None:
        """Make the entries durable, and the directory anew if it is gone.

        Raises ``OSError``: then repeat with all of them.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for entry in entries:
            body = {
                "format": _FORMAT,
                "coordinator": entry.key.coordinator,
                "job": entry.key.job,
                "partial": entry.scored.partial.to_json(),
                "execution": entry.scored.execution.to_json(),
            }
            text = json.dumps({"body": body, "checksum": digest_json(body)}, separators=(",", ":"))
            _write_whole(self._file(entry.key), text.encode())
        _flush_directory(self.directory)

    def remove(self, keys: Iterable[ResultKey]) -> None:
        """Forget acknowledged entries. Not flushed: one that comes back is sent as a duplicate."""
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def load(self) -> tuple[list[SpoolEntry], list[Corrupted]]:
        """Return every whole entry, and what had to be moved aside; nothing if the directory is gone.

        Raises ``OSError``.
        """
        if not self.directory.exists():
            return [], []
        entries: list[SpoolEntry] = []
        corrupted: list[Corrupted] = []
        for path in sorted(self.directory.iterdir()):
            if path.suffix == ".tmp":
                path.unlink()  # a write that was cut short: its result was never promised to anyone
            elif path.suffix == ".json":
                try:
                    entry = _parse(path.read_bytes())
                    if path != self._file(entry.key):
                        raise ValueError("the file's name does not belong to its content")
                    entries.append(entry)
                except ValueError as error:
                    moved_to = path.with_suffix(".corrupt")
                    path.rename(moved_to)
                    corrupted.append(Corrupted(path.name, str(error), moved_to))
        return sorted(entries, key=lambda e: e.key), corrupted

    def _file(self, key: ResultKey) -> Path:
        # Job ids come from elsewhere: hashed, they cannot leave the directory or collide by letter case.
        name = hashlib.sha256(json.dumps([key.coordinator, key.job, key.shard]).encode()).hexdigest()
        return self.directory / f"{name[:40]}.json"


def _parse(text: bytes) -> SpoolEntry:
    """Return the entry of a file's content; raises ``ValueError`` with the reason."""
    try:
        data = json.loads(text)
        body: dict[str, Any] = data["body"]
        if data["checksum"] != digest_json(body):
            raise ValueError("the checksum does not match")
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']} is not {_FORMAT}")
        scored = ScoredShard(Partial.from_json(body["partial"]), Execution.from_json(body["execution"]))
        return SpoolEntry(ResultKey(body["coordinator"], body["job"], scored.partial.shard), scored)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a spool entry ({type(error).__name__}: {error})") from None


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk the half-written file would keep it full
        raise


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
