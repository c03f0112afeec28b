"""A coordinator whose journal fails ends with that error; what it had not written was acknowledged to nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from coordinator import serve
from coordinator.client import Client
from coordinator.config import ServeConfig
from eval_kernel.errors import DirectoryUnusable, JournalCorrupt, JournalFull, Unreachable
from tests.support.fake_engine import fake_spec
from tests.support.faulty_journal import FaultyJournal
from tests.support.processes import until


class ClosableJournal(FaultyJournal):
    closed = False

    def close(self) -> None:
        self.closed = True


def use(journal: ClosableJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the coordinator open this journal."""
    monkeypatch.setattr(serve, "open_journal", lambda path: journal)


@pytest.mark.parametrize("error", [JournalCorrupt("row 7 fails its checksum"), DirectoryUnusable("the disk is gone")])
def test_a_failing_journal_ends_the_coordinator_with_its_error(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is told to come again, the error ends the process, the journal is let go."""
    journal = ClosableJournal()
    journal.always = error
    use(journal, monkeypatch)

    async def submit(address: str) -> None:
        async with Client(address) as client:
            with pytest.raises(Unreachable):
                await client.submit(fake_spec(), patience=0.1)

    async def main() -> None:
        clients: list[asyncio.Task[None]] = []
        config = ServeConfig(listen="127.0.0.1:0", data_dir=tmp_path)
        with pytest.raises(type(error), match=str(error)):
            await serve.serve(config, lambda address: clients.append(asyncio.create_task(submit(address))))
        await clients[0]

    asyncio.run(main())

    assert journal.closed
    assert [] == journal.written
    assert {"audit.jsonl", "security.db"} == {path.name for path in tmp_path.iterdir()}


def test_a_coordinator_stops_in_time_even_if_its_journal_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM with a full disk: the facts that are left were told to nobody, and the end comes within seconds."""
    journal = ClosableJournal()
    journal.always = JournalFull("no space is left")
    use(journal, monkeypatch)

    async def submit(address: str) -> None:
        async with Client(address) as client:
            asked = asyncio.create_task(client.submit(fake_spec(), patience=0.1))
            await until(lambda: journal.attempts)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(Unreachable):
                await asked

    async def main() -> None:
        clients: list[asyncio.Task[None]] = []
        config = ServeConfig(listen="127.0.0.1:0", data_dir=tmp_path)
        async with asyncio.timeout(5):
            await serve.serve(config, lambda address: clients.append(asyncio.create_task(submit(address))))
        await clients[0]

    asyncio.run(main())

    assert journal.closed
    assert [] == journal.written
