"""``python -m eval_kernel job.yaml``: the reference evaluator's command line. Evaluation itself is ``reference``'s."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from eval_kernel.errors import DirectoryUnusable, FedevalError, JobIncomplete
from eval_kernel.spec import load_spec


def main(argv: list[str] | None = None) -> int:
    """Evaluate a job and print its report; return 0, or the exit code of what stood in the way."""
    parser = argparse.ArgumentParser(
        prog="python -m eval_kernel", description="Evaluate a job in this process, without a coordinator."
    )
    parser.add_argument("job", type=Path, help="the job file (YAML)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there as JSON")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=default_cache(), help="tokens and converted models"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", action="append", help="read only under this directory")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(argv)
    try:
        report = _run(options)
    except FedevalError as error:
        print(f"eval_kernel: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("eval_kernel: interrupted", file=sys.stderr)
        return 130
    return 0 if report["complete"] else JobIncomplete.exit_code


def default_cache() -> Path:
    """``$XDG_CACHE_HOME/fedeval``, or ``~/.cache/fedeval``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedeval"


def _run(options: argparse.Namespace) -> dict[str, Any]:
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
