"""Second opinions: an agent that computes otherwise than others is found, and nothing of it stays in a total."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.audit import sample
from coordinator.core.calls import SchedulerConfig, ScoreWork
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from coordinator.core.trust import AuditOutcome, Opinion, agree, decide
from eval_kernel.partial import ScoredShard
from eval_kernel.tally import Tally
from tests.support.core_cases import make_partial, make_scored, running_job

SHARDS = 40
HALF_A_PERCENT = 1.005


def off(scored: ScoredShard, factor: float) -> ScoredShard:
    """The same result with every loss multiplied: still a partial that fits its plan."""
    rows = tuple(replace(row, steps=int(row.steps * factor)) for row in scored.partial.rows)
    partial = replace(scored.partial, rows=rows, steps=sum(row.steps for row in rows))
    return replace(scored, partial=partial)


def expected() -> str:
    """The digest of the total that honest agents come to."""
    tally = Tally()
    for shard in range(SHARDS):
        tally.add(make_partial(shard))
    return tally.digest()


def run(config: SchedulerConfig, factors: dict[str, float], seconds: float = 4000.0) -> Scheduler:
    """A job on agents a1, a2, ... that take turns; ``factors``: what each multiplies its losses with."""
    scheduler = running_job(SHARDS, agents=len(factors), config=config)
    now = 0.0
    while scheduler.job("j1").state is JobState.RUNNING and now < seconds:
        now += 1.0
        scheduler.tick(now)
        for agent, factor in factors.items():
            scheduler.renew(agent, "1", (), "", None, False, False, now)
            work = scheduler.acquire(agent, "1", 2, "j1", now)
            for plan in work.shards if isinstance(work, ScoreWork) else ():
                scheduler.scored(agent, "1", "j1", off(make_scored(plan.index), factor), now)
                scheduler.check()
    return scheduler


@pytest.mark.parametrize("liar", ["a1", "a2", "a3"])
def test_an_agent_that_adds_half_a_percent_is_quarantined_and_nothing_of_it_stays(liar: str) -> None:
    """The job ends with the honest total, bit for bit, though the liar had shards accepted."""
    factors = {agent: HALF_A_PERCENT if agent == liar else 1.0 for agent in ("a1", "a2", "a3")}
    scheduler = run(SchedulerConfig(audit_share=0.25), factors)
    view = scheduler.job("j1")

    assert JobState.SUCCEEDED is view.state
    assert expected() == view.tally.digest()
    assert SHARDS == view.shards_done
    assert view.audits is not None
    assert view.audits["outlier"] >= 1
    assert {liar} == {node.agent for node in scheduler.nodes(0.0) if node.activity.startswith("quarantined: ")}
    assert liar not in {progress.agent for progress in view.nodes if progress.shards_done}


def test_without_an_audit_the_lie_stays_in_the_total() -> None:
    """The negative control: the same agents, no audit, another number."""
    view = run(SchedulerConfig(), {"a1": 1.0, "a2": 1.0, "a3": HALF_A_PERCENT}).job("j1")

    assert JobState.SUCCEEDED is view.state
    assert expected() != view.tally.digest()
    assert view.audits is None


def test_honest_agents_agree_and_every_audited_shard_is_scored_twice() -> None:
    """A quarter of 40 shards is 10 audits, all agreed, and the spread between equal devices is zero."""
    view = run(SchedulerConfig(audit_share=0.25), {"a1": 1.0, "a2": 1.0}).job("j1")

    assert view.audits is not None
    assert (10, 0) == (view.audits["agreed"], view.audits["open"])
    assert [0.0] == [seen["largest_relative_difference"] for seen in view.audits["spread"]]
    assert expected() == view.tally.digest()


def test_devices_within_the_tolerance_are_both_right() -> None:
    """A last digit of float32 quarantines nobody; the spread says how far they were apart."""
    view = run(SchedulerConfig(audit_share=0.25), {"a1": 1.0, "a2": 1.000001}).job("j1")

    assert view.audits is not None
    assert 10 == view.audits["agreed"]
    assert 0 < view.audits["spread"][0]["largest_relative_difference"] < 2e-6


def test_two_that_differ_and_no_third_are_disputed() -> None:
    """Nobody is there to say who is right: the job ends, and says so."""
    config = SchedulerConfig(audit_share=0.25, audit_patience_seconds=10.0)
    view = run(config, {"a1": 1.0, "a2": HALF_A_PERCENT}).job("j1")

    assert JobState.SUCCEEDED is view.state
    assert view.audits is not None
    assert 10 == view.audits["disputed"]


def test_one_agent_alone_cannot_be_audited() -> None:
    """The audits are waived, and the job does not wait for a second agent for ever."""
    view = run(SchedulerConfig(audit_share=0.25, audit_patience_seconds=10.0), {"a1": 1.0}).job("j1")

    assert (JobState.SUCCEEDED, expected()) == (view.state, view.tally.digest())
    assert view.audits is not None
    assert 10 == view.audits["waived"]


def test_the_sample_is_a_share_and_depends_on_the_salt() -> None:
    """5 % of 100 shards is 5, the same for the same salt only."""
    chosen = sample("j1", range(100), 0.05, "salt")

    assert 5 == len(set(chosen))
    assert chosen == sample("j1", range(100), 0.05, "salt")
    assert chosen != sample("j1", range(100), 0.05, "pepper")


def opinion(steps: int, kind: str = "full") -> Opinion:
    """An opinion of a CPU."""
    return Opinion(steps, 0, "cpu", "float32", kind)


def test_a_majority_names_the_outlier() -> None:
    """Two of three that agree are a majority; one against one is not."""
    two = {"a": opinion(1_000_000), "b": opinion(1_005_000)}

    assert decide(two).outcome is None
    assert ("b",) == decide({**two, "c": opinion(1_000_001)}).outliers
    assert AuditOutcome.AGREED is decide({"a": two["a"], "c": opinion(1_000_001)}).outcome


def test_the_wider_tolerance_of_two_classes_counts() -> None:
    """What bf16 may differ by is no evidence against it; the same difference between float32s is."""
    assert agree(opinion(1_000_000), opinion(1_001_000, "half"))
    assert not agree(opinion(1_000_000), opinion(1_001_000))


def test_other_counts_of_losses_that_are_not_finite_never_agree() -> None:
    """Equal sums with one NaN left out are different results."""
    nan = Opinion(1_000_000, 1, "cpu", "float32", "full")

    assert not agree(opinion(1_000_000), nan)
