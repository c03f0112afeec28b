"""Layer streaming against resident weights: SmolLM2-135M in fp32, its layers fetched from mapped files at each visit.

Prints tokens/s of both in turn, their ratio by the number of windows that go through a layer together, and the bytes
of weights in memory. The loss sums must be equal to the last bit. ``--quick`` takes fewer windows and rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common

LENGTH = 512
#: Weights may take so many bytes in memory (the model has 538 MB).
CAP = 150_000_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    import numpy as np
    import torch

    from eval_kernel import checkpoint, model, scoring
    from eval_kernel.parallel.layers import sizes
    from eval_kernel.parallel.memory import fraction_for
    from eval_kernel.parallel.opening import open_streamed
    from eval_kernel.precision import loading, skeleton
    from eval_kernel.precision.plan import resolve
    from eval_kernel.precision.policy import PrecisionSpec
    from eval_kernel.spec import ModelSpec

    torch.set_num_threads(options.threads)
    device, note = torch.device("cpu"), lambda _: None
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, note)
    plan = resolve(PrecisionSpec(default="fp32"), skeleton.build(found, torch.float32).outline)
    digest = checkpoint.weights_digest(found, common.CACHE)
    sized = sizes(plan)
    fraction = fraction_for(sized, CAP)
    begun = time.perf_counter()
    streamed, _ = open_streamed(
        loading.ingredients(found, digest, plan, common.CACHE, note), device, fraction, "SmolLM2"
    )
    opening = time.perf_counter() - begun
    begun = time.perf_counter()
    resident = model.load(found, "float32", device)
    loading_seconds = time.perf_counter() - begun
    held = sized.resident(fraction)
    print(
        f"weights {sized.total / 1e6:.0f} MB; streamed {fraction:.0%} of {len(sized.layers)} layers: "
        f"{held / 1e6:.0f} MB in memory at one time (cap {CAP / 1e6:.0f} MB)"
    )
    print(f"opening: streamed {opening:.1f} s, resident {loading_seconds:.1f} s")
    ids = np.array(common.bench_tokens(found), dtype=np.int32)
    counts = (1, 8) if options.quick else (1, 4, 16, 64)
    ratios: dict[str, float] = {}
    equal = True
    for count in counts:
        rows = []
        for k in range(count):
            window = ids[k * LENGTH : (k + 1) * LENGTH + 1]
            rows.append(scoring.Row(window[:-1], window[1:]))
        best = {"streamed": float("inf"), "resident": float("inf")}
        sums = {}
        for _ in range(2 if options.quick else 3):
            for name in best:
                begun = time.perf_counter()
                if name == "streamed":
                    losses = scoring.score(streamed, rows, 4096, lambda: None)
                else:
                    losses = scoring.score(resident, rows, 4096, lambda: None)
                best[name] = min(best[name], time.perf_counter() - begun)
                sums[name] = sum(int(x.steps.sum()) for x in losses)
        equal = equal and sums["streamed"] == sums["resident"]
        ratios[str(count)] = round(best["resident"] / best["streamed"], 3)
        speeds = {name: count * LENGTH / seconds for name, seconds in best.items()}
        print(
            f"{count:>3} windows of {LENGTH} per layer visit: streamed {speeds['streamed']:7.0f} tokens/s, "
            f"resident {speeds['resident']:7.0f} tokens/s, ratio {ratios[str(count)]:.2f}, "
            f"sums {'equal' if sums['streamed'] == sums['resident'] else 'DIFFER'}"
        )
    common.finish(
        {
            "bench": "streaming",
            "weights_mb": round(sized.total / 1e6, 1),
            "resident_mb": round(held / 1e6, 1),
            "fraction": fraction,
            "ratio_by_windows": ratios,
            "sums_equal": equal,
        }
    )
    if not equal:
        sys.exit("bench: the sums differ")


if __name__ == "__main__":
    main()
