"""The spool and the state directory: whole or absent, never sent when damaged, owned by one process."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.spool import ResultKey, Spool, SpoolEntry, StateDirectory, remedy
from eval_kernel.errors import DirectoryLocked, DirectoryUnusable
from eval_kernel.partial import Execution, NonFinite, Partial, RowSums, ScoredShard


def an_entry(shard: int = 0, job: str = "job", coordinator: str = "c") -> SpoolEntry:
    """Return an entry with every field in use."""
    rows = (RowSums(3, 1, 1 << 52, 7, 20, 4), RowSums(None, 70, 5, 90, 300, 60))
    partial = Partial(shard, (1 << 52) + 5, 97, 320, 64, rows, 1, (NonFinite(3, 0, "nan"),))
    execution = Execution(0.1, "cpu", "float32", 2, 1 << 40, {"torch": "2.9"})
    return SpoolEntry(ResultKey(coordinator, job, shard), ScoredShard(partial, execution))


def test_entries_come_back_equal(tmp_path: Path) -> None:
    """What was put is loaded again bit for bit, sorted by coordinator, job and shard."""
    entries = [an_entry(2), an_entry(0, job="../../etc/ü"), an_entry(1, coordinator="other")]
    Spool(tmp_path).put(entries)

    assert ([entries[1], entries[0], entries[2]], []) == Spool(tmp_path).load()


def test_a_second_put_replaces_the_first(tmp_path: Path) -> None:
    """There is one entry for each coordinator, job and shard, however often it is put."""
    spool = Spool(tmp_path)
    spool.put([an_entry(1)])
    spool.put([an_entry(1)])

    assert ([an_entry(1)], []) == spool.load()


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Without its directory, parents included, a spool is empty; the next put makes it anew."""
    spool = Spool(tmp_path / "state" / "spool")
    shutil.rmtree(tmp_path / "state")
    empty = spool.load()
    spool.remove([an_entry(1).key])
    spool.put([an_entry(1)])

    assert ([], []) == empty
    assert ([an_entry(1)], []) == spool.load()


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "mount that disk writable"),
        (errno.EACCES, "the right to write"),
        (errno.ENOENT, "make that directory again"),
        (errno.EIO, "repair that disk"),
    ],
)
def test_the_remedy_fits_the_fault(number: int, text: str) -> None:
    """What a person is told to do depends on why the disk refused."""
    assert text in remedy(OSError(number, os.strerror(number)))


def test_removed_entries_are_gone_and_removal_repeats(tmp_path: Path) -> None:
    """Removing an entry twice is no error."""
    spool = Spool(tmp_path)
    spool.put([an_entry(1), an_entry(2)])
    spool.remove([an_entry(1).key])
    spool.remove([an_entry(1).key])

    assert ([an_entry(2)], []) == spool.load()


@pytest.mark.parametrize("keep", [0, 1, 60, -1])
def test_a_torn_file_is_moved_aside(tmp_path: Path, keep: int) -> None:
    """A file that was cut short is never returned, is kept under another name, and is reported once."""
    spool = Spool(tmp_path)
    spool.put([an_entry(1), an_entry(2)])
    torn = next(p for p in tmp_path.iterdir() if '"shard":1' in p.read_text())
    torn.write_bytes(torn.read_bytes()[:keep])
    entries, corrupted = spool.load()

    assert [an_entry(2)] == entries
    assert [torn.name] == [c.file for c in corrupted]
    assert corrupted[0].moved_to.exists()
    assert ([an_entry(2)], []) == spool.load()


def test_a_changed_digit_is_found_by_the_checksum(tmp_path: Path) -> None:
    """An entry that is valid JSON but not what was written is not sent."""
    spool = Spool(tmp_path)
    spool.put([an_entry(1)])
    file = next(tmp_path.iterdir())
    file.write_text(file.read_text().replace("320", "321"))
    entries, corrupted = spool.load()

    assert [] == entries
    assert "the checksum does not match" == corrupted[0].reason


def test_an_entry_under_a_foreign_name_is_refused(tmp_path: Path) -> None:
    """A file that was copied to another name is not a second result."""
    spool = Spool(tmp_path)
    spool.put([an_entry(1)])
    file = next(tmp_path.iterdir())
    (tmp_path / "copy.json").write_text(file.read_text())
    entries, corrupted = spool.load()

    assert [an_entry(1)] == entries
    assert ["copy.json"] == [c.file for c in corrupted]


def test_a_later_format_is_moved_aside(tmp_path: Path) -> None:
    """An entry of a format this version does not know is kept but not guessed at."""
    from eval_kernel.plan import digest_json

    spool = Spool(tmp_path)
    spool.put([an_entry(1)])
    file = next(tmp_path.iterdir())
    body = json.loads(file.read_text())["body"] | {"format": 2}
    file.write_text(json.dumps({"body": body, "checksum": digest_json(body)}))

    assert "format 2 is not 1" == spool.load()[1][0].reason


def test_unfinished_writes_are_swept(tmp_path: Path) -> None:
    """A temporary file left by a killed agent disappears."""
    (tmp_path / "x.tmp").write_text("{")

    assert ([], []) == Spool(tmp_path).load()
    assert [] == list(tmp_path.iterdir())


def test_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk refuses, the half-written file is removed and the error is the caller's to repeat."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = Spool(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("agent.spool.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            spool.put([an_entry(1)])

    assert [] == list(tmp_path.iterdir())
    spool.put([an_entry(1)])
    assert ([an_entry(1)], []) == spool.load()


def test_a_partial_with_the_largest_exact_sum_survives(tmp_path: Path) -> None:
    """Sums are integers on disk: 2^53 - 1 steps come back exactly."""
    entry = an_entry()
    partial = replace(entry.scored.partial, steps=(1 << 53) - 1)
    entry = SpoolEntry(entry.key, ScoredShard(partial, entry.scored.execution))
    Spool(tmp_path).put([entry])

    assert [entry] == Spool(tmp_path).load()[0]


def test_the_state_directory_has_one_owner(tmp_path: Path) -> None:
    """A second agent on one state directory is refused, with the owner's pid and the remedy."""
    code = "import sys\nfrom pathlib import Path\nfrom agent.spool import StateDirectory\n"
    code += "s = StateDirectory(Path(sys.argv[1]))\nprint('locked', flush=True)\nsys.stdin.read()\n"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert owner.stdout is not None
        assert "locked\n" == owner.stdout.readline()
        with pytest.raises(DirectoryLocked, match=f"pid {owner.pid}.*--state"):
            StateDirectory(tmp_path)
    finally:
        owner.communicate()
    with StateDirectory(tmp_path) as state:
        assert str(os.getpid()) == (state.path / "lock").read_text().strip()


def test_the_name_is_made_once(tmp_path: Path) -> None:
    """An agent keeps its name over restarts; two state directories give two names."""
    with StateDirectory(tmp_path / "a") as state:
        name = state.name()
    with StateDirectory(tmp_path / "a") as state:
        again = state.name()
    with StateDirectory(tmp_path / "b") as state:
        other = state.name()

    assert name == again
    assert name != other


def test_a_file_in_place_of_the_directory_is_unusable(tmp_path: Path) -> None:
    """A state directory that cannot be made gives one line with the remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DirectoryUnusable, match="--state"):
        StateDirectory(tmp_path / "file" / "below")
