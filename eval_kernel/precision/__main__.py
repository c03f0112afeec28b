"""``python -m eval_kernel.precision plan job.yaml``: plans a job's precision by measurement, in this process."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from eval_kernel.errors import CallError, FedevalError
from eval_kernel.precision.formats import FORMATS, suggestion
from eval_kernel.precision.policy import MeasureSpec, as_spec
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
    policy = as_spec(spec.precision)
    budget = _share(options.budget, "--budget")
    limit = _share(options.max_ppl_increase, "--max-ppl-increase")
    if budget is None and limit is None:
        budget, limit = policy.budget, policy.max_ppl_increase
    if (budget is None) == (limit is None):
        raise CallError("give one of --budget and --max-ppl-increase, or the same under precision in the job")
    from eval_kernel.__main__ import default_cache
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.precision import planner, proof

    request = planner.Request(measure_of(options), budget, limit, options.proof)
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
        planner.write(options.out, text)
    return 0


def measure_of(options: argparse.Namespace) -> MeasureSpec:
    """What to measure, from the options. Raises ``CallError``."""
    chosen = {} if options.formats is None else {"formats": tuple(options.formats.split(","))}
    for name in chosen.get("formats", ()):
        if name not in FORMATS:
            raise CallError(f"--formats: no format {name!r}; {suggestion(name, list(FORMATS))}")
    try:
        return MeasureSpec.model_validate({**chosen, "rows": options.rows, "context": options.context})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"--{part} " for part in first["loc"][:1])
        raise CallError(f"{where or '--'}{first['msg'].removeprefix('Value error, ')}") from None


def _share(text: str | None, option: str) -> float | None:
    """``40%`` or ``0.4`` as a fraction. Raises ``CallError``."""
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 10:
        raise CallError(f"{option} is {text!r}; write a share such as 40% or 0.4")
    return value


if __name__ == "__main__":
    sys.exit(main())
