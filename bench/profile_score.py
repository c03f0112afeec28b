"""Where the time of scoring goes: one window on one thread, by kind of work, for each precision of ``bench/score.py``.

Times are those of torch's profiler (operators), the rest up to the CPU time of the unprofiled run is Python and
dispatch. A busy machine stretches all of them; their shares are what counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import Any

import common
import score

#: Operators by kind of work; products are told apart by the shapes of their weights.
KINDS = {
    "attention": ("aten::bmm", "aten::_softmax"),
    "exponentials": ("aten::exp2_", "aten::sum", "aten::amax", "aten::sub_", "aten::log", "aten::logsumexp"),
    "copies, casts": ("aten::copy_",),
}
PRODUCTS = ("mkldnn::_linear_pointwise", "onednn::qlinear_pointwise", "aten::addmm", "aten::mm", "aten::linear")


def profiled(side: str, context: int) -> tuple[dict[str, float], float]:
    """Milliseconds by kind of work for one window, and the CPU time of an unprofiled run of it."""
    import numpy as np
    import torch
    from torch.profiler import ProfilerActivity, profile

    from eval_kernel import checkpoint
    from eval_kernel.spec import ModelSpec

    torch.set_num_threads(1)
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    tokens = np.array(common.bench_tokens(found)[:context], dtype=np.int64)
    ready = score.load(found, score.SIDES[side])
    ready.score([tokens])
    plain = min(_cpu(ready, tokens) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        ready.score([tokens])
    spent: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages(group_by_input_shape=True):
        spent[_kind(event.key, event.input_shapes, ready.facts["shape"])] += event.self_cpu_time_total / 1e3
    return spent, plain * 1e3


def _cpu(ready: Any, tokens: Any) -> float:
    started = time.thread_time()
    ready.score([tokens])
    return time.thread_time() - started


def _kind(operator: str, shapes: list[Any], shape: dict[str, int]) -> str:
    for kind, operators in KINDS.items():
        if operator in operators:
            return kind
    if operator in PRODUCTS:
        sizes = {size for one in shapes if len(one) == 2 for size in one}
        if shape["intermediate"] in sizes:
            return "linear: MLP"
        if sizes & {shape["vocabulary"], shape["tile"]}:
            return "linear: head"
        return "linear: attention"
    return "other elementwise"


def main() -> None:
    """Print a table of shares, a column for each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sides, a shorter window")
    parser.add_argument("--only", nargs="+", choices=list(score.SIDES), metavar="SIDE")
    options = parser.parse_args()
    context = 256 if options.quick else 1024
    sides = options.only or (["fp32", "bf16"] if options.quick else [s for s in score.SIDES if score.SIDES[s]])
    found = {side: profiled(side, context) for side in sides}
    kinds = sorted({kind for spent, _ in found.values() for kind in spent}, key=lambda k: -found[sides[0]][0].get(k, 0))
    print(f"one window of {context} tokens on one thread, milliseconds in operators" + "".ljust(4))
    print("".ljust(20) + "".join(side.rjust(16) for side in sides))
    for kind in kinds:
        cells = [(spent.get(kind, 0.0), sum(spent.values())) for spent, _ in found.values()]
        print(kind.ljust(20) + "".join(f"{ms:9.0f} {ms / total:5.0%} " for ms, total in cells))
    print("sum".ljust(20) + "".join(f"{sum(spent.values()):9.0f}       " for spent, _ in found.values()))
    print("CPU, unprofiled".ljust(20) + "".join(f"{plain:9.0f}       " for _, plain in found.values()))
    common.finish(
        {
            "bench": "profile_score",
            "context": context,
            "sides": {
                side: {kind: round(ms, 1) for kind, ms in spent.items()} | {"cpu_ms": round(plain, 1)}
                for side, (spent, plain) in found.items()
            },
        }
    )


if __name__ == "__main__":
    sys.exit(main())
