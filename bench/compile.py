"""What ``torch.compile`` would bring and cost on this CPU, beside our kernel, which computes eagerly.

Each side is a process of its own; they take turns on the same windows. A compiled side's first window pays for the
compilation, and so does every process that starts anew; it pays back only against a side that is slower. Printed are
tokens/s, the seconds that the first window took longer than the others, and after how many tokens a compiled side
would have caught up with ours in the same precision. Where it never would, compiling by itself would be a loss, so the
kernel does not, and results say so (``torch.compile: not used``): a sum's bits would depend on whether it had been.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import common
import score

#: What each side is: whose layers, in which precision, and whether compiled.
SIDES = {
    "plain fp32": ("plain", "fp32"),
    "compiled fp32": ("compiled", "fp32"),
    "ours fp32": ("ours", "fp32"),
    "plain bf16": ("plain", "bf16"),
    "compiled bf16": ("compiled", "bf16"),
    "ours bf16": ("ours", "bf16"),
    "compiled int8": ("compiled", "int8"),
    "ours int8": ("ours", "int8"),
}
QUICK = ["compiled bf16", "ours bf16"]


def transformers_side(found: Any, precision: str, compiled: bool) -> score.Ready:
    """The plain loop in a precision (int8: torchao's dynamic int8 on bf16), its forward pass compiled or not."""
    import torch
    from torch.nn import functional as F
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(str(found.directory), dtype=dtype).eval()
    if precision == "int8":
        quantize_(model, Int8DynamicActivationInt8WeightConfig(), lambda m, name: "layers" in name and _linear(m))
    forward = torch.compile(model, dynamic=False) if compiled else model

    def nats(windows: list[Any]) -> float:
        total = 0.0
        with torch.inference_mode():
            for window in windows:
                ids = torch.from_numpy(window).unsqueeze(0)
                logits = forward(ids, use_cache=False).logits[0, :-1].float()
                total += float(F.cross_entropy(logits, ids[0, 1:], reduction="none").double().sum())
        return total

    return score.Ready(nats, {"kernel": "transformers"})


def _linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear)


def serve(name: str, context: int, count: int, rounds: int, threads: int) -> None:
    """Score ``rounds`` times ``count`` windows; one JSON line with the seconds of the first window and of each turn."""
    import numpy as np
    import torch

    from eval_kernel import checkpoint
    from eval_kernel.quiet import quiet
    from eval_kernel.spec import ModelSpec

    quiet()
    torch.set_num_threads(threads)
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    tokens = np.array(common.bench_tokens(found), dtype=np.int64)
    whose, precision = SIDES[name]
    if whose == "ours":
        ready = score.load(found, score.SIDES[precision])
    else:
        ready = transformers_side(found, precision, whose == "compiled")
    started = time.perf_counter()
    ready.score([tokens[:context]])
    first = time.perf_counter() - started
    seconds, nats = [], 0.0
    for turn in range(rounds):
        windows = [tokens[w * context : (w + 1) * context] for w in range(turn * count, (turn + 1) * count)]
        started = time.perf_counter()
        nats += ready.score(windows)
        seconds.append(time.perf_counter() - started)
    common.finish({"first": first, "seconds": seconds, "nats": nats})


def main() -> None:
    """Run the sides one after the other, twice over, and print what compiling costs and brings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one precision, short windows")
    parser.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    context = options.context or (256 if options.quick else 1024)
    if options.side:
        name, *numbers = options.side
        serve(name, *(int(n) for n in numbers), options.threads)
        return
    names = QUICK if options.quick else list(SIDES)
    count, rounds, passes = (2, 1, 1) if options.quick else (4, 2, 2)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(passes):
        for name in names:
            arguments = [name, str(context), str(count), str(rounds)]
            given = ["--context", str(context), "--threads", str(options.threads), "--side", *arguments]
            found[name].append(common.child(__file__, *given))
    print(
        f"{passes * rounds} x {count} windows of {context}, {options.threads} threads; first: the first window's extra"
    )
    figures = {}
    for name in names:
        turns = [s for one in found[name] for s in one["seconds"]]
        each = statistics.median(turns) / count
        figures[name] = {
            "tokens_per_s": context / each,
            "first_extra_s": min(one["first"] for one in found[name]) - each,
            "nats": found[name][0]["nats"],
        }
    for name, row in figures.items():
        whose, precision = SIDES[name]
        line = f"{name:14s}{row['tokens_per_s']:7.0f} tokens/s{row['first_extra_s']:8.1f} s first"
        if whose == "compiled":
            ours = figures[f"ours {precision}"]
            gain = 1 / ours["tokens_per_s"] - 1 / row["tokens_per_s"]
            row["ours_is"] = ours["tokens_per_s"] / row["tokens_per_s"]
            line += f"; ours is {row['ours_is']:.2f} x as fast; sums differ by {row['nats'] / ours['nats'] - 1:+.1e}; "
            pays = (row["first_extra_s"] - ours["first_extra_s"]) / gain if gain > 0 else None
            line += f"compiling pays after {pays:,.0f} tokens" if pays else "compiling never pays"
            row["pays_after_tokens"] = pays
        print(line)
    common.finish({"bench": "compile", "context": context, "threads": options.threads, "sides": figures})


if __name__ == "__main__":
    sys.exit(main())
