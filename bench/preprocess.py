"""How long agents that score wait for tokens, with and without an agent that prepares packs for them.

    python bench/preprocess.py [--quick] [--megabytes N]

Real processes: a coordinator, two agents that score, each with a cache of its own as on a machine of its own, and in
the second run an agent with the role preprocess alone. Long documents; the model is a small one, so that tokens are
used up about as fast as by a large model on a fast device. Waiting is what a scoring agent spends reading and
tokenising the text, or waiting for a pack; its share is that of the time from the plan to the last result.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import finish
from eval_kernel import corpus, documents
from eval_kernel.engine import Engine, EngineConfig

__all__ = ["EngineConfig", "TimedEngine"]

#: Environment variable: a directory in which each worker notes the seconds that it spent on text while scoring.
NOTES = "FEDEVAL_BENCH_TOKENS"
SCORING = ("f1", "f2")
ROOT = Path(__file__).resolve().parent.parent


class TimedEngine(Engine):
    """The engine, noting what opening a job spends on the text itself."""

    def open(self, *given: Any, **more: Any) -> Any:
        """As the engine's; seconds of reading and tokenising go to a file."""
        spent = [0.0]

        def timed(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                begun = time.perf_counter()
                try:
                    return call(*arguments, **named)
                finally:
                    spent[0] += time.perf_counter() - begun

            return run

        kept = corpus.load, documents.find
        corpus.load, documents.find = timed(corpus.load), timed(documents.find)
        try:
            return super().open(*given, **more)
        finally:
            corpus.load, documents.find = kept
            with (Path(os.environ[NOTES]) / str(os.getpid())).open("a", encoding="ascii") as notes:
                notes.write(f"{spent[0]}\n")


async def run(directory: Path, spec: Any, root: Path, preprocess: bool) -> dict[str, Any]:
    """One job; return its figures. Leaves no process behind."""
    from coordinator.client import Client
    from coordinator.core.states import JobState
    from tests.multiprocess.test_preprocess import ready
    from tests.support.cluster import Cluster

    notes = directory / "notes"
    notes.mkdir(parents=True)
    os.environ[NOTES] = str(notes)
    cluster = Cluster(directory / "cluster", lease=10.0)
    names = [*SCORING, *(["pre"] if preprocess else [])]
    async with cluster:
        for name in names:
            roles = {"pre": ["preprocess"]}.get(name, ["forward"] if preprocess else ["forward", "preprocess"])
            options = [word for role in roles for word in ("--role", role)]
            options += ["--engine", "bench.preprocess:TimedEngine", "--root", str(root)]
            cluster.start_agent(name, *options, "--cache", str(cluster.directory / f"{name}-cache"))
        await ready(cluster, len(names))
        job = await cluster.submit(spec)
        async with Client(cluster.address) as client:
            async for status in client.watch(job):
                if status.state is not JobState.PLANNING:
                    break
            begun = time.perf_counter()
            await client.settled(job)
            seconds = time.perf_counter() - begun
            report = await client.report(job)
        for process in cluster.agents.values():
            process.terminate()
        for process in cluster.agents.values():
            process.wait(30)
    logs = [(cluster.directory / f"{name}.log").read_text() for name in SCORING]
    fetching = [float(re.findall(r"waited_seconds=([\d.]+)", log)[-1]) for log in logs]
    packs = [int(re.findall(r"packs=(\d+)", log)[-1]) for log in logs]
    own = sum(float(line) for file in notes.iterdir() for line in file.read_text().split())
    return {
        "seconds": round(seconds, 2),
        "tokens": report["totals"]["tokens"],
        "waiting_for_packs_s": round(sum(fetching), 3),
        "making_tokens_s": round(own, 3),
        "waiting_share": round((sum(fetching) + own) / (len(SCORING) * seconds), 4),
        "packs_fetched": sum(packs),
        "shards": report["accounting"]["accepted"],
        "totals": report["totals"]["digest"],
    }


def equal_digests(directory: Path, spec: Any) -> tuple[int, int]:
    """How many packs have equal digests from a packer and from a scoring node's own corpus, and of how many."""
    from eval_kernel import packer
    from eval_kernel.pack import Pack, name_of
    from tests.support.evaluations import silent

    engine = Engine(EngineConfig(directory / "own", threads=1))
    plan = engine.plan(spec, silent)
    made = directory / "packs"
    made.mkdir(parents=True)
    theirs = packer.Packer(packer.EngineConfig(directory / "other")).pack(
        spec, plan.manifest, plan.shards[0], len(plan.shards), made, silent
    )
    layout = engine._prepare(spec, silent).layout
    equal = [name == name_of(Pack.of(layout, shard).encode()) for shard, name, _ in theirs]
    return sum(equal), len(plan.shards)


def main() -> None:
    """Run both, and compare."""
    from tests.support.evaluations import Evaluator
    from tests.support.models import dyadic_table, write_char_tokenizer, write_table_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=4.0, help="size of the corpus")
    parser.add_argument("--quick", action="store_true", help="one megabyte")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedeval-preprocess-") as name:
        directory = Path(name)
        model = write_table_model(directory / "model", dyadic_table())
        write_char_tokenizer(model)
        evaluator = Evaluator(directory)
        length = 200_000
        texts = [
            "abcd" * (length // 4 + i)
            for i in range(max(1, round((1.0 if given.quick else given.megabytes) * 1e6 / length)))
        ]
        spec = evaluator.spec(model, texts, window={"context": 64}, shard={"tokens": 8192}, batch={"tokens": 8192})
        without = asyncio.run(run(directory / "without", spec, directory, preprocess=False))
        with_one = asyncio.run(run(directory / "with", spec, directory, preprocess=True))
        equal, shards = equal_digests(directory / "digests", spec)
    print(
        f"two agents score {without['tokens']} tokens of documents of {length} characters; waiting for tokens takes "
        f"{without['waiting_share']:.1%} of their time without an agent that prepares packs ({without['seconds']} s), "
        f"{with_one['waiting_share']:.1%} with one ({with_one['seconds']} s, {with_one['packs_fetched']} packs "
        f"fetched for {with_one['shards']} shards); {equal} of {shards} packs have equal digests from either"
    )
    same = without["totals"] == with_one["totals"]
    finish({"benchmark": "preprocess", "without": without, "with": with_one, "equal": equal, "equal_totals": same})


if __name__ == "__main__":
    main()
