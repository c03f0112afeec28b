"""`eval-coordinator`: the commands of commands/ put together, and errors turned into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import typer

from coordinator.commands.access import agents, ca, join, token, user
from coordinator.commands.check import check
from coordinator.commands.compare import compare
from coordinator.commands.demo import demo
from coordinator.commands.jobs import cancel, jobs, submit, wait, watch
from coordinator.commands.journal import app as journal
from coordinator.commands.nodes import nodes
from coordinator.commands.plan import plan
from coordinator.commands.report import report
from coordinator.commands.serve import serve
from coordinator.live import plain
from eval_kernel import __version__
from eval_kernel.errors import DirectoryUnusable, FedevalError, IllegalTransition

PROGRAM = "eval-coordinator"
#: Exit codes of the shell's tradition: ended by SIGINT, by SIGPIPE.
INTERRUPTED = 130
BROKEN_PIPE = 141

# The usage error of click, or of the copy of it that newer versions of typer carry.
_ClickException = cast(type[Exception], typer.BadParameter.__mro__[2])


def application() -> typer.Typer:
    """Return the command-line application."""
    app = typer.Typer(
        name=PROGRAM,
        help="Exact evaluation of language models over many machines: the coordinator and its clients.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": 100},
    )

    @app.callback()
    def version(
        show: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_version),
    ) -> None:
        """Exact evaluation of language models over many machines: the coordinator and its clients."""

    for command in (serve, submit, watch, wait, jobs, nodes, report, compare, plan, cancel, check, demo):
        app.command()(command)
    app.command()(join)
    app.add_typer(token, name="token")
    app.add_typer(agents, name="agents")
    app.add_typer(user, name="user")
    app.add_typer(ca, name="ca")
    app.add_typer(journal, name="journal")
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error is one line on standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result = application()(arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
        if not arguments:
            return 2
        return result if isinstance(result, int) else 0
    except FedevalError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _silence()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            return _bug(error)
        _silence()  # files of ours have errors of their own: what is left is what we print to
        text = f"cannot write to standard output ({error.strerror}); make room there or send it elsewhere"
        return _fail(text, DirectoryUnusable.exit_code)
    except _ClickException as error:
        return _usage(error)
    except Exception as error:  # noqa: BLE001 - a fault of ours: the user gets one line, we get the place
        return _bug(error)


def main() -> None:
    """Entry point of the command."""
    sys.exit(run())


def _version(show: bool) -> None:
    if show:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _usage(error: Exception) -> int:
    """Report a wrong command line."""
    explain = getattr(error, "format_message", error.__str__)
    text = " ".join(str(explain()).split())
    context = getattr(error, "ctx", None)
    where = f"; see {context.command_path} --help" if context is not None else ""
    return _fail(f"{text[:1].lower()}{text[1:].rstrip('.')}{where}", 2)


def _place(error: BaseException) -> str:
    """Return file and line where an exception was raised, as far as it is our code."""
    root = Path(__file__).resolve().parent.parent
    place = "an unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = Path(frame.f_code.co_filename).resolve()
        if file.is_relative_to(root) and "site-packages" not in file.relative_to(root).parts:
            place = f"{file.relative_to(root)}:{line}"
    return place


def _bug(error: Exception) -> int:
    """Report a fault of this program."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _fail(f"internal error at {_place(error)}: {text}; please report it", IllegalTransition.exit_code)


def _silence() -> None:
    """Drop what standard output still holds: the interpreter's last flush must not complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, code: int) -> int:
    typer.echo(plain(f"{PROGRAM}: error: {text}"), err=True)
    return code
