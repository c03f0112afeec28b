"""Makes a sound journal of a damaged one: rows that prove themselves are kept, what they do not add up to is dropped.

A lost partial is only a shard to be scored again, so this always comes to a correct state: each job is as far as its
sound rows say. What cannot be known any more is decided for doing the work again.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.core import facts as f
from coordinator.core.calls import SchedulerConfig
from coordinator.core.facts import Fact
from coordinator.core.scheduler import Scheduler
from coordinator.journal.base import Row, chained, decode, seed_of
from coordinator.journal.directory import Directory, from_os
from coordinator.journal.sqlite import FILE, look_at_header, open_journal
from coordinator.journal.upkeep import Summary, journal_file, replace, summary
from eval_kernel.errors import FedevalError, JournalCorrupt, JournalNewer

#: Rows in a row that may be unreadable before the end is believed, where nothing says how many there were.
MAX_GAP = 10_000
#: Tries of shards and of planning: begun anew for a job of which something was lost.
_TRIES = (f.ShardFailed, f.ShardExpired, f.PlanFailed, f.PlanExpired)


@dataclass(frozen=True, slots=True)
class Salvaged:
    """What came of it. ``lost`` are rows that were damaged or missing; ``dropped`` sound ones that need a lost one."""

    summary: Summary
    kept: int
    lost: tuple[int, ...]
    dropped: int
    damaged: Path  # the old file


@dataclass(frozen=True, slots=True)
class _Stored:
    seq: int
    row: Row | None  # None: no text; its checksum may still prove the next one
    checksum: bytes


def salvage(data_dir: Path) -> Salvaged:
    """Put a sound journal in the place of a data directory's damaged one, which stays beside it.

    Raises ``ConfigError`` where there is none, ``DirectoryLocked`` while a coordinator runs, ``JournalNewer``,
    ``JournalFull``, ``DirectoryUnusable``.
    """
    path = journal_file(data_dir)
    directory = Directory(data_dir)
    try:
        identity, stored, last = _read(path, directory.head)
        sound = dict(_sound(stored, identity))
        lost = tuple(seq for seq in range(1, last + 1) if seq not in sound)
        facts = list(sound.values())
        kept, scheduler = _consistent(facts, anything_lost=bool(lost))
        scheduler.check()
        name, damaged = _write(directory, identity, kept)
        found = summary(path, name, len(kept), scheduler)
        return Salvaged(found, len(kept), lost, len(facts) - len(kept), damaged)
    except OSError as error:
        raise from_os(error, f"cannot write beside {path}") from None
    finally:
        directory.close()


# ---------------------------------------------------------------- reading what can be read


def _read(path: Path, head: int) -> tuple[str | None, list[_Stored], int]:
    """Return the identity, the rows that can be read at all, and the number of the last row there was."""
    try:
        look_at_header(path)
    except JournalNewer:
        raise
    except JournalCorrupt:
        pass  # SQLite may still make something of it
    rows: list[_Stored] = []
    identity = None
    try:
        connection = sqlite3.connect(path, isolation_level=None, timeout=5.0)
    except sqlite3.Error:
        return None, [], head
    try:
        connection.text_factory = bytes  # a damaged text may be no UTF-8
        connection.execute("PRAGMA trusted_schema=OFF")
        found = _one(connection, "SELECT value FROM meta WHERE name = 'identity'")
        identity = _text(found[0]) if found else None
        highest = _one(connection, "SELECT max(seq) FROM fact")
        last = max(head, highest[0] if highest and isinstance(highest[0], int) else 0)
        seq = gap = 0
        while seq < last or (not last and gap < MAX_GAP):
            seq += 1
            row = _one(connection, "SELECT kind, job, shard, body, checksum FROM fact WHERE seq = ?", seq)
            item = None if row is None else _item(seq, row)
            gap = 0 if item is not None else gap + 1
            if item is not None:
                rows.append(item)
    finally:
        connection.close()
    return identity, rows, max(last, rows[-1].seq if rows else 0)


def _one(connection: sqlite3.Connection, statement: str, *values: object) -> tuple[object, ...] | None:
    """Return the first row of a query; ``None`` where there is none or the file is damaged there."""
    try:
        row: tuple[object, ...] | None = connection.execute(statement, values).fetchone()
    except sqlite3.Error:
        return None
    return row


def _text(value: object) -> str | None:
    if not isinstance(value, bytes):
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _item(seq: int, row: tuple[object, ...]) -> _Stored | None:
    kind, job, body = (_text(row[column]) for column in (0, 1, 3))
    shard, checksum = row[2], row[4]
    if not isinstance(checksum, bytes):
        return None
    if kind is None or job is None or body is None or not isinstance(shard, int | None):
        return _Stored(seq, None, checksum)
    return _Stored(seq, Row(kind, job, shard, body), checksum)


# ---------------------------------------------------------------- believing what proves itself


def _sound(rows: list[_Stored], identity: str | None) -> Iterator[tuple[int, Fact]]:
    """Yield the facts, and their rows' numbers, whose checksum fits: chained to the row before, stored or computed.

    A row whose own checksum was hit is proven by the next one, which is chained to it.
    """
    before: tuple[int, set[bytes]] = (0, {seed_of(identity)} if identity else set())
    by_seq = {item.seq: item for item in rows}
    for item in rows:
        computed: set[bytes] = set()
        if item.row is not None:
            previous = before[1] if before[0] == item.seq - 1 else set()
            computed = {chained(link, item.seq, item.row) for link in previous}
            if item.checksum in computed or _continued(computed, by_seq.get(item.seq + 1)):
                fact = _decoded(item.row)
                if fact is not None:
                    yield item.seq, fact
        before = item.seq, {item.checksum, *computed}


def _continued(computed: set[bytes], following: _Stored | None) -> bool:
    if following is None or following.row is None:
        return False
    return any(chained(link, following.seq, following.row) == following.checksum for link in computed)


def _decoded(row: Row) -> Fact | None:
    try:
        return decode(row, "a row")
    except JournalCorrupt:  # its number of a shard is in no checksum
        return None


# ---------------------------------------------------------------- keeping what makes sense


def _consistent(facts: list[Fact], *, anything_lost: bool) -> tuple[list[Fact], Scheduler]:
    """Return the facts that can follow each other, and what they come to."""
    kept, scheduler = _replayed(facts)
    if not anything_lost and len(kept) == len(facts):
        return kept, scheduler
    # A lost row may have been the end of an unsettled job's last shard, or of its tries: these begin anew, so that the
    # job can go on and come to an end by itself.
    unsettled = {view.job for view in scheduler.jobs() if not view.state.settled}
    return _replayed([fact for fact in kept if not (fact.job in unsettled and isinstance(fact, _TRIES))])


def _replayed(facts: list[Fact]) -> tuple[list[Fact], Scheduler]:
    scheduler = Scheduler(SchedulerConfig())
    kept: list[Fact] = []
    for fact in facts:
        try:
            if isinstance(fact, f.ShardDiverged) and all(c.shard != fact.shard for c in scheduler.commits(fact.job)):
                continue  # it differs from something that is gone
            scheduler.apply(fact)
        except (KeyError, IndexError, ValueError, FedevalError):
            continue  # what it follows is gone
        kept.append(fact)
    return kept, scheduler


def _write(directory: Directory, identity: str | None, facts: list[Fact]) -> tuple[str, Path]:
    """Write the facts as a new journal under the old identity, and put it in the old one's place."""
    workshop = directory.path / "salvage"
    shutil.rmtree(workshop, ignore_errors=True)
    journal = open_journal(workshop, identity)
    try:
        journal.append(facts)
        name = journal.identity
    finally:
        journal.close()
    damaged = replace(directory, workshop / FILE, "damaged", len(facts))
    shutil.rmtree(workshop, ignore_errors=True)
    assert damaged is not None, "there was a journal"
    return name, damaged
