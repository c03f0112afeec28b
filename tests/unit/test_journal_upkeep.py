"""Journals are verified, copied, restored, salvaged and upgraded; whatever is lost is only scored again."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.core import facts as f
from coordinator.core.calls import SchedulerConfig, ScoreWork
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from coordinator.journal import base, open_journal, sqlite
from coordinator.journal.directory import HEAD
from coordinator.journal.salvage import salvage
from coordinator.journal.sqlite import FILE
from coordinator.journal.upkeep import backup, restore, verify
from eval_kernel.errors import ConfigError, DirectoryLocked, JournalCorrupt, JournalNewer
from eval_kernel.tally import Tally
from tests.support.core_cases import info, make_partial, make_plan, make_scored

SHARDS = 12
#: The journal of two jobs: one half done, one over, with a failure, an expiry and a divergence on the way.
FACTS: list[f.Fact] = [
    f.JobSubmitted("j1", "k1", "name", "{}", 1.0),
    f.JobPlanned("j1", "a1", make_plan(SHARDS), 2.0),
    f.JobSubmitted("j2", "k2", "other", "[]", 2.5),
    *(f.ShardCommitted("j1", "a1", make_scored(i), 3.0 + i) for i in range(5)),
    f.ShardFailed("j1", 6, "a1", "OUT_OF_MEMORY", "no room", False),
    f.ShardExpired("j1", 7, "a2", False),
    f.JobPlanned("j2", "a2", make_plan(2), 9.0),
    f.ShardCommitted("j2", "a2", make_scored(0), 9.5),
    f.ShardDiverged("j2", "a1", make_scored(0, shift=1), 9.6),
    f.ShardCommitted("j2", "a2", make_scored(1), 9.7),
    f.ShardCommitted("j1", "a2", make_scored(5), 10.0),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory whose journal holds FACTS and is closed."""
    write(tmp_path / "data", FACTS)
    return tmp_path / "data"


def write(data: Path, facts: list[f.Fact]) -> None:
    """Append facts to the journal of a directory."""
    journal = open_journal(data)
    journal.append(facts)
    journal.close()


def read(data: Path) -> list[f.Fact]:
    """Return the facts of a directory's journal."""
    journal = open_journal(data)
    try:
        return list(journal.facts())
    finally:
        journal.close()


def reference(shards: int) -> str:
    """Return the digest of what one process adds up."""
    tally = Tally()
    for shard in range(shards):
        tally.add(make_partial(shard))
    return tally.digest()


def finish(data: Path) -> dict[str, tuple[JobState, str]]:
    """Go on where the journal ends, until all jobs are settled; return their states and digests, by their keys."""
    journal = open_journal(data)
    try:
        scheduler = Scheduler(SchedulerConfig())
        scheduler.replay(journal.facts())
        now = 100.0
        journal.append(scheduler.register(info("a9"), now))
        for key, spec in (("k1", "{}"), ("k2", "[]")):  # clients repeat their calls until they are told
            journal.append(scheduler.submit(f"again-{key}", key, spec, "", now).facts)
        for _ in range(100):
            now += 1.0
            work = scheduler.acquire("a9", "1", 8, "", now)
            if work is None:
                break
            if isinstance(work, ScoreWork):
                for shard in work.shards:
                    journal.append(scheduler.scored("a9", "1", work.job, make_scored(shard.index), now).facts)
            else:
                plan = make_plan(SHARDS if work.spec_json == "{}" else 2)
                journal.append(scheduler.planned("a9", "1", work.job, plan, now).facts)
        scheduler.check()
        return {view.key: (view.state, view.tally.digest()) for view in scheduler.jobs()}
    finally:
        journal.close()


DONE = {"k1": (JobState.SUCCEEDED, reference(SHARDS)), "k2": (JobState.SUCCEEDED, reference(2))}


# ---------------------------------------------------------------- damage


def rows(data: Path) -> list[tuple[object, ...]]:
    """Return the journal's rows as they are stored."""
    connection = sqlite3.connect(data / FILE)
    try:
        return connection.execute("SELECT seq, kind, job, shard, body, checksum FROM fact ORDER BY seq").fetchall()
    finally:
        connection.close()


def flip_a_bit(data: Path, chance: random.Random) -> str:
    """Flip one bit of one column's content in the file; return where."""
    content = bytearray((data / FILE).read_bytes())
    while True:
        row = chance.choice(rows(data))
        column = chance.choice((1, 2, 4, 4, 4, 5))  # kind, job, checksum; the body most often
        value = row[column]
        stored = value.encode() if isinstance(value, str) else bytes(value)  # type: ignore[arg-type]
        anchor = bytes(row[5])  # type: ignore[arg-type]  # the checksum is unique: the row's content ends with it
        end = content.find(anchor) + len(anchor)
        # A long body lies on pages of its own, in pieces: then its first piece is looked for anywhere.
        place = content.rfind(stored, 0, end) if column != 5 else end - len(anchor)
        if end >= len(anchor) and place >= 0:
            break
    bit = chance.randrange(8 * len(stored))
    content[place + bit // 8] ^= 1 << (bit % 8)
    (data / FILE).write_bytes(content)
    return f"row {row[0]}, column {column}, bit {bit}"


@pytest.mark.parametrize("block", range(4))
def test_every_flipped_bit_is_noticed_and_salvage_comes_to_the_right_total(block: int, tmp_path: Path) -> None:
    """Of 200 single bits flipped in rows, 200 are noticed, no wrong total is made, and the jobs end as they should."""
    write(tmp_path / "sound", FACTS)
    for seed in range(50 * block, 50 * block + 50):
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(tmp_path / "sound", copy)
        where = flip_a_bit(copy, random.Random(seed))
        with pytest.raises((JournalCorrupt, JournalNewer), match=FILE):
            read(copy)
        with pytest.raises((JournalCorrupt, JournalNewer), match=FILE):
            verify(copy)
        made = salvage(copy)

        assert 1 >= len(made.lost), f"seed {seed}: {where} cost the rows {made.lost}"
        assert made.kept == verify(copy).facts
        assert finish(copy) == DONE, f"seed {seed}: {where}"
        shutil.rmtree(copy)


def test_without_the_checksum_flipped_bits_make_wrong_totals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with the comparison taken out, the same bits come through."""
    write(tmp_path / "sound", FACTS)
    monkeypatch.setattr(base, "chained", lambda previous, seq, row: Anything())
    unnoticed = 0
    for seed in range(60):
        copy = tmp_path / f"copy{seed}"
        shutil.copytree(tmp_path / "sound", copy)
        flip_a_bit(copy, random.Random(seed))
        with suppress(JournalCorrupt, JournalNewer):
            unnoticed += read(copy) != FACTS

    assert unnoticed >= 10


class Anything(bytes):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_cut_or_overwritten_salvage_ends_in_a_correct_job(seed: int, tmp_path: Path) -> None:
    """A torn page, a cut file, rows deleted, the WAL gone: every job is done again as far as it must be, and exact."""
    chance = random.Random(seed)
    data = tmp_path / "data"
    write(data, FACTS)
    path = data / FILE
    content = bytearray(path.read_bytes())
    match seed % 4:
        case 0:
            start = chance.randrange(100, len(content) - 512)
            content[start : start + 512] = chance.randbytes(512)
            path.write_bytes(content)
        case 1:
            path.write_bytes(content[: chance.randrange(0, len(content))])
        case 2:
            connection = sqlite3.connect(path)
            gone = chance.sample(range(1, len(FACTS) + 1), chance.randint(1, 6))
            connection.executemany("DELETE FROM fact WHERE seq = ?", [(seq,) for seq in gone])
            connection.commit()
            connection.close()
        case _:
            path.write_bytes(b"no journal at all" * chance.randint(0, 50))
    made = salvage(data)

    assert made.damaged.exists()
    assert finish(data) == DONE, f"seed {seed}: {made}"


def test_a_lost_end_is_salvaged_without_what_is_gone(data: Path) -> None:
    """After the WAL was removed the remedy of the message works, and names the rows that are gone."""
    (data / HEAD).write_text(f"{len(FACTS) + 2:020d}\n")
    with pytest.raises(JournalCorrupt, match="journal salvage"):
        open_journal(data)
    made = salvage(data)

    assert (len(FACTS) + 1, len(FACTS) + 2) == made.lost
    assert finish(data) == DONE


def test_a_sound_journal_comes_out_of_salvage_as_it_was(data: Path) -> None:
    """Nothing lost, nothing dropped, the same identity: agents' spooled results stay welcome."""
    before = verify(data)
    made = salvage(data)

    assert ((), 0) == (made.lost, made.dropped)
    assert read(data) == FACTS
    assert before.identity == verify(data).identity


def test_a_journal_of_a_newer_version_is_not_salvaged(data: Path) -> None:
    """It is not damaged: the newer version can read it."""
    content = bytearray((data / FILE).read_bytes())
    content[63] = len(sqlite.MIGRATIONS) + 1
    (data / FILE).write_bytes(content)
    with pytest.raises(JournalNewer):
        salvage(data)

    assert content == (data / FILE).read_bytes()


# ---------------------------------------------------------------- copies


def test_a_backup_is_made_while_the_journal_is_in_use_and_can_be_restored(data: Path, tmp_path: Path) -> None:
    """The copy holds what was durable at that moment; restoring it keeps the replaced journal beside it."""
    journal = open_journal(data)
    late = f.ShardCommitted("j1", "a1", make_scored(6), 20.0)
    journal.append([late])
    made = backup(data, tmp_path / "copy.db")
    journal.append([f.ShardCommitted("j1", "a1", make_scored(7), 21.0)])

    assert len(FACTS) + 1 == made.facts
    assert len(FACTS) + 2 == verify(data).facts
    with pytest.raises(DirectoryLocked):
        restore(tmp_path / "copy.db", data)
    journal.close()
    restore(tmp_path / "copy.db", data)

    assert read(data) == [*FACTS, late]
    assert 1 == len(list(data.glob(f"{FILE}.replaced-*")))
    assert finish(data) == DONE
    restore(tmp_path / "copy.db", tmp_path / "elsewhere")
    assert read(tmp_path / "elsewhere") == [*FACTS, late]


def test_a_damaged_backup_is_refused_and_changes_nothing(data: Path, tmp_path: Path) -> None:
    """It is verified before anything is touched."""
    backup(data, tmp_path / "copy.db")
    with pytest.raises(ConfigError, match="exists already"):
        backup(data, tmp_path / "copy.db")
    content = bytearray((tmp_path / "copy.db").read_bytes())
    place = content.find(b'"OUT_OF_MEMORY"')
    content[place + 3] ^= 1
    (tmp_path / "copy.db").write_bytes(content)
    before = {path.name: path.read_bytes() for path in data.iterdir() if path.is_file()}
    with pytest.raises(JournalCorrupt, match="fails its checksum"):
        restore(tmp_path / "copy.db", data)

    assert before == {path.name: path.read_bytes() for path in data.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match="is no file"):
        restore(tmp_path / "nothing.db", data)


def test_verifying_touches_nothing(data: Path) -> None:
    """A journal that nobody uses is read as it lies there."""
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    found = verify(data)

    assert len(FACTS) == found.facts
    assert [("j1", "RUNNING", 12, 6), ("j2", "SUCCEEDED", 2, 2)] == [
        (job.job, job.state, job.shards, job.shards_done) for job in found.jobs
    ]
    assert before == {path.name: path.read_bytes() for path in data.iterdir()}


# ---------------------------------------------------------------- formats


def test_an_older_format_is_upgraded_after_a_copy_was_made(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next format's statements run once, and the journal as it was lies beside."""
    number = len(sqlite.MIGRATIONS)
    later = (*sqlite.MIGRATIONS, ("CREATE TABLE note (text TEXT)", "INSERT INTO note VALUES ('new')"))
    monkeypatch.setattr(sqlite, "MIGRATIONS", later)

    assert read(data) == FACTS
    connection = sqlite3.connect(data / FILE)
    assert (number + 1,) == connection.execute("PRAGMA user_version").fetchone()
    assert [("new",)] == connection.execute("SELECT text FROM note").fetchall()
    connection.close()
    assert read(data) == FACTS
    monkeypatch.undo()
    with pytest.raises(JournalNewer):
        read(data)
    restore(data / f"{FILE}.format-{number}", data)
    assert read(data) == FACTS


def test_a_failed_upgrade_changes_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each format's statements take effect together or not at all."""
    later = (*sqlite.MIGRATIONS, ("CREATE TABLE note (text TEXT)", "INSERT INTO nowhere VALUES (1)"))
    monkeypatch.setattr(sqlite, "MIGRATIONS", later)
    with pytest.raises(JournalCorrupt):
        read(data)
    monkeypatch.undo()

    assert read(data) == FACTS


# ---------------------------------------------------------------- commands


def test_the_commands_say_what_they_found(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prints one line and the jobs, or JSON; a damaged journal exits 43 and names the next command."""
    run: Callable[..., int] = lambda *words: cli.run(["journal", *words, "--data-dir", str(data)])  # noqa: E731

    assert 0 == run("verify")
    out = capsys.readouterr().out
    assert f"{data / FILE} is sound: {len(FACTS)} facts" in out
    assert "job j1: RUNNING, 6 of 12 shards" in out
    assert 0 == run("backup", str(tmp_path / "b.db"), "--json")
    assert len(FACTS) == json.loads(capsys.readouterr().out)["facts"]
    connection = sqlite3.connect(data / FILE)
    connection.execute("UPDATE fact SET body = replace(body, 'a1', 'a7') WHERE seq = 5")
    connection.commit()
    connection.close()
    assert JournalCorrupt.exit_code == run("verify")
    assert "row 5 fails its checksum; `eval-coordinator journal salvage`" in capsys.readouterr().err
    assert 0 == run("salvage")
    out = capsys.readouterr().out
    assert "1 lost (rows 5)" in out
    assert "job j1: RUNNING, 5 of 12 shards" in out
    assert 0 == run("restore", str(tmp_path / "b.db"))
    assert read(data) == FACTS
    assert 2 == cli.run(["journal", "verify", "--data-dir", str(tmp_path / "none")])
    assert "holds no journal" in capsys.readouterr().err
