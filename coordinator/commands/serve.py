"""The command that runs a coordinator, and the form of its log."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from coordinator.commands.common import JournalUrl, say
from coordinator.config import (
    CERTIFICATE_LIFE,
    DATA_DIR_TEXT,
    DEFAULT_ADDRESS,
    ServeConfig,
    default_data_dir,
    scheduler_config,
)
from coordinator.core.calls import SchedulerConfig
from coordinator.live import plain
from eval_kernel.errors import ConfigError


def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes any free one.")
    ] = DEFAULT_ADDRESS,
    advertise: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="How other machines call this one (repeat for more); for join strings."),
    ] = None,
    enrol: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where nodes join.", show_default="same host, one port higher")
    ] = "",
    tls: Annotated[
        str, typer.Option(metavar="WHEN", help="Ask every caller for a certificate: auto (off this machine), always.")
    ] = "auto",
    invite: Annotated[
        str, typer.Option(metavar="SITE", help="Print a join string for an agent of that site, good for an hour.")
    ] = "",
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the journal is; one directory each.", show_default=DATA_DIR_TEXT),
    ] = None,
    journal: JournalUrl = None,
    heartbeat: Annotated[
        float, typer.Option(metavar="SECONDS", help="How often agents are told to report that they live.")
    ] = SchedulerConfig().heartbeat_seconds,
    lease: Annotated[
        float, typer.Option(metavar="SECONDS", help="Silence after which an agent's work is given to others.")
    ] = SchedulerConfig().lease_seconds,
    audit: Annotated[
        str, typer.Option(metavar="SHARE", help="Share of the shards, such as 5%, that a second agent scores too.")
    ] = "0%",
    canary: Annotated[
        bool, typer.Option("--canary", help="An agent new to a model first repeats a shard that another has scored.")
    ] = False,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="A job takes over the shards that an equal one has had accepted.")
    ] = False,
    certificate_life: Annotated[float, typer.Option(hidden=True, help="Seconds; for tests.")] = (
        CERTIFICATE_LIFE.total_seconds()
    ),
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines instead of text.")] = False,
) -> None:
    """Run a coordinator until SIGTERM. Its log goes to standard error, its address to standard output.

    With --journal it stands by while another one leads, and takes over when that one dies.
    """
    from coordinator.serve import serve as run

    config = ServeConfig(
        listen=listen,
        enrolment=enrol,
        advertise=tuple(advertise or ()),
        tls=tls,
        certificate_life=timedelta(seconds=certificate_life),
        data_dir=(data_dir or default_data_dir()).expanduser().absolute(),
        journal=journal,
        scheduler=replace(
            scheduler_config(heartbeat, lease),
            audit_share=_share(audit),
            audit_salt=secrets.token_hex(16),
            canary=canary,
            reuse=reuse,
        ),
    )
    configure_log(as_json=log_json)
    if invite and not config.secure:
        raise ConfigError("--invite is for other machines: use --listen with an address that they can reach")
    asyncio.run(
        run(
            config,
            ready=lambda address: say(f"coordinator listening on {address}"),
            invite=invite,
            invited=lambda text: say(f"eval-agent run --join {text}"),
        )
    )


def _share(text: str) -> float:
    """Return a share that is written as a percentage or a fraction; raises ``ConfigError``."""
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if number != text else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"--audit {text}: a share from 0% to 100% is wanted, such as 5%")
    return value


def configure_log(*, as_json: bool) -> None:
    """Log to standard error: one line per event, words and key=value pairs."""
    renderer: structlog.typing.Processor
    cleaned: tuple[structlog.typing.Processor, ...] = ()  # JSON escapes by itself
    if as_json:
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        cleaned = (_clean,)
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.dict_tracebacks)
    structlog.configure(
        processors=[*processors, *cleaned, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _clean(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Names and reasons come from job files and agents: nothing in them may steer the terminal."""
    return {key: plain(value) if isinstance(value, str) else value for key, value in event.items()}
