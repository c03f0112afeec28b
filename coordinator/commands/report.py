"""The command that fetches a job's report, and what a settled job's exit code is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.client import Client, call
from coordinator.commands.common import ADDRESS, Address, AsJson, Job, print_json, say
from coordinator.report import write_reports
from coordinator.status import JobState, JobStatus
from eval_kernel.errors import JobIncomplete
from eval_kernel.report import render_text


def report(
    job: Job,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the report there as JSON, HTML and Markdown.")
    ] = None,
    as_json: AsJson = False,
    address: Address = ADDRESS,
) -> None:
    """Print a job's report. Exits 1 when it has no number: what is missing is then printed."""
    fetched = call(address, lambda client: client.report(job))
    paths = None if out is None else write_reports(fetched, out, fetched["name"] or fetched["job"])
    if as_json:
        print_json(fetched)
    else:
        say(render_text(fetched))
        if paths is not None:
            say("\n".join(str(path) for path in (paths.json, paths.html, paths.markdown)))
    if not fetched["complete"]:
        raise typer.Exit(1)


async def without_number(client: Client, status: JobStatus) -> JobIncomplete | None:
    """Return why a settled job has no number, ``None`` where it has one."""
    if status.state is not JobState.SUCCEEDED:
        why = status.failure.text if status.failure else "see its report"
        return JobIncomplete(f"job {status.job} {status.state.value}: {why}")
    report = await client.report(status.job)
    if report["complete"]:
        return None
    return JobIncomplete(f"job {status.job} has no number: {'; '.join(report['missing']['summary'])}")
