"""Whole jobs through real processes: the same report whatever number of agents works on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from eval_kernel.report import comparable
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_plan, reference_tally


def test_one_two_three_and_five_agents_give_one_report(tmp_path: Path) -> None:
    """What can be equal in the reports of one job is equal, and the totals are the reference's."""
    spec = fake_spec("counted", shards=40, span=3, documents=2)

    async def main() -> dict[int, dict[str, Any]]:
        reports = {}
        async with Cluster(tmp_path) as cluster:
            started = 0
            for agents in (1, 2, 3, 5):
                for number in range(started, agents):
                    cluster.start_agent(f"agent-{number}")
                started = agents
                reports[agents] = await cluster.report(await cluster.submit(spec))
        return reports

    reports = asyncio.run(main())

    for report in reports.values():
        assert report["complete"]
        assert reference_tally(spec).digest() == report["totals"]["digest"]
        assert reference_plan(spec).digest == report["provenance"]["plan_digest"]
        assert (40, 0) == (report["accounting"]["accepted"], report["accounting"]["failures"])
        assert comparable(reports[1]) == comparable(report)


def test_several_jobs_run_at_once(tmp_path: Path) -> None:
    """Jobs submitted together, one of them cancelled, each come to their own result."""
    specs = [fake_spec(f"job {seed}", shards=15, seed=seed) for seed in range(3)]

    async def main() -> tuple[list[dict[str, Any]], str]:
        async with Cluster(tmp_path) as cluster:
            cancelled = await cluster.submit(fake_spec("slow", shards=50, delay=0.2))
            jobs = [await cluster.submit(spec) for spec in specs]
            for name in ("a", "b"):
                cluster.start_agent(name)
            from coordinator.client import Client

            async with Client(cluster.address) as client:
                await client.cancel(cancelled, "no longer wanted")
            reports = [await cluster.report(job) for job in jobs]
            async with Client(cluster.address) as client:
                state = (await client.job(cancelled)).state.value
        return reports, state

    reports, state = asyncio.run(main())

    assert "cancelled" == state
    for spec, report in zip(specs, reports, strict=True):
        assert reference_tally(spec).digest() == report["totals"]["digest"]
        assert report["complete"]
