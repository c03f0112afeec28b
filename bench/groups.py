"""Groups of two ranks on SmolLM2-135M: the same numbers in every layout, and what working together costs.

Prints a table of layouts (tokens/s, the loss sum against one process); one group of 2 data-parallel ranks against two
independent processes on the same 2 cores, in turn; and what the float64 all_reduce of a shard costs.
``--quick`` takes fewer windows and rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import common


class Size(NamedTuple):
    """How much is scored: tokens a window, windows a shard and in all, and how often."""

    context: int
    per_shard: int
    windows: int
    rounds: int


FULL, QUICK = Size(512, 4, 16, 3), Size(256, 2, 2, 1)
#: Name, precision, what the job says under ``parallel``, and the largest relative difference of a sum.
LAYOUTS: tuple[tuple[str, str, dict[str, Any], float], ...] = (
    ("dp", "fp32", {"dp_replicate": 2}, 0.0),
    ("fsdp", "fp32", {"dp_shard": 2}, 0.0),
    ("streaming", "fp32", {"dp_replicate": 2, "streaming_fraction": 1.0}, 0.0),
    ("tp", "fp32", {"tp": 2}, 1e-5),
    ("tp+int8", "int8", {"tp": 2}, 1e-5),
    ("tp+int4", "int4-g32", {"tp": 2}, 1e-5),
)


def job(size: Size, precision: str, parallel: dict[str, Any] | str = "auto") -> Any:
    """The job in a layout."""
    from eval_kernel.spec import parse_spec

    text = common.wikitext()
    return parse_spec(
        {
            "model": str(common.smollm2()),
            "dataset": "pydoc:topics" if text is None else str(text),
            "precision": precision,
            "window": {"policy": "concat", "context": size.context, "max_windows": size.windows},
            "shard": {"tokens": size.context * size.per_shard},
            "parallel": parallel,
        },
        where="bench",
    )


def silent(_: str) -> None:
    """Progress is not looked at."""


class Opened:
    """A job that is open on one engine: all its shards can be scored again and again."""

    def __init__(self, engine: Any, spec: Any, plan: Any, threads: int) -> None:
        import torch

        self._torch, self._threads, self._plan = torch, threads, plan
        torch.set_num_threads(threads)
        self._evaluation = engine.open(spec, plan.manifest, silent)
        self.steps, self.tokens = 0, 0

    def score(self, shards: list[Any] | None = None) -> float:
        """Score shards, by default all, and return the seconds."""
        self._torch.set_num_threads(self._threads)
        self.steps, self.tokens = 0, 0
        begun = time.perf_counter()
        for shard in self._plan.shards if shards is None else shards:
            partial = self._evaluation.score(shard, lambda: None).partial
            self.steps, self.tokens = self.steps + partial.steps, self.tokens + partial.tokens
        return time.perf_counter() - begun


def alone(size: Size, mine: int) -> None:
    """One of two independent processes: scores every other shard each time a line comes, and says the seconds."""
    from eval_kernel.engine import Engine, EngineConfig

    engine = Engine(EngineConfig(common.CACHE, None, "cpu", 1))
    spec = job(size, "fp32")
    plan = engine.plan(spec, silent)
    opened = Opened(engine, spec, plan, 1)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(opened.score(list(plan.shards[mine::2])), flush=True)


class Pair:
    """Two processes that know nothing of each other."""

    def __init__(self, size: Size) -> None:
        self._children = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), "--alone", str(k), "--size", json.dumps(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=common.ROOT,
            )
            for k in range(2)
        ]
        for child in self._children:
            self._line(child)

    def score(self) -> float:
        """Have both score their half at once; return the seconds until both were done."""
        begun = time.perf_counter()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        for child in self._children:
            self._line(child)
        return time.perf_counter() - begun

    def close(self) -> None:
        """End both."""
        for child in self._children:
            child.communicate()

    @staticmethod
    def _line(child: subprocess.Popen[str]) -> str:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            sys.exit("bench: a process ended")
        return line


def table(engine: Any, group: Any, size: Size) -> list[dict[str, Any]]:
    """Score the job in one process and in every layout; return a row for each."""
    rows = []
    for name, precision, parallel, tolerance in LAYOUTS:
        plan = engine.plan(job(size, precision), silent)
        single = Opened(engine, job(size, precision), plan, 2)
        together = Opened(group, job(size, precision, parallel), plan, 1)
        best = {"single": float("inf"), "group": float("inf")}
        for _ in range(size.rounds):
            best["single"] = min(best["single"], single.score())
            best["group"] = min(best["group"], together.score())
        inputs = sum(shard.input_tokens for shard in plan.shards)
        difference = abs(together.steps - single.steps) / single.steps
        right = together.tokens == single.tokens and difference <= tolerance
        row = {"layout": name, "counts": together.tokens == single.tokens, "difference": difference, "right": right}
        row |= {"tokens_per_second": round(inputs / best["group"]), "ratio": round(best["single"] / best["group"], 3)}
        rows.append(row)
        print(
            f"{name:<10} {row['tokens_per_second']:>6} tokens/s, {row['ratio']:.2f} x one process of 2 threads; counts "
            f"{'equal' if row['counts'] else 'DIFFER'}, sum {'equal' if not difference else f'{difference:.1e} apart'}"
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.alone is not None:
        alone(Size(*options.size), options.alone)
        return
    from eval_kernel.engine import Engine, EngineConfig
    from eval_kernel.parallel.group import EngineConfig as GroupConfig
    from eval_kernel.parallel.group import GroupEngine

    engine = Engine(EngineConfig(common.CACHE, None, "cpu", 2))
    group = GroupEngine(GroupConfig(common.CACHE, None, "cpu", 2, 2))
    rows = table(engine, group, size)

    size = size._replace(windows=2 * size.windows)
    plan = engine.plan(job(size, "fp32"), silent)
    del engine
    pair, together = Pair(size), Opened(group, job(size, "fp32", {"dp_replicate": 2}), plan, 1)
    waits = timed_sums(group)
    best = {"group": float("inf"), "pair": float("inf")}
    for _ in range(size.rounds):
        best["group"] = min(best["group"], together.score())
        best["pair"] = min(best["pair"], pair.score())
    pair.close()
    group.close()
    ratio = best["pair"] / best["group"]
    shard = best["group"] / len(plan.shards)
    print(f"one group of 2 dp ranks: {ratio:.3f} x the speed of two independent processes on 2 cores")
    cost = min(waits)
    alone_us = reduced(plan.shards[0].tokens) * 1e6
    print(
        f"float64 all_reduce of a shard of {plan.shards[0].tokens} tokens: {alone_us:.0f} µs by itself "
        f"({alone_us / 1e4 / shard:.3f} % of the shard); with waiting for the other rank at least {cost * 1e3:.1f} ms"
    )
    common.finish(
        {
            "bench": "groups",
            "layouts": rows,
            "group_against_two_processes": round(ratio, 3),
            "all_reduce_us_per_shard": round(alone_us),
            "shard_seconds": round(shard, 3),
            "right": all(row["right"] for row in rows),
        }
    )
    if not all(row["right"] for row in rows):
        sys.exit("bench: a layout comes to another number")


def timed_sums(group: Any) -> list[float]:
    """Have rank 0 note how long each summing over the ranks takes it."""
    ranks, waits = group.formed._ranks, list[float]()
    plain = ranks.sums

    def timed(*arrays: Any) -> Any:
        begun = time.perf_counter()
        found = plain(*arrays)
        waits.append(time.perf_counter() - begun)
        return found

    ranks.sums = timed
    return waits


def reduced(tokens: int) -> float:
    """Seconds that two idle ranks take to sum a shard's losses and flags."""
    command = [sys.executable, "-m", "eval_kernel.parallel.selftest", "--device", "cpu", "--ranks", "2"]
    done = subprocess.run(
        [*command, "--tokens", str(tokens)], capture_output=True, text=True, cwd=common.ROOT, check=True
    )
    return float(json.loads(done.stdout)["shard_seconds"])


if __name__ == "__main__":
    main()
