"""The command that proves an environment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.common import AsJson, JournalUrl, print_json, say
from coordinator.config import ADDRESS_VARIABLE, DATA_DIR_TEXT, DEFAULT_ADDRESS, ServeConfig, default_data_dir


def check(
    job_file: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="A job file to check too.")] = None,
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            "--coordinator",
            envvar=ADDRESS_VARIABLE,
            metavar="HOST:PORT",
            help="Where a coordinator would listen, or does.",
        ),
    ] = DEFAULT_ADDRESS,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the journal would be.", show_default=DATA_DIR_TEXT)
    ] = None,
    journal: JournalUrl = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a coordinator can run here, or that one answers. Prints a remedy for each failure; exits 1 on any."""
    from coordinator.check import examine, exit_code, lines

    directory = (data_dir or default_data_dir()).expanduser().absolute()
    config = ServeConfig(listen=listen, data_dir=directory, journal=journal)
    findings = asyncio.run(examine(config, job_file))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        lines(findings, say)
    raise typer.Exit(exit_code(findings))
