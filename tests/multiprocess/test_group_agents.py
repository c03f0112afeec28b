"""Agents with several ranks under a real coordinator: same numbers as a plain agent's, whatever happens to a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands.jobs import layouts as layouts_of
from coordinator.status import JobStatus
from eval_kernel.report import comparable
from eval_kernel.report_text import render_text
from eval_kernel.spec import JobSpec, parse_spec
from tests.support import models
from tests.support.cluster import Cluster
from tests.support.corpora import write_jsonl
from tests.support.processes import alive, until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

REAL = ("--engine", "eval_kernel.engine:Engine", "--device", "cpu")
#: Seconds of silence after which a rank is lost; and until a job must be over on a busy machine.
WATCHDOG, PATIENCE = 3.0, 300.0
#: A shard of so many tokens takes about a third of a second on two ranks.
SHARD_TOKENS = 16384


@dataclass(frozen=True)
class Case:
    """A model, and texts of so many tokens that a shard can be hit while it is scored."""

    directory: Path

    def spec(self, shards: int, **job: Any) -> JobSpec:
        """A job of about so many shards."""
        data = self.directory / f"{shards}.jsonl"
        if not data.exists():
            write_jsonl(data, [f"{k} cats sat on the mat. " * 180 for k in range(4 * shards)])
        given = {"model": str(self.directory / "model"), "dataset": str(data), "precision": "fp32"}
        window, shard = {"policy": "rolling", "context": 512}, {"tokens": SHARD_TOKENS}
        return parse_spec({**given, "window": window, "shard": shard, **job}, where="test")

    def group(self, ranks: int = 2, watchdog: float = WATCHDOG) -> tuple[str, ...]:
        """Options of an agent with so many ranks of one thread each."""
        return (*self.plain, "--threads", str(ranks), "--ranks", str(ranks), "--watchdog-seconds", str(watchdog))

    @property
    def plain(self) -> tuple[str, ...]:
        """Options of an agent with one rank."""
        return (*REAL, "--root", str(self.directory))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A small Llama with a large vocabulary."""
    directory = tmp_path_factory.mktemp("groups")
    models.write_char_tokenizer(models.write_random_llama(directory / "model", vocabulary=8192))
    return Case(directory)


def test_a_job_on_one_group_is_the_job_on_one_plain_agent(case: Case, tmp_path: Path) -> None:
    """Replicas and sharded layers give the whole report bit for bit; tensor parallelism the counts, and the losses
    up to float32 sums. The report says which layout it was."""
    layouts: dict[str, dict[str, Any]] = {
        "2 replicas": {},
        "sharded over 2 ranks": {"parallel": {"dp_shard": -1}},
        "tensor parallel over 2 ranks": {"parallel": {"tp": -1}},
    }
    specs = {layout: case.spec(3, **job) for layout, job in layouts.items()}

    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with Cluster(tmp_path, lease=10.0) as cluster:
            plain = cluster.start_agent("plain", *case.plain)
            jobs = [await cluster.submit(spec) for spec in specs.values()]
            alone = [await cluster.report(job, PATIENCE) for job in jobs]
            plain.terminate()
            await until(lambda: plain.code is not None)
            cluster.start_agent("group", *case.group())
            jobs = [await cluster.submit(spec) for spec in specs.values()]
            together = [await cluster.report(job, PATIENCE) for job in jobs]
            said.extend([await cluster.status(job) for job in jobs])
            return alone, together

    said: list[JobStatus] = []
    alone, together = asyncio.run(main())

    for layout, expected, got, status in zip(specs, alone, together, said, strict=True):
        (node,) = got["nodes"]
        assert "group" == node["node"]
        assert "2" == node["software"]["ranks"]
        assert node["layout"].startswith(f"{layout}: ")
        assert f"layout on group: {layout}: " in render_text(got)
        assert [f"agent group: {node['layout']}"] == layouts_of(status)
        if not layout.startswith("tensor"):
            assert comparable(expected) == comparable(got)
            continue
        a, b = expected["totals"], got["totals"]
        counts = ("tokens", "bytes", "words", "documents", "shards")
        assert [a[name] for name in counts] == [b[name] for name in counts]
        assert a["loss_nats"] == pytest.approx(b["loss_nats"], rel=1e-5)


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_rank_may_be_killed_or_stopped_at_any_time(case: Case, tmp_path: Path, times: int) -> None:
    """Each rank in turn is killed, and stopped, while a shard is scored: the job ends with an undisturbed group's bits,
    each loss costs no more than the watchdog, a new group and a shard, and of the lost groups nothing stays."""
    lost: dict[tuple[str, int], list[float]] = {}
    shared: set[Path] = set()

    async def main() -> tuple[float, list[dict[str, Any]]]:
        async with Cluster(tmp_path, lease=10.0) as cluster:
            cluster.start_agent("group", *case.group())
            spec = case.spec(12, parallel={"dp_shard": -1})
            begun = time.monotonic()
            job = await cluster.submit(spec)
            await cluster.reach(job, 1, PATIENCE)
            formed = time.monotonic() - begun
            reports = [await cluster.report(job, PATIENCE)]
            for number in (signal.SIGKILL, signal.SIGSTOP) * times:
                # Two hits a job: a shard that is hit a third time would be given up, as one that kills its ranks.
                job = await cluster.submit(spec)
                await cluster.reach(job, 1, PATIENCE)
                for rank in (0, 1):
                    group = ranks(cluster)
                    shared.update(path for pid in group.values() for path in shared_memory(pid))
                    seconds = await hit(cluster, job, group, number, rank)
                    lost.setdefault((number.name, rank), []).append(seconds)
                reports.append(await cluster.report(job, PATIENCE))
            return formed, reports

    formed, (undisturbed, *reports) = asyncio.run(main())

    print(f"seconds lost, where the first shard of a group takes {formed:.1f}:")
    for (name, rank), seconds in lost.items():
        print(f"{name} of rank {rank}: {', '.join(f'{s:.1f}' for s in seconds)}")
        assert max(seconds) <= WATCHDOG * (name == "SIGSTOP") + 3 * formed + 5.0
    for report in reports:
        assert comparable(undisturbed) == comparable(report)
        assert 2 == report["accounting"]["failures"]
    assert [] == [path for path in shared if path.exists()]


async def hit(cluster: Cluster, job: str, group: dict[int, int], number: signal.Signals, rank: int) -> float:
    """Send a rank a signal in the middle of a shard; return the seconds until the job went on with another group."""
    begun = time.monotonic()
    os.kill(group[rank], number)
    await until(lambda: not any(alive(pid) for other, pid in group.items() if other), WATCHDOG + 20)
    # A result that was on its way when the rank was hit has long arrived when the next group stands.
    await until(lambda: len(ranks(cluster)) == len(group), PATIENCE, 0.1)
    await cluster.reach(job, await cluster.done(job) + 1, PATIENCE)
    return time.monotonic() - begun


def ranks(cluster: Cluster) -> dict[int, int]:
    """Return the process of each rank."""
    found = {}
    for pid, command in cluster.marked().items():
        if " agent.worker " in command:
            found[0] = pid
        elif " eval_kernel.parallel.helper " in command:
            found[int(command.partition("--rank ")[2].split()[0])] = pid
    return dict(sorted(found.items()))


def shared_memory(pid: int) -> set[Path]:
    """Return the files under /dev/shm that a process has mapped or open."""
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    opened = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    return {Path(name) for name in mapped | opened if name.startswith("/dev/shm/")}
