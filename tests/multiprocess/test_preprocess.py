"""An agent that prepares packs for two that score: the reference's bits, also when it is killed in the middle."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Client
from tests.support.cluster import Cluster
from tests.support.evaluations import Evaluator
from tests.support.models import write_char_tokenizer, write_random_llama
from tests.support.processes import until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

REAL = ("--engine", "eval_kernel.engine:Engine")
PATIENCE = 200.0


async def ready(cluster: Cluster, agents: int) -> None:
    """Wait until so many agents have probed their engine, and may be given work."""
    async with Client(cluster.address) as client, asyncio.timeout(PATIENCE):
        while sum(bool(json.loads(n.capabilities_json).get("engine")) for n in await client.nodes()) < agents:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # the condition is in other processes


def packs_used(log: str) -> int:
    """How many packs an agent says it has fetched, when it stopped."""
    return int(re.findall(r"packs=(\d+)", log)[-1])


def test_the_death_of_the_agent_that_packs_loses_nothing(tmp_path: Path) -> None:
    """Two agents without a tokenised text score packs; after SIGKILL they make their own, to the same totals."""
    from eval_kernel.reference import evaluate

    model = write_random_llama(tmp_path / "model", vocabulary=64)
    write_char_tokenizer(model)
    (tmp_path / "reference").mkdir()
    evaluator = Evaluator(tmp_path / "reference")
    texts = ["abcd" * n for n in range(5, 120)]
    spec = evaluator.spec(model, texts, window={"context": 64}, shard={"tokens": 64}, batch={"tokens": 64})

    def tokenised(agent: str) -> bool:
        """Whether an agent has tokenised the text itself: its cache has a corpus."""
        return any((cluster.directory / f"{agent}-cache").glob("corpora/*"))

    cluster = Cluster(tmp_path / "cluster", lease=10.0)

    def start(name: str, role: str) -> None:
        options = ("--role", role, "--root", str(tmp_path), "--cache", str(cluster.directory / f"{name}-cache"))
        cluster.start_agent(name, *REAL, *options)

    async def main() -> dict[str, Any]:
        async with cluster:
            start("pre", "preprocess")
            await ready(cluster, 1)
            for name in ("f1", "f2"):
                start(name, "forward")
            await ready(cluster, 3)
            job = await cluster.submit(spec)
            await cluster.reach(job, 30, PATIENCE)
            assert not tokenised("f1")
            assert not tokenised("f2")
            cluster.kill_agent("pre")
            report = await cluster.report(job, PATIENCE)
            assert tokenised("f1") or tokenised("f2")
            agents = dict(cluster.agents)
            for process in agents.values():
                process.terminate()
            await until(lambda: all(process.code is not None for process in agents.values()), 30)
        return report

    report = asyncio.run(main())
    reference = evaluate(spec, evaluator.engine, lambda text: None, lambda *progress: None)

    assert reference["totals"] == report["totals"]
    assert report["complete"]
    assert 30 <= sum(packs_used((cluster.directory / f"{name}.log").read_text()) for name in ("f1", "f2"))
