"""What each format costs in perplexity: paired differences to float32 with intervals, on windows of WikiText-2.

SmolLM2-135M, whose weights were dequantised from a 4-bit asymmetric grid of blocks of 32: an asymmetric int4-g32 of it
is nearly lossless for that reason alone, and is never listed here. ``--model`` takes any other model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import common

#: Calibration text: the end of the same file, far from the windows that are evaluated (which is checked).
CALIBRATION = {"skip": "60%", "windows": 32, "context": 512}


def sides(text: Path) -> dict[str, Any]:
    """Precisions by name; float32 comes first."""
    calibration = {"source": str(text), **CALIBRATION}

    def gptq(name: str, **more: Any) -> dict[str, Any]:
        return {"default": name, "quantiser": "gptq", "calibration": calibration, **more}

    return {
        "fp32": "fp32",
        "bf16": "bf16",
        "int8": "int8",
        "int8 rtn": {"default": "int8", "quantiser": "rtn"},
        "int8 gptq": gptq("int8"),
        "int8-g64": "int8-g64",
        "int8-g64 gptq": gptq("int8-g64"),
        "int8-dynamic": "int8-dynamic",
        "int4-g64 rtn": {"default": "int4-g64", "quantiser": "rtn"},
        "int4-g64 mse": "int4-g64",
        "int4-g64 gptq": gptq("int4-g64"),
        "brief": "brief",
    }


def torchao_losses(spec: Any, config: Any, context: int, windows: int) -> list[tuple[float, int]]:
    """What torchao's own ``quantize_`` gives: (loss sum in nats, scored tokens) of each window, with the plain
    transformers loop in float32. The head stays float32, as in our uniform formats."""
    import torch
    from torch.nn import functional as F
    from torchao.quantization import quantize_
    from transformers import AutoModelForCausalLM

    from eval_kernel import checkpoint

    found = checkpoint.find(spec.model, None, common.CACHE, lambda note: None)
    ids = torch.tensor(common.bench_tokens(found)[: windows * context]).view(windows, 1, context)
    model = AutoModelForCausalLM.from_pretrained(str(found.directory), dtype=torch.float32).eval()
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and name != "lm_head")
    losses = []
    with torch.inference_mode():
        for window in ids:
            logits = model(window).logits[0, :-1]
            losses.append((float(F.cross_entropy(logits, window[0, 1:], reduction="none").double().sum()), context - 1))
    return losses


def torchao_sides() -> dict[str, Any]:
    """torchao's plain round-to-nearest, by name."""
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

    return {
        "torchao int8": Int8WeightOnlyConfig(),
        "torchao int8-g64": IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerGroup(64)),
        "torchao int4-g64": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
    }


def _partial(shard: int, nats: float, tokens: int) -> Any:
    """A window's loss as a partial that ``compare`` pairs."""
    from eval_kernel.gridsum import STEPS_PER_NAT
    from eval_kernel.partial import Partial

    return Partial(shard, round(nats * STEPS_PER_NAT), tokens, 0, 0, ())


def main() -> int:
    """Score every side on the same windows and print each against float32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 windows of 256 tokens, 3 sides")
    parser.add_argument("--windows", type=int, default=60)
    parser.add_argument("--model", default=None, help="directory or GGUF file; default SmolLM2-135M")
    parser.add_argument("--only", action="append", help="side to run (besides fp32)")
    parser.add_argument(
        "--torchao", action="store_true", help="also torchao's own round-to-nearest, on the same windows"
    )
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    text = common.wikitext()
    if text is None:
        print("bench: WikiText-2 is not here (FEDEVAL_TEST_DATA); nothing is measured")
        return 0
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.precision.compare import compare
    from eval_kernel.precision.plan import PrecisionPlan, bytes_by_class
    from eval_kernel.spec import parse_spec

    engine = Engine(EngineConfig(common.CACHE, device="cpu", threads=options.threads))
    wanted = sides(text)
    if options.quick:
        wanted = {name: wanted[name] for name in ("fp32", "int8", "int4-g64 rtn")}
    if options.only:
        wanted = {name: side for name, side in wanted.items() if name == "fp32" or name in options.only}
    windows, context = (4, 256) if options.quick else (options.windows, 1024)
    figures: dict[str, Any] = {}
    reference = None
    job = {
        "model": options.model or str(common.smollm2()),
        "dataset": {"source": str(text)},
        "window": {"policy": "concat", "context": context, "max_windows": windows},
        "shard": {"tokens": context - 1},  # a window is a shard: the unit of pairing
    }
    for name, precision in wanted.items():
        spec = parse_spec({**job, "precision": precision}, where="bench")
        plan = engine.plan(spec, lambda note: None)
        started = time.perf_counter()
        evaluation = engine.open(spec, plan.manifest, lambda note: None)
        opened = time.perf_counter() - started
        scored = [evaluation.score(shard, lambda: None) for shard in plan.shards]
        partials = [s.partial for s in scored]
        reference = reference or partials
        found = compare(reference, partials, by="shard")
        total = bytes_by_class(PrecisionPlan.from_canonical(plan.manifest.precision_plan))["total"]
        speed = plan.manifest.input_tokens / sum(s.execution.seconds for s in scored)
        interval = "" if found.change_low is None else f" [{found.change_low:+.3%}, {found.change_high:+.3%}]"
        print(
            f"{name:16s} ppl {found.perplexity:8.4f} {found.change:+.3%}{interval} of {found.clusters} windows, "
            f"weights {total['bytes'] / 1e6:6.1f} MB = {total['bytes'] / total['fp32']:.1%} of fp32, "
            f"{speed:6.0f} tokens/s, ready in {opened:.1f} s",
            flush=True,
        )
        figures[name] = {"ppl": found.perplexity, "change": found.change, "bytes": total["bytes"]}
        figures[name] |= {"low": found.change_low, "high": found.change_high, "tokens_per_second": round(speed)}
    for name, config in (torchao_sides() if options.torchao else {}).items():
        spec = parse_spec(job, where="bench")
        losses = torchao_losses(spec, config, context, windows)
        found = compare(reference or [], [_partial(i, *loss) for i, loss in enumerate(losses)], by="shard")
        interval = "" if found.change_low is None else f" [{found.change_low:+.3%}, {found.change_high:+.3%}]"
        print(
            f"{name:16s} ppl {found.perplexity:8.4f} {found.change:+.3%}{interval} of {found.clusters} windows",
            flush=True,
        )
        figures[name] = {"ppl": found.perplexity, "change": found.change}
        figures[name] |= {"low": found.change_low, "high": found.change_high}
    common.finish({"bench": "quantised", "windows": windows, "context": context, "sides": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
