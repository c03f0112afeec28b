"""What a partial and a plan must fulfil to be accepted; each broken rule is named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.core.acceptance import MAX_STEPS, contradiction, unusable
from eval_kernel.partial import NonFinite, Partial, RowSums, ScoredShard
from eval_kernel.plan import Plan, ShardPlan
from tests.support.core_cases import make_plan, make_scored, with_partial

PLAN = make_plan(3).shards[1]  # documents 2 and 3
GOOD = make_scored(1)
ROWS = GOOD.partial.rows


def rows(*changed: RowSums) -> ScoredShard:
    """A shard with other rows, whose sums stay consistent."""
    totals = {name: sum(getattr(row, name) for row in changed) for name in ("steps", "tokens", "bytes", "words")}
    return with_partial(GOOD, rows=changed, **totals)


def lumped(documents: int) -> tuple[ShardPlan, ScoredShard]:
    """A plan that lumps, and a result that is one lump of so many documents."""
    p = GOOD.partial
    return replace(PLAN, lump=True), rows(RowSums(None, documents, p.steps, p.tokens, p.bytes, p.words))


def test_a_result_that_fits_is_accepted() -> None:
    """Rows by document, a lump where the plan has one, and places of non-finite losses are all fine."""
    places = (NonFinite(2, 0, "nan"), NonFinite(3, 5, "inf"))

    assert contradiction(PLAN, GOOD) is None
    assert contradiction(*lumped(2)) is None
    assert contradiction(PLAN, with_partial(GOOD, nonfinite=3, places=places)) is None


FAULTS: list[tuple[ScoredShard, str]] = [
    (with_partial(GOOD, tokens=9), "tokens is 9, its plan says 10"),
    (with_partial(GOOD, bytes=41), "bytes is 41, its plan says 40"),
    (with_partial(GOOD, words=0), "words is 0, its plan says 7"),
    (with_partial(GOOD, steps=GOOD.partial.steps + 1), "its rows add up to"),
    (with_partial(GOOD, rows=ROWS[:1]), "its rows add up to"),
    (with_partial(GOOD, rows=()), "its rows add up to 0"),
    (rows(replace(ROWS[0], steps=MAX_STEPS), ROWS[1]), "outside [0, 2^53)"),
    (rows(replace(ROWS[0], steps=-1), replace(ROWS[1], steps=2)), "negative sum"),
    (rows(replace(ROWS[0], tokens=11), replace(ROWS[1], tokens=-1)), "negative sum"),
    (rows(replace(ROWS[0], document=1), ROWS[1]), "document 1 is outside [2, 4)"),
    (rows(ROWS[0], replace(ROWS[1], document=4)), "document 4 is outside [2, 4)"),
    (rows(ROWS[1], ROWS[0]), "document 2 follows document 3; they must ascend"),
    (rows(ROWS[0], replace(ROWS[1], document=2)), "document 2 follows document 2"),
    (rows(ROWS[0], replace(ROWS[1], documents=2)), "stands for 2 documents"),
    (rows(replace(ROWS[0], document=None), ROWS[1]), "lumps documents together"),
    (with_partial(GOOD, nonfinite=11), "11 of 10 tokens cannot be non-finite"),
    (with_partial(GOOD, nonfinite=-1), "cannot be non-finite"),
    (with_partial(GOOD, nonfinite=10), "no token has a finite loss, yet their sum"),
    (with_partial(GOOD, nonfinite=1, places=(NonFinite(2, 0, "nan"),) * 2), "names 2 places of 1"),
    (with_partial(GOOD, nonfinite=1, places=(NonFinite(9, 0, "nan"),)), "document 9 is outside the shard"),
    (with_partial(GOOD, nonfinite=1, places=(NonFinite(2, 0, "-inf"),)), "no place of a non-finite loss"),
    (with_partial(GOOD, nonfinite=1, places=(NonFinite(2, -1, "inf"),)), "no place of a non-finite loss"),
    *(
        (replace(GOOD, execution=replace(GOOD.execution, seconds=seconds)), "which no clock measures")
        for seconds in (-1.0, math.nan, math.inf)
    ),
]


@pytest.mark.parametrize(("scored", "reason"), FAULTS, ids=[reason for _, reason in FAULTS])
def test_each_broken_rule_is_named(scored: ScoredShard, reason: str) -> None:
    """The first contradiction comes back as one line that begins with the shard."""
    problem = contradiction(PLAN, scored)

    assert problem is not None
    assert problem.startswith("shard 1: ")
    assert reason in problem


def test_a_lump_stands_for_a_plausible_number_of_documents() -> None:
    """One lump, of at least one document and no more than the shard has."""
    plan, _ = lumped(2)
    two = replace(ROWS[0], document=None), replace(ROWS[1], document=None)

    assert "stands for 0 documents" in (contradiction(*lumped(0)) or "")
    assert "stand for 3 documents, its plan has 2" in (contradiction(*lumped(3)) or "")
    assert "it has 2 lumps" in (contradiction(plan, rows(*two)) or "")


def test_sums_of_the_largest_shard_pass() -> None:
    """The bound itself is out, one step below it is in."""
    full = rows(replace(ROWS[0], steps=MAX_STEPS - 1 - ROWS[1].steps), ROWS[1])

    assert contradiction(PLAN, full) is None
    assert MAX_STEPS - 1 == full.partial.steps
    assert isinstance(full.partial, Partial)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "scores 0 tokens"),
        ({"tokens": (1 << 17) + 1}, "scores 131073 tokens"),
        ({"first_document": 4}, "has documents [4, 4) of 6"),
        ({"end_document": 7}, "has documents [2, 7) of 6"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, int], reason: str) -> None:
    """Shards stay within the bound that keeps their sums exact, and within the documents."""
    good = make_plan(3)
    shards = (good.shards[0], replace(good.shards[1], **changes), good.shards[2])  # type: ignore[arg-type]
    sums = {f"scored_{name}": sum(getattr(s, name) for s in shards) for name in ("tokens", "bytes", "words")}
    plan = Plan(replace(good.manifest, **sums), shards)

    assert unusable(good) is None
    assert reason in (unusable(plan) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": math.nan}, "nan seconds"),
        ({"seconds": 1e300}, "1e+300 seconds"),
        ({"threads": -1}, "-1 threads"),
        ({"peak_bytes": 1 << 60}, "1152921504606846976 bytes at its peak"),
        ({"software": {str(i): "1" for i in range(65)}}, "its software has 65 entries"),
        ({"precision": {"head": "x" * 501}}, "a text of 501 characters"),
        ({"device": "x" * 501}, "a text of 501 characters"),
    ],
)
def test_what_an_agent_tells_of_how_it_computed_is_bounded(changes: dict[str, Any], reason: str) -> None:
    """It goes into the journal and every report as it is."""
    told = replace(GOOD, execution=replace(GOOD.execution, **changes))

    assert reason in (contradiction(PLAN, told) or "")
