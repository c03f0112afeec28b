"""Planning on a cluster of real processes: the same measurements by one agent or two, whether or not one is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from coordinator import precision
from coordinator.client import Client
from coordinator.precision import Wanted
from eval_kernel.precision.groups import Sensitivity
from eval_kernel.precision.policy import MeasureSpec
from eval_kernel.spec import JobSpec, load_spec, parse_spec
from tests.support.cluster import Cluster
from tests.support.evaluations import Evaluator
from tests.support.models import ALPHABET
from tests.support.precision import llama, write

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

REAL = ("--engine", "eval_kernel.engine:Engine", "--device", "cpu")
MEASURE = MeasureSpec(formats=("bf16", "int8", "int4-g32"), rows=2, context=40)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    """A small Llama on text of no pattern."""
    directory = tmp_path_factory.mktemp("planned")
    write(directory / "m", llama())
    draws = np.random.default_rng(5).integers(0, 54, 6000)
    (directory / "text.txt").write_text("".join(ALPHABET[i] for i in draws))
    return parse_spec(
        {
            "model": str(directory / "m"),
            "dataset": str(directory / "text.txt"),
            "window": {"policy": "concat", "context": 64},
        },
        where="job",
    )


def root(job: JobSpec) -> str:
    """The directory that agents must be allowed to read."""
    return str(Path(job.model.source).parent)


def silent(_: str) -> None:
    """Say nothing."""


async def until_submitted(client: Client) -> None:
    """Wait until there is a job."""
    while not await client.jobs():  # noqa: ASYNC110 - the condition is in another process
        await asyncio.sleep(0.02)


def test_one_agent_or_two_measure_the_same_and_one_may_die(job: JobSpec, tmp_path: Path) -> None:
    """Equal sensitivities, to the last integer; of the two, one is killed while it measures."""
    wanted = Wanted(MEASURE, 0.3, None, 6)

    async def alone() -> dict[str, Any]:
        async with Cluster(tmp_path / "one") as cluster:
            cluster.start_agent("a", *REAL, "--root", root(job))
            async with Client(cluster.address) as client, asyncio.timeout(250):
                return await precision.sensitivities(client, job, wanted, silent)

    async def together() -> tuple[dict[str, Any], dict[str, Any]]:
        async with Cluster(tmp_path / "two") as cluster:
            cluster.start_agent("a", *REAL, "--root", root(job))
            async with Client(cluster.address) as client, asyncio.timeout(250):
                found = asyncio.create_task(precision.sensitivities(client, job, wanted, silent))

                await until_submitted(client)
                await cluster.reach((await client.jobs())[0].job, 1)
                cluster.start_agent("b", *REAL, "--root", root(job))
                cluster.kill_agent("a")
                measured = await found
                report = await client.report((await client.jobs())[0].job)
                return measured, report

    first = asyncio.run(alone())
    second, report = asyncio.run(together())

    assert first == second
    assert 9 == len(Sensitivity.from_json(first).cells)
    assert "divergence_per_token" == report["metrics"][0]["name"]
    assert report["metric_name"].startswith("divergence_per_token[sensitivity")


def test_a_plan_is_made_proved_and_used_on_the_cluster(job: JobSpec, tmp_path: Path) -> None:
    """The same plan as in one process, through the command; its file then runs as a job of its own."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(json.loads(job.canonical())))

    async def main() -> tuple[subprocess.CompletedProcess[str], dict[str, Any], str]:
        async with Cluster(tmp_path / "cluster") as cluster:
            cluster.start_agent("a", *REAL, "--root", root(job))
            command = [sys.executable, "-m", "coordinator", "plan", str(file), "--coordinator", cluster.address]
            command += ["--budget", "30%", "--rows", "2", "--context", "40", "--proof", "6"]
            for name in ("out", "chart", "sensitivity"):
                command += [f"--{name}", str(tmp_path / name)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=240)
            assert 0 == done.returncode, done.stderr
            later = {**json.loads(job.canonical()), "precision": yaml.safe_load((tmp_path / "out").read_text())}
            later["window"]["max_windows"] = 6
            spec = tmp_path / "later.yaml"
            spec.write_text(yaml.safe_dump(later))
            report = await cluster.report(await cluster.submit(load_spec(spec)))
            plain = {**later, "precision": "fp32"}
            spec.write_text(yaml.safe_dump(plain))
            other = await cluster.report(await cluster.submit(load_spec(spec)))
            command = [sys.executable, "-m", "coordinator", "compare", other["job"], report["job"]]
            command += ["--coordinator", cluster.address]
            compared = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
            return done, report, compared.stdout

    done, report, compared = asyncio.run(main())
    text = (tmp_path / "out").read_text()
    total = report["precision"]["classes"][-1]
    alone = Evaluator(tmp_path).score(JobSpec.model_validate_json(json.dumps(report["spec"])))

    assert text in done.stdout
    assert total["bytes"] <= 0.3 * total["checkpoint"]
    assert f"{total['bytes']:,} bytes" in text
    assert alone.tally.steps == report["totals"]["loss_steps"]
    assert "auto, budget 30%" in (tmp_path / "chart").read_text()
    assert "paired over" in compared
    assert f"{report['metrics'][1]['value']:.4f}" in text
    assert Sensitivity.from_json(json.loads((tmp_path / "sensitivity").read_text())).cells
