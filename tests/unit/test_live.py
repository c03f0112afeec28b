"""What people see of a job: the live view, its plain lines, and that nothing in a name steers their terminal."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from coordinator.live import LiveView, duration, estimate, line, plain, render
from coordinator.status import Failure, JobState, JobStatus, NodeProgress, NodeState

NODE = NodeProgress("node-1", NodeState.ACTIVE, 3, 3000, 512.4, 2, "scoring")
STATUS = JobStatus(
    job="ab12cd",
    name="my job",
    state=JobState.RUNNING,
    shards=10,
    shards_done=4,
    shards_held=2,
    shards_quarantined=0,
    input_tokens=10_000,
    input_tokens_done=4_000,
    scored_tokens_done=3_900,
    waiting=(),
    failure=None,
    bits_per_byte=0.912345,
    bits_per_byte_half_width=0.0123,
    nodes=(NODE, replace(NODE, node="node-2", state=NodeState.LOST, activity="", tokens_per_second=0.0)),
    age_seconds=75.0,
    eta_seconds=110.0,
    spec_json="{}",
)


def shown(status: JobStatus) -> str:
    """Return the view as plain text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(render(status))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (125, "2m05s"), (11_220, "3h07m")]
)
def test_durations_are_written_as_people_write_them(seconds: float, text: str) -> None:
    """Seconds, minutes or hours, two units at most."""
    assert text == duration(seconds)


def test_the_view_shows_progress_estimate_and_every_node() -> None:
    """State, shards, tokens, bits per byte with its interval, time left, and what each node does."""
    text = shown(STATUS)

    for part in ("my job", "ab12cd", "running", "4/10 shards", "4,000/10,000 tokens", "0.9123 ± 0.0123 bits/byte"):
        assert part in text
    assert "about 1m50s left" in text
    (first,) = [row for row in text.splitlines() if "node-1" in row]
    (second,) = [row for row in text.splitlines() if "node-2" in row]
    assert ["node-1", "active", "scoring", "2", "3", "3,000", "512"] == first.split()
    assert ["node-2", "lost", "-", "2", "3", "3,000", "-"] == second.split()


def test_the_view_says_why_nothing_happens() -> None:
    """Waiting reasons, quarantined shards and the failure are each on a line."""
    waiting = shown(replace(STATUS, waiting=("no agent is connected",), shards_quarantined=2))
    failed = shown(replace(STATUS, state=JobState.FAILED, failure=Failure("DATASET_EMPTY", "no document")))

    assert "waiting: no agent is connected" in waiting
    assert "2 shards are given up" in waiting
    assert "DATASET_EMPTY: no document" in failed
    assert "left" not in failed


def test_an_estimate_shows_no_more_than_there_is() -> None:
    """Without an interval there is no ±, without a result there is no number."""
    assert "0.9123 bits/byte" == estimate(replace(STATUS, bits_per_byte_half_width=None))
    assert "no estimate yet" == estimate(replace(STATUS, bits_per_byte=None, bits_per_byte_half_width=None))


def test_a_line_says_it_all() -> None:
    """The plain form of a status, for logs."""
    assert "my job: running, 4/10 shards, 0.9123 ± 0.0123 bits/byte, about 1m50s left" == line(STATUS)
    assert "ab12cd: planning, waiting: one; two" == line(
        replace(
            STATUS,
            name="",
            state=JobState.PLANNING,
            shards=0,
            bits_per_byte=None,
            eta_seconds=None,
            waiting=("one", "two"),
        )
    )


def test_nothing_in_a_name_steers_the_terminal() -> None:
    """Escape sequences in names, activities and reasons are shown as question marks, markup as it is."""
    evil = "\x1b[2J[bold]x[/bold]\r\n"
    status = replace(
        STATUS, name=evil, waiting=(evil,), nodes=(replace(NODE, node=evil, activity=evil),), shards_done=5
    )

    for text in (shown(status), line(status), plain(evil)):
        assert "\x1b" not in text.replace("\x1b[0m", "")
        assert "[bold]x[/bold]" in text


def lines_of(statuses: list[JobStatus]) -> list[str]:
    """Return what a view that is no terminal writes for these statuses."""

    async def source() -> AsyncIterator[JobStatus]:
        for status in statuses:
            yield status

    out = io.StringIO()
    with LiveView(Console(file=out, width=200)) as view:
        last = asyncio.run(_follow(view, source()))

    assert statuses[-1] == last
    return out.getvalue().splitlines()


async def _follow(view: LiveView, source: Any) -> JobStatus:
    return await view.follow(source)


def test_off_a_terminal_only_what_matters_is_written() -> None:
    """A line per tenth of the work, per new reason and per state; nothing for an unchanged status."""
    steps = [replace(STATUS, input_tokens_done=done) for done in (0, 10, 500, 1000, 1000, 1999, 2000)]
    lines = lines_of([*steps, replace(steps[-1], waiting=("why",)), replace(steps[-1], state=JobState.SUCCEEDED)])

    assert 5 == len(lines)
    assert lines[-2].endswith("waiting: why")
    assert lines[-1].startswith("my job: succeeded")


def test_on_a_terminal_the_view_is_drawn_and_notes_stay() -> None:
    """The last view and every note are on the screen at the end."""
    out = io.StringIO()
    with LiveView(Console(file=out, width=120, force_terminal=True)) as view:
        view.show(STATUS)
        view.note("agent-2 is killed now")
        view.show(replace(STATUS, shards_done=10, state=JobState.SUCCEEDED))

    assert "agent-2 is killed now" in out.getvalue()
    assert "10/10 shards" in out.getvalue()
