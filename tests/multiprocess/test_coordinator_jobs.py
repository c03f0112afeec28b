"""Whole jobs through real processes: the same report whatever number of agents works on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from coordinator.client import Client
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


def test_a_job_waits_with_the_reason_until_an_agent_has_the_data(tmp_path: Path) -> None:
    """Without access nobody plans it, and it says which agent lacks what; an agent that has it does it all."""
    data = tmp_path / "elsewhere" / "data.txt"
    spec = fake_spec("fenced", shards=3, path=str(data))

    async def main() -> tuple[tuple[str, ...], dict[str, Any]]:
        async with Cluster(tmp_path / "cluster") as cluster:
            cluster.start_agent("outsider", "--root", str(tmp_path / "cluster"))
            job = await cluster.submit(spec)
            async with Client(cluster.address) as client:
                async with asyncio.timeout(30):
                    async for status in client.watch(job):
                        if any("PATH_REFUSED" in reason or "outside" in reason for reason in status.waiting):
                            break
                data.parent.mkdir()
                data.write_text("text")
                cluster.start_agent("insider", "--root", str(data.parent))
                return status.waiting, await cluster.report(job)

    waiting, report = asyncio.run(main())

    assert any("outsider" in reason for reason in waiting), waiting
    assert report["complete"]
    assert ["insider"] == [node["node"] for node in report["nodes"]]


def test_the_commands_follow_a_job_to_its_report(tmp_path: Path) -> None:
    """submit --watch and wait exit 0, report writes three files; an incomplete job exits 1."""
    good = tmp_path / "good.yaml"
    good.write_text(f"name: good\nmodel: hub:fake/model\ndataset: {fake_spec(shards=5).dataset.source[0]}\n")
    bad = tmp_path / "bad.yaml"
    bad.write_text(f"name: bad\nmodel: hub:fake/model\ndataset: {fake_spec(shards=5, nan='2').dataset.source[0]}\n")

    async def main() -> dict[str, subprocess.CompletedProcess[str]]:
        results = {}
        async with Cluster(tmp_path / "cluster") as cluster:
            cluster.start_agent("a")

            async def command(*arguments: str) -> subprocess.CompletedProcess[str]:
                full = [sys.executable, "-m", "coordinator", *arguments, "--coordinator", cluster.address]
                return await asyncio.to_thread(
                    lambda: subprocess.run(full, capture_output=True, text=True, timeout=60, check=False)
                )

            results["watched"] = await command("submit", str(good), "--watch")
            job = results["watched"].stdout.split()[0]
            results["waited"] = await command("wait", job, "--json")
            results["report"] = await command("report", job, "--out", str(tmp_path / "out"))
            results["bad"] = await command("submit", str(bad), "--watch")
            results["bad report"] = await command("report", results["bad"].stdout.split()[0])
        return results

    results = asyncio.run(main())

    assert 0 == results["watched"].returncode, results["watched"].stderr
    assert "good: succeeded, 5/5 shards" in results["watched"].stdout
    assert (0, "succeeded") == (results["waited"].returncode, json.loads(results["waited"].stdout)["state"])
    assert 0 == results["report"].returncode
    assert ["good.html", "good.json", "good.md"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (1, 1) == (results["bad"].returncode, results["bad report"].returncode)
    assert "without a finite loss" in results["bad report"].stdout
    assert "has no number" in results["bad"].stderr
    assert "without a finite loss" in results["bad"].stderr
