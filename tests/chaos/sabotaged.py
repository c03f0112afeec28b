"""A coordinator with one protection taken out, for the controls: ``python -m tests.chaos.sabotaged NAME serve ...``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from coordinator import cli
from coordinator.committer import Committer
from coordinator.core import results
from coordinator.core.facts import Fact
from coordinator.core.results import Results
from coordinator.core.states import JobState
from coordinator.journal.sqlite import SqliteJournal


def _told_before_written() -> None:
    """Answers do not wait for the disk, and the disk takes its time."""
    original = SqliteJournal.append

    def append(self: SqliteJournal, facts: Sequence[Fact]) -> None:
        time.sleep(0.5)
        original(self, facts)

    async def barrier(self: Committer, number: int | None = None, *, patient: bool = False) -> None:
        await asyncio.sleep(0)

    SqliteJournal.append = append  # type: ignore[method-assign]
    Committer.barrier = barrier  # type: ignore[method-assign]


def _counted_twice() -> None:
    """A shard that comes again is added again; the journal's own word that it is counted once is gone too."""
    original = Results.scored

    def scored(self: Results, agent: str, incarnation: str, job: str, scored: Any, now: float) -> Any:
        found = self._board.jobs.get(job)
        if found is not None and found.state is JobState.RUNNING:
            found.commits.pop(scored.partial.shard, None)
        return original(self, agent, incarnation, job, scored, now)

    results.Results.scored = scored  # type: ignore[method-assign]


SABOTAGE = {"told-before-written": _told_before_written, "counted-twice": _counted_twice}


def command(name: str) -> tuple[str, ...]:
    """Return what Python is told to run in place of the coordinator."""
    return ("-m", "tests.chaos.sabotaged", name)


if __name__ == "__main__":
    SABOTAGE[sys.argv.pop(1)]()
    cli.main()
