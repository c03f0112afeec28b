"""The data directory as one process's own: made, locked, and remembered how far its journal had come.

Nothing here knows what a journal holds. The lock is the kernel's (``flock``): it ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from eval_kernel.errors import DirectoryLocked, DirectoryUnusable, JournalFull

LOCK = "lock"
HEAD = "head"


def from_os(error: OSError, what: str) -> DirectoryUnusable | JournalFull:
    """Return what an ``OSError`` about the data directory means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(f"{what}: no space is left; free some on that file system")
    reason = error.strerror or type(error).__name__
    return DirectoryUnusable(f"{what}: {reason}; name a directory this user can write, with --data-dir")


class Directory:
    """A locked directory. ``close`` unlocks it."""

    def __init__(self, path: Path) -> None:
        """Make it if need be, and lock it. Raises ``DirectoryLocked``, ``DirectoryUnusable``, ``JournalFull``."""
        self.path = path
        self._closed = False
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise from_os(error, f"cannot use the data directory {path}") from None
        try:
            self._take()
            self._head = os.open(path / HEAD, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            os.close(self._lock)
            raise from_os(error, f"cannot use the data directory {path}") from None
        except DirectoryLocked:
            os.close(self._lock)
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise DirectoryLocked(
                f"the data directory {self.path} belongs to the running process {pid}; "
                "stop that one, or name another directory with --data-dir"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def head(self) -> int:
        """How many facts were durable when that was last noted; 0 where no note can be read."""
        try:
            return int(os.pread(self._head, 32, 0))
        except ValueError:
            return 0

    def note_head(self, count: int) -> None:
        """Note how many facts are durable. Not synced: the note may be old after a power cut, never too new."""
        # The facts themselves are safe already; a note that cannot be written only guards less.
        with suppress(OSError):
            os.pwrite(self._head, f"{count:020d}\n".encode(), 0)

    def sync(self) -> None:
        """Make names in the directory durable."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Unlock the directory; may be repeated."""
        if not self._closed:
            self._closed = True
            os.close(self._head)
            os.close(self._lock)
