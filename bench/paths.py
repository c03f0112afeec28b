"""One plan on two code paths: the fast kernels that score, and transformers over dequantised weights, shard by shard.

Both hold the same quantised weights; the losses of a shard may differ by what the fast path's self-test allows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import common

PRECISIONS: dict[str, Any] = {
    "int8": "int8",
    "int4-g64": "int4-g64",
    "brief": "brief",
    "int8, bf16": {"default": "int8", "compute": "bf16"},
    "int4-g64, bf16": {"default": "int4-g64", "compute": "bf16"},
}


def main() -> int:
    """Score every precision on both paths and print the largest difference of a shard; 1 where one is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 shards of 512 tokens")
    parser.add_argument("--plan", type=Path, action="append", default=[], help="a plan's file, beside the others")
    parser.add_argument("--only", action="append", help="precision to run")
    parser.add_argument("--shards", type=int, default=20)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--model", default=None, help="directory or GGUF file; default SmolLM2-135M")
    parser.add_argument("--text", type=Path, default=None, help="default WikiText-2's test text")
    parser.add_argument("--cache", type=Path, default=common.CACHE)
    options = parser.parse_args()
    text = options.text or common.wikitext()
    if text is None:
        print("bench: WikiText-2 is not here (FEDEVAL_TEST_DATA); nothing is measured")
        return 0
    import torch
    import yaml

    from eval_kernel import fast
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.evaluation import Evaluation
    from eval_kernel.precision.distance import CHUNK, steps
    from eval_kernel.spec import parse_spec

    shards, context = (2, 512) if options.quick else (options.shards, options.context)
    wanted = {n: p for n, p in PRECISIONS.items() if not options.only or n in options.only}
    wanted |= {f"plan {path.name}": yaml.safe_load(path.read_text()) for path in options.plan}
    engine = Engine(EngineConfig(options.cache, device="cpu"))
    figures, within = {}, True
    for name, precision in wanted.items():
        mapping = {"default": precision} if isinstance(precision, str) and precision != "brief" else precision
        spec = parse_spec(
            {
                "model": options.model or str(common.smollm2()),
                "dataset": {"source": str(text)},
                "window": {"policy": "concat", "context": context, "max_windows": shards},
                "precision": mapping,
                "shard": {"tokens": context - 1},
            },
            where="bench",
        )
        plan = engine.plan(spec, lambda note: None)
        evaluation = engine.open(spec, plan.manifest, lambda note: None)
        assert isinstance(evaluation, Evaluation)
        dtype = getattr(torch, plan.manifest.dtype)
        allowed, worst, how = fast.TOLERANCE[dtype], 0.0, ""
        for shard in plan.shards:
            scored = evaluation.score(shard, lambda: None)
            other = 0
            for logits, targets in evaluation.logits(shard, CHUNK):
                wanted_logit = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
                other += steps(torch.logsumexp(logits, -1) - wanted_logit)
            worst, how = (
                max(worst, abs(scored.partial.steps - other) / other),
                scored.execution.software.get("kernel", ""),
            )
        within = within and worst <= allowed
        print(
            f"{name:24s} {len(plan.shards)} shards of {context - 1} tokens: losses differ by at most {worst:.1e} "
            f"of a shard's sum (allowed {allowed:.0e}); fast path: {how}",
            flush=True,
        )
        figures[name] = {"worst": worst, "allowed": allowed}
    common.finish({"bench": "paths", "within": within, "sides": figures})
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
