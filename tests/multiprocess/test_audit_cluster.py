"""Audits between real processes: a node whose numbers are off by half a percent changes no total."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.client import Client
from tests.support.cluster import Cluster
from tests.support.fake_engine import FACTOR, fake_spec, reference_tally

SPEC = fake_spec("audited", shards=30, delay=0.02, seed=5)


def scored(directory: Path, *serve: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The report of a job that two honest agents and one that adds 0.5 % score, and what each is doing."""

    async def body() -> tuple[dict[str, Any], dict[str, str]]:
        async with Cluster(directory, serve=serve) as cluster:
            cluster.start_agent("liar", before=("env", f"{FACTOR}=1.005"))
            cluster.start_agent("one")
            cluster.start_agent("two")
            job = await cluster.submit(SPEC)
            report = await cluster.report(job, 60)
            async with Client(cluster.address) as client:
                return report, {node.node: node.activity for node in await client.nodes()}

    return asyncio.run(body())


@pytest.mark.timeout(120)
def test_an_agent_that_adds_half_a_percent_is_caught_and_the_total_is_exact(tmp_path: Path) -> None:
    """Every shard audited: the total has the bits of an honest run, and the nodes say who is out and why."""
    report, nodes = scored(tmp_path, "--audit", "100%")

    assert report["complete"]
    assert reference_tally(SPEC).digest() == report["totals"]["digest"]
    assert "+0.5" in nodes["liar"]
    assert nodes["liar"].startswith("quarantined: ")
    assert report["accounting"]["audits"]["outlier"] >= 1
    assert {"one", "two"} >= {node["node"] for node in report["nodes"] if node["shards"]}


@pytest.mark.timeout(120)
def test_without_audits_the_total_is_wrong(tmp_path: Path) -> None:
    """The negative control: the same agents and no audit."""
    report, nodes = scored(tmp_path)

    assert report["complete"]
    assert reference_tally(SPEC).digest() != report["totals"]["digest"]
    assert not nodes["liar"].startswith("quarantined: ")
    assert report["accounting"]["audits"] is None
