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
) -> None:
    """Evaluate a real model with a coordinator and two agents here, kill one, and prove that the number is exact."""
    from coordinator.demo import DemoConfig, run

    raise typer.Exit(run(DemoConfig(out), console()))
