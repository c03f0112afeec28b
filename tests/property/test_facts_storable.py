"""Whatever agents and clients can say on the wire, the facts that come of it can be journaled and read back equal.

A fact that cannot be written would end the coordinator, and end it again as often as the agent repeats itself.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.facts import Facts
from coordinator.core.scheduler import Scheduler
from coordinator.journal.base import decode, encode
from eval_kernel.partial import NonFinite, ScoredShard
from tests.support.core_cases import make_scored, running_job

#: What an int64 of the wire can hold, and a double.
numbers = st.one_of(st.integers(-2, 50), st.sampled_from((1 << 31, 1 << 53, (1 << 63) - 1, -(1 << 63))))
reals = st.one_of(st.floats(), st.sampled_from((math.nan, math.inf, -math.inf, -0.0, 1e308)))
texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=8), st.sampled_from(("\x00", "\u2028", "a" * 5000, "nan"))
)
tables = st.dictionaries(texts, texts, max_size=3)


def changed(original: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return some fields of a data class with other values of their type."""
    of_type: dict[type, st.SearchStrategy[Any]] = {int: numbers, float: reals, str: texts, dict: tables}
    values = {field.name: of_type.get(type(getattr(original, field.name))) for field in fields(original)}
    return st.fixed_dictionaries({}, optional={name: value for name, value in values.items() if value is not None})


SOUND = make_scored(0)


@st.composite
def results(draw: st.DrawFn) -> ScoredShard:
    """A result of shard 0 in which anything may be wrong; often so that its sums still add up."""
    partial = SOUND.partial
    if draw(st.booleans()):
        rows = [replace(row, **draw(changed(row))) for row in SOUND.partial.rows]
        partial = replace(partial, rows=tuple(rows), **draw(changed(partial)))
    if draw(st.booleans()):
        places = draw(st.lists(st.builds(NonFinite, numbers, numbers, texts), max_size=2))
        extra = draw(st.lists(st.tuples(texts, numbers), max_size=2))
        partial = replace(partial, places=tuple(places), extra=tuple(extra))
    execution = replace(SOUND.execution, **draw(changed(SOUND.execution)))
    return ScoredShard(partial, execution)


def storable(scheduler: Scheduler, facts: Facts) -> None:
    """Each fact becomes a row, and the same fact again."""
    for fact in facts:
        assert fact == decode(encode(fact), "the row")
    scheduler.check()


@settings(max_examples=300, deadline=None)
@given(scored=results())
def test_no_result_makes_a_fact_that_cannot_be_written(scored: ScoredShard) -> None:
    """It is refused, or its commit can be written and read back, and the state holds."""
    scheduler = running_job(2)
    scheduler.acquire("a1", "1", 2, "", 1.0)
    storable(scheduler, scheduler.scored("a1", "1", "j1", scored, 2.0).facts)
    scheduler.scored("a1", "1", "j1", make_scored(0), 3.0)
    storable(scheduler, scheduler.scored("a1", "1", "j1", scored, 4.0).facts)


@settings(max_examples=100, deadline=None)
@given(code=texts, message=texts, name=texts, key=texts, spec=texts)
def test_no_text_makes_a_fact_that_cannot_be_written(code: str, message: str, name: str, key: str, spec: str) -> None:
    """Texts of agents and clients come back as they were."""
    scheduler = running_job(2)
    scheduler.acquire("a1", "1", 2, "", 1.0)
    storable(scheduler, scheduler.shard_failed("a1", "1", "j1", 0, code, message, 2.0).facts)
    storable(scheduler, scheduler.submit("j9", key, spec, name, 3.0).facts)
    storable(scheduler, scheduler.plan_failed("a1", "1", "j9", code, message, 4.0).facts)
    storable(scheduler, scheduler.cancel("j9", message, 5.0))
