"""What a person does with a journal between two runs: verify it, copy it while it is in use, put a copy in its place.

What to do with one that is damaged is salvage's.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from coordinator.core.calls import SchedulerConfig
from coordinator.core.facts import Fact
from coordinator.core.scheduler import Scheduler
from coordinator.journal.directory import HEAD, Directory, from_os
from coordinator.journal.sqlite import (
    FILE,
    check_head,
    copy_whole,
    identity_of,
    look_at_header,
    translate,
    verified,
)
from eval_kernel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class JobSummary:
    """Where a job of a journal stands."""

    job: str
    state: str
    shards: int
    shards_done: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a journal, every row verified and every fact applied."""

    path: Path | str  # a file; a database, without its password
    identity: str
    facts: int
    jobs: tuple[JobSummary, ...]


def summary(path: Path | str, identity: str, facts: int, scheduler: Scheduler) -> Summary:
    """Return what a journal's facts came to, oldest job first."""
    views = reversed(scheduler.jobs())
    jobs = tuple(JobSummary(view.job, view.state.name, view.shards, view.shards_done) for view in views)
    return Summary(path, identity, facts, jobs)


def verify(data_dir: Path) -> Summary:
    """Read every row of a data directory's journal, also while a coordinator uses it.

    Raises ``ConfigError`` where there is none, ``JournalCorrupt``, ``JournalNewer``, ``DirectoryUnusable``.
    """
    path = journal_file(data_dir)
    with reading(path) as connection:
        return _verified(connection, path, _head(data_dir))


def backup(data_dir: Path, target: Path) -> Summary:
    """Copy the journal of a data directory to one file, verified; a coordinator may be at work on it meanwhile.

    Raises as ``verify``, and ``ConfigError`` for a target that exists.
    """
    path = journal_file(data_dir)
    if target.exists():
        raise ConfigError(f"{target} exists already; name another file")
    try:
        with reading(path) as connection:
            copy_whole(connection, target)
    except OSError as error:
        raise from_os(error, f"cannot write {target}") from None
    with reading(target) as connection:
        return _verified(connection, target, 0)


def restore(source: Path, data_dir: Path) -> Summary:
    """Put a backup in the place of a data directory's journal; what was there stays beside it.

    Raises ``ConfigError`` for a source that does not exist, ``DirectoryLocked`` while a coordinator runs, and as
    ``verify`` where the backup is not sound: then nothing was changed.
    """
    if not source.is_file():
        raise ConfigError(f"{source} is no file; name one that `eval-coordinator journal backup` made")
    with reading(source) as connection:
        found = _verified(connection, source, 0)
    directory = Directory(data_dir)
    try:
        with reading(source) as connection:
            new = directory.path / f"{FILE}.restored"
            copy_whole(connection, new)
        replace(directory, new, "replaced", found.facts)
    except OSError as error:
        raise from_os(error, f"cannot restore {directory.path / FILE}") from None
    finally:
        directory.close()
    return Summary(directory.path / FILE, found.identity, found.facts, found.jobs)


def replace(directory: Directory, new: Path, why: str, facts: int) -> Path | None:
    """Put a whole file in the journal's place and return where the old one is now, WAL and all.

    At every moment the directory holds the old journal, or one that a coordinator refuses, or the new one.
    """
    path = directory.path / FILE
    kept = None
    if path.exists():
        numbers = (directory.path / f"{FILE}.{why}-{number}" for number in range(1, 1 << 20))
        kept = next(name for name in numbers if not name.exists())
        for ending in ("", "-wal"):
            old = path.with_name(path.name + ending)
            if old.exists():
                os.link(old, kept.with_name(kept.name + ending))
    directory.sync()
    for ending in ("-wal", "-shm"):
        # Before the new file comes: SQLite would take the old one's WAL for the new one's.
        path.with_name(path.name + ending).unlink(missing_ok=True)
    directory.sync()
    new.replace(path)
    directory.note_head(facts)
    directory.sync()
    return kept


def journal_file(data_dir: Path) -> Path:
    """Return the file of a data directory's journal; raises ``ConfigError`` where there is none."""
    path = data_dir / FILE
    if not path.exists():
        raise ConfigError(f"{data_dir} holds no journal ({FILE}); name the coordinator's directory with --data-dir")
    return path


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a journal to read it. One that nobody uses and that has no WAL is not touched at all."""
    look_at_header(path)
    still = not path.with_name(f"{path.name}-wal").exists()
    uri = f"file:{quote(str(path))}?mode=ro" + ("&immutable=1" if still else "")
    try:
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=5.0)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise translate(error, path) from None


def _verified(connection: sqlite3.Connection, path: Path, head: int) -> Summary:
    connection.execute("BEGIN")  # one state of it, whatever is appended meanwhile
    identity = identity_of(connection, path)
    scheduler = Scheduler(SchedulerConfig())
    count = 0

    def counted() -> Iterator[Fact]:
        nonlocal count
        for fact in verified(connection, path, identity):
            count += 1
            yield fact

    scheduler.replay(counted())
    check_head(path, count, head)
    return summary(path, identity, count, scheduler)


def _head(data_dir: Path) -> int:
    """Read the note of how many facts were durable: before the rows, so that they can only be more."""
    try:
        return int((data_dir / HEAD).read_text("ascii"))
    except (OSError, ValueError):
        return 0
