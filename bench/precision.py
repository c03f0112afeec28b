"""Peak resident memory while loading, by format, against the bytes of the finished weights: SmolLM2-135M, each alone.

Loading ends with one forward pass of 64 tokens, so that every weight was really touched. Packs are made in the same
process: quantising is part of loading.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

#: Formats that are measured, as they stand in a job.
FORMATS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "int8": {"default": "int8", "embedding": "int8"},
    "int4-g64": {"default": "int4-g64", "embedding": "int4-g64"},
}
#: What may come on top of final weights and the largest layer.
SLACK = 0.10


def measure(name: str, cache: Path) -> dict[str, Any]:
    """Load SmolLM2 in a format in this process and return memory and bytes."""
    import torch

    from eval_kernel import checkpoint
    from eval_kernel.precision import loading, skeleton
    from eval_kernel.precision.plan import bytes_by_class, resolve
    from eval_kernel.precision.policy import as_spec
    from eval_kernel.quiet import quiet
    from eval_kernel.spec import ModelSpec, parse_spec

    quiet()
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    digest = checkpoint.weights_digest(found, common.CACHE)
    spec = parse_spec({"model": "m", "dataset": "d", "precision": FORMATS[name]}, where="bench")
    plan = resolve(as_spec(spec.precision), skeleton.build(found, torch.float32).outline)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (Linux)
    before = _status("VmRSS")
    loaded = loading.load(found, digest, plan, torch.device("cpu"), cache, lambda text: None)
    with torch.inference_mode():
        loaded.module.base_model(input_ids=torch.arange(64).unsqueeze(0), use_cache=False)
    peak = _status("VmHWM") - before
    layers: dict[str, int] = {}
    for t in plan.tensors:
        layer = re.match(r".*?layers\.\d+\.", t.name)
        key = layer[0] if layer else t.name
        layers[key] = layers.get(key, 0) + t.value_bytes + t.scale_bytes
    classes = bytes_by_class(plan)
    return {
        "format": name,
        "weights": classes["total"]["bytes"],
        "largest_layer": max(layers.values()),
        "peak": peak,
        "classes": classes,
        "used": loaded.used,
    }


def _status(key: str) -> int:
    """Bytes of one line of this process's status."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    """Measure each format and print one line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two formats only")
    parser.add_argument("--format", choices=FORMATS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.format:
        print(json.dumps(measure(options.format, options.cache)))
        return 0
    figures, within = {}, True
    for name in ["fp32", "int4-g64"] if options.quick else list(FORMATS):
        cache = Path(tempfile.mkdtemp(prefix="bench-precision-"))
        try:
            got = common.child(Path(__file__).resolve(), "--format", name, "--cache", str(cache))
        finally:
            shutil.rmtree(cache)
        allowed = (got["weights"] + got["largest_layer"]) * (1 + SLACK)
        within = within and got["peak"] <= allowed
        total = got["classes"]["total"]
        print(
            f"{name:9s} weights {got['weights'] / 1e6:6.1f} MB ({got['weights'] / total['fp32']:.1%} of fp32), largest "
            f"layer {got['largest_layer'] / 1e6:5.1f} MB, peak while loading {got['peak'] / 1e6:6.1f} MB: "
            f"{got['peak'] / (got['weights'] + got['largest_layer']):.2f} x their sum"
        )
        for kind, row in got["classes"].items():
            share = f"{row['bytes'] / row['checkpoint']:6.1%} of the checkpoint's" if row["checkpoint"] else ""
            print(f"    {kind:10s} {row['bytes'] / 1e6:7.2f} MB, scales {row['scales'] / 1e6:5.2f} MB {share}")
        figures[name] = {k: got[k] for k in ("weights", "largest_layer", "peak")}
    common.finish({"bench": "precision", "within": within, **figures})
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
