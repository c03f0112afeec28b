"""The executor with real worker processes: what a crash, a hang, a bug or a parent's death costs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fedeval.wire.messages import manifest_to_json

from agent.config import AgentConfig
from agent.executor import Executor
from agent.logs import WorkerLog, make_logger
from agent.work import JobPlan, Work
from eval_kernel.errors import (
    DataChanged,
    FedevalError,
    ModelNotFound,
    OutOfMemory,
    ShardError,
    WorkerCrashed,
    WorkerHung,
    WorkerUnusable,
)
from eval_kernel.partial import Partial, ScoredShard
from eval_kernel.spec import JobSpec
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan
from tests.support.processes import alive, until

ENGINE = "tests.support.fake_engine:FakeEngine"


@asynccontextmanager
async def an_executor(path: Path, engine: str = ENGINE, hang: float = 20.0) -> AsyncIterator[Executor]:
    """Give an executor whose files lie below ``path``."""
    config = AgentConfig(
        state=path / "state", cache=path / "cache", roots=(path,), threads=1, hang_seconds=hang, engine=engine
    )
    with (path / "log").open("w") as stream:
        executor = Executor(config, WorkerLog(path / "worker.log"), make_logger(as_json=True, stream=stream))
        try:
            yield executor
        finally:
            await executor.close()


def works(spec: JobSpec, job: str = "job") -> list[Work]:
    """Return the scoring of each shard of a job."""
    plan = reference_plan(spec)
    manifest = manifest_to_json(plan.manifest)
    return [Work(job, spec.canonical(), manifest, shard) for shard in plan.shards]


async def outcome(executor: Executor, work: Work) -> Partial | str:
    """Return a shard's partial or the code it failed with."""
    try:
        scored = await executor.run(work)
    except FedevalError as error:
        return error.code
    assert isinstance(scored, ScoredShard)
    return scored.partial


def run(path: Path, body: Callable[[Executor], Awaitable[None]], hang: float = 20.0, engine: str = ENGINE) -> None:
    """Run ``body`` with an executor in an event loop of its own."""

    async def scenario() -> None:
        async with an_executor(path, engine, hang) as executor:
            await body(executor)

    asyncio.run(scenario())


def test_the_worker_plans_and_scores_like_the_reference(tmp_path: Path) -> None:
    """A plan of more rows than one line holds, and every partial, cross the pipe unchanged."""
    spec = fake_spec(shards=4500, tokens=4)

    async def body(executor: Executor) -> None:
        plan = await executor.run(Work("job", spec.canonical()))
        partials = [await outcome(executor, work) for work in works(spec)[:20]]

        expected = reference_plan(spec)
        assert JobPlan(manifest_to_json(expected.manifest), expected.shards) == plan
        assert reference_partials(spec)[:20] == partials
        assert "job" == executor.loaded_job

    run(tmp_path, body)


def test_failures_cost_their_own_shard_only(tmp_path: Path) -> None:
    """A crash, a kill, a bug, an out-of-memory and a refused shard each fail with their own code; the rest is exact."""
    spec = fake_spec(shards=11, crash="1", kill="3", bug="5", oom="7", error="9")
    codes = {1: WorkerCrashed, 3: WorkerCrashed, 5: ShardError, 7: OutOfMemory, 9: ShardError}

    async def body(executor: Executor) -> None:
        outcomes = [await outcome(executor, work) for work in works(spec)]

        expected: list[Partial | str] = list(reference_partials(spec))
        for shard, error in codes.items():
            expected[shard] = error.code
        assert expected == outcomes

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("crash", WorkerCrashed, "the worker ended with exit code 11 while scoring shard 0 of job job"),
        ("kill", WorkerCrashed, "killed by SIGKILL .probably by the system, for want of memory."),
        ("bug", ShardError, "^RuntimeError: a bug met shard 0$"),
        ("oom", OutOfMemory, "no room for shard 0"),
    ],
)
def test_the_message_says_what_happened(tmp_path: Path, fault: str, error: type[FedevalError], text: str) -> None:
    """Each way to fail has one line that names it."""
    spec = fake_spec(**{fault: "0"})

    async def body(executor: Executor) -> None:
        with pytest.raises(error, match=text):
            await executor.run(works(spec)[0])

    run(tmp_path, body)


def test_a_bug_s_traceback_goes_to_the_log(tmp_path: Path) -> None:
    """The traceback of an exception is in the worker's log, where the message does not have it."""

    async def body(executor: Executor) -> None:
        await outcome(executor, works(fake_spec(bug="0"))[0])

    run(tmp_path, body)

    assert "Traceback (most recent call last)" in (tmp_path / "worker.log").read_text()


def test_a_hung_worker_is_killed(tmp_path: Path) -> None:
    """Silence beyond the limit is WORKER_HUNG, where it hung is in the log, and the next shard is scored."""
    spec = fake_spec(hang="0x1")

    async def body(executor: Executor) -> None:
        with pytest.raises(WorkerHung, match="no progress for 2 s while scoring shard 0"):
            await executor.run(works(spec)[0])

        assert reference_partials(spec)[0] == await outcome(executor, works(spec)[0])
        assert re.search(r"fake_engine.py.*in score", (tmp_path / "worker.log").read_text())

    run(tmp_path, body, hang=2.0)


def test_a_slow_worker_is_not_hung(tmp_path: Path) -> None:
    """A shard, a plan and a model load that take longer than the limit but show progress are left alone."""
    spec = fake_spec(shards=1, delay=2.0, load_delay=2.0, plan_delay=2.0)

    async def body(executor: Executor) -> None:
        plan = await executor.run(Work("job", spec.canonical()))

        assert isinstance(plan, JobPlan)
        assert reference_partials(spec)[0] == await outcome(executor, works(spec)[0])

    run(tmp_path, body, hang=1.5)


def test_prints_cannot_spoil_the_protocol(tmp_path: Path) -> None:
    """What a library writes to the standard output lands in the log."""
    spec = fake_spec(shards=2, noise="0,1")

    async def body(executor: Executor) -> None:
        outcomes = [await outcome(executor, work) for work in works(spec)]

        assert reference_partials(spec) == outcomes

    run(tmp_path, body)

    assert 2 == (tmp_path / "worker.log").read_text().count("and this, past Python")


def test_an_idle_worker_s_death_is_nobody_s_failure(tmp_path: Path) -> None:
    """A worker that was killed between two shards is replaced without a word."""
    spec = fake_spec(shards=2)

    async def body(executor: Executor) -> None:
        first = await outcome(executor, works(spec)[0])
        pid = executor.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        second = await outcome(executor, works(spec)[1])

        assert reference_partials(spec) == [first, second]
        assert pid != executor.worker_pid

    run(tmp_path, body)


def test_errors_of_the_engine_keep_their_class(tmp_path: Path) -> None:
    """What opening or planning raises arrives as the same class with the same text."""

    async def body(executor: Executor) -> None:
        with pytest.raises(ModelNotFound, match="opening fails with MODEL_NOT_FOUND"):
            await executor.run(works(fake_spec(open_fails="MODEL_NOT_FOUND"))[0])
        with pytest.raises(ModelNotFound, match="planning fails with MODEL_NOT_FOUND"):
            await executor.run(Work("job", fake_spec(plan_fails="MODEL_NOT_FOUND").canonical()))
        other = works(fake_spec(seed=2))[0]
        with pytest.raises(DataChanged):
            await executor.run(Work("job", fake_spec(seed=1).canonical(), other.manifest_json, other.shard))

    run(tmp_path, body)


@pytest.mark.parametrize("options", [{"delay": 60.0}, {"load_delay": 60.0}])
def test_a_shard_can_be_called_off(tmp_path: Path, options: dict[str, float]) -> None:
    """Calling off a shard ends it at its next beat and keeps the worker."""

    async def body(executor: Executor) -> None:
        running = asyncio.create_task(executor.run(works(fake_spec(**options))[0]))
        await until(lambda: executor.activity in ("scoring", "loading the model"))
        pid = executor.worker_pid
        await executor.cancel()

        assert None is await asyncio.wait_for(running, 5)
        assert pid == executor.worker_pid
        assert reference_partials(fake_spec())[0] == await outcome(executor, works(fake_spec())[0])

    run(tmp_path, body)


def test_calling_off_kills_a_worker_that_does_not_listen(tmp_path: Path) -> None:
    """A hung shard that is called off ends as called off, not as crashed."""

    async def body(executor: Executor) -> None:
        running = asyncio.create_task(executor.run(works(fake_spec(hang="0"))[0]))
        await until(lambda: executor.activity == "scoring")
        await executor.cancel(patience=0.3)

        assert None is await asyncio.wait_for(running, 5)

    run(tmp_path, body)


def test_calling_off_before_the_worker_is_up(tmp_path: Path) -> None:
    """A request that is called off while the worker starts is not begun."""

    async def body(executor: Executor) -> None:
        running = asyncio.create_task(executor.run(works(fake_spec(delay=60.0))[0]))
        await until(lambda: executor.activity == "starting the worker")
        await executor.cancel()

        assert None is await asyncio.wait_for(running, 10)

    run(tmp_path, body)


def test_a_missing_engine_is_one_line(tmp_path: Path) -> None:
    """An engine that cannot be imported is WORKER_UNUSABLE with a remedy, at once."""

    async def body(executor: Executor) -> None:
        with pytest.raises(WorkerUnusable, match=r"No module named 'no_such_engine'.*pip install"):
            await executor.probe()

    run(tmp_path, body, engine="no_such_engine:Engine")


def test_the_probe_answers(tmp_path: Path) -> None:
    """The engine's facts arrive as they are."""

    async def body(executor: Executor) -> None:
        facts = await executor.probe()

        assert {"engine": "fake", "device": "cpu", "dtypes": ["float32"], "threads": 1} == facts

    run(tmp_path, body)


def test_closing_ends_the_worker_while_it_computes(tmp_path: Path) -> None:
    """Nothing is left of a worker whose executor is closed in the middle of a shard."""
    pids: list[int] = []

    async def scenario() -> None:
        async with an_executor(tmp_path) as executor:
            running = asyncio.create_task(executor.run(works(fake_spec(delay=60.0))[0]))
            await until(lambda: executor.activity == "scoring")
            assert executor.worker_pid is not None
            pids.append(executor.worker_pid)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())

    assert not alive(pids[0])


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.multiprocess.test_agent_executor import an_executor, works, fake_spec, until
async def main():
    async with an_executor(Path(sys.argv[1])) as executor:
        running = asyncio.create_task(executor.run(works(fake_spec(**eval(sys.argv[2])))[0]))
        await until(lambda: executor.activity == "scoring")
        print(executor.worker_pid, flush=True)
        await running
asyncio.run(main())
"""


@pytest.mark.parametrize("options", [{"delay": 600}, {"hang": "0"}])
def test_a_killed_parent_leaves_no_orphan(tmp_path: Path, options: dict[str, object]) -> None:
    """SIGKILL of the process that started the worker ends the worker, even one that hangs."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", PARENT, str(tmp_path), repr(options)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        os.sched_yield()

    assert not alive(pid)


def test_the_worker_never_imports_grpc(tmp_path: Path) -> None:
    """The worker's own modules bring in neither grpc nor torch; only the engine may bring torch."""
    code = "import sys, agent.worker; print([m for m in ('grpc', 'torch', 'google.protobuf') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)

    assert [] == json.loads(done.stdout.replace("'", '"'))
