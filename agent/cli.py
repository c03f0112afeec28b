"""The `eval-agent` command: reads options, prints, sets the exit code. Everything else is done elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, cast

import typer
from fedeval.wire.credentials import local_source
from fedeval.wire.pki import date
from rich.console import Console
from rich.text import Text

from agent.check import Finding, findings
from agent.config import (
    ADDRESS_VARIABLE,
    DEFAULT_ADDRESS,
    DEFAULT_ENGINE,
    DEFAULT_LISTEN,
    DEFAULT_PACK_DISK_BYTES,
    DEFAULT_PACK_LISTEN,
    AgentConfig,
    Role,
    default_cache,
    default_roots,
    default_state,
    usable_cpus,
)
from agent.daemon import Daemon
from agent.executor import Executor
from agent.groupcheck import group_findings
from agent.logs import Logger, WorkerLog, make_logger
from agent.membership import join_once, load, path_in
from agent.probe import Capabilities
from agent.probe import probe as probe_machine
from agent.spool import StateDirectory
from eval_kernel import __version__
from eval_kernel.errors import ConfigError, DirectoryUnusable, FedevalError

PROGRAM = "eval-agent"
#: Exit codes: a fault of this program; and by the shell's tradition, ended by SIGINT, by SIGPIPE.
INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141

# The usage error of click, or of the copy of it that newer versions of typer carry.
_ClickException = cast(type[Exception], typer.BadParameter.__mro__[2])

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def options(
    show: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_version),
) -> None:
    """Score shards of evaluation jobs for a coordinator."""


_Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        "-c",
        envvar=ADDRESS_VARIABLE,
        metavar="HOST:PORT",
        help="The coordinator or the site's relay.",
        show_default=f"the one that was joined, else {DEFAULT_ADDRESS}",
    ),
]
_Name = Annotated[str | None, typer.Option(help="This agent's name; default: host name and random, kept.")]
_State = Annotated[Path | None, typer.Option(help="Spool, name and lock of this agent; default: XDG state home.")]
_Cache = Annotated[Path | None, typer.Option(help="Downloads and packs; may be shared; default: XDG cache home.")]
_Root = Annotated[
    list[Path] | None,
    typer.Option("--root", help="Directory that jobs may read from (repeat for more); default: home and here."),
]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
_Threads = Annotated[int | None, typer.Option(help="Threads of the worker; default: all processors.")]
_Ranks = Annotated[
    int, typer.Option(help="Processes that score one shard together: one a GPU, or a share of the threads each.")
]
_Watchdog = Annotated[
    float, typer.Option(help="Silence after which one of several ranks counts as lost: the group is formed anew.")
]
_Engine = Annotated[str, typer.Option(hidden=True, help="MODULE:CLASS of the worker's engine.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def run(
    coordinator: _Coordinator = None,
    name: _Name = None,
    join: Annotated[
        str, typer.Option(metavar="STRING", help="Join first, as `eval-agent join` does, unless that was done before.")
    ] = "",
    site: Annotated[
        str | None, typer.Option(help="The site this node belongs to.", show_default="the one joined, else default")
    ] = None,
    role: Annotated[
        list[Role] | None,
        typer.Option(help="Repeat for more.", show_default="those joined with, else forward, preprocess"),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the role aggregate listens for the site's agents.")
    ] = DEFAULT_LISTEN,
    pack_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where an agent with the role preprocess alone serves packs.")
    ] = DEFAULT_PACK_LISTEN,
    pack_disk_mb: Annotated[int, typer.Option(help="MiB of disk that it may use for packs.")] = (
        DEFAULT_PACK_DISK_BYTES >> 20
    ),
    state: _State = None,
    cache: _Cache = None,
    root: _Root = None,
    device: _Device = "auto",
    threads: _Threads = None,
    ranks: _Ranks = 1,
    watchdog_seconds: _Watchdog = 10.0,
    hang_seconds: Annotated[float, typer.Option(help="Silence after which a worker counts as hung.")] = 300.0,
    drain_seconds: Annotated[float, typer.Option(help="What the running shard gets when stopping.")] = 30.0,
    give_up_after: Annotated[
        float | None, typer.Option(help="Exit with 2 after so many seconds without the coordinator.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON lines.")] = False,
    engine: _Engine = DEFAULT_ENGINE,
) -> None:
    """Work for a coordinator until stopped (SIGTERM or Ctrl-C: finish the shard; twice: at once)."""
    if join:
        place = (state or default_state(name)).absolute()
        joined = load(path_in(place))
        if joined is None or joined.membership.certificate.expires <= time.time():
            _join(join, name, place)
    config = _config(coordinator, name, state, cache, root, device, threads, engine)
    if config.membership is not None and site not in (None, config.site):
        raise ConfigError(f"this node has joined as one of site {config.site}; leave out --site {site}")
    config = replace(
        config,
        site=site or config.site,
        roles=tuple(dict.fromkeys(role)) if role else config.roles,
        listen=listen,
        pack_listen=pack_listen,
        pack_disk_bytes=pack_disk_mb << 20,
        ranks=ranks,
        watchdog_seconds=watchdog_seconds,
        hang_seconds=hang_seconds,
        drain_seconds=drain_seconds,
        give_up_after=give_up_after,
    )
    log = make_logger(as_json=log_json)
    capabilities = probe_machine(config.cache)
    with StateDirectory(config.state) as directory:
        try:
            asyncio.run(_live(config, directory, capabilities, log))
        except FedevalError:
            raise
        except Exception as error:
            # A fault of ours: one line for people, the rest in a file if the disk takes it.
            crash = config.state / "crash.log"
            with suppress(OSError):
                crash.write_text(traceback.format_exc())
                error.add_note(f"details are in {crash}")
            raise


async def _live(config: AgentConfig, state: StateDirectory, capabilities: Capabilities, log: Logger) -> None:
    daemon = Daemon(config, state, capabilities, log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop)
    await daemon.run()


@app.command()
def join(
    invitation: Annotated[str, typer.Argument(metavar="STRING", help="From `eval-coordinator token create`.")],
    name: _Name = None,
    state: _State = None,
) -> None:
    """Join a coordinator on another machine: `eval-agent run`, with the same --name or --state, then needs no address.

    Makes this node's key, which never leaves it, checks the coordinator's CA against the join string, and only then
    shows its secret. The certificate is good for a week, and renewed while the agent runs.
    """
    _join(invitation, name, (state or default_state(name)).absolute())


def _join(invitation: str, name: str | None, state: Path) -> None:
    with StateDirectory(state) as directory:
        membership = join_once(invitation, path_in(state), name or directory.name())
    until = date(membership.certificate.expires)
    typer.echo(f"joined {membership.coordinator} at {membership.address} as {membership.owner}, until {until}")


@app.command()
def probe(
    cache: _Cache = None,
    device: _Device = "auto",
    threads: _Threads = None,
    as_json: _Json = False,
    engine: _Engine = DEFAULT_ENGINE,
) -> None:
    """Print what this machine is and what the libraries can really do on it; fail if the engine does."""
    config = _config(None, None, None, cache, None, device, threads, engine)
    capabilities = probe_machine(config.cache)

    async def ask() -> dict[str, object]:
        executor = Executor(config, WorkerLog(None), make_logger(as_json=False))
        try:
            return await executor.probe()
        finally:
            await executor.close()

    failure: FedevalError | None = None
    try:
        engine_facts = asyncio.run(ask())
    except FedevalError as error:
        failure, engine_facts = error, {"error": str(error), "code": error.code}
    facts = asdict(replace(capabilities, engine=engine_facts))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        for key, value in facts.items():
            text = json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
            typer.echo(f"{key:<18} {text}")
    if failure is not None:
        raise failure


@app.command()
def check(
    coordinator: _Coordinator = None,
    name: _Name = None,
    state: _State = None,
    cache: _Cache = None,
    root: _Root = None,
    device: _Device = "auto",
    threads: _Threads = None,
    group: Annotated[
        bool, typer.Option("--group", help="Look at groups instead: ranks, their sums and link, versions, environment.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="With --group: how many ranks; default: one a GPU, else 2.")
    ] = None,
    as_json: _Json = False,
    engine: _Engine = DEFAULT_ENGINE,
) -> None:
    """Prove that an agent can work here: exit with 0 if all is well, else with 1 and remedies.

    With --group, prove that several ranks can score together on this machine, and measure the link between them.
    """
    config = _config(coordinator, name, state, cache, root, device, threads, engine)
    if ranks is not None and not group:
        raise typer.BadParameter("is for --group", param_hint="--ranks")
    capabilities = probe_machine(config.cache)
    found = asyncio.run(
        _shown(
            group_findings(config.device, ranks, config.threads, capabilities)
            if group
            else findings(config, capabilities, make_logger(as_json=False)),
            quiet=as_json,
        )
    )
    good = all(finding.ok for finding in found)
    if as_json:
        typer.echo(json.dumps({"ok": good, "findings": [finding.to_json() for finding in found]}, indent=2))
    if not good:
        raise typer.Exit(1)


async def _shown(looked_at: AsyncIterator[Finding], *, quiet: bool) -> list[Finding]:
    console = Console(quiet=quiet, soft_wrap=True, highlight=False)
    found = []
    async for finding in looked_at:
        found.append(finding)
        word, style = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
        console.print(Text.assemble((word, style), f"  {finding.name:<16} {finding.detail}"))
        if not finding.ok:
            console.print(Text(f"      remedy: {finding.remedy}"))
    return found


def _config(
    coordinator: str | None,
    name: str | None,
    state: Path | None,
    cache: Path | None,
    root: list[Path] | None,
    device: str,
    threads: int | None,
    engine: str,
) -> AgentConfig:
    """Options to configuration; raises ``ConfigError``."""
    place = (state or default_state(name)).absolute()
    config = AgentConfig(
        name=name,
        state=place,
        cache=(cache or default_cache()).absolute(),
        roots=tuple(path.absolute() for path in root) if root else default_roots(),
        device=device,
        threads=usable_cpus() if threads is None else threads,
        engine=engine,
    )
    joined = load(path_in(place))
    if joined is None or (coordinator is not None and _own(coordinator, joined.membership.address)):
        return replace(config, coordinator=coordinator or DEFAULT_ADDRESS)
    known = joined.membership
    if name not in (None, known.owner.name):
        raise ConfigError(f"this node has joined as {known.owner}; leave out --name {name}, or use another --state")
    return replace(
        config,
        membership=path_in(place),
        coordinator=coordinator or known.address,
        name=known.owner.name,
        site=known.owner.site,
        roles=tuple(role for role in Role if role.value in known.roles),
    )


def _own(address: str, joined: str) -> bool:
    """Whether somebody of this very user listens at an address, a relay say, and lets this user in as such."""
    return address != joined and bool(local_source(address)().token)


def run_command(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on the standard error."""
    words = sys.argv[1:] if words is None else words
    try:
        result = app(list(words) or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        if not words:
            return 2
        return result if isinstance(result, int) else 0
    except FedevalError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _ClickException as error:
        return _usage(error)
    except Exception as error:  # noqa: BLE001 - a fault of ours: the user gets one line, never a traceback
        if isinstance(error, OSError) and (code := _output_lost()) is not None:
            return code
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        return _fail(f"internal error ({type(error).__name__}: {error}){notes}; please report it", INTERNAL)


def main() -> None:
    """Entry point of the command."""
    sys.exit(run_command())


def _usage(error: Exception) -> int:
    """Report a wrong command line."""
    explain = getattr(error, "format_message", error.__str__)
    text = " ".join(str(explain()).split())
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return _fail(f"{text[:1].lower()}{text[1:].rstrip('.')}{where}", 2)


def _output_lost() -> int | None:
    """If the standard output takes nothing, say so and return the exit code; ``None`` if it does."""
    try:
        # A line more, since an unbuffered stream has nothing left to flush.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        # The interpreter's last flush must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        return _fail(
            f"the standard output cannot be written ({error.strerror}); send it elsewhere", DirectoryUnusable.exit_code
        )
    return None


def _fail(text: str, code: int) -> int:
    typer.echo(f"{PROGRAM}: error: {' '.join(text.split())}", err=True)
    return code
