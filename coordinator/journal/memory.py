"""A journal in memory, for tests and the simulator: same rules, same rows, gone with the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.core.facts import Fact, ShardCommitted
from coordinator.journal.base import Row, decode, encode
from eval_kernel.errors import JournalCorrupt, JournalFull


class MemoryJournal:
    """Rows in a list. ``room`` is how many facts fit; beyond it the journal is full, as a disk would be."""

    def __init__(self, identity: str, room: int | None = None) -> None:
        """Begin empty; nothing here is random, so the identity is given."""
        self._identity = identity
        self._rows: list[Row] = []
        self._commits: set[tuple[str, int | None]] = set()
        self.room = room

    @property
    def identity(self) -> str:
        """The name given at birth."""
        return self._identity

    @property
    def count(self) -> int:
        """How many facts are in it."""
        return len(self._rows)

    def facts(self) -> Iterator[Fact]:
        """Yield every fact in order, decoded from its row."""
        for number, row in enumerate(list(self._rows), start=1):
            yield decode(row, f"fact {number} of the journal in memory")

    def append(self, facts: Sequence[Fact]) -> None:
        """Keep the facts, all of them or none. Raises ``JournalFull``; ``JournalCorrupt`` for a second commit."""
        rows = [encode(fact) for fact in facts]
        commits = [(row.job, row.shard) for row in rows if row.kind == ShardCommitted.kind]
        for number, commit in enumerate(commits):
            if commit in self._commits or commit in commits[:number]:
                raise JournalCorrupt(
                    f"shard {commit[1]} of job {commit[0]} is committed already: the journal keeps the first"
                )
        if self.room is not None and len(self._rows) + len(rows) > self.room:
            raise JournalFull(f"the journal in memory has room for {self.room} facts; nothing was written")
        self._commits.update(commits)
        self._rows += rows

    def close(self) -> None:
        """Do nothing: a test goes on reading what a process before it wrote."""
