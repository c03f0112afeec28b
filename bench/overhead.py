"""What a coordinator and an agent cost: a job's wall time on one agent against the bare scoring loop on its shards.

The agent's worker has the model loaded (a small job ran before); planning, opening, leases, spool, journal and report
are inside the measured time. Both sides use the same threads, one after the other, interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

from coordinator.client import Client
from coordinator.fleet import Fleet
from eval_kernel.engine import Engine, EngineConfig
from eval_kernel.spec import JobSpec, parse_spec

START_SECONDS = 60.0


def job(windows: int, name: str) -> JobSpec:
    """The measured job: SmolLM2-135M in float32 over the first ``windows`` windows of 512 tokens."""
    text = common.wikitext()
    return parse_spec(
        {
            "name": name,
            "model": str(common.smollm2()),
            "dataset": str(text) if text else "pydoc:topics",
            "window": {"policy": "concat", "context": 512, "max_windows": windows},
            "precision": "fp32",
            "batch": {"tokens": 1024},
            "shard": {"tokens": 1024},
        },
        "bench",
    )


def bare_loop(windows: int) -> Callable[[], tuple[float, int]]:
    """Return a function that scores all shards in this process and returns (seconds, loss sum in grid steps)."""
    engine = Engine(EngineConfig(common.CACHE))
    spec = job(windows, "bare")
    plan = engine.plan(spec, lambda text: None)
    evaluation = engine.open(spec, plan.manifest, lambda text: None)
    evaluation.score(plan.shards[0], lambda: None)  # the first forward pass allocates

    def run() -> tuple[float, int]:
        begin = time.perf_counter()
        steps = sum(evaluation.score(shard, lambda: None).partial.steps for shard in plan.shards)
        return time.perf_counter() - begin, steps

    return run


async def cluster_job(client: Client, windows: int, name: str) -> tuple[float, int]:
    """Run the job on the cluster and return (seconds from submission to the report, loss sum in grid steps)."""
    begin = time.perf_counter()
    submitted = await client.submit(job(windows, name))
    status = await client.settled(submitted.status.job)
    report = await client.report(status.job)
    seconds = time.perf_counter() - begin
    if not report["complete"]:
        sys.exit(f"bench: the job ended {status.state.value}: {status.failure}")
    return seconds, int(report["totals"]["loss_steps"])


async def address_of(data: Path) -> str:
    """Wait for the coordinator to say where it listens."""
    deadline = time.monotonic() + START_SECONDS
    while not (data / "address").exists():
        if time.monotonic() > deadline:
            sys.exit("bench: the coordinator did not start")
        await asyncio.sleep(0.05)
    return (data / "address").read_text(encoding="utf-8").strip()


async def measure(windows: int, rounds: int) -> None:
    """Interleave both sides and print ratios."""
    bare = bare_loop(windows)
    loops, jobs = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as temp, Fleet(Path(temp) / "fleet") as fleet:
        data = fleet.directory / "data"
        fleet.start(
            "coordinator",
            [sys.executable, "-m", "coordinator", "serve", "--listen", "127.0.0.1:0", "--data-dir", str(data)],
        )
        address = await address_of(data)
        agent = [sys.executable, "-m", "agent", "run", "--coordinator", address, "--name", "bench"]
        agent += ["--state", str(fleet.directory / "agent"), "--cache", str(common.CACHE), "--root", "/"]
        fleet.start("agent", agent)
        async with Client(address) as client:
            await cluster_job(client, 2, "warm-up")
            for number in range(rounds):
                loop, expected = bare()
                wall, got = await cluster_job(client, windows, f"round {number}")
                if expected != got:
                    sys.exit(f"bench: the cluster's sum is {got} steps, the bare loop's {expected}")
                loops.append(loop)
                jobs.append(wall)
                print(f"round {number + 1}: bare loop {loop:6.2f} s, job {wall:6.2f} s, ratio {wall / loop:.3f}")
    ratios = [wall / loop for wall, loop in zip(jobs, loops, strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"job / bare loop: median {ratio:.3f}, best {min(ratios):.3f} over {rounds} rounds; sums equal to the last bit"
    )
    common.finish(
        {
            "bench": "overhead",
            "windows": windows,
            "rounds": rounds,
            "ratio_median": round(ratio, 4),
            "ratio_best": round(min(ratios), 4),
            "seconds_added_median": round(statistics.median(w - x for w, x in zip(jobs, loops, strict=True)), 3),
        }
    )


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of few windows")
    options = parser.parse_args()
    asyncio.run(measure(12, 1) if options.quick else measure(60, 3))


if __name__ == "__main__":
    main()
