"""What only a journal on disk can suffer: damage, cut files, newer formats, locks, full disks, bad directories."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.core import facts as f
from coordinator.journal import MemoryJournal, open_journal
from coordinator.journal.base import decode, encode
from coordinator.journal.salvage import salvage
from coordinator.journal.sqlite import FILE, MIGRATIONS
from eval_kernel.errors import DirectoryLocked, DirectoryUnusable, JournalCorrupt, JournalFull, JournalNewer
from tests.support.core_cases import make_plan, make_scored

FACTS: list[f.Fact] = [
    f.JobSubmitted("j1", "k", "name", "{}", 1.0),
    f.JobPlanned("j1", "a1", make_plan(5), 2.0),
    *(f.ShardCommitted("j1", "a1", make_scored(i), 3.0 + i) for i in range(5)),
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory whose journal holds FACTS and is closed."""
    journal = open_journal(tmp_path / "data")
    journal.append(FACTS)
    journal.close()
    return tmp_path / "data"


def change(data: Path, statement: str, *values: object) -> None:
    """Run a statement on the file behind the journal's back."""
    connection = sqlite3.connect(data / FILE)
    try:
        with connection:
            connection.execute(statement, values)
    finally:
        connection.close()


def replay(data: Path) -> list[f.Fact]:
    """Open, read everything, close."""
    journal = open_journal(data)
    try:
        return list(journal.facts())
    finally:
        journal.close()


@pytest.mark.parametrize("column", ["kind", "job", "body", "checksum", "shard"])
def test_a_changed_column_is_noticed(data: Path, column: str) -> None:
    """Each column of a row is covered: the row is named, and the remedy."""
    changed = {"kind": "'shard_diverged'", "job": "'j2'", "checksum": "zeroblob(32)", "shard": "77"}
    body = "replace(body, '\"a1\"', '\"a2\"')"
    change(data, f"UPDATE fact SET {column} = {changed.get(column, body)} WHERE seq = 4")
    with pytest.raises(JournalCorrupt, match=r"row 4 .*restore"):
        replay(data)


def test_exchanged_rows_are_noticed(data: Path) -> None:
    """Two whole rows that change places break the chain."""
    change(data, "UPDATE fact SET seq = seq + 100 WHERE seq IN (3, 4)")
    change(data, "UPDATE fact SET seq = 107 - seq WHERE seq > 100")
    with pytest.raises(JournalCorrupt, match="row 3 fails its checksum"):
        replay(data)


@pytest.mark.parametrize(("row", "message"), [(1, "row 1 is missing"), (4, "row 4 is missing"), (7, "ends at fact 6")])
def test_a_missing_row_is_noticed(data: Path, row: int, message: str) -> None:
    """A row taken out at the beginning, in the middle or at the end."""
    change(data, "DELETE FROM fact WHERE seq = ?", row)
    with pytest.raises(JournalCorrupt, match=message):
        replay(data)


def test_rows_of_another_journal_do_not_fit(data: Path, tmp_path: Path) -> None:
    """The chain begins at the journal's identity."""
    change(data, "UPDATE meta SET value = 'someone else' WHERE name = 'identity'")
    with pytest.raises(JournalCorrupt, match="row 1 fails its checksum"):
        replay(data)


def test_flipped_bytes_are_never_replayed(data: Path, tmp_path: Path) -> None:
    """Wherever a byte of the file flips, replay gives the facts as they were, or raises a JournalCorrupt or kin."""
    original = (data / FILE).read_bytes()
    noticed = 0
    positions = range(100, len(original), 251)
    for position in positions:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(data, copy)
        damaged = bytearray(original)
        damaged[position] ^= 0x15
        (copy / FILE).write_bytes(damaged)
        try:
            facts = replay(copy)
        except (JournalCorrupt, JournalNewer):
            noticed += 1
        else:
            assert FACTS == facts, f"byte {position} flipped unnoticed"

    assert noticed > len(positions) / 10


def test_what_is_no_journal_is_refused_untouched(data: Path) -> None:
    """An empty file, text, a cut file and another program's database: one line each, and the file stays as it was."""
    other = data.parent / "other.db"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    whole = (data / FILE).read_bytes()
    for content, message in (
        (b"", "no journal"),
        (b"hello " * 100, "no journal"),
        (whole[:50], "no journal"),
        (whole[: len(whole) // 2], "cut short"),
        (other.read_bytes(), "another program"),
    ):
        (data / FILE).write_bytes(content)
        with pytest.raises(JournalCorrupt, match=message):
            open_journal(data)

        assert content == (data / FILE).read_bytes()


def test_a_newer_format_is_refused_untouched(data: Path) -> None:
    """A journal of a later version is left alone, and the message says what to do."""
    newer = bytearray((data / FILE).read_bytes())
    newer[60:64] = struct.pack(">I", len(MIGRATIONS) + 1)
    (data / FILE).write_bytes(newer)
    with pytest.raises(JournalNewer, match="install that one again"):
        open_journal(data)

    assert newer == (data / FILE).read_bytes()


def test_an_unknown_kind_of_fact_is_from_a_newer_version(tmp_path: Path) -> None:
    """A row whose checksum holds and whose kind is unknown was written by a later version."""

    class Later(f.JobCancelled):
        kind = "job_praised"

    journal = open_journal(tmp_path)
    try:
        journal.append([Later("j1", "well done", 1.0)])
        with pytest.raises(JournalNewer, match="job_praised"):
            list(journal.facts())
    finally:
        journal.close()


def test_a_directory_is_used_by_one_process(data: Path) -> None:
    """A second opening is refused and names the process that has it; closing lets go."""
    journal = open_journal(data)
    with pytest.raises(DirectoryLocked, match=f"running process {os.getpid()}; stop that one"):
        open_journal(data)
    journal.close()
    journal.close()

    assert FACTS == replay(data)


HOLD = """
import sys
from pathlib import Path
from coordinator.core import facts as f
from coordinator.journal import open_journal
journal = open_journal(Path(sys.argv[1]))
journal.append([f.JobCancelled("j1", "from the child", 9.0)])
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(data: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the journal open and has appended one fact."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(data)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_process_leaves_no_lock_and_loses_nothing(data: Path, holder: subprocess.Popen[str]) -> None:
    """The lock ends with its process; what was appended is there."""
    with pytest.raises(DirectoryLocked, match=str(holder.pid)):
        open_journal(data)
    holder.send_signal(signal.SIGKILL)
    holder.wait()

    assert [*FACTS, f.JobCancelled("j1", "from the child", 9.0)] == replay(data)


def test_a_wal_that_is_gone_is_noticed(data: Path, holder: subprocess.Popen[str]) -> None:
    """Removing or cutting the WAL of a killed process would lose facts silently: the head note knows."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    wal = data / f"{FILE}-wal"
    content = wal.read_bytes()
    wal.write_bytes(content[:40])
    with pytest.raises(JournalCorrupt, match="ends at fact 7, but 8 were written"):
        open_journal(data)
    wal.unlink(missing_ok=True)
    (data / f"{FILE}-shm").unlink(missing_ok=True)
    with pytest.raises(JournalCorrupt, match="eval-coordinator journal salvage"):
        open_journal(data)
    assert (8,) == salvage(data).lost

    assert FACTS == replay(data), "the remedy that the message names works"


def test_a_full_disk_loses_nothing_and_ends_when_there_is_space(tmp_path: Path) -> None:
    """JournalFull: all of the batch or none of it; the same call works once there is room."""
    journal = open_journal(tmp_path)
    try:
        journal.append(FACTS)
        pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
        journal._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
        batch = [f.JobSubmitted(f"x{i}", f"x{i}", "", "{}" * 500, 1.0) for i in range(50)]
        for _ in range(3):
            with pytest.raises(JournalFull, match="nothing was written"):
                journal.append(batch)

            assert FACTS == list(journal.facts())
        journal._connection.execute("PRAGMA max_page_count = 100000")
        journal.append(batch)
        assert [*FACTS, *batch] == list(journal.facts())
    finally:
        journal.close()
    assert [*FACTS, *batch] == replay(tmp_path)


def test_a_full_journal_in_memory_behaves_alike() -> None:
    """The journal of the simulator fills up in the same way."""
    journal = MemoryJournal("m", room=3)
    journal.append(FACTS[:2])
    with pytest.raises(JournalFull):
        journal.append(FACTS[2:4])
    journal.append(FACTS[2:3])

    assert FACTS[:3] == list(journal.facts())


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_removed_while_in_use_is_noticed(data: Path, replaced: bool) -> None:
    """An append to a file that a restart would not find raises, though the write itself succeeds."""
    journal = open_journal(data)
    try:
        (data / FILE).rename(data / "away.db")
        if replaced:
            shutil.copy(data / "away.db", data / FILE)
        with pytest.raises(DirectoryUnusable, match="was removed or replaced while in use: put it back"):
            journal.append([f.ShardCommitted("j1", "a1", make_scored(9), 9.0)])
    finally:
        journal.close()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A path below a file, or where nothing can be made."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "data", tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(DirectoryUnusable, match=f"cannot use the data directory {path}"):
            open_journal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    """A directory without the right to write is refused at once."""
    tmp_path.chmod(0o500)
    with pytest.raises(DirectoryUnusable, match="Permission denied"):
        open_journal(tmp_path)


def test_half_a_creation_is_begun_anew(tmp_path: Path) -> None:
    """A process killed while it made the journal leaves nothing that stands in the way."""
    (tmp_path / f"{FILE}.new").write_bytes(b"half")
    (tmp_path / f"{FILE}.new-journal").write_bytes(b"half")
    journal = open_journal(tmp_path)
    journal.append(FACTS)
    journal.close()

    assert FACTS == replay(tmp_path)
    assert {FILE, "head", "lock"} == {path.name for path in tmp_path.iterdir()}


def test_a_manifest_that_cannot_be_is_no_fact_of_a_journal() -> None:
    """What the wire refuses, a journal cannot bring in either; the error names the field."""
    row = encode(f.JobPlanned("j1", "a1", make_plan(1), 0.0))
    assert f.JobPlanned("j1", "a1", make_plan(1), 0.0) == decode(row, "row 1")

    for sound, broken, named in (
        ('"parameters":1', '"parameters":NaN', "parameters is nan"),
        ('"dtype":"float32"', '"dtype":"\\ud800"', "dtype is"),
        ("[0,0,2,10,", "[0,0,2,-10,", "tokens is -10"),
    ):
        assert sound in row.body
        with pytest.raises(JournalCorrupt, match=f"row 1 is no 'job_planned'.*{named}"):
            decode(replace(row, body=row.body.replace(sound, broken)), "row 1")
