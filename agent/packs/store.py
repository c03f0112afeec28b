"""Packs on this agent's disk: found by shard, named by digest, the least used ones dropped when there are too many."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from eval_kernel.errors import DirectoryUnusable


@dataclass(frozen=True, slots=True)
class Stored:
    """One pack: its digest, which is its file's name, and its size in bytes."""

    name: str
    size: int


class PackStore:
    """Begins empty: what a life before has left is cheaper made anew than judged."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        """Make the directory, empty. Raises ``DirectoryUnusable``."""
        self.directory = directory
        self._most = most_bytes
        self._packs: OrderedDict[Hashable, Stored] = OrderedDict()  # least recently used first
        self.bytes = 0
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryUnusable(
                f"the directory for packs {directory} cannot be made ({error.strerror}); name another with --state"
            ) from None

    def __contains__(self, key: Hashable) -> bool:
        """Whether a shard's pack is there; that is no use of it."""
        return key in self._packs

    def __len__(self) -> int:
        """The number of packs."""
        return len(self._packs)

    def add(self, key: Hashable, name: str, size: int) -> None:
        """Take note of a pack whose file is in the directory; others go until all fit, never this one."""
        self._forget(key, keep=name)
        self._packs[key] = Stored(name, size)
        self.bytes += size
        while self.bytes > self._most and len(self._packs) > 1:
            self._forget(next(iter(self._packs)))

    def read(self, key: Hashable) -> tuple[Stored, bytes] | None:
        """Return a pack with its bytes; ``None`` if it is not there, or its file cannot be read any more."""
        found = self._packs.get(key)
        if found is None:
            return None
        self._packs.move_to_end(key)
        try:
            return found, (self.directory / found.name).read_bytes()
        except OSError:
            self._forget(key)  # it is made again
            return None

    def _forget(self, key: Hashable, keep: str = "") -> None:
        old = self._packs.pop(key, None)
        if old is None:
            return
        self.bytes -= old.size
        # Shards of jobs with the same text share a file.
        if old.name != keep and all(other.name != old.name for other in self._packs.values()):
            (self.directory / old.name).unlink(missing_ok=True)
