"""The command that runs a coordinator, and the form of its log."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer

from coordinator.commands.common import say
from coordinator.config import DEFAULT_ADDRESS, ServeConfig, default_data_dir, scheduler_config
from coordinator.core.calls import SchedulerConfig


def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes any free one.")
    ] = DEFAULT_ADDRESS,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the journal is.", show_default=str(default_data_dir))
    ] = None,
    heartbeat: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often agents are told to report that they live.")
    ] = SchedulerConfig().heartbeat_seconds,
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="Silence after which an agent's work is given to others.")
    ] = SchedulerConfig().lease_seconds,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines instead of text.")] = False,
) -> None:
    """Run a coordinator until SIGTERM. Its log goes to standard error, its address to standard output."""
    from coordinator.serve import serve as run

    config = ServeConfig(
        listen=listen,
        data_dir=(data_dir or default_data_dir()).expanduser().absolute(),
        scheduler=scheduler_config(heartbeat, lease),
    )
    configure_log(as_json=log_json)
    asyncio.run(run(config, ready=lambda address: say(f"coordinator listening on {address}")))


def configure_log(*, as_json: bool) -> None:
    """Log to standard error: one line per event, words and key=value pairs."""
    renderer: structlog.typing.Processor
    if as_json:
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
