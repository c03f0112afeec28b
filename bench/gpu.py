"""Scoring on one GPU (or, to try this program, on the CPU): correct first, then tokens/s and MFU by precision.

A random model of Llama's shape, written as safetensors, is loaded in each precision on the device and scores the same
rows as the same weights do on the CPU in float32 by plain dequantised products. Then a larger one is timed in turns,
A B A B, with CUDA events. Needs torch, transformers, safetensors, pydantic and pyyaml; torchao where kernels of its
own are wanted. Ends with 1 where a precision is not correct.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

#: Precision, and how far its losses may be from the CPU's in float32 with the same weights: root mean square over
#: tokens, in standard deviations of the losses (unrelated losses are 1.4 apart).
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({"default": "fp32"}, 1e-4),
    "bf16": ({"default": "bf16"}, 2e-2),
    "fp16": ({"default": "fp16"}, 5e-3),
    "int8": ({"default": "int8", "compute": "bf16"}, 2e-2),
    "int8 dynamic": ({"default": "int8-dynamic", "head": "bf16", "compute": "bf16"}, 5e-2),
    "int4 g64": ({"default": "int4-g64", "compute": "bf16"}, 2e-2),
    "fp8": ({"default": "fp8", "head": "bf16", "compute": "bf16"}, 1e-1),
}
#: Which measured product each is held against.
PRODUCT = {"fp32": "fp32", "fp16": "fp16", "int8 dynamic": "int8", "fp8": "fp8"}


@dataclass(frozen=True)
class Shape:
    """A Llama's size."""

    width: int
    layers: int
    heads: int
    groups: int
    inner: int
    vocabulary: int


SMALL = Shape(256, 4, 4, 2, 640, 4096)
LARGE = Shape(2048, 16, 32, 8, 5632, 32000)


@dataclass
class Side:
    """A precision under test."""

    name: str
    score: Callable[[list[Any]], Any]
    kernel: str
    used: dict[str, str]
    config: Any
    seconds: list[float] = field(default_factory=list)


def write(directory: Path, shape: Shape) -> Path:
    """Write a random model in bfloat16 whose weights have the spread of a trained one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    config.dtype = torch.bfloat16
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def load(directory: Path, name: str, precision: dict[str, Any], device: torch.device, cache: Path) -> Side:
    """Load a model in a precision; what loading refuses is an error of the program's user: its line is printed."""
    from eval_kernel import checkpoint, model, scoring
    from eval_kernel.budget import Measured
    from eval_kernel.precision import loading, skeleton
    from eval_kernel.precision.plan import resolve
    from eval_kernel.precision.policy import PrecisionSpec
    from eval_kernel.spec import ModelSpec

    found = checkpoint.find(ModelSpec(source=str(directory), tokenizer=str(directory)), None, cache, lambda text: None)
    plan = resolve(PrecisionSpec(**precision), skeleton.build(found, torch.float32).outline)
    model.check_precision(plan.compute, device)
    digest = checkpoint.weights_digest(found, cache)
    loaded = loading.load(found, digest, plan, device, cache / "packs", lambda text: None)
    ready = model.prepare(loaded.module, device, model.DTYPES[plan.compute], name)
    budget = Measured(device, cache, "bench", name, str(directory))

    def score(rows: list[Any]) -> Any:
        losses = scoring.score(ready, rows, budget, lambda: None)
        return np.concatenate([x.steps for x in losses]) / 2**30

    return Side(name, score, ready.kernel, loaded.used, loaded.module.config)


def rows(shape: Shape, count: int, length: int) -> list[Any]:
    """Rows of random tokens."""
    from eval_kernel.scoring import Row

    made = np.random.default_rng(1).integers(0, shape.vocabulary, (count, length + 1), dtype=np.int32)
    return [Row(row[:-1], row[1:]) for row in made]


def available(name: str, device: torch.device) -> str:
    """Return why a precision cannot be tried on a device, or nothing."""
    if device.type == "cpu":
        return "a CPU has no kernel for it" if name == "fp16" else ""
    capability = torch.cuda.get_device_capability(device)
    if name == "fp8" and capability < (8, 9):
        return f"needs compute capability 8.9, this is {capability[0]}.{capability[1]}"
    return ""


def correct(device: torch.device, names: list[str], place: Path) -> dict[str, dict[str, Any]]:
    """Compare each precision with the CPU's float32 products of the same weights; print and return the figures."""
    directory = write(place / "small", SMALL)
    work = rows(SMALL, 8, 128)
    figures = {}
    print(f"{'precision':14s}{'apart':>8s}{'allowed':>10s}  how")
    for name in names:
        precision, allowed = PRECISIONS[name]
        try:
            got = load(directory, name, precision, device, place / "cache")
            plain = {**precision, "compute": "fp32", "kernels": "reference"}
            if name in ("fp32", "bf16", "fp16"):
                plain = {"default": "fp32"}
            exact = load(directory, name, plain, torch.device("cpu"), place / "cache-cpu")
        except (ValueError, RuntimeError) as error:
            print(f"{name:14s}{'refused':>8s}{allowed:>10.0e}  {error}")
            figures[name] = {"refused": str(error)}
            continue
        expected, losses = exact.score(work), got.score(work)
        difference = float(np.sqrt(np.mean((losses - expected) ** 2)) / np.std(expected))
        again = np.array_equal(losses, got.score(work))
        ok = difference <= allowed and again
        how = f"{got.kernel}; {', '.join(f'{k} {v}' for k, v in got.used.items())}"
        print(
            f"{name:14s}{difference:8.1e}{allowed:10.0e}  {'' if ok else 'NOT CORRECT: '}"
            f"{'' if again else 'does not repeat itself; '}{how}"
        )
        figures[name] = {"difference": difference, "correct": ok}
    return figures


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of some work: by CUDA events on a GPU, by the wall clock else."""
    if device.type == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def products(device: torch.device, size: int) -> dict[str, float]:
    """Best dense matrix product by dtype, in TFLOP/s (int8: Top/s); a dtype without one is absent."""
    made: dict[str, Callable[[], Any]] = {}
    base = torch.randn(size, size, device=device)
    made["fp32"] = lambda: base @ base
    half = base.to(torch.bfloat16)
    made["bf16"] = lambda: half @ half
    if device.type == "cuda":
        other = base.to(torch.float16)
        made["fp16"] = lambda: other @ other
        whole = torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8)
        made["int8"] = lambda: torch._int_mm(whole, whole.t())
        if torch.cuda.get_device_capability(device) >= (8, 9):
            short, one = base.to(torch.float8_e4m3fn), torch.ones((), device=device)
            made["fp8"] = lambda: torch._scaled_mm(short, short.t(), one, one, out_dtype=torch.bfloat16)
    with torch.inference_mode():
        return {k: 2 * size**3 / min(seconds_of(v, device) for _ in range(8)) / 1e12 for k, v in made.items()}


def timed(device: torch.device, names: list[str], place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time each precision in turns; print and return tokens/s and the fraction of the device's measured products."""
    shape = SMALL if options.quick else LARGE
    directory = place / "small" if options.quick else write(place / "large", shape)
    context, count = (128, 16) if options.quick else (2048, options.windows)
    best = products(device, 512 if options.quick else 8192)
    print("best matrix product: " + ", ".join(f"{k} {v:.1f} TFLOP/s" for k, v in best.items()))
    sides = [load(directory, n, PRECISIONS[n][0], device, place / "cache") for n in names]
    work = rows(shape, count, context)
    for side in sides:
        side.score(work)  # finds the budget, warms up
    for _ in range(options.rounds):
        for side in sides:
            side.seconds.append(seconds_of(lambda side=side: side.score(work), device))
    figures = {}
    first = statistics.median(sides[0].seconds)
    per_token = common.flops_per_token(common.flops_of(sides[0].config), context)
    print(f"{'precision':14s}{'tokens/s':>12s}{'of ' + sides[0].name:>9s}{'MFU':>6s}  against")
    for side in sides:
        median = statistics.median(side.seconds)
        speed = count * context / median
        product = PRODUCT.get(side.name, "bf16")
        product = product if product in best else "bf16"
        mfu = speed * per_token / 1e12 / best[product]
        print(f"{side.name:14s}{speed:12.0f}{first / median:9.2f}{mfu:6.0%}  {product}")
        figures[side.name] = {"tokens_s": round(speed), "ratio": round(first / median, 3), "mfu": round(mfu, 3)}
    return {"products_tflops": {k: round(v, 1) for k, v in best.items()}, "speed": figures}


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="the small model only; the default without a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=64, help="of 2048 tokens, per turn")
    parser.add_argument("--only", nargs="+", choices=list(PRECISIONS), metavar="PRECISION")
    options = parser.parse_args()
    device = torch.device(options.device)
    options.quick |= device.type == "cpu"
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}")
    names = []
    for name in options.only or PRECISIONS:
        why = available(name, device)
        print(f"{name}: left out, {why}") if why else names.append(name)
    from eval_kernel.quiet import quiet

    quiet()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        checked = correct(device, names, place)
        able = [name for name in names if "refused" not in checked[name]]
        figures = timed(device, able, place, options)
    wrong = [name for name in able if not checked[name]["correct"]]
    if wrong:
        print(f"not correct: {', '.join(wrong)}")
    common.finish({"bench": "gpu", "card": card, "checked": checked, **figures})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
