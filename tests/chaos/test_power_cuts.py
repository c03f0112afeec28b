"""Power cuts and failing disks under the real SQLite: what was acknowledged is there, whatever was not synced is lost.

A shim records each write and sync of a run. Disks are made of the record: all that was synced, and of the rest some
writes whole, some torn, some missing, in any company.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator.journal import open_journal
from coordinator.journal.sqlite import FILE
from eval_kernel.errors import FedevalError
from tests.chaos.writer import BATCHES

ROOT = Path(__file__).resolve().parents[2]
FACTS = [fact for batch in BATCHES for fact in batch]
CUTS = 200
SECTOR = 512


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler (cc) for the shim between SQLite and the disk")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return library


def under(shim: Path, watched: Path, *arguments: str) -> str:
    """Run the writer under the shim and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "LD_PRELOAD": str(shim)}
    environment["FEDEVAL_SHIM_DIR"] = str(watched)
    command = [sys.executable, "-m", "tests.chaos.writer", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout


@dataclass(frozen=True)
class Call:
    """One recorded call: ``w``rite, ``s``ync or ``t``runcate."""

    kind: str
    name: str
    offset: int
    data: bytes


def recorded(record: Path) -> list[Call]:
    """Read a record."""
    calls = []
    with record.open("rb") as file:
        while header := file.readline():
            kind, name, offset, length = header.decode().split()
            calls.append(Call(kind, name, int(offset), file.read(int(length))))
    return calls


class Disk:
    """The files of a directory as calls change them: what is synced, and what is not yet."""

    def __init__(self, directory: Path) -> None:
        self._synced = {file.name: file.read_bytes() for file in directory.iterdir()}
        self._since: defaultdict[str, list[Call]] = defaultdict(list)
        self.acknowledged = 0

    def take(self, call: Call) -> None:
        if call.name == "acknowledged":
            self.acknowledged = int(call.data)
        elif call.kind == "s":
            self._synced[call.name] = self._with(call.name, self._since.pop(call.name, []))
        else:
            self._since[call.name].append(call)

    def _with(self, name: str, calls: list[Call]) -> bytes:
        content = bytearray(self._synced.get(name, b""))
        for call in calls:
            if call.kind == "t":
                del content[call.offset :]
                content.extend(bytes(call.offset - len(content)))
            else:
                content.extend(bytes(max(0, call.offset - len(content))))
                content[call.offset : call.offset + len(call.data)] = call.data
        return bytes(content)

    def cut(self, target: Path, chance: random.Random) -> None:
        """Write the files as a power cut may leave them."""
        target.mkdir()
        for name in {*self._synced, *self._since}:
            if name.endswith("-shm"):
                continue  # shared memory: nobody writes it to the disk
            kept = []
            for call in self._since.get(name, ()):
                fate = chance.random()
                if call.kind == "w" and fate < 0.3:
                    torn = SECTOR * chance.randrange(len(call.data) // SECTOR + 1)
                    call = Call("w", name, call.offset, call.data[:torn])
                if fate < 0.65:
                    kept.append(call)
            (target / name).write_bytes(self._with(name, kept))


def lost(shim: Path, tmp_path: Path, synchronous: str) -> tuple[int, int]:
    """Cut the power at 200 instants of a run; return after how many something told was gone, or a fact was wrong."""
    data = tmp_path / "data"
    open_journal(data, "identity").close()
    start = tmp_path / "start"
    shutil.copytree(data, start)
    under(shim, data, "record", str(data), str(tmp_path / "record"), synchronous)
    calls = recorded(tmp_path / "record")
    assert len(BATCHES) == sum(call.name == "acknowledged" for call in calls)
    gone = wrong = 0
    for seed in range(CUTS):
        chance = random.Random(seed)
        disk = Disk(start)
        for call in calls[: chance.randrange(1, len(calls) + 1)]:
            disk.take(call)
        cut = tmp_path / f"cut{seed}"
        disk.cut(cut, chance)
        try:
            journal = open_journal(cut)
            try:
                facts = list(journal.facts())
            finally:
                journal.close()
        except FedevalError:
            gone += 1
            continue
        gone += len(facts) < disk.acknowledged
        wrong += facts != FACTS[: len(facts)]
        shutil.rmtree(cut)
    return gone, wrong


def test_no_power_cut_loses_what_was_acknowledged(shim: Path, tmp_path: Path) -> None:
    """Of 200 power cuts none loses an acknowledged fact or leaves a journal that cannot be opened."""

    assert (0, 0) == lost(shim, tmp_path, "FULL")


def test_without_syncing_each_commit_power_cuts_lose_facts(shim: Path, tmp_path: Path) -> None:
    """The control: with ``synchronous=NORMAL`` the same cuts lose facts, and still never change one."""
    gone, wrong = lost(shim, tmp_path, "NORMAL")

    assert gone >= 10
    assert 0 == wrong


def test_a_write_or_sync_that_fails_acknowledges_nothing_that_is_not_there(shim: Path, tmp_path: Path) -> None:
    """Each of the first 200 calls fails once with EIO: the journal says so, and a restart finds all that was told."""
    data = tmp_path / "data"
    open_journal(data, "identity").close()
    output = under(shim, tmp_path / "watched", "fail", str(data), str(CUTS))
    results = [json.loads(line) for line in output.splitlines()]
    struck = [result for result in results if result["struck"]]

    assert CUTS == len(results) == len(struck)
    assert [] == [result for result in results if not result["sound"] or result["facts"] < result["acknowledged"]]
    # A failing fold of the WAL is no failed commit: SQLite tries it again with the next one.
    assert sum(result["error"] == "DIRECTORY_UNUSABLE" for result in results) >= CUTS // 2
    assert all(result["error"] or result["facts"] == len(FACTS) for result in results)
    assert (tmp_path / "data" / FILE).exists()
