"""The command that shows it all on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.common import console


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the job file, the logs and the reports go.")] = Path(
        "demo-out"
    ),
    documents: Annotated[int, typer.Option(min=1, help="How many documents to score.")] = 22,
) -> None:
    """See it all work on this machine.

    Evaluates a real model on real text with a coordinator and two agents, kills one of them half-way, and proves that
    the number is exact: against the manifest, and bit by bit against the reference evaluator.
    """
    from coordinator.demo import DemoConfig, run

    raise typer.Exit(run(DemoConfig(out, documents), console()))
