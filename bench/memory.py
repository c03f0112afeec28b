"""Peak memory and the result of scoring 8 x 1024 tokens with a vocabulary of 49,152: our kernel against the plain loop.

Each side runs in a process of its own; what is compared is the growth of the resident set over the loaded model.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
from pathlib import Path

import common

ROWS, LENGTH = 8, 1024


def measure(side: str, rows: int) -> None:
    """Score ``rows`` x 1024 tokens in this process and print loss sum, count, and memory in bytes."""
    import numpy as np
    import psutil
    import torch

    from eval_kernel import checkpoint, model, scoring
    from eval_kernel.quiet import quiet
    from eval_kernel.spec import ModelSpec

    quiet()
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    tokens = np.random.default_rng(1).integers(100, 49000, (rows, LENGTH + 1), dtype=np.int32)
    if side == "kernel":
        loaded = model.load(found, "float32", torch.device("cpu"))
        before = _settled(psutil.Process())
        parts = [scoring.Row(t[:-1], t[1:]) for t in tokens]
        losses = scoring.score(loaded, parts, rows * LENGTH, lambda: None)
        nll = sum(int(x.steps.sum()) for x in losses) / 2**30
    else:
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(str(found.directory), dtype=torch.float32).eval()
        for weight in plain.parameters():
            weight.sum()  # memory-mapped until touched: loading ends here, as it does on the other side
        before = _settled(psutil.Process())
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.inference_mode():
            logits = plain(ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            nll = float(loss.double().sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"nll": nll, "tokens": rows * LENGTH, "before": before, "peak": peak, "growth": peak - before}))


def _settled(process: object) -> int:
    """Resident bytes after loading; the peak of loading must not hide the peak of scoring, so it is reset."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (Linux)
    rss: int = process.memory_info().rss  # type: ignore[attr-defined]
    return rss


def main() -> None:
    """Measure both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 rows instead of 8")
    parser.add_argument("--side", choices=["kernel", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, default=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure(options.side, options.rows)
        return
    rows = 2 if options.quick else options.rows
    script = Path(__file__).resolve()
    sides = {side: common.child(script, "--side", side, "--rows", str(rows)) for side in ("plain", "kernel")}
    for side, figures in sides.items():
        print(
            f"{side:7s} {rows} x {LENGTH} tokens: {figures['growth'] / 1e6:8.0f} MB over the loaded model "
            f"({figures['before'] / 1e6:.0f} MB), loss sum {figures['nll']:.6f} nats"
        )
    ratio = sides["plain"]["growth"] / sides["kernel"]["growth"]
    relative = abs(sides["plain"]["nll"] - sides["kernel"]["nll"]) / sides["kernel"]["nll"]
    print(f"plain / kernel: {ratio:.1f} x the memory; loss sums differ by {relative:.1e} of themselves")
    common.finish(
        {
            "bench": "memory",
            "rows": rows,
            "memory_ratio": round(ratio, 2),
            "plain_growth_mb": round(sides["plain"]["growth"] / 1e6),
            "kernel_growth_mb": round(sides["kernel"]["growth"] / 1e6),
            "relative_difference": relative,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
