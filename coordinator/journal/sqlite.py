"""The journal as a SQLite file: WAL, ``synchronous=FULL``, one connection, each row's checksum chained to the last.

What SQLite itself does not notice is noticed here: a flipped bit or an exchanged row (checksums), rows that are
missing at the end because the WAL file was removed or an old copy put in place (the ``head`` note beside it).
"""

from __future__ import annotations

import os
import sqlite3
import struct
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from coordinator.core.facts import Fact
from coordinator.journal import base
from coordinator.journal.base import Row, chained, encode, seed_of
from coordinator.journal.directory import Directory, from_os
from eval_kernel.errors import DirectoryUnusable, FedevalError, JournalCorrupt, JournalFull, JournalNewer

FILE = "journal.db"
#: In the file's header, so that no other program's database is taken for a journal. ASCII "fdev".
APPLICATION_ID = 0x66646576
#: What brings a journal of version i to version i + 1; each runs in one transaction. Never changed, only added to.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        "CREATE TABLE fact (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, job TEXT NOT NULL, shard INTEGER, "
        "body TEXT NOT NULL, checksum BLOB NOT NULL)",
        # The database's own word that a shard is counted once.
        "CREATE UNIQUE INDEX one_commit ON fact (job, shard) WHERE kind = 'shard_committed'",
    ),
)
_BACKUP = "`eval-coordinator journal salvage` keeps what is sound, `journal restore` puts a backup in its place"


def open_journal(data_dir: Path, identity: str | None = None) -> SqliteJournal:
    """Open the journal of a data directory, making both if need be; ``identity`` is what a new one is called.

    An older format is brought to the present one, after a copy was put beside it.
    Raises ``DirectoryLocked``, ``DirectoryUnusable``, ``JournalNewer``, ``JournalCorrupt``, ``JournalFull``.
    """
    directory = Directory(data_dir)
    try:
        return SqliteJournal(directory, identity)
    except BaseException:
        directory.close()
        raise


class SqliteJournal:
    """An open journal; see ``base.Journal``. Made by ``open_journal``."""

    def __init__(self, directory: Directory, identity: str | None = None) -> None:
        """Open or make the file in a locked directory; raises as ``open_journal``."""
        self._directory = directory
        self._path = directory.path / FILE
        try:
            if not self._path.exists():
                _make(directory, self._path, identity)
            look_at_header(self._path)
        except OSError as error:
            raise from_os(error, f"cannot use {self._path}") from None
        try:
            self._connection = _connect(self._path)
            try:
                _upgrade(self._connection, self._path)
                self._identity = identity_of(self._connection, self._path)
                last = self._connection.execute("SELECT seq, checksum FROM fact ORDER BY seq DESC LIMIT 1").fetchone()
            except BaseException:
                self._connection.close()
                raise
        except sqlite3.Error as error:
            raise self._translated(error) from None
        found = self._path.stat()
        self._file = found.st_dev, found.st_ino
        self._seed = seed_of(self._identity)
        self._count: int = last[0] if last else 0
        self._checksum: bytes = last[1] if last else self._seed
        try:
            check_head(self._path, self._count, directory.head)
        except JournalCorrupt:
            self._connection.close()
            raise

    @property
    def identity(self) -> str:
        """The journal's UUID."""
        return self._identity

    @property
    def count(self) -> int:
        """How many facts are durable."""
        return self._count

    def facts(self) -> Iterator[Fact]:
        """Yield every fact in order, its checksum verified. Raises ``JournalCorrupt``, ``JournalNewer``."""
        number = 0
        try:
            for fact in verified(self._connection, self._path, self._identity):
                number += 1
                yield fact
        except sqlite3.Error as error:
            raise self._translated(error) from None
        if number != self._count:
            raise JournalCorrupt(f"{self._path}: row {number + 1} is missing; {_BACKUP}")

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts in one transaction; durable on return. See ``base.Journal.append`` for what is raised."""
        count, checksum = self._count, self._checksum
        rows = []
        for row in map(encode, facts):
            count += 1
            checksum = chained(checksum, count, row)
            rows.append((count, row.kind, row.job, row.shard, row.body, checksum))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT INTO fact VALUES (?, ?, ?, ?, ?, ?)", rows)
            self._connection.execute("COMMIT")
            self._look_whether_it_is_there()
        except sqlite3.Error as error:
            translated = self._translated(error)
            try:
                # SQLite has rolled back by itself after some errors, not after others.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            except sqlite3.Error as second:
                raise self._translated(second) from None
            raise translated from None
        self._count, self._checksum = count, checksum
        self._directory.note_head(count)

    def _look_whether_it_is_there(self) -> None:
        """Raise ``DirectoryUnusable`` if the file is no longer where a restart looks: writing to it still succeeds."""
        try:
            found = self._path.stat()
        except OSError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._file:
            raise DirectoryUnusable(
                f"{self._path} was removed or replaced while in use: put it back, WAL and all, or what was done since "
                "is scored again; then start the coordinator"
            )

    def close(self) -> None:
        """Fold the WAL into the file and unlock the directory; may be repeated."""
        try:
            self._connection.close()
        finally:
            self._directory.close()

    def _translated(self, error: sqlite3.Error) -> FedevalError:
        return translate(error, self._path)


def verified(connection: sqlite3.Connection, path: Path, identity: str) -> Iterator[Fact]:
    """Return the facts of a journal in order, each one's checksum verified as it is read.

    Reading them raises ``JournalCorrupt``, ``JournalNewer``, and what SQLite raises.
    """
    rows = connection.execute("SELECT seq, kind, job, shard, body, checksum FROM fact ORDER BY seq")
    stored = ((seq, Row(kind, job, shard, body), checksum) for seq, kind, job, shard, body, checksum in rows)
    return base.verified(stored, identity, path, _BACKUP)


def check_head(path: Path, count: int, head: int) -> None:
    """Raise ``JournalCorrupt`` if a journal of ``count`` facts ends before the note beside it says."""
    if count < head:
        raise JournalCorrupt(
            f"{path} ends at fact {count}, but {head} were written: {FILE}-wal was removed or cut short, or an old "
            f"copy put in place; put back all of {path.parent}, or `eval-coordinator journal salvage` to go on "
            "without the facts that are missing (their shards are scored again)"
        )


def _connect(path: Path) -> sqlite3.Connection:
    # One connection in the whole process; the runtime sees to it that one thread uses it at a time.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
        (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise DirectoryUnusable(
                f"the file system of {path} does not bear SQLite's WAL; use a local disk: --data-dir"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _make(directory: Directory, path: Path, identity: str | None) -> None:
    """Make an empty journal whole under another name, then rename it: a crash never leaves half of one."""
    new = path.with_name(f"{FILE}.new")
    for left_over in (new, new.with_name(f"{new.name}-journal")):
        left_over.unlink(missing_ok=True)
    connection = sqlite3.connect(new, isolation_level=None)
    try:
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        _migrate(connection, new)
        connection.execute("INSERT INTO meta VALUES ('identity', ?)", (identity or str(uuid.uuid4()),))
    except sqlite3.Error as error:
        raise translate(error, path) from None
    finally:
        connection.close()
    new.replace(path)
    directory.sync()


def look_at_header(path: Path) -> None:
    """Refuse what is no journal of ours, or a newer one, before SQLite touches the file."""
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise JournalCorrupt(f"{path} is no journal (not a SQLite file, or cut short); {_BACKUP}")
    (version,) = struct.unpack(">I", header[60:64])
    (application,) = struct.unpack(">I", header[68:72])
    if application != APPLICATION_ID:
        raise JournalCorrupt(f"{path} is a database of another program; {_BACKUP}")
    _refuse_newer(version, path)
    # A WAL beside it holds what a crash may have kept from the file: SQLite puts it right.
    if not path.with_name(f"{FILE}-wal").exists():
        pages, page_size = struct.unpack(">I", header[28:32])[0], struct.unpack(">H", header[16:18])[0]
        whole = pages * (65536 if page_size == 1 else page_size)  # 1 stands for 65536
        size = path.stat().st_size
        if size < whole:
            raise JournalCorrupt(f"{path} is cut short: {size} of {whole} bytes; {_BACKUP}")


def _refuse_newer(version: int, path: Path) -> None:
    if version > len(MIGRATIONS):
        raise JournalNewer(
            f"{path} has the format {version}, this version reads up to {len(MIGRATIONS)}: it was written by a newer "
            "version; install that one again, or name another directory with --data-dir"
        )


def _upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Bring an older journal to the present format, after a copy of it was put beside it, whole and flushed."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if 0 < version < len(MIGRATIONS):
        copy_whole(connection, path.with_name(f"{FILE}.format-{version}"))
    _migrate(connection, path)


def copy_whole(connection: sqlite3.Connection, target: Path) -> None:
    """Copy a journal, while it is in use if need be, into one file that is there whole or not at all."""
    new = target.with_name(f"{target.name}.new")
    new.unlink(missing_ok=True)
    copy = sqlite3.connect(new, isolation_level=None)
    try:
        connection.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
    finally:
        copy.close()
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a journal to the present format, one transaction a version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    _refuse_newer(version, path)
    for number in range(version, len(MIGRATIONS)):
        connection.execute("BEGIN IMMEDIATE")
        for statement in MIGRATIONS[number]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={number + 1}")
        connection.execute("COMMIT")


def identity_of(connection: sqlite3.Connection, path: Path) -> str:
    """Return the UUID that a journal was given at birth; raises ``JournalCorrupt`` where it has lost it."""
    found = connection.execute("SELECT value FROM meta WHERE name = 'identity'").fetchone()
    if found is None:
        raise JournalCorrupt(f"{path} has lost its identity; {_BACKUP}")
    return str(found[0])


def translate(error: sqlite3.Error, path: Path) -> FedevalError:
    """Return what an error of SQLite means to the user."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the rest tells variants of it apart
    if primary == sqlite3.SQLITE_FULL:
        return JournalFull(f"{path} cannot grow: no space is left; free some on that file system (nothing was written)")
    if primary == sqlite3.SQLITE_CONSTRAINT:
        return JournalCorrupt(
            f"{path} holds a first commit of this shard already ({error}); start the coordinator again"
        )
    if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return DirectoryUnusable(
            f"{path} cannot be read and written ({error}); check the disk and the directory's rights"
        )
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DirectoryUnusable(f"{path} is locked by another program ({error}); end it, then start the coordinator")
    return JournalCorrupt(f"{path} is damaged ({error}); {_BACKUP}")
