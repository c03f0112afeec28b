"""What overlapping windows cost per scored token, and why keys and values of the overlap cannot be used again.

A token's state depends on every token before it in its window. In the next window the overlap begins later, so its
states differ from the second layer on: only the first layer's keys and values are the same. Reusing them all gives
another metric (each token then sees further back than its window says, and what models put on a window's first token is
gone); this script measures how far off it is. What can be left out without changing a value is left out: the head, and
the last layer beyond its keys and values, for positions that are not scored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import common


def main() -> None:
    """Score disjoint and half-overlapping windows of one text, three ways, in turns."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from eval_kernel import checkpoint, model, scoring
    from eval_kernel.precision import loading
    from eval_kernel.quiet import quiet
    from eval_kernel.spec import ModelSpec

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short text, short windows, one round")
    parser.add_argument("--context", type=int)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    context = options.context or (256 if options.quick else 1024)
    rounds = options.rounds or (1 if options.quick else 3)
    stride, count = context // 2, 4
    quiet()
    warnings.simplefilter("ignore", FutureWarning)  # the cache's argument has two names across transformers 5
    device = torch.device("cpu")
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    tokens = np.array(common.bench_tokens(found)[: context * count + 1], dtype=np.int32)
    plain = AutoModelForCausalLM.from_pretrained(str(found.directory), dtype=torch.float32).eval()
    ours = model.prepare(loading.load_floats(found, "float32", device), device, torch.float32, "bench")

    def rows(step: int) -> list[scoring.Row]:
        """Windows of ``context`` inputs that score the last ``step`` of them each, and the first one all of its own."""
        ends = range(context, context * count + 1, step)
        found = [(end - context, context if end == context else step, end) for end in ends]
        return [scoring.Row(tokens[a:end], tokens[end - scored + 1 : end + 1]) for a, scored, end in found]

    def kernel(step: int) -> float:
        return sum(int(x.steps.sum()) for x in scoring.score(ours, rows(step), 4096, lambda: None)) / 2**30

    def whole(step: int) -> float:
        return sum(_nll(plain(_ids(row.inputs)).logits[0], row.targets) for row in rows(step))

    def reused(step: int) -> float:
        return _with_old_keys(plain, rows(step), context, step)

    sides: dict[str, Callable[[], float]] = {
        "disjoint, ours": lambda: kernel(context),
        "strided, ours": lambda: kernel(stride),
        "disjoint, transformers in full": lambda: whole(context),
        "strided, transformers in full": lambda: whole(stride),
        "strided, keys and values reused": lambda: reused(stride),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    nats: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, run in sides.items():
                started = time.perf_counter()
                nats[name] = run()
                seconds[name].append(time.perf_counter() - started)
    scored = context * count
    cost = {name: statistics.median(found) / scored for name, found in seconds.items()}
    exact = nats["strided, transformers in full"]
    print(f"{scored} scored tokens, context {context}, stride {stride}, medians of {rounds}")
    for name in sides:
        base = cost["disjoint, ours" if "ours" in name else "disjoint, transformers in full"]
        off = f", off by {nats[name] / exact - 1:+.2e} of the sum" if name.startswith("strided") else ""
        print(f"{name:33s} {1e3 * cost[name]:6.2f} ms per scored token, {cost[name] / base:.2f} x disjoint{off}")
    common.finish(
        {
            "bench": "strided",
            "context": context,
            "cost_ours": round(cost["strided, ours"] / cost["disjoint, ours"], 3),
            "error_ours": nats["strided, ours"] / exact - 1,
            "error_reused": nats["strided, keys and values reused"] / exact - 1,
        }
    )


def _ids(tokens: Any) -> Any:
    import torch

    return torch.from_numpy(tokens.astype("int64")).unsqueeze(0)


def _nll(logits: Any, targets: Any) -> float:
    import torch

    wanted = _ids(targets)[0]
    part = logits[-len(wanted) :]
    return float((torch.logsumexp(part, -1) - part.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)).double().sum())


def _with_old_keys(plain: Any, rows: list[Any], context: int, step: int) -> float:
    """Score with the keys and values that the window before left behind: only ``step`` new tokens go in."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=plain.config)
    total = 0.0
    for index, row in enumerate(rows):
        if index == 0:
            total += _nll(plain(_ids(row.inputs), past_key_values=cache, use_cache=True).logits[0], row.targets)
            continue
        for layer in cache.layers:
            layer.keys, layer.values = (x[:, :, step - context :].clone() for x in (layer.keys, layer.values))
        start = context + (index - 1) * step
        positions = torch.arange(start, start + step).unsqueeze(0)
        out = plain(_ids(row.inputs[-step:]), past_key_values=cache, use_cache=True, position_ids=positions)
        total += _nll(out.logits[0], row.targets)
    return total


if __name__ == "__main__":
    sys.exit(main())
