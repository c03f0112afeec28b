"""Measured plans against rules of thumb: for each budget, the perplexity of `auto` and of every rule that fits it.

One file of sensitivities serves all budgets; it is measured first where there is none. What is compared was scored on
windows that neither sensitivities nor calibration have seen. Budgets are shares of the checkpoint's bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

BUDGETS = (0.15, 0.2, 0.3, 0.4, 0.5, 0.6)
#: Formats to choose from; with whatever the checkpoint has.
FORMATS = ("int8", "int8-g64", "int4-g64")
#: Perplexity may differ by so much before one plan counts as worse: below what the windows can tell.
SLACK = 1e-4


def job(model: str, text: str, context: int, quantiser: str) -> dict[str, Any]:
    """The job that is planned; its first windows are those that plans are compared on."""
    calibration = {"source": text, "skip": "60%", "windows": 32, "context": min(512, context)}
    return {
        "model": model,
        "dataset": text,
        "window": {"policy": "concat", "context": context},
        "precision": {"quantiser": quantiser, "calibration": calibration},
    }


def main() -> int:
    """Plan every budget, score plans and rules, print a table; 1 where a rule that fits is better than the plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a model trained for 10 seconds")
    parser.add_argument("--model", help="directory or GGUF file; default SmolLM2-135M")
    parser.add_argument("--text", help="default WikiText-2's test text")
    parser.add_argument("--sensitivity", type=Path, help="measurements: used if the file is there, else written")
    parser.add_argument("--quantiser", default="gptq", choices=("rtn", "mse", "gptq"))
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--cache", type=Path, default=common.CACHE)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-plans-") as place:
        if options.quick:
            import small_model

            made = small_model.make(Path(place), 10.0)
            options.model, options.text, options.context = str(made.model), str(made.text), 128
        return compare(options, Path(place))


def compare(options: argparse.Namespace, place: Path) -> int:
    """Plan, score and print."""
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.errors import PrecisionInfeasible
    from eval_kernel.precision.choose import baselines
    from eval_kernel.precision.planner import Planner, Request
    from eval_kernel.precision.policy import MeasureSpec
    from eval_kernel.precision.proof import Settling, interval, mapping_of
    from eval_kernel.spec import parse_spec

    text = options.text or (str(found) if (found := common.wikitext()) else None)
    if text is None:
        print("bench: WikiText-2 is not here (FEDEVAL_TEST_DATA); nothing is measured")
        return 0
    wanted = job(options.model or str(common.smollm2()), text, options.context, options.quantiser)
    spec = parse_spec(wanted, where="bench")
    measure = MeasureSpec(formats=FORMATS, rows=4, context=min(256, options.context))
    engine = Engine(EngineConfig(options.cache, device="cpu"))
    planner = Planner(spec, Request(measure, 1.0, None, options.windows), engine, lambda note: None)
    table = planner.table(planner.sensitivity(options.sensitivity or place / "sensitivity.json"))
    fp32 = sum(w.elements for w in table.outline.weights) * 4
    source = spec.precision.calibration if not isinstance(spec.precision, str) else None
    sides: dict[str, tuple[int, float | None, dict[str, Any]]] = {}
    for budget in BUDGETS:
        try:
            chosen, mapping = Settling(table, budget, None, source).next()
        except PrecisionInfeasible as error:
            print(f"budget {budget:.0%}: {error}")
            continue
        sides[f"auto {budget:.0%}"] = (chosen.bytes, budget, mapping)
    for label, choice in baselines(table).items():
        rule = table.chosen(choice)
        sides[label] = (rule.bytes, None, mapping_of(table, rule, source))
    figures: dict[str, dict[str, Any]] = {}
    known: dict[str, Any] = {}
    print(f"{'plan':40s} {'bytes':>13s} {'of ckpt':>8s} {'of fp32':>8s} {'of bf16':>8s}  change of perplexity")
    for name, (size, budget, mapping) in sorted(sides.items(), key=lambda side: side[1][0]):
        key = json.dumps(mapping, sort_keys=True)
        found = known.get(key) or planner.measured(mapping)
        known[key] = found
        print(
            f"{name:40s} {size:13,} {size / table.checkpoint:8.1%} {size / fp32:8.1%} {size / (fp32 / 2):8.1%}  "
            f"{interval(found)}",
            flush=True,
        )
        figures[name] = {"bytes": size, "budget": budget, "change": found.change, "high": found.change_high}
    worse = []
    for name, plan in figures.items():
        if plan["budget"] is None:
            continue
        fitting = {n: f for n, f in figures.items() if f["budget"] is None and f["bytes"] <= plan["bytes"]}
        best = min(fitting, key=lambda n: fitting[n]["change"], default=None)
        if best is None:
            print(f"{name}: no rule fits its bytes")
            continue
        holds = plan["change"] <= fitting[best]["change"] + SLACK
        print(f"{name}: {plan['change']:+.3%}; best rule of at most its bytes: {best}, {fitting[best]['change']:+.3%}")
        if not holds:
            worse.append(name)
    print(f"auto is at least as good as every rule of equal or fewer bytes: {'no: ' + str(worse) if worse else 'yes'}")
    common.finish({"bench": "plans", "windows": options.windows, "worse": worse, "sides": figures})
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
