"""``python -m eval_kernel.precision plan job.yaml``: plans a job's precision by measurement, in this process."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from eval_kernel.errors import FedevalError
from eval_kernel.precision.options import limits, measure_of
from eval_kernel.precision.policy import as_spec
from eval_kernel.precision.proofjob import write
from eval_kernel.spec import load_spec


def main(argv: list[str] | None = None) -> int:
    """Plan, print, write; return 0, or the exit code of what stood in the way."""
    parser = argparse.ArgumentParser(prog="python -m eval_kernel.precision", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="choose formats so that a budget or a limit on perplexity is kept")
    plan.add_argument("job", type=Path, help="the job file (YAML)")
    plan.add_argument("--budget", help="share of the checkpoint's bytes, such as 40%%")
    plan.add_argument("--max-ppl-increase", help="share by which perplexity may rise, such as 0.5%%")
    plan.add_argument("--formats", help="formats to choose from, with commas between")
    plan.add_argument("--rows", type=int, default=4, help="rows that sensitivities are measured on")
    plan.add_argument("--context", type=int, default=256, help="tokens of such a row")
    plan.add_argument("--proof", type=int, default=20, help="windows that the plan is proved on")
    plan.add_argument("--sensitivity", type=Path, metavar="FILE", help="measurements to reuse and to add to (JSON)")
    plan.add_argument("--out", type=Path, metavar="FILE", help="write the plan there (YAML)")
    plan.add_argument("--cache", type=Path, metavar="DIR", help="tokens, models, packs")
    plan.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    plan.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    plan.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(argv)
    try:
        return _plan(options)
    except FedevalError as error:
        print(f"eval_kernel.precision: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("eval_kernel.precision: interrupted; what was measured is kept with --sensitivity", file=sys.stderr)
        return 130


def _plan(options: argparse.Namespace) -> int:
    spec = load_spec(options.job)
    budget, limit = limits(as_spec(spec.precision), options.budget, options.max_ppl_increase)
    measure = measure_of(options.formats, options.rows, options.context)
    from eval_kernel.__main__ import default_cache
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.precision import planner, proof

    request = planner.Request(measure, budget, limit, options.proof)
    engine = Engine(EngineConfig(options.cache or default_cache(), None, options.device, options.threads))
    started = time.monotonic()

    def note(text: str) -> None:
        if not options.quiet:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    work = planner.Planner(spec, request, engine, note)
    table = work.table(work.sensitivity(options.sensitivity))
    planned = work.plan(table)
    text = proof.plan_text(planned, table)
    print(proof.tradeoff_text(table) + "\n" + text, end="")
    if options.out is not None:
        write(options.out, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
