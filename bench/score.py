"""Scoring speed, side by side: the plain transformers loop and our kernel in several precisions, on the same windows.

Each side is a process of its own that loads its model once; then they take turns, A B A B, so that a busy machine
hits all of them alike. Printed are medians and minima of wall and CPU time, ratios to the plain loop, perplexities,
peak memory, start-up time, and the fraction of the machine's best matrix product that was reached (MFU). Where they
are installed, lm-evaluation-harness and llama.cpp take turns too (``peers``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common
import peers

#: What each side is, as the key ``precision`` of a job; None is the plain loop.
SIDES: dict[str, Any] = {
    "plain fp32": None,
    "fp32": "fp32",
    "bf16": "bf16",
    "mixed": common.MIXED,
    "int8": {"default": "bf16", "attention": "int8-dynamic", "mlp": "int8-dynamic"},
    "int8+head": {"default": "bf16", "attention": "int8-dynamic", "mlp": "int8-dynamic", "head": "int8-dynamic"},
    "w8": {"default": "int8", "compute": "bf16"},
    "w4-g64": {"default": "int4-g64", "compute": "bf16"},
    "8da4w": {"default": "8da4w", "compute": "bf16"},
}
QUICK = ["plain fp32", "fp32", "bf16", "int8"]


# ---------------------------------------------------------------- one side, in a process of its own


def serve(side: str, context: int, threads: int) -> None:
    """Load a side's model, then score the windows that the standard input names, one JSON line for each request."""
    started = time.perf_counter()
    import numpy as np
    import torch

    from eval_kernel import checkpoint
    from eval_kernel.quiet import quiet
    from eval_kernel.spec import ModelSpec

    quiet()
    torch.set_num_threads(threads)
    found = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda text: None)
    tokens = np.array(common.bench_tokens(found), dtype=np.int64)
    imported = time.perf_counter()
    before = resident()
    ready = load(found, SIDES[side])
    loaded = time.perf_counter()
    memory = peak_resident() - before
    ready.score([tokens[:context]])
    times = {"import": imported - started, "load": loaded - imported, "first": time.perf_counter() - imported}
    answer({**times, "load_peak": memory, **ready.facts})
    for line in sys.stdin:
        first, count = json.loads(line)
        windows = [tokens[w * context : (w + 1) * context] for w in range(first, first + count)]
        wall, cpu = time.perf_counter(), time.process_time()
        nll = ready.score(windows)
        answer(
            {
                "wall": time.perf_counter() - wall,
                "cpu": time.process_time() - cpu,
                "nll": nll,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )


def resident() -> int:
    """Bytes this process holds now; the high-water mark starts anew from here (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident() -> int:
    """The high-water mark in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def answer(message: dict[str, Any]) -> None:
    """Write a line to the parent."""
    print(json.dumps(message), flush=True)


class Ready:
    """A loaded side: ``score(windows)`` gives the loss sum, ``facts`` what the parent should know."""

    def __init__(self, score: Any, facts: dict[str, Any]) -> None:
        self.score, self.facts = score, facts


def load(found: Any, precision: Any) -> Ready:
    """Load a side: a precision of ours, or the plain loop for None."""
    return _plain(found) if precision is None else _kernel(found, precision)


def _plain(found: Any) -> Ready:
    import torch
    from torch.nn import functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(found.directory), dtype=torch.float32).eval()

    def score(windows: list[Any]) -> float:
        total = 0.0
        with torch.inference_mode():
            for window in windows:
                ids = torch.from_numpy(window).unsqueeze(0)
                logits = model(ids).logits
                total += float(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none").double().sum())
        return total

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return Ready(score, {"kernel": "transformers", "bytes": size, "flops": common.flops_of(model.config)})


def _kernel(found: Any, precision: Any) -> Ready:
    import numpy as np
    import torch

    from eval_kernel import checkpoint, kernels, model, scoring
    from eval_kernel.precision import loading, skeleton
    from eval_kernel.precision.plan import resolve
    from eval_kernel.precision.policy import PrecisionSpec, as_spec

    policy = as_spec(precision) if isinstance(precision, str) else PrecisionSpec(**precision)
    plan = resolve(policy, skeleton.build(found, torch.float32).outline)
    digest = checkpoint.weights_digest(found, common.CACHE)
    device = torch.device("cpu")
    loaded = loading.load(found, digest, plan, device, common.CACHE, lambda text: None)
    ready = model.prepare(loaded.module, device, model.DTYPES[plan.compute], "bench")

    def score(windows: list[Any]) -> float:
        rows = [scoring.Row(w[:-1].astype(np.int32), w[1:].astype(np.int32)) for w in windows]
        losses = scoring.score(ready, rows, 4096, lambda: None)
        return sum(int(x.steps.sum()) for x in losses) / 2**30

    facts = {"kernel": ready.kernel, "bytes": sum(t.value_bytes + t.scale_bytes for t in plan.tensors)}
    config = loaded.module.config
    shape = {"intermediate": config.intermediate_size, "vocabulary": config.vocab_size, "tile": kernels.TILE}
    return Ready(score, {**facts, "flops": common.flops_of(config), "shape": shape})


# ---------------------------------------------------------------- all sides


class Side:
    """A side's process, from outside."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--side", name, "--context", str(options.context)]
        self.name = name
        self._process = subprocess.Popen(
            [*command, "--threads", str(options.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.facts = self._read()
        self.turns: list[dict[str, float]] = []

    def turn(self, first: int, count: int) -> None:
        """Have it score some windows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"[{first}, {count}]\n")
        self._process.stdin.flush()
        self.turns.append(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"bench: the side {self.name} failed:\n{self._process.communicate()[1][-2000:]}")
        result: dict[str, Any] = json.loads(line)
        return result


def main() -> None:
    """Let the sides take turns and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sides, fewer and shorter windows")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", choices=list(SIDES), metavar="SIDE", help="besides the plain loop")
    parser.add_argument("--context", type=int)
    parser.add_argument("--windows", type=int, help="windows per turn")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--lm-eval", metavar="PYTHON", help="an interpreter that has lm-evaluation-harness")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="where llama-perplexity and llama-quantize are")
    options = parser.parse_args()
    options.context = options.context or (256 if options.quick else 1024)
    if options.side:
        serve(options.side, options.context, options.threads)
        return
    if options.llama_cpp and common.wikitext() is None:
        parser.error("llama.cpp reads WikiText-2's test text: set FEDEVAL_TEST_DATA")
    windows = options.windows or 2 * options.threads
    rounds = options.rounds or (2 if options.quick else 5)
    names = ["plain fp32", *(options.only or [n for n in (QUICK if options.quick else SIDES) if SIDES[n]])]
    print(f"load average at the start: {os.getloadavg()[0]:.2f}; {options.threads} threads")
    sides: list[Any] = []
    peaks: list[dict[str, float]] = []
    try:
        for name in names:
            sides.append(Side(name, options))
        sides += others(options)
        for r in range(rounds):
            for side in sides:
                side.turn(r * windows, windows)
            peaks.append(common.gemm_peaks(options.threads))
        report(sides, peaks, windows, options)
    finally:
        for side in sides:
            side.close()


def others(options: argparse.Namespace) -> list[Any]:
    """Other tools that the command line names."""
    from eval_kernel import checkpoint
    from eval_kernel.spec import ModelSpec

    found: list[Any] = []
    text = common.wikitext()
    if options.lm_eval:
        model = checkpoint.find(ModelSpec(source=str(common.smollm2())), None, common.CACHE, lambda note: None)
        found.append(peers.LmEval(options.lm_eval, model.directory, common.bench_tokens(model), options, common.CACHE))
    if options.llama_cpp:
        assert text is not None
        kinds = list(peers.EQUALS)[: 1 if options.quick else None]
        found += [
            peers.LlamaCpp(options.llama_cpp, kind, common.smollm2(), text, options, common.CACHE) for kind in kinds
        ]
    return found


def report(sides: list[Any], peaks: list[dict[str, float]], windows: int, options: argparse.Namespace) -> None:
    """Print the table and the JSON line."""
    tokens = windows * options.context
    peak = {kind: max(p[kind] for p in peaks) for kind in peaks[0]}
    spread = {kind: min(p[kind] for p in peaks) / peak[kind] for kind in peak}
    print("best matrix product: " + ", ".join(f"{k} {v:.0f} GFLOP/s (worst {spread[k]:.0%})" for k, v in peak.items()))
    plain = sides[0]
    exact = next((s for s in sides if s.name == "fp32"), plain)
    scored = windows * (options.context - 1) * len(plain.turns)
    print(
        f"{len(plain.turns)} x {windows} windows of {options.context} in turns, tokens/s and ratios to the plain loop; "
        "start: loading, loading and first window, memory over the bare process while loading"
    )
    print(
        f"{'side':15s}{'median':>7s}{'best':>7s}{'ratio':>7s}{'of best':>8s}{'of CPU':>7s}{'MFU':>5s}{'peak MB':>8s}"
        f"{'model MB':>9s}{'load s':>7s}{'first s':>8s}{'load MB':>8s}{'rel. ppl':>10s}  kernel"
    )
    figures = {}
    for side in sides:
        row = compare(side, plain, tokens)
        per_token = common.flops_per_token(plain.facts["flops"], options.context)
        kind = "fp32" if side.name.lower().endswith(("fp32", "f32")) else "bf16"
        row["mfu"] = row["best"] * per_token / 1e9 / peak[kind]
        if "nll" in side.turns[0]:
            nats = [sum(t["nll"] for t in s.turns) for s in (side, exact)]
            row["relative_ppl"] = math.expm1((nats[0] - nats[1]) / scored)
        if "peak" in side.turns[-1]:
            row["peak_mb"] = side.turns[-1]["peak"] / 1e6
        for key, name, unit in (("load", "load_s", 1), ("first", "first_s", 1), ("load_peak", "load_mb", 1e6)):
            if key in side.facts:
                row[name] = side.facts[key] / unit
        figures[side.name] = row
        print(
            f"{side.name:15s}{row['median']:7.0f}{row['best']:7.0f}{row['ratio']:7.2f}{row['best_ratio']:8.2f}"
            + cell(row, "cpu_ratio", "7.2f")
            + f"{row['mfu']:5.0%}"
            + cell(row, "peak_mb", "8.0f")
            + f"{side.facts['bytes'] / 1e6:9.0f}"
            + cell(row, "load_s", "7.1f")
            + cell(row, "first_s", "8.1f")
            + cell(row, "load_mb", "8.0f")
            + cell(row, "relative_ppl", "+10.3%")
            + f"  {side.facts['kernel']}"
        )
    for kind, ours in peers.EQUALS.items():
        peer = figures.get(f"llama.cpp {kind}")
        if peer and ours in figures:
            times = figures[ours]["median"] / peer["median"], figures[ours]["best"] / peer["best"]
            print(f"{ours} against llama.cpp {kind}: {times[0]:.2f} x (of medians), {times[1]:.2f} x (of the best)")
            figures[ours][f"to_llama_{kind}"] = times[0]
    if "lm-eval fp32" in figures:
        times = exact.name, figures[exact.name]["median"] / figures["lm-eval fp32"]["median"]
        print(f"{times[0]} against lm-eval fp32: {times[1]:.2f} x (of medians)")
        figures[exact.name]["to_lm_eval"] = times[1]
    print(f"load average at the end: {os.getloadavg()[0]:.2f}")
    common.finish(
        {
            "bench": "score",
            "context": options.context,
            "tokens_per_turn": tokens,
            "turns": len(plain.turns),
            "load_average": round(os.getloadavg()[0], 2),
            "peak_gflops": {k: round(v) for k, v in peak.items()},
            "sides": {n: {k: round(v, 5) for k, v in row.items()} for n, row in figures.items()},
        }
    )


def cell(row: dict[str, float], key: str, form: str) -> str:
    """A column of the table, blank where a side has no such figure."""
    width = int(form.lstrip("+").split(".")[0])
    return format(row[key], form) if key in row else " " * width


def compare(side: Any, plain: Side, tokens: int) -> dict[str, float]:
    """Tokens/s of a side, and ratios to the plain loop: of medians, of minima, and of the least CPU time."""
    wall, other = [t["wall"] * tokens / t.get("tokens", tokens) for t in side.turns], [t["wall"] for t in plain.turns]
    row = {
        "median": tokens / statistics.median(wall),
        "best": tokens / min(wall),
        "ratio": statistics.median(other) / statistics.median(wall),
        "best_ratio": min(other) / min(wall),
    }
    if "cpu" in side.turns[0]:
        row["cpu_ratio"] = min(t["cpu"] for t in plain.turns) / min(t["cpu"] for t in side.turns)
    return row


if __name__ == "__main__":
    sys.exit(main())
