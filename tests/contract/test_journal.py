"""What every kind of journal promises, run against each kind there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.core import facts as f
from coordinator.journal import Journal, MemoryJournal, open_journal
from coordinator.journal.postgres import open_database
from eval_kernel.errors import JournalCorrupt
from eval_kernel.partial import NonFinite
from tests.support.core_cases import make_plan, make_scored, with_partial

#: One fact of each kind, with what is hard to store: other scripts, quotes, long integers, floats that repr must keep.
EVERY_KIND: tuple[f.Fact, ...] = (
    f.JobSubmitted("j1", "schlüssel ✓", "名前 \u2028 'quoted' \"double\"", '{"a":"\\u0000"}', 1.7e9 + 0.1),
    f.JobPlanned("j1", "a1", make_plan(3), 0.1 + 0.2),
    f.ShardCommitted("j1", "a1", make_scored(0, seconds=1 / 3), 1e-300),
    f.ShardCommitted(
        "j1", "a2", with_partial(make_scored(1), nonfinite=1, places=(NonFinite(2, 4, "nan"),), steps=1 << 60), 3.0
    ),
    f.ShardDiverged("j1", "a2", make_scored(0, shift=1), 4.0),
    f.ShardFailed("j1", 2, "a1", "OUT_OF_MEMORY", "no room\ud800 \x00", False),
    f.ShardExpired("j1", 2, "a1", True),
    f.PlanFailed("j2", "a1", "WORKER_CRASHED", "signal 11"),
    f.PlanExpired("j2", "a1"),
    f.JobFailed("j1", "JOB_INCOMPLETE", "1 of 3 shards", 5.0),
    f.JobCancelled("j2", "no need", 6.0),
    f.AuditOpened("j1", (0, 2)),
    f.AuditOpinion("j1", "a2", make_scored(0, shift=1), 6.5),
    f.AuditClosed("j1", 0, "OUTLIER", 7.0),
    f.AgentQuarantined("j1", "a1", "its loss is +0.5% from that of a2 and a3, who agree", 7.0),
    f.ShardsWithdrawn("j1", "a1", (0,)),
    f.ShardRecommitted("j1", "a3", make_scored(0), 7.5),
    f.JobReused("j3", "j1", 9.0),
)
Open = Callable[[], Journal]


@pytest.fixture(params=["sqlite", "memory", "postgres"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """A function that opens the same journal again, closing it first where it is open."""
    opened: list[Journal] = []
    memory = MemoryJournal("memory")
    opening: dict[str, Open] = {"memory": lambda: memory, "sqlite": lambda: open_journal(tmp_path / "data")}
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").journal()
        opening["postgres"] = lambda: open_database(url)

    def open_again() -> Journal:
        for journal in opened:
            journal.close()
        opened.append(opening[request.param]())
        return opened[-1]

    yield open_again
    for journal in opened:
        journal.close()


def test_every_kind_of_fact_is_listed() -> None:
    """A new kind of fact comes with its case here."""

    assert set(f.KINDS) == {fact.kind for fact in EVERY_KIND}


def test_facts_come_back_equal_and_in_order(reopen: Open) -> None:
    """What was appended is what is replayed, in this process and the next."""
    journal = reopen()
    journal.append(EVERY_KIND[:4])
    journal.append(EVERY_KIND[4:])

    assert EVERY_KIND == tuple(journal.facts())
    assert EVERY_KIND == tuple(reopen().facts())


def test_a_journal_goes_on_where_it_ended(reopen: Open) -> None:
    """Count and identity survive; appending continues the chain."""
    first = reopen()
    identity = first.identity
    first.append(EVERY_KIND[:2])
    second = reopen()
    second.append(EVERY_KIND[2:])
    third = reopen()

    assert (identity, len(EVERY_KIND)) == (third.identity, third.count)
    assert EVERY_KIND == tuple(third.facts())


def test_an_empty_journal_has_no_facts(reopen: Open) -> None:
    """A new journal is empty, and an empty batch leaves it so."""
    journal = reopen()
    journal.append(())

    assert (0, []) == (journal.count, list(journal.facts()))


def test_a_shard_is_committed_once(reopen: Open) -> None:
    """A second commit of one shard is refused together with all of its batch."""
    journal = reopen()
    journal.append(EVERY_KIND[:3])
    again = f.ShardCommitted("j1", "a9", make_scored(0, shift=5), 9.0)
    for batch in ([again], [EVERY_KIND[4], again], [EVERY_KIND[3], EVERY_KIND[3]]):
        with pytest.raises(JournalCorrupt, match="already"):
            journal.append(batch)

        assert 3 == journal.count
    other_job = f.ShardCommitted("j2", "a9", make_scored(0), 9.0)
    journal.append([EVERY_KIND[3], other_job])
    assert (*EVERY_KIND[:4], other_job) == tuple(reopen().facts())


def test_a_number_json_lacks_is_refused_before_anything_is_written(reopen: Open) -> None:
    """NaN cannot be replayed equal to itself, so it never gets in."""
    journal = reopen()
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.append([EVERY_KIND[0], f.JobCancelled("j1", "", float("nan"))])

    assert (0, []) == (journal.count, list(journal.facts()))
