"""What a person does with a journal in PostgreSQL between two runs: verify it, copy it to a file, put a file's into it.

A copy is a SQLite journal, row for row and checksum for checksum: so jobs move between the two kinds as well.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path

from coordinator.core.calls import SchedulerConfig
from coordinator.core.scheduler import Scheduler
from coordinator.journal import sqlite, upkeep
from coordinator.journal.database import Connection, Database, DriverError
from coordinator.journal.directory import from_os
from coordinator.journal.leadership import one_row, read_meta
from coordinator.journal.postgres import check_end, open_database, verified
from coordinator.journal.upkeep import Summary, summary
from eval_kernel.errors import ConfigError

#: Facts copied at a time.
_BATCH = 2000


def verify(url: str) -> Summary:
    """Read every row of a database's journal, whoever leads meanwhile. Raises as ``read_only`` and ``verified``."""
    database, connection, identity = read_only(url)
    scheduler = Scheduler(SchedulerConfig())
    try:
        with connection:
            # The note first: what is appended meanwhile only makes more of them.
            (noted,) = one_row(connection, "SELECT facts FROM fedeval_leader")
            (count,) = one_row(connection, "SELECT coalesce(max(seq), 0) FROM fedeval_fact")
            check_end(database, count, noted)
            scheduler.replay(verified(connection, database, identity, count))
    except DriverError as error:
        raise database.translate(error) from None
    return summary(str(database), identity, count, scheduler)


def backup(url: str, target: Path) -> Summary:
    """Copy a database's journal to one file, verified; a coordinator may be at work on it meanwhile.

    Raises as ``verify``, ``ConfigError`` for a target that exists, ``DirectoryUnusable``, ``JournalFull``.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already; name another file")
    database, connection, identity = read_only(url)
    try:
        with connection, tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as workshop:
            (count,) = one_row(connection, "SELECT coalesce(max(seq), 0) FROM fedeval_fact")
            copy = sqlite.open_journal(Path(workshop), identity)
            try:
                facts = verified(connection, database, identity, count)
                while batch := list(islice(facts, _BATCH)):
                    copy.append(batch)
            finally:
                copy.close()
            return upkeep.backup(Path(workshop), target)
    except DriverError as error:
        raise database.translate(error) from None
    except OSError as error:
        raise from_os(error, f"cannot write {target}") from None


def restore(source: Path, url: str) -> Summary:
    """Put a copy into a database that holds no journal yet: all of it or nothing.

    Raises ``ConfigError`` for a source that does not exist and for a database with a journal, ``DirectoryLocked``
    while a coordinator runs, and what is wrong with the copy: then nothing was changed.
    """
    if not source.is_file():
        raise ConfigError(f"{source} is no file; name one that `eval-coordinator journal backup` made")
    with upkeep.reading(source) as file:
        identity = sqlite.identity_of(file, source)
        facts = list(sqlite.verified(file, source, identity))
    scheduler = Scheduler(SchedulerConfig())
    scheduler.replay(facts)
    database = Database(url)
    try:
        with database.connect("fedeval restoring") as connection:
            version, holds = read_meta(connection, database)
    except DriverError as error:
        raise database.translate(error) from None
    if version:
        raise ConfigError(f"{database} holds the journal {holds} already; name an empty database")
    journal = open_database(url, identity)
    try:
        journal.append(facts)
    finally:
        journal.close()
    return summary(str(database), identity, len(facts), scheduler)


def look(url: str) -> str:
    """Connect as a coordinator would and return in words what is there; changes nothing. Raises as ``read_only``."""
    database = Database(url)
    try:
        with database.connect("fedeval looking") as connection:
            (server,) = one_row(connection, "SHOW server_version")
            version, _ = read_meta(connection, database)
            text = f"{database}, PostgreSQL {server}: "
            if version == 0:
                return text + "no journal yet"
            holder, epoch, facts = one_row(connection, "SELECT holder, epoch, facts FROM fedeval_leader")
            return text + f"a journal of at least {facts} facts, last led by {holder} in epoch {epoch}"
    except DriverError as error:
        raise database.translate(error) from None


def read_only(url: str) -> tuple[Database, Connection, str]:
    """Open a database to read its journal, whoever leads; return its identity too.

    Raises ``ConfigError`` where it holds none, and as ``Database.connect``.
    """
    database = Database(url)
    connection = database.connect("fedeval reading", writing=False)
    try:
        connection.execute("SET default_transaction_read_only = on")
        version, identity = read_meta(connection, database)
    except DriverError as error:
        connection.close()
        raise database.translate(error) from None
    except BaseException:
        connection.close()
        raise
    if version == 0:
        connection.close()
        raise ConfigError(f"{database} holds no journal; name the database that the coordinators were given")
    return database, connection, identity
