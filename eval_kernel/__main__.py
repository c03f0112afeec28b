"""``python -m eval_kernel job.yaml``: the reference evaluator's command line. Evaluation itself is ``reference``'s."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from eval_kernel.errors import ConfigError, DirectoryUnusable, FedevalError, JobIncomplete, WorkerUnusable, reason
from eval_kernel.spec import load_spec

#: Exit codes: a fault of this program; and by the shell's tradition, ended by SIGINT, by SIGPIPE.
INTERNAL, INTERRUPTED, BROKEN_PIPE = 70, 130, 141
#: Set to anything, this environment variable has the traceback of an internal error printed too.
TRACEBACK_VARIABLE = "FEDEVAL_TRACEBACK"
INSTALL = "pip install 'fedeval[agent]' (in a checkout: pip install '.[agent]')"


class _Parser(argparse.ArgumentParser):
    """Says a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(ConfigError.exit_code, f"eval_kernel: error: {message}; see {self.prog} --help\n")


def main(argv: list[str] | None = None) -> int:
    """Evaluate a job and print its report; return 0, or the exit code of what stood in the way."""
    parser = _Parser(prog="python -m eval_kernel", description="Evaluate a job in this process, without a coordinator.")
    parser.add_argument("job", type=Path, help="the job file (YAML)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as JSON")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=default_cache(), help="tokens and converted models"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", action="append", help="read only under this directory")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, help="CPU threads, 1 to 4096 (default: all cores)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(argv)
    try:
        report = _run(options)
        sys.stdout.flush()
    except FedevalError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        print("eval_kernel: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever a library raises: one line, never a traceback unasked
        if isinstance(error, OSError) and (code := _output_lost()) is not None:
            return code
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("eval_kernel"):
            return _fail(f"what evaluation needs is not installed ({error}): {INSTALL}", WorkerUnusable.exit_code)
        if os.environ.get(TRACEBACK_VARIABLE):
            traceback.print_exc()
        return _fail(
            f"internal error ({reason(error)}); {TRACEBACK_VARIABLE}=1 shows where; please report it", INTERNAL
        )
    return 0 if report["complete"] else JobIncomplete.exit_code


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fedeval``, or ``~/.cache/fedeval``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedeval"


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.threads is not None and not 1 <= options.threads <= 4096:
        raise ConfigError(f"--threads is {options.threads}; allowed: 1 to 4096")
    if options.json is not None and options.json.is_dir():
        raise ConfigError(f"--json {options.json} is a directory; name a file")
    spec = load_spec(options.job)
    if options.json is not None:
        # Found out before the work, not after it.
        _write(options.json, "")
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.reference import evaluate
    from eval_kernel.report import render_text

    roots = tuple(options.root) if options.root else None
    engine = Engine(EngineConfig(options.cache, roots, options.device, options.threads))
    progress = _Progress(options.quiet)
    report = evaluate(spec, engine, progress.note, progress.done)
    progress.end()
    if options.json is not None:
        _write(options.json, json.dumps(report, indent=1) + "\n")
    print(render_text(report))
    return report


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
    print(f"eval_kernel: error: {text}", file=sys.stderr)
    return code


def _write(path: Path, text: str) -> None:
    temp = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(text, encoding="utf-8")
        if text:
            temp.replace(path)
        else:
            temp.unlink()
    except OSError as error:
        raise DirectoryUnusable(f"{path} cannot be written ({error.strerror}); choose another --json") from None


class _Progress:
    """Says on stderr what goes on: a line per step, and on a terminal a line that is rewritten per shard."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live, self._started = quiet, sys.stderr.isatty(), time.monotonic()

    def note(self, text: str) -> None:
        if not self._quiet:
            print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr)

    def done(self, plan: Any, shard: Any, tally: Any, seconds: float) -> None:
        if self._quiet:
            return
        total = plan.manifest.input_tokens
        inputs = sum(s.input_tokens for s in plan.shards[: shard.index + 1])
        line = f"shard {shard.index + 1}/{len(plan.shards)}, {inputs / seconds:,.0f} tokens/s, {inputs / total:.0%}"
        if self._live:
            print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
        elif shard.index + 1 == len(plan.shards):
            print(line, file=sys.stderr)

    def end(self) -> None:
        if self._live and not self._quiet:
            print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
