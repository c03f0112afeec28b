"""Journals written by earlier versions, one directory a format: this version reads them, and goes on where they end.

A format's directory is written once, by the version that introduced it, and never changed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coordinator.core.calls import SchedulerConfig, ScoreWork
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from coordinator.journal import open_journal
from coordinator.journal.sqlite import FILE, MIGRATIONS
from coordinator.journal.upkeep import verify
from eval_kernel.tally import Tally
from tests.support.core_cases import info, make_scored

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FORMATS = sorted(GOLDEN.glob("journal-format-*"))


def test_every_format_has_its_journal() -> None:
    """A new format comes with a journal that the version before it wrote."""

    assert [f"journal-format-{number}" for number in range(1, len(MIGRATIONS) + 1)] == [p.name for p in FORMATS]


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A data directory with a copy of a golden journal."""
    shutil.copytree(request.param, tmp_path / "data")
    return tmp_path / "data"


def test_every_fact_is_read_as_it_was_meant(data: Path) -> None:
    """Kinds, jobs and contents are those that the old version wrote beside it; verifying comes to the old totals."""
    journal = open_journal(data)
    try:
        facts = [[fact.kind, fact.job, json.loads(json.dumps(fact.to_json()))] for fact in journal.facts()]
        scheduler = Scheduler(SchedulerConfig())
        scheduler.replay(journal.facts())
    finally:
        journal.close()
    totals = {view.job: [view.state.name, view.shards_done, view.tally.digest()] for view in scheduler.jobs()}

    assert json.loads((data / "facts.json").read_text()) == facts
    assert json.loads((data / "totals.json").read_text()) == totals
    assert len(facts) == verify(data).facts


def test_a_job_that_an_old_version_began_is_finished_by_this_one(data: Path) -> None:
    """The upgrade in the middle of a job changes no bit of its total: old rows and new ones add up to all of them."""
    journal = open_journal(data)
    try:
        scheduler = Scheduler(SchedulerConfig())
        scheduler.replay(journal.facts())
        now = 100.0
        journal.append(scheduler.register(info("new"), now))
        while isinstance(work := scheduler.acquire("new", "1", 1, "", now), ScoreWork):
            for shard in work.shards:
                journal.append(scheduler.scored("new", "1", work.job, make_scored(shard.index), now).facts)
            now += 1.0
        scheduler.check()
        again = Scheduler(SchedulerConfig())
        again.replay(journal.facts())
        rows = [fact for fact in journal.facts() if fact.kind == "shard_committed" and fact.job == "half"]
    finally:
        journal.close()
    tally = Tally()
    for fact in rows:
        tally.add(fact.scored.partial)  # type: ignore[attr-defined]  # a commit

    assert JobState.SUCCEEDED is again.job("half").state
    assert tally.digest() == again.job("half").tally.digest() == scheduler.job("half").tally.digest()
    assert again.durable() == scheduler.durable()
    assert (data / FILE).exists()
