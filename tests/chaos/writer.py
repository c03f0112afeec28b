"""What runs under the shim: appends facts to a journal and notes each one that a coordinator would acknowledge.

``python -m tests.chaos.writer record DIR RECORD FULL|NORMAL`` appends once; ``... fail DIR COUNT`` appends once for
each n below COUNT on a copy of DIR of which the n-th write or sync fails, and prints what came of it as JSON lines.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

from coordinator.core import facts as f
from coordinator.journal import open_journal, sqlite
from eval_kernel.errors import FedevalError
from tests.support.core_cases import make_plan, make_scored

SHARDS = 120
#: What is appended, batch by batch: long enough for the WAL to be folded into the file on the way.
BATCHES: list[list[f.Fact]] = [
    [f.JobSubmitted("j1", "k1", "name", "{}", 1.0), f.JobPlanned("j1", "a1", make_plan(SHARDS), 2.0)],
    *([f.ShardCommitted("j1", "a1", make_scored(shard), 3.0 + shard)] for shard in range(SHARDS)),
]
#: Pages after which SQLite folds the WAL in; its own default of 1000 would need a longer run.
CHECKPOINT_PAGES = 40


def append_all(data: Path) -> int:
    """Append every batch; return how many facts were acknowledged. Raises what the journal raises."""
    acknowledged = 0
    note = os.open(data / "acknowledged", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        journal = open_journal(data)
        try:
            for batch in BATCHES:
                journal.append(batch)
                acknowledged += len(batch)
                os.pwrite(note, f"{acknowledged:08d}".encode(), 0)
        finally:
            journal.close()
    finally:
        os.close(note)
    return acknowledged


def main() -> None:
    """Do what the arguments say."""
    shim = ctypes.CDLL(None)
    what, directory, third, *rest = sys.argv[1:]
    original = sqlite._connect

    def connect(path: Path) -> sqlite3.Connection:
        connection = original(path)
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        if rest:
            connection.execute(f"PRAGMA synchronous={rest[0]}")
        return connection

    sqlite._connect = connect
    data = Path(directory)
    if what == "record":
        record = os.open(third, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        shim.shim_arm(record, -1)
        append_all(data)
        shim.shim_arm(-1, -1)
        return
    watched = Path(os.environ["FEDEVAL_SHIM_DIR"])
    for number in range(int(third)):
        shutil.rmtree(watched, ignore_errors=True)
        shutil.copytree(data, watched)
        shim.shim_arm(-1, number)
        error = ""
        try:
            append_all(watched)
        except FedevalError as failure:
            error = failure.code
        struck = shim.shim_calls() > number
        shim.shim_arm(-1, -1)
        told = (watched / "acknowledged").read_text("ascii") if (watched / "acknowledged").exists() else ""
        print(
            json.dumps(
                {"call": number, "struck": struck, "error": error, "acknowledged": int(told or 0), **after(watched)}
            )
        )


def after(data: Path) -> dict[str, object]:
    """Return what a coordinator finds that starts on the directory now."""
    journal = open_journal(data)
    try:
        facts = list(journal.facts())
    finally:
        journal.close()
    return {"facts": len(facts), "sound": facts == [fact for batch in BATCHES for fact in batch][: len(facts)]}


if __name__ == "__main__":
    main()
