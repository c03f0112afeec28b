"""Who may write the journal of a database: one coordinator at a time, chosen by a lock, fenced by a number.

The lock (an advisory one, of a session) says who leads. It ends with its session, so a killed leader is followed at
once. A leader that stands still keeps its session: one that has not beaten for ``STALE_SECONDS`` is ended by whoever
stands by. Neither keeps the old leader from writing when it wakes; the epoch does. It grows by one with each leader,
and every write carries the writer's. What is written is not known here.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from coordinator.journal.database import Connection, Database, DriverError
from eval_kernel.errors import (
    JournalCorrupt,
    JournalExchanged,
    JournalNewer,
    JournalPaused,
    JournalRefused,
    JournalUnreachable,
    LeadershipLost,
)

#: First half of the lock's number ("fdev"); the second half is the schema's, so that each may hold a journal.
LOCK_CLASS = 0x66646576
BEAT_SECONDS = 1.0
STALE_SECONDS = 6.0
#: What brings a journal of format i to i + 1, in one transaction. Never changed, only added to.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE fedeval_meta (name text PRIMARY KEY, value text NOT NULL)",
        "CREATE TABLE fedeval_fact (seq bigint PRIMARY KEY, kind text NOT NULL, job text NOT NULL, shard bigint, "
        "body text NOT NULL, checksum bytea NOT NULL)",
        # The database's own word that a shard is counted once.
        "CREATE UNIQUE INDEX fedeval_one_commit ON fedeval_fact (job, shard) WHERE kind = 'shard_committed'",
        # One row. ``facts``: how many there were when that was last noted, never too many.
        "CREATE TABLE fedeval_leader (one boolean PRIMARY KEY DEFAULT true CHECK (one), epoch bigint NOT NULL, "
        "holder text NOT NULL, backend integer NOT NULL, beat bigint NOT NULL, facts bigint NOT NULL, "
        "since timestamptz NOT NULL) WITH (fillfactor = 50)",
        "INSERT INTO fedeval_leader VALUES (true, 0, 'nobody', 0, 0, 0, now())",
    ),
)
#: Ends whoever holds the lock, unless there is a new beat, or a new leader, by now.
_END_HOLDER = f"""
SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
WHERE datname = current_database() AND locktype = 'advisory' AND objsubid = 2 AND granted AND classid = {LOCK_CLASS}
AND objid::bigint = hashtext(current_schema())::bigint & 4294967295
AND EXISTS (SELECT FROM fedeval_leader WHERE epoch = %s AND beat = %s)
"""
_LOCK = f"SELECT pg_try_advisory_lock({LOCK_CLASS}, hashtext(current_schema()))"
_UNLOCK = f"SELECT pg_advisory_unlock({LOCK_CLASS}, hashtext(current_schema()))"


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, as the database has it. ``holder`` is ``host:pid``."""

    holder: str
    epoch: int


def session_name(identity: str, epoch: int) -> str:
    """Name of the sessions of a leader: whoever follows it ends what bears this name."""
    return f"fedeval {identity} epoch {epoch}"


def read_meta(connection: Connection, database: Database) -> tuple[int, str]:
    """Return a journal's format and identity, ``(0, "")`` where there is none.

    Raises ``JournalNewer``, ``JournalCorrupt`` for one that has lost either, and ``DriverError``.
    """
    (table,) = one_row(connection, "SELECT to_regclass('fedeval_meta')")
    if table is None:
        return 0, ""
    meta: dict[str, str] = dict(connection.execute("SELECT name, value FROM fedeval_meta").fetchall())
    if not meta.get("identity") or not str(meta.get("format", "")).isdigit():
        raise JournalCorrupt(f"{database} has lost its journal's identity or format; restore it from a backup")
    version = int(meta["format"])
    if version > len(MIGRATIONS):
        raise JournalNewer(
            f"{database} holds a journal of the format {version}, this version reads up to {len(MIGRATIONS)}: it was "
            "written by a newer version; install that one again, or name another database"
        )
    return version, meta["identity"]


class Election:
    """A coordinator's wish to lead: ``attempt`` until it succeeds, then ``close`` (the leadership stays)."""

    def __init__(self, database: Database, *, identity: str | None = None, stale: float = STALE_SECONDS) -> None:
        """``identity``: what a journal made here is called; ``stale``: seconds without a beat that end a leader."""
        self._database = database
        self._identity = identity or str(uuid.uuid4())
        self._stale = stale
        self._connection: Connection | None = None
        self._seen: tuple[int, int, float] = (0, -1, 0.0)  # epoch and beat last read, and since when they are so
        self.leader: Leader | None = None
        #: Leaders that were ended because they stood still.
        self.ended = 0

    def attempt(self) -> Leadership | None:
        """Lead if nobody else does; end the session of a leader that stands still.

        Raises ``JournalPaused`` where trying again may help, and ``JournalRefused``, ``JournalNewer``,
        ``JournalCorrupt``.
        """
        try:
            if self._connection is None:
                self._connection = self._database.connect("fedeval standing by")
            read_meta(self._connection, self._database)
            (won,) = one_row(self._connection, _LOCK)
            if not won:
                self._watch(self._connection)
                return None
            leadership = self._take(self._connection)
        except DriverError as error:
            self.close()  # and with the session the lock
            raise self._database.translate(error) from None
        except BaseException:
            self.close()
            raise
        self._connection = None  # it is the leadership's now
        return leadership

    def close(self) -> None:
        """Stand for it no more; may be repeated."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _watch(self, connection: Connection) -> None:
        (table,) = one_row(connection, "SELECT to_regclass('fedeval_leader')")
        if table is None:
            return  # its leader is just making it
        epoch, beat, holder = one_row(connection, "SELECT epoch, beat, holder FROM fedeval_leader")
        self.leader = Leader(holder, epoch)
        now = time.monotonic()  # of this process alone: no clock is compared with another
        if self._seen[:2] != (epoch, beat):
            self._seen = (epoch, beat, now)
        elif now - self._seen[2] > self._stale:
            self._seen = (epoch, beat, now)
            _, identity = read_meta(connection, self._database)
            ended = _end_sessions(connection, session_name(identity, epoch))
            # One that stood by, too, may stand still with the lock just won: it has no name yet.
            ended += len(connection.execute(_END_HOLDER.encode(), (epoch, beat)).fetchall()) if not ended else 0
            if not ended:
                raise JournalRefused(
                    f"the leader {holder} of {self._database} stands still, and its session is not to be found; let "
                    "all coordinators connect directly, with the same user"
                )
            self.ended += 1

    def _take(self, connection: Connection) -> Leadership:
        """Begin an epoch, in a journal made first if need be."""
        version, identity = read_meta(connection, self._database)
        with connection.transaction():
            for number in range(version, len(MIGRATIONS)):
                for statement in MIGRATIONS[number]:
                    connection.execute(statement.encode())
            if version == 0:
                identity = self._identity
                connection.execute("INSERT INTO fedeval_meta VALUES ('identity', %s)", (identity,))
                connection.execute("INSERT INTO fedeval_meta VALUES ('format', %s)", (str(len(MIGRATIONS)),))
            elif version < len(MIGRATIONS):
                connection.execute("UPDATE fedeval_meta SET value = %s WHERE name = 'format'", (str(len(MIGRATIONS)),))
        (last,) = one_row(connection, "SELECT epoch FROM fedeval_leader")
        # A leader that has lost the lock may still be writing: what it holds of the leader's row ends with its session.
        _end_sessions(connection, session_name(identity, last))
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '5s'")
            (last,) = one_row(connection, "SELECT epoch FROM fedeval_leader FOR UPDATE")
            epoch: int = last + 1
            connection.execute(
                "UPDATE fedeval_leader SET epoch = %s, holder = %s, backend = pg_backend_pid(), beat = beat + 1, "
                "since = now()",
                (epoch, f"{socket.gethostname()}:{os.getpid()}"),
            )
        return Leadership(self._database, connection, identity, epoch)


class Leadership:
    """The right to write, and the thread that keeps it. ``lost`` gets the error when another one leads."""

    def __init__(self, database: Database, connection: Connection, identity: str, epoch: int) -> None:
        """Take over the session that holds the lock; made by ``Election``."""
        self.database = database
        self.identity = identity
        self.epoch = epoch
        self.lost: Future[NoReturn] = Future()
        self._connection: Connection | None = connection
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._prepare(connection)

    @property
    def name(self) -> str:
        """What the sessions of this leader are called."""
        return session_name(self.identity, self.epoch)

    def start(self, facts: Callable[[], int]) -> None:
        """Begin to beat; ``facts`` tells how many are durable."""
        self._thread = threading.Thread(target=self._keep, args=(facts,), name="leadership", daemon=True)
        self._thread.start()

    def beat(self, facts: int) -> None:
        """Say once that this leader lives, in a new session if the old one was lost.

        Raises ``LeadershipLost``, ``JournalExchanged``, and ``JournalPaused`` where trying again may help.
        """
        try:
            if self._connection is None:
                self._connection = self._database_again()
            done = self._connection.execute(
                "UPDATE fedeval_leader SET beat = beat + 1, facts = greatest(facts, %s), backend = pg_backend_pid() "
                "WHERE epoch = %s",
                (facts, self.epoch),
            )
        except DriverError as error:
            self._drop()
            raise self.database.translate(error) from None
        if done.rowcount != 1:
            raise self.followed()

    def followed(self) -> LeadershipLost:
        """Return the error of a leader whose epoch is over."""
        return LeadershipLost(
            f"another coordinator leads {self.database} now, this one's epoch {self.epoch} is over: nothing of it was "
            "written since; start it again to have it stand by"
        )

    def check(self, connection: Connection) -> None:
        """Raise ``LeadershipLost`` or ``JournalExchanged`` unless a new session still finds this epoch in this journal.

        Raises ``DriverError`` too.
        """
        _, identity = read_meta(connection, self.database)
        if identity != self.identity:
            raise JournalExchanged(
                f"{self.database} holds the journal {identity or 'of nobody'} now, it was {self.identity}: the "
                "database was replaced under the coordinator; start it again to go on with what is there"
            )
        if one_row(connection, "SELECT epoch FROM fedeval_leader") != (self.epoch,):
            raise self.followed()

    def close(self) -> None:
        """Stop beating and let another coordinator lead; may be repeated."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._connection is not None:
            with suppress(DriverError):  # the session's end unlocks it too, only a little later
                self._connection.execute(_UNLOCK)
        self._drop()

    def _keep(self, facts: Callable[[], int]) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                self.beat(facts())
            except JournalPaused:
                continue  # the journal's own writes tell of it; while nobody else leads, nothing is lost
            except Exception as error:  # noqa: BLE001 - whatever it is: without beats this leader is soon followed
                with suppress(InvalidStateError):  # nobody waits for it any more
                    self.lost.set_exception(error)
                return

    def _database_again(self) -> Connection:
        """Open a session anew and take the lock again, unless another leader has begun an epoch meanwhile."""
        try:
            connection = self.database.connect(self.name)
        except JournalRefused as error:
            raise JournalUnreachable(str(error)) from None  # it let us in before: an operator may mend it
        try:
            self.check(connection)
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity JOIN fedeval_leader ON pid = backend "
                "WHERE application_name = %s",  # the old one: its server may believe in it for hours
                (self.name,),
            )
            if not one_row(connection, _LOCK)[0]:
                raise JournalUnreachable(f"another session holds the lock of {self.database} at present")
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: Connection) -> None:
        connection.execute("SELECT set_config('application_name', %s, false)", (self.name,))
        # A beat need not outlive a power cut, and must not wait for a slow disk: that would look like standing still.
        connection.execute("SET synchronous_commit = off")

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _end_sessions(connection: Connection, name: str) -> int:
    """End the sessions of that name in this database; return how many there were."""
    ended = connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = %s AND pid <> pg_backend_pid()",
        (name,),
    )
    return len(ended.fetchall())


def one_row(connection: Connection, statement: str) -> tuple[Any, ...]:
    """Return the one row of a query that always has one; a missing one is a damaged journal's."""
    row = connection.execute(statement.encode()).fetchone()
    if row is None:
        raise JournalCorrupt("the table fedeval_leader has lost its row; restore the database from a backup")
    return row
