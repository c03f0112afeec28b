"""What the client commands share: their common options, calling the coordinator, printing. Decides nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.config import ADDRESS_VARIABLE, DEFAULT_ADDRESS, JOURNAL_VARIABLE
from eval_kernel.errors import Unreachable

Address = Annotated[
    str,
    typer.Option("--coordinator", envvar=ADDRESS_VARIABLE, metavar="HOST:PORT", help="Where the coordinator listens."),
]
JournalUrl = Annotated[
    str | None,
    typer.Option(
        "--journal",
        envvar=JOURNAL_VARIABLE,
        metavar="postgresql://USER@HOST/DATABASE",
        help="A journal in PostgreSQL instead of a file.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, or an unambiguous beginning of it.")]
JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]

ADDRESS = DEFAULT_ADDRESS


def console() -> Console:
    """Return the console of standard output."""
    return Console(file=sys.stdout)


def say(text: str) -> None:
    """Print text as it is."""
    typer.echo(text)


class Answers:
    """Whether the coordinator answers a command that follows a job: says so once when it stops to."""

    def __init__(self, address: str) -> None:
        """Nothing has been heard yet."""
        self._address = address
        self.silent = True
        self._told = False

    def __call__(self, silence: Unreachable | None) -> None:
        """Take note of an answer, or of why there was none."""
        self.silent = silence is not None
        if self.silent and not self._told:
            typer.echo(f"eval-coordinator: the coordinator at {self._address} does not answer; trying again", err=True)
        self._told = self.silent


def print_json(value: Any) -> None:
    """Print a JSON text, indented, keys in the given order."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def table(*titles: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table without a box, with the titles in ``right`` aligned to the right."""
    result = Table(box=None, pad_edge=False, header_style="dim")
    for title in titles:
        result.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return result
