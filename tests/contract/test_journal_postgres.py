"""What a journal in PostgreSQL promises beyond the common contract: one leader, fenced; lost sessions; clear errors."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.core import facts as f
from coordinator.journal import leadership as leading
from coordinator.journal import open_journal, postgres, postgres_upkeep, upkeep
from coordinator.journal.database import Database
from coordinator.journal.leadership import Election
from coordinator.journal.postgres import PostgresJournal, lead, open_database
from eval_kernel.errors import (
    ConfigError,
    DirectoryLocked,
    JournalCorrupt,
    JournalExchanged,
    JournalFull,
    JournalNewer,
    JournalRefused,
    JournalUnreachable,
    LeadershipLost,
)
from tests.support.core_cases import make_plan, make_scored
from tests.support.postgres import PASSWORD, PASSWORD_IN_URL, USER, PostgresServer, server_of_its_own
from tests.support.processes import until

FACTS: list[f.Fact] = [
    f.JobSubmitted("j1", "k1", "name", "{}", 1.0),
    f.JobPlanned("j1", "a1", make_plan(3), 2.0),
    *(f.ShardCommitted("j1", "a1", make_scored(i), 3.0 + i) for i in range(3)),
]
Opening = Callable[..., PostgresJournal]


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    """The URL of an empty place for a journal."""
    return postgres_server.journal()


@pytest.fixture
def opened() -> Iterator[Opening]:
    """Opens journals as ``open_database`` does, or those of a leadership; all are closed at the end."""
    journals: list[PostgresJournal] = []

    def open_one(place: Any) -> PostgresJournal:
        journals.append(open_database(place) if isinstance(place, str) else lead(place))
        return journals[-1]

    yield open_one
    for journal in journals:
        journal.close()


def admin(server: PostgresServer, url: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a session of the administrator in a journal's place."""
    return server.admin(url=url)


def read(url: str) -> list[f.Fact]:
    """Return the facts of a database, every row verified, whoever leads."""
    database, connection, identity = postgres_upkeep.read_only(url)
    with connection:
        count = connection.execute("SELECT count(*) FROM fedeval_fact").fetchone()
        assert count is not None
        return list(postgres.verified(connection, database, identity, count[0]))


async def won(election: Election) -> leading.Leadership:
    """Attempt until it succeeds."""
    found: list[leading.Leadership] = []

    def attempt() -> bool:
        leadership = election.attempt()
        if leadership is not None:
            found.append(leadership)
        return bool(found)

    await until(attempt, 20)
    return found[0]


def sessions(server: PostgresServer, url: str, name: str = "fedeval % epoch %") -> list[int]:
    """Return the backends of the leader's sessions."""
    with admin(server, url) as session:
        rows = session.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE %s", (name,)
        )
        return [row[0] for row in rows]


def end(server: PostgresServer, backends: list[int]) -> None:
    """End sessions as an administrator, or a broken network, would."""
    with server.admin() as session:
        for backend in backends:
            session.execute("SELECT pg_terminate_backend(%s, 10000)", (backend,))


# ---------------------------------------------------------------- who leads


def test_one_coordinator_leads_and_the_next_begins_the_next_epoch(url: str, opened: Opening) -> None:
    """While one leads, nobody else does; when it lets go, the next one finds everything."""
    first = opened(url)
    first.append(FACTS)
    with pytest.raises(DirectoryLocked, match="belongs to the running coordinator"):
        open_database(url)
    first.close()
    second = opened(url)

    assert (1, 2) == (first.leadership.epoch, second.leadership.epoch)
    assert (first.identity, FACTS) == (second.identity, list(second.facts()))


def test_a_leader_that_has_not_beaten_is_ended_and_cannot_write(
    url: str, opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sessions are ended, its epoch is over: a write when it wakes is refused, and leaves no trace."""
    monkeypatch.setattr(leading, "BEAT_SECONDS", 3600.0)
    old = opened(url)
    old.append(FACTS[:3])
    election = Election(Database(url), stale=0.2)
    new = opened(asyncio.run(won(election)))
    with pytest.raises(LeadershipLost, match="another coordinator leads"):
        old.append(FACTS[3:4])
    with pytest.raises(JournalUnreachable, match="terminating connection"):
        old.leadership.beat(4)
    with pytest.raises(LeadershipLost, match="epoch 1 is over"):
        old.leadership.beat(4)

    assert (1, 2) == (election.ended, new.leadership.epoch)
    assert election.leader is not None
    assert re.fullmatch(r".+:\d+", election.leader.holder)
    assert FACTS[:3] == list(new.facts()) == read(url)


def test_one_that_stops_with_the_lock_just_won_is_ended_too(url: str, opened: Opening) -> None:
    """Between the lock and its epoch a coordinator has no beat of its own: the old one's tells that nobody leads."""
    opened(url).close()
    with psycopg.connect(url, autocommit=True) as stopped:
        stopped.execute(leading._LOCK.encode())
        journal = opened(asyncio.run(won(Election(Database(url), stale=0.2))))

        assert 2 == journal.leadership.epoch
        with pytest.raises(psycopg.OperationalError):
            stopped.execute("SELECT 1")


def test_a_leader_that_beats_is_left_alone(url: str, opened: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long another one watches: only a beat that does not come ends a leader."""
    monkeypatch.setattr(leading, "BEAT_SECONDS", 0.05)
    opened(url).append(FACTS)
    election = Election(Database(url), stale=1.0)
    beats: set[int] = set()

    def many() -> bool:
        assert election.attempt() is None
        beats.add(election._seen[1])
        return len(beats) > 25

    asyncio.run(until(many))

    assert 0 == election.ended
    election.close()


def follow(old: PostgresJournal, url: str, opened: Opening, monkeypatch: pytest.MonkeyPatch) -> PostgresJournal:
    """Have another one lead while the old leader's writing session lives on, as when it cannot be ended."""
    monkeypatch.setattr(leading, "_end_sessions", lambda connection, name: 1)
    old.leadership.close()  # the lock, and no more
    return opened(url)


def test_the_epoch_alone_keeps_an_old_leader_from_writing(
    url: str, opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even in a session that nobody has ended: the statement that writes finds no epoch of its own."""
    old = opened(url)
    old.append(FACTS[:3])
    new = follow(old, url, opened, monkeypatch)
    with pytest.raises(LeadershipLost):
        old.append(FACTS[4:])
    new.append(FACTS[3:4])

    assert FACTS[:4] == read(url)


def test_without_the_fence_an_old_leader_writes(url: str, opened: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the epoch left out of the statement, the same write comes through and spoils the journal."""
    monkeypatch.setattr(postgres, "_APPEND", postgres._APPEND.replace("WHERE epoch = %s", "WHERE epoch >= %s"))
    old = opened(url)
    old.append(FACTS[:3])
    new = follow(old, url, opened, monkeypatch)
    old.append(FACTS[4:])
    with pytest.raises(JournalCorrupt):
        new.append(FACTS[3:4])

    assert [*FACTS[:3], *FACTS[4:]] == read(url)


def test_a_new_epoch_waits_for_the_old_leader_s_last_write(
    url: str, postgres_server: PostgresServer, opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that holds the old epoch is in before the follower reads, or not at all: never after."""
    old = opened(url)
    with admin(postgres_server, url) as gate:
        gate.execute(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(7); RETURN new; END'"
        )
        gate.execute("CREATE TRIGGER wait BEFORE INSERT ON fedeval_fact FOR EACH ROW EXECUTE FUNCTION wait()")
        gate.execute("SELECT pg_advisory_lock(7)")
        writing = threading.Thread(target=old.append, args=(FACTS[:3],))
        writing.start()

        def waiting(count: int) -> Callable[[], bool]:
            statement = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            return lambda: gate.execute(statement).fetchone() == (count,)

        asyncio.run(until(waiting(1)))
        found: list[PostgresJournal] = []
        following = threading.Thread(target=lambda: found.append(follow(old, url, opened, monkeypatch)))
        following.start()
        asyncio.run(until(waiting(2)))

        assert [] == found
        gate.execute("SELECT pg_advisory_unlock(7)")
        writing.join()
        following.join()

    assert FACTS[:3] == list(found[0].facts())


# ---------------------------------------------------------------- what may go wrong while it leads


def test_a_lost_session_is_replaced(url: str, postgres_server: PostgresServer, opened: Opening) -> None:
    """Both sessions ended from outside: the next write and the next beat go on in new ones, in the same epoch."""
    journal = opened(url)
    journal.append(FACTS[:2])
    end(postgres_server, sessions(postgres_server, url))
    journal.append(FACTS[2:])
    asyncio.run(until(lambda: 2 == len(sessions(postgres_server, url))))
    with pytest.raises(DirectoryLocked):
        open_database(url)

    assert FACTS == read(url)
    assert 1 == journal.leadership.epoch


class Lost:
    """A session whose answer to a write is lost: the commit itself is not."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, statement: Any, values: Any = None) -> Any:
        done = self._connection.execute(statement, values)
        if statement == postgres._APPEND:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        return done

    def close(self) -> None:
        self._connection.close()


def test_a_commit_whose_answer_was_lost_is_written_once(url: str, opened: Opening) -> None:
    """The end of the journal tells whether the facts are there."""
    journal = opened(url)
    journal.append(FACTS[:2])
    journal._connection = Lost(journal._connection)  # type: ignore[assignment]
    journal.append(FACTS[2:4])
    journal.append(FACTS[4:])

    assert FACTS == read(url)
    assert len(FACTS) == journal.count


def test_a_server_that_restarts_pauses_the_journal(opened: Opening) -> None:
    """While it is down the write may be repeated; afterwards it goes on in the same epoch, nothing lost or doubled."""
    with server_of_its_own() as server:
        url = server.journal()
        journal = opened(url)
        journal.append(FACTS[:3])
        server.kill()
        for _ in range(2):
            with pytest.raises(JournalUnreachable, match="no PostgreSQL server answers"):
                journal.append(FACTS[3:])
        with pytest.raises(JournalUnreachable, match="no PostgreSQL server answers"):
            open_database(url)
        server.start()
        journal.append(FACTS[3:])

        assert FACTS == read(url)
        assert 1 == journal.leadership.epoch
        journal.close()


def test_a_server_without_space_pauses_the_journal(url: str, postgres_server: PostgresServer, opened: Opening) -> None:
    """Its error for a full disk is ours: nothing was written, and the same write succeeds once there is space."""
    journal = opened(url)
    journal.append(FACTS[:2])
    with admin(postgres_server, url) as session:
        session.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN RAISE EXCEPTION ''could not extend file'' USING ERRCODE = ''53100''; END'"
        )
        session.execute("CREATE TRIGGER full_disk BEFORE INSERT ON fedeval_fact EXECUTE FUNCTION full_disk()")
        with pytest.raises(JournalFull, match=r"no space left.*could not extend file"):
            journal.append(FACTS[2:])

        assert FACTS[:2] == read(url)
        session.execute("DROP TRIGGER full_disk ON fedeval_fact")
    journal.append(FACTS[2:])

    assert FACTS == read(url)


def test_another_journal_in_the_same_place_is_refused(
    url: str, postgres_server: PostgresServer, opened: Opening
) -> None:
    """A database that was replaced under the coordinator is not written to."""
    journal = opened(url)
    journal.append(FACTS[:2])
    with admin(postgres_server, url) as session:
        session.execute("UPDATE fedeval_meta SET value = 'other' WHERE name = 'identity'")
    end(postgres_server, sessions(postgres_server, url))
    with pytest.raises(JournalExchanged, match="holds the journal other now"):
        journal.append(FACTS[2:])


def test_commits_are_durable_whatever_the_server_s_default(
    url: str, postgres_server: PostgresServer, opened: Opening
) -> None:
    """The server of the tests defaults to synchronous_commit=off; the session that writes does not take part."""
    journal = opened(url)
    with postgres_server.admin() as session:
        default = session.execute("SHOW synchronous_commit").fetchone()
    assert journal._connection is not None

    assert ("off",) == default
    assert ("on",) == journal._connection.execute("SHOW synchronous_commit").fetchone()


def test_a_server_without_fsync_is_refused() -> None:
    """What it reports as durable is not."""
    with server_of_its_own("-c", "fsync=off") as server, pytest.raises(JournalRefused, match="fsync=off"):
        open_database(server.journal())


# ---------------------------------------------------------------- what may be wrong with the place


def test_every_wrong_url_is_one_line_without_its_password(
    url: str, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """No server, no such database, a wrong password, no URL at all: each has its error, and none repeats a secret."""
    server, _, name = url.rpartition("/")
    port = str(postgres_server.port)
    cases: list[tuple[str, type[Exception], str]] = [
        (url.replace(PASSWORD_IN_URL, "hunter2"), JournalRefused, "password authentication failed"),
        (url.replace(f":{PASSWORD_IN_URL}", ""), JournalRefused, "PGPASSWORD"),
        (f"{server}/nowhere", JournalRefused, "nowhere"),
        (f"postgresql://{USER}:hunter2@127.0.0.1:1/{name}", JournalUnreachable, "no PostgreSQL server answers"),
        (f"postgresql://{USER}:hunter2@127.0.0.1:{port}x/{name}", ConfigError, "cannot be read"),
        (f"postgresql://{USER}:hunter2@[::1/{name}", ConfigError, "cannot be read"),
        (f"{url}&no_such_option=1", ConfigError, "cannot be read"),
    ]
    for wrong, error, text in cases:
        with pytest.raises(error, match=text) as caught:
            open_database(wrong)
        for secret in (PASSWORD, PASSWORD_IN_URL, "hunter2"):
            assert secret not in f"{caught.value}{caught.value!r}{caught.value.__cause__!r}", wrong
    for form in (f"{Database(url)}", f"{Database(url)!r}"):
        assert PASSWORD not in form
        assert f"{USER}@127.0.0.1:{port}/journals" in form


def test_a_newer_format_is_refused_by_leader_standby_and_reader(
    url: str, postgres_server: PostgresServer, opened: Opening
) -> None:
    """Nobody works on what a newer version has written, and nobody waits for it."""
    journal = opened(url)
    with admin(postgres_server, url) as session:
        session.execute("UPDATE fedeval_meta SET value = '99' WHERE name = 'format'")
    for attempt in (lambda: Election(Database(url)).attempt(), lambda: postgres_upkeep.verify(url)):
        with pytest.raises(JournalNewer, match="format 99"):
            attempt()
    journal.close()
    with pytest.raises(JournalNewer, match="format 99"):
        open_database(url)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("UPDATE fedeval_fact SET body = replace(body, 'a1', 'a2') WHERE seq = 2", "row 2 fails its checksum"),
        ("DELETE FROM fedeval_fact WHERE seq = 2", "row 2 is missing"),
        ("DELETE FROM fedeval_fact WHERE seq > 3", "ends at fact 3, but 5 were written"),
        ("DELETE FROM fedeval_meta WHERE name = 'identity'", "lost its journal's identity"),
    ],
)
def test_damage_is_noticed(url: str, postgres_server: PostgresServer, opened: Opening, damage: str, text: str) -> None:
    """A changed row, a missing one, a missing end, a missing name: by the next leader and by ``verify``."""
    journal = opened(url)
    journal.append(FACTS)
    journal.leadership.beat(journal.count)
    journal.close()
    with admin(postgres_server, url) as session:
        session.execute(damage.encode())
    with pytest.raises(JournalCorrupt, match=text):
        postgres_upkeep.verify(url)
    with pytest.raises(JournalCorrupt, match=text):
        list(opened(url).facts())


def test_a_foreign_table_of_that_name_is_refused(url: str, postgres_server: PostgresServer) -> None:
    """Tables of another program are not taken for a journal, and not touched."""
    with admin(postgres_server, url) as session:
        session.execute("CREATE TABLE fedeval_fact (x integer)")
    with pytest.raises(JournalCorrupt, match="already exists"):
        open_database(url)
    with pytest.raises(ConfigError, match="holds no journal"):
        postgres_upkeep.verify(url)


# ---------------------------------------------------------------- copies


def test_a_journal_moves_between_a_file_and_a_database(url: str, opened: Opening, tmp_path: Path) -> None:
    """A copy holds the same rows under the same name; it is put into an empty database, or into a directory."""
    file = open_journal(tmp_path / "data")
    file.append(FACTS)
    file.close()
    copy = tmp_path / "copy.db"
    upkeep.backup(tmp_path / "data", copy)
    restored = postgres_upkeep.restore(copy, url)
    with pytest.raises(ConfigError, match="holds the journal"):
        postgres_upkeep.restore(copy, url)
    journal = opened(url)
    saved = postgres_upkeep.backup(url, tmp_path / "again.db")
    upkeep.restore(tmp_path / "again.db", tmp_path / "data2")
    back = open_journal(tmp_path / "data2")

    assert [] == [name for name in tmp_path.iterdir() if name.name.startswith(".")]
    assert {file.identity} == {restored.identity, saved.identity, journal.identity, back.identity}
    assert FACTS == list(journal.facts()) == list(back.facts())
    back.close()
