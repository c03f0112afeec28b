"""The transition tables: what they hold, and that a refused step changes nothing."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from coordinator.core import facts as f
from coordinator.core.jobs import Job
from coordinator.core.nodes import Node
from coordinator.core.states import (
    JOB_TABLE,
    NODE_TABLE,
    SHARD_TABLE,
    JobEvent,
    JobState,
    NodeEvent,
    NodeState,
    ShardEvent,
    ShardState,
    advance,
)
from eval_kernel.errors import IllegalTransition
from tests.support.core_cases import info, make_plan, make_scored, running_job

MACHINES = [
    (JOB_TABLE, JobState, JobEvent),
    (SHARD_TABLE, ShardState, ShardEvent),
    (NODE_TABLE, NodeState, NodeEvent),
]
MISSING = [
    (table, state, event)
    for table, states, events in MACHINES
    for state in states
    for event in events
    if event not in table[state]  # type: ignore[index]
]


@pytest.mark.parametrize(("table", "states", "events"), MACHINES)
def test_every_state_has_a_row_and_every_event_a_use(
    table: dict[Any, Any], states: type[Enum], events: type[Enum]
) -> None:
    """A table has a row for each state, and uses each event."""

    assert set(states) == set(table)
    assert set(events) == {event for row in table.values() for event in row}


@pytest.mark.parametrize(("table", "state", "event"), MISSING)
def test_a_step_that_is_not_in_the_table_is_refused(table: dict[Any, Any], state: Enum, event: Enum) -> None:
    """Whatever the table lacks raises, and names state and event."""
    with pytest.raises(IllegalTransition, match=rf"{state.name} has no transition for \w+\.{event.name}"):
        advance(table, state, event)


def test_settled_states_lead_nowhere() -> None:
    """Succeeded, failed and cancelled jobs stay so; a committed shard waits again only if its agent is quarantined."""

    assert {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED} == {s for s in JobState if s.settled}
    assert {ShardEvent.WITHDRAW} == set(SHARD_TABLE[ShardState.COMMITTED])


def test_a_refused_fact_leaves_the_job_as_it_was() -> None:
    """A fact that cannot follow raises and changes nothing durable."""
    job = Job(f.JobSubmitted("j", "k", "n", "{}", 0.0), 0)
    job.apply(f.JobPlanned("j", "a1", make_plan(2), 1.0))
    job.apply(f.ShardCommitted("j", "a1", make_scored(0), 2.0))
    before, changed = job.durable(), job.changed
    impossible = [
        f.JobPlanned("j", "a1", make_plan(2), 3.0),
        f.ShardCommitted("j", "a2", make_scored(0, shift=1), 3.0),
        f.ShardCommitted("j", "a2", make_scored(7), 3.0),
        f.ShardFailed("j", 0, "a1", "SHARD_FAILED", "late", True),
        f.ShardExpired("j", 0, "a1", True),
        f.JobSubmitted("j", "k", "n", "{}", 0.0),
    ]
    for fact in impossible:
        with pytest.raises((IllegalTransition, ValueError, IndexError)):
            job.apply(fact)

        assert (before, changed) == (job.durable(), job.changed)


@pytest.mark.parametrize("settle", [f.JobFailed("j1", "CODE", "why", 1.0), f.JobCancelled("j1", "why", 1.0)])
def test_nothing_but_a_divergence_follows_a_settled_job(settle: f.Fact) -> None:
    """A settled job takes no commit, no failure and no second end."""
    scheduler = running_job(2)
    scheduler.apply(settle)
    before = scheduler.durable()
    for fact in (
        f.ShardCommitted("j1", "a1", make_scored(0), 2.0),
        f.ShardFailed("j1", 0, "a1", "SHARD_FAILED", "late", False),
        f.JobCancelled("j1", "again", 2.0),
    ):
        with pytest.raises(IllegalTransition):
            scheduler.apply(fact)

        assert before == scheduler.durable()


def test_a_refused_event_leaves_the_node_as_it_was() -> None:
    """A lost node cannot be heard again without registering."""
    node = Node(info("a1"), 0.0)
    node.advance(NodeEvent.SILENT)
    with pytest.raises(IllegalTransition):
        node.advance(NodeEvent.HEAR)

    assert NodeState.LOST is node.state
