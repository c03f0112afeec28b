"""Real models on real clusters: the exact answers and the golden ones, through a coordinator and agents with torch.

The fake engine of the other multi-process tests starts in half a second; these start real workers, so few of them.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Client
from eval_kernel.report import comparable
from tests.contract.test_golden_smollm2 import GOLDEN, gguf  # noqa: F401 - the fixture is used by name
from tests.support.cluster import Cluster
from tests.support.corpora import full_text, write_head, write_k_corpus
from tests.support.evaluations import Evaluator
from tests.support.models import dyadic_table, write_char_tokenizer, write_random_llama, write_table_model

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
REAL = ("--engine", "eval_kernel.engine:Engine")
#: Seconds for a job whose workers may still be importing torch on a busy machine.
PATIENCE = 300.0


def _evaluator(directory: Path) -> Evaluator:
    (directory / "reference").mkdir()
    return Evaluator(directory / "reference")


async def ready(cluster: Cluster, agents: int) -> None:
    """Wait until so many agents have probed their engine, and may be given work."""
    async with Client(cluster.address) as client, asyncio.timeout(PATIENCE):
        while sum(bool(json.loads(n.capabilities_json).get("engine")) for n in await client.nodes()) < agents:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # the condition is in other processes


def metric(report: dict[str, Any], name: str) -> float:
    """Return a metric's value; fails where the report has no number."""
    assert report["complete"], report["missing"]["summary"]
    return float(next(m["value"] for m in report["metrics"] if m["name"] == name))


def test_the_k_corpus_is_exact_at_1_2_3_and_5_agents(tmp_path: Path) -> None:
    """Perplexity 4 and 2 bits per byte, the same bits for any number of agents and any batch budget."""
    model = write_table_model(tmp_path / "model", dyadic_table())
    write_char_tokenizer(model)
    text = write_k_corpus(tmp_path)
    evaluator = _evaluator(tmp_path)
    budgets = (1, 7, 4096)

    async def main() -> list[dict[str, Any]]:
        reports = []
        async with Cluster(tmp_path / "cluster", lease=10.0) as cluster:
            running = 0
            for agents in (1, 2, 3, 5):
                while running < agents:
                    running += 1
                    cluster.start_agent(f"a{running}", *REAL, "--root", str(tmp_path))
                await ready(cluster, agents)
                for budget in budgets:
                    job = {"shard": {"tokens": 1}, "batch": {"tokens": budget}, "name": f"{agents} agents"}
                    spec = evaluator.spec(model, text, window={"context": 16}, **job)
                    reports.append(await cluster.report(await cluster.submit(spec), PATIENCE))
        return reports

    reports = asyncio.run(main())

    assert 12 == len(reports)
    for report in reports:
        assert 4.0 == pytest.approx(metric(report, "perplexity"), abs=1e-6)
        assert 2.0 == pytest.approx(metric(report, "bits_per_byte"), abs=1e-6)
        assert 5 == report["accounting"]["accepted"] == report["totals"]["documents"]
    assert 1 == len({report["totals"]["digest"] for report in reports})


def test_a_cluster_and_the_reference_evaluator_report_the_same(tmp_path: Path) -> None:
    """Two agents and one process agree in every field that does not say who worked, and when."""
    from eval_kernel.reference import evaluate

    model = write_random_llama(tmp_path / "model", vocabulary=64)
    write_char_tokenizer(model)
    evaluator = _evaluator(tmp_path)
    texts = ["abcd" * n for n in range(5, 60)] + [""]
    job = {"window": {"context": 64}, "shard": {"tokens": 256}, "batch": {"tokens": 512}}
    spec = evaluator.spec(model, texts, **job)

    async def main() -> dict[str, Any]:
        async with Cluster(tmp_path / "cluster", lease=10.0) as cluster:
            for name in ("a1", "a2"):
                cluster.start_agent(name, *REAL, "--root", str(tmp_path))
            return await cluster.report(await cluster.submit(spec), PATIENCE)

    report = asyncio.run(main())
    reference = evaluate(spec, evaluator.engine, lambda text: None, lambda *progress: None)

    assert comparable(reference) == comparable(report)
    assert reference["totals"] == report["totals"]


@pytest.mark.slow
def test_two_agents_reproduce_every_golden_value(tmp_path: Path, gguf: Path) -> None:  # noqa: F811
    """Token counts are equal and loss sums within 1e-6 of the float64 reference, policy by policy."""
    head = write_head(tmp_path)
    evaluator = _evaluator(tmp_path)
    cases = [(case.id, head, *case.values) for case in GOLDEN]
    size = {"tokens": 1024}
    concat = {"policy": "concat", "context": 1024, "max_windows": 10}
    cases.append(("concat 10 x 1024", full_text(), concat, 10230, 10, 32271.43036))

    async def main() -> dict[str, dict[str, Any]]:
        reports = {}
        cache = ROOT / ".cache" / "golden" / "cache"
        async with Cluster(tmp_path / "cluster", lease=10.0) as cluster:
            options = ("--root", str(tmp_path), "--root", str(full_text().parent), "--root", str(gguf.parent))
            for name in ("a1", "a2"):
                cluster.start_agent(name, *REAL, *options, "--cache", str(cache))
            for name, text, window, *_ in cases:
                spec = evaluator.spec(gguf, text, window=window, shard=size, batch=size, name=name)
                reports[str(name)] = await cluster.report(await cluster.submit(spec), 600.0)
        return reports

    reports = asyncio.run(main())

    for name, _, _, tokens, windows, nats in cases:
        report = reports[str(name)]
        got = report["totals"]["loss_nats"]
        print(f"{name}: {report['totals']['tokens']} tokens, {got:.6f} nats, relative {(got - nats) / nats:+.1e}")

        assert report["complete"]
        assert (tokens, windows) == (report["totals"]["tokens"], report["provenance"]["windows"])
        assert nats == pytest.approx(got, rel=1e-6)
