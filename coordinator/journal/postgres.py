"""The journal in a PostgreSQL database: the rows and checksums of the SQLite one, written by the leader alone.

One statement is one commit, and the same statement holds the leader's epoch: whoever has been followed writes nothing.
Who leads is leadership's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from coordinator.core.facts import Fact
from coordinator.journal import base
from coordinator.journal.base import Row, Stored, chained, encode, seed_of
from coordinator.journal.database import Connection, Database, DriverError, UniqueViolation
from coordinator.journal.leadership import Election, Leadership, one_row
from eval_kernel.errors import DirectoryLocked, JournalCorrupt, JournalRefused, JournalUnreachable

#: A row as its columns are.
_Columns = tuple[int, str, str, int | None, str, bytes]
#: Rows read at a time: in replay nothing else holds them.
_PAGE = 2000
_BACKUP = "stop all coordinators and restore the database from a backup (pg_dump, or the server's own)"
# KEY SHARE lets the leader's own beats pass, which change no key, and waits for whoever begins an epoch (FOR UPDATE):
# either these facts are there before the follower reads, or there is no row of this epoch and nothing is written.
_APPEND = """
WITH fence AS MATERIALIZED (SELECT epoch FROM fedeval_leader WHERE epoch = %s FOR KEY SHARE)
INSERT INTO fedeval_fact (seq, kind, job, shard, body, checksum)
SELECT row.* FROM fence, unnest(%s::bigint[], %s::text[], %s::text[], %s::bigint[], %s::text[], %s::bytea[]) AS row
"""


def open_database(url: str, identity: str | None = None) -> PostgresJournal:
    """Open a database's journal as its leader, making it if need be; ``identity`` is what a new one is called.

    Raises ``DirectoryLocked`` where another coordinator leads, and as ``Election.attempt``.
    """
    database = Database(url)
    election = Election(database, identity=identity)
    try:
        leadership = election.attempt()
        if leadership is None:
            raise DirectoryLocked(f"{database} belongs to the running coordinator {election.leader or ''}".rstrip())
    finally:
        election.close()
    return lead(leadership)


def lead(leadership: Leadership) -> PostgresJournal:
    """Open the journal of which the leadership was won, and begin to beat; what fails here gives it back."""
    try:
        return PostgresJournal(leadership)
    except BaseException:
        leadership.close()
        raise


class PostgresJournal:
    """An open journal; see ``base.Journal``. ``leadership.lost`` tells when another coordinator has taken it over."""

    def __init__(self, leadership: Leadership) -> None:
        """Find the end of the journal. Raises ``JournalCorrupt`` and ``JournalUnreachable``."""
        self.leadership = leadership
        self._database = leadership.database
        self._connection: Connection | None = None
        try:
            self._connection = self._session()
            self._count, self._checksum = self._tail(self._connection)
            check_end(self._database, self._count, *one_row(self._connection, "SELECT facts FROM fedeval_leader"))
        except DriverError as error:
            self._drop()
            raise self._database.translate(error) from None
        except BaseException:
            self._drop()
            raise
        leadership.start(lambda: self._count)

    @property
    def identity(self) -> str:
        """The journal's UUID."""
        return self.leadership.identity

    @property
    def count(self) -> int:
        """How many facts are durable."""
        return self._count

    def facts(self) -> Iterator[Fact]:
        """Yield every fact in order, its checksum verified. Raises ``JournalCorrupt``, ``JournalNewer``."""
        try:
            if self._connection is None:
                self._connection = self._session()
            yield from verified(self._connection, self._database, self.identity, self._count)
        except DriverError as error:
            self._drop()
            raise self._database.translate(error) from None

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts in one transaction; durable on return. See ``base.Journal.append`` for what is raised.

        ``LeadershipLost`` where another coordinator leads, ``JournalExchanged`` where the database has another journal.
        """
        count, checksum = self._count, self._checksum
        rows: list[_Columns] = []
        for row in map(encode, facts):
            count += 1
            checksum = chained(checksum, count, row)
            rows.append((count, row.kind, row.job, row.shard, row.body, checksum))
        if not rows:
            return
        missing = self._connection is None
        try:
            self._write(rows, (count, checksum))
        except JournalUnreachable:
            if missing:
                raise
            self._write(rows, (count, checksum))  # a session that was ended is replaced at once
        self._count, self._checksum = count, checksum

    def _write(self, rows: list[_Columns], end: tuple[int, bytes]) -> None:
        """Write the rows, after which the journal ends at ``end``; drop a session that is of no more use."""
        try:
            if self._connection is None:
                self._connection = self._session()
                # The last one may have been lost in the middle of a commit: its rows are there, or none of them.
                tail = self._tail(self._connection)
                if tail == end:
                    return
                if tail != (self._count, self._checksum):
                    raise JournalCorrupt(f"{self._database} ends otherwise than this coordinator left it; {_BACKUP}")
            try:
                columns = map(list, zip(*rows, strict=True))
                written = self._connection.execute(_APPEND, (self.leadership.epoch, *columns))
            except UniqueViolation:
                if self._tail(self._connection) != end:
                    raise
                return  # the server was still busy with the lost session's commit, and has ended it now
        except DriverError as error:
            translated = self._database.translate(error)
            if isinstance(translated, JournalUnreachable):
                self._drop()
            raise translated from None
        if written.rowcount != len(rows):
            raise self.leadership.followed()

    def close(self) -> None:
        """End the sessions, and with them the leadership; may be repeated."""
        self._drop()
        self.leadership.close()

    def _session(self) -> Connection:
        """Open a session; it is of use only while the epoch is still this leader's."""
        try:
            connection = self._database.connect(self.leadership.name)
        except JournalRefused as error:
            raise JournalUnreachable(str(error)) from None  # it let us in before: an operator may mend it
        try:
            self.leadership.check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _tail(self, connection: Connection) -> tuple[int, bytes]:
        last = connection.execute("SELECT seq, checksum FROM fedeval_fact ORDER BY seq DESC LIMIT 1").fetchone()
        return (last[0], last[1]) if last else (0, seed_of(self.identity))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def verified(connection: Connection, database: Database, identity: str, count: int) -> Iterator[Fact]:
    """Yield the first ``count`` facts of a journal in order, each one's checksum verified.

    Raises ``JournalCorrupt``, also where there are fewer, ``JournalNewer``, and ``DriverError``.
    """
    number = 0
    for fact in base.verified(_rows(connection, count), identity, database, _BACKUP):
        number += 1
        yield fact
    if number != count:
        raise JournalCorrupt(f"{database}: row {number + 1} is missing; {_BACKUP}")


def check_end(database: Database, count: int, noted: int) -> None:
    """Raise ``JournalCorrupt`` if a journal of ``count`` facts ends before its leader has noted."""
    if count < noted:
        raise JournalCorrupt(f"{database} ends at fact {count}, but {noted} were written; {_BACKUP}")


def _rows(connection: Connection, count: int) -> Iterator[Stored]:
    """Yield stored rows up to number ``count``, a page at a time: they never change, so no transaction is needed."""
    last = 0
    while True:
        page = connection.execute(
            "SELECT seq, kind, job, shard, body, checksum FROM fedeval_fact WHERE seq > %s AND seq <= %s "
            "ORDER BY seq LIMIT %s",
            (last, count, _PAGE),
        ).fetchall()
        for seq, kind, job, shard, body, checksum in page:
            yield seq, Row(kind, job, shard, body), checksum
            last = seq
        if len(page) < _PAGE:
            return
