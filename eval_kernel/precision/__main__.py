"""``python -m eval_kernel.precision``: plans a job's precision by measurement, or compares two, in this process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from eval_kernel.errors import FedevalError, SpecError, reason
from eval_kernel.precision.compare import check_manifests
from eval_kernel.precision.options import limits, measure_of
from eval_kernel.precision.policy import as_spec
from eval_kernel.precision.proofjob import write
from eval_kernel.spec import JobSpec, load_spec, parse_spec

if TYPE_CHECKING:
    from eval_kernel.engine import Engine


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
    plan.set_defaults(run=_plan)
    pair = commands.add_parser("compare", help="loss, divergence and agreement of two precisions on the same tokens")
    pair.add_argument("job", type=Path, help="the job file (YAML); its own precision does not matter")
    pair.add_argument("reference", help="a precision's name, or the YAML file of a plan")
    pair.add_argument("other", help="likewise")
    pair.add_argument("--json", action="store_true", help="print one JSON object")
    pair.set_defaults(run=_compare)
    for command in (plan, pair):
        command.add_argument("--cache", type=Path, metavar="DIR", help="tokens, models, packs")
        command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        command.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
        command.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
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
    from eval_kernel.precision import planner, proof

    request = planner.Request(measure, budget, limit, options.proof)
    work = planner.Planner(spec, request, _engine(options), _noting(options))
    table = work.table(work.sensitivity(options.sensitivity))
    planned = work.plan(table)
    text = proof.plan_text(planned, table)
    print(proof.tradeoff_text(table) + "\n" + text, end="")
    if options.out is not None:
        write(options.out, text)
    return 0


def _compare(options: argparse.Namespace) -> int:
    spec = load_spec(options.job)
    sides = [_with(spec, _precision(name)) for name in (options.reference, options.other)]
    from eval_kernel.evaluation import Evaluation
    from eval_kernel.precision import distance

    if any(as_spec(side.precision).measure for side in sides):
        raise SpecError("compare takes precisions to evaluate in, not measure")
    engine, note = _engine(options), _noting(options)
    plans = [engine.plan(side, note) for side in sides]
    check_manifests(plans[0].manifest, plans[1].manifest)
    opened = [engine.open(side, plan.manifest, note) for side, plan in zip(sides, plans, strict=True)]
    sums = []
    evaluations = [e for e in opened if isinstance(e, Evaluation)]
    for shard in plans[0].shards:
        note(f"comparing shard {shard.index + 1} of {len(plans[0].shards)}")
        sums.append(distance.of_pieces(*(e.logits(shard, distance.CHUNK) for e in evaluations)))
    found = distance.distance(sums)
    print(json.dumps(found.to_json()) if options.json else "\n".join(distance.lines(found)))
    return 0


def _with(spec: JobSpec, precision: Any) -> JobSpec:
    """The job in another precision. Raises ``SpecError``."""
    return parse_spec({**spec.model_dump(mode="json"), "precision": precision}, where="compare")


def _precision(text: str) -> Any:
    """What a name or a plan's file says. Raises ``SpecError`` for a file that is no YAML."""
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        return text
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SpecError(f"{path}: no plan of a precision ({reason(error)})") from None


def _engine(options: argparse.Namespace) -> Engine:
    from eval_kernel.__main__ import default_cache
    from eval_kernel.engine import Engine, EngineConfig

    return Engine(EngineConfig(options.cache or default_cache(), None, options.device, options.threads))


def _noting(options: argparse.Namespace) -> Callable[[str], None]:
    started = time.monotonic()

    def note(text: str) -> None:
        if not options.quiet:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    return note


if __name__ == "__main__":
    sys.exit(main())
