"""Commands about jobs: submit, watch, wait, jobs, cancel. The report has its own module."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated

import typer
from rich.text import Text

from coordinator.client import Client, call
from coordinator.commands.common import ADDRESS, Address, Answers, AsJson, Job, JobFile, console, print_json, say, table
from coordinator.commands.report import without_number
from coordinator.live import LiveView, duration, estimate, line, plain
from coordinator.status import JobStatus, Submitted
from eval_kernel.errors import JobIncomplete, TimedOut, Unreachable
from eval_kernel.spec import load_spec

#: Seconds that `wait --timeout` grants the first answer at least.
FIRST_ANSWER_SECONDS = 2.0


def submit(
    job_file: JobFile,
    key: Annotated[
        str | None,
        typer.Option(help="Your own key: the same key and file again give the same job, not a second one."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show the progress until the job is settled.")] = False,
    as_json: AsJson = False,
    address: Address = ADDRESS,
) -> None:
    """Submit a job and print its id. With --watch, follow it and exit as `wait` does."""
    spec = load_spec(job_file)

    async def action(client: Client) -> Submitted:
        return await client.submit(spec, key)

    made = call(address, action)
    if as_json:
        print_json({**made.status.to_json(), "existed": made.existed})
    else:
        say(made.status.job)
    if watch:
        call(address, lambda client: _watch(client, made.status.job, as_json))


def watch(job: Job, as_json: AsJson = False, address: Address = ADDRESS) -> None:
    """Show a job's progress until it is settled. Exits as `wait` does. With --json, one line of JSON per change."""
    call(address, lambda client: _watch(client, job, as_json))


def wait(
    job: Job,
    timeout: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Give up after so long; the job goes on.")
    ] = None,
    as_json: AsJson = False,
    address: Address = ADDRESS,
) -> None:
    """Wait until a job is settled.

    Exits 0 when it succeeded, 1 when it failed, was cancelled or is incomplete, 2 when the call was refused or nobody
    answers, 3 when the time is over.
    """

    answers = Answers(address)

    async def action(client: Client) -> tuple[JobStatus, JobIncomplete | None]:
        end = None if timeout is None else asyncio.get_running_loop().time() + timeout
        # However short the time is, a coordinator that is there gets a chance to say so.
        async with asyncio.timeout(None if timeout is None else max(timeout, FIRST_ANSWER_SECONDS)):
            status = await client.job(job)
        answers(None)
        if not status.state.settled:
            async with asyncio.timeout_at(end):
                status = await client.settled(status.job, on_answer=answers)
        return status, await without_number(client, status)

    try:
        status, why = call(address, action)
    except TimeoutError:
        if answers.silent:
            raise Unreachable(
                f"no coordinator answers at {address} after {timeout:g} seconds; is `eval-coordinator serve` running "
                "there?"
            ) from None
        raise TimedOut(f"job {job} is not settled after {timeout:g} seconds; it goes on") from None
    if as_json:
        print_json(status.to_json())
    else:
        say(line(status))
    if why is not None:
        raise why


def jobs(
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say why each job waits or failed, and how its model lies on nodes with several ranks."
        ),
    ] = False,
    as_json: AsJson = False,
    address: Address = ADDRESS,
) -> None:
    """List the jobs, newest first."""
    listed = call(address, lambda client: client.jobs())
    if as_json:
        print_json([status.to_json() for status in listed])
        return
    if not listed:
        say("no jobs")
        return
    rows = table("job", "name", "state", "shards", "result so far", "elapsed", right=("shards", "elapsed"))
    for status in listed:
        shards = f"{status.shards_done}/{status.shards}" if status.shards else "-"
        result = estimate(status) if status.bits_per_byte is not None else "-"
        rows.add_row(
            status.job, Text(plain(status.name)), status.state.value, shards, result, duration(status.age_seconds)
        )
    console().print(rows)
    if explain:
        for status in listed:
            for reason in explanation(status) + layouts(status):
                say(plain(f"{status.label} ({status.job}): {reason}"))


def explanation(status: JobStatus) -> list[str]:
    """Return why a job is not finished, or not successfully, one line each."""
    if status.failure is not None:
        return [status.failure.text]
    if status.state.settled:
        return []
    return list(status.waiting) or ["nothing is in its way"]


def layouts(status: JobStatus) -> list[str]:
    """Return how the model lies on nodes with several ranks, or is streamed, and why, one line each."""
    return [f"agent {node.node}: {node.layout}" for node in status.nodes if node.layout]


def cancel(
    job: Job,
    reason: Annotated[str, typer.Option(help="Why, for the report.")] = "",
    as_json: AsJson = False,
    address: Address = ADDRESS,
) -> None:
    """Cancel a job. A settled job stays as it is."""
    status = call(address, lambda client: client.cancel(job, reason))
    if as_json:
        print_json(status.to_json())
    else:
        say(line(status))


async def _watch(client: Client, job: str, as_json: bool) -> None:
    async with contextlib.aclosing(client.watch(job, on_answer=Answers(client.address))) as statuses:
        if as_json:
            status: JobStatus | None = None
            async for status in statuses:
                say(json.dumps(status.to_json(), ensure_ascii=False))
            assert status is not None, "a watch yields the present status first"
        else:
            with LiveView(console()) as view:
                status = await view.follow(statuses)
    why = await without_number(client, status)
    if why is not None:
        raise why
