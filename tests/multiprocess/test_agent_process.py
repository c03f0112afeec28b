"""`eval-agent` as a real process: signals, exit codes, what it prints, what it imports, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fake_coordinator import FakeCoordinator, activities
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan
from tests.support.processes import alive, children, until

ENGINE = "tests.support.fake_engine:FakeEngine"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "NO_COLOR": "1"}


def arguments(path: Path, address: str, *more: str) -> list[str]:
    """Return the command line of an agent whose files lie below ``path``."""
    common = ["--coordinator", address, "--name", "a1", "--state", str(path / "a1")]
    common += ["--cache", str(path / "cache"), "--root", str(path), "--threads", "1", "--engine", ENGINE]
    return [sys.executable, "-m", "agent", "run", *common, *more]


@asynccontextmanager
async def a_process(path: Path, address: str, *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run an agent process with its log in ``a1.log``; it is killed at the end if it still lives."""
    with (path / "a1.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*arguments(path, address, *more), stderr=log, env=ENVIRONMENT)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run(body: Callable[[FakeCoordinator], Awaitable[None]]) -> None:
    """Run ``body`` with a listening coordinator in an event loop of its own."""

    async def scenario() -> None:
        async with FakeCoordinator() as coordinator:
            await asyncio.wait_for(body(coordinator), 90)

    asyncio.run(scenario())


async def working(coordinator: FakeCoordinator, process: asyncio.subprocess.Process) -> int:
    """Wait until the agent scores a shard; return its worker's pid."""
    await until(lambda: "scoring" in activities(coordinator)["a1"])
    (worker,) = children(process.pid)
    return worker


def command(*words: str, timeout: float = 30.0) -> subprocess.CompletedProcess[str]:
    """Run `eval-agent` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "agent", *words], capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT
    )


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mapped(pid: int) -> str:
    """Return the memory map of a process, with the libraries it has loaded."""
    return Path(f"/proc/{pid}/maps").read_text()


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error line of a command that logged nothing else, having checked that there is no traceback."""
    assert "Traceback" not in done.stderr
    (line,) = done.stderr.splitlines()
    return line


# ---------------------------------------------------------------- signals


def test_sigterm_drains(tmp_path: Path) -> None:
    """SIGTERM, to all processes as a service manager sends it, lets the running shard end; then exit code 0."""
    spec = fake_spec(shards=6, delay=0.8)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        async with a_process(tmp_path, coordinator.address) as process:
            worker = await working(coordinator, process)
            os.kill(worker, signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            code = await process.wait()

        assert 0 == code
        assert ["a1"] == coordinator.left
        assert [0] == list(job.partials)
        assert not job.failures
        assert not alive(worker)
        assert [] == list((tmp_path / "a1" / "spool").iterdir())

    run(body)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """SIGTERM twice does not wait for the shard, and leaves no orphan."""
    spec = fake_spec(shards=2, delay=600.0)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.add_job("job", spec, reference_plan(spec))
        async with a_process(tmp_path, coordinator.address) as process:
            worker = await working(coordinator, process)
            process.send_signal(signal.SIGTERM)
            await until(lambda: any(request.draining for _, request in coordinator.renewals))
            process.send_signal(signal.SIGINT)
            code = await asyncio.wait_for(process.wait(), 5)
            await until(lambda: not alive(worker), 5)

        assert 130 == code

    run(body)


@pytest.mark.parametrize("fault", [{"delay": 600.0}, {"hang": "0"}])
def test_sigkill_leaves_no_orphan(tmp_path: Path, fault: dict[str, float | str]) -> None:
    """When the agent is killed its worker goes too, be it busy or hung."""
    spec = fake_spec(shards=2, **fault)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.add_job("job", spec, reference_plan(spec))
        async with a_process(tmp_path, coordinator.address) as process:
            worker = await working(coordinator, process)
            process.kill()
            await until(lambda: not alive(worker), 5)

    run(body)


def test_killed_agents_lose_nothing(tmp_path: Path) -> None:
    """An agent killed three times with unacknowledged results sends them in its next life; totals are exact."""
    spec = fake_spec(shards=40, delay=0.03)

    async def body(coordinator: FakeCoordinator) -> None:
        job = coordinator.add_job("job", spec, reference_plan(spec))
        for enough in (4, 12, 20):
            async with a_process(tmp_path, coordinator.address) as process:
                await until(lambda n=enough: len(job.partials) >= n)
                coordinator.hold_acks = True
                await until(lambda: any((tmp_path / "a1" / "spool").glob("*.json")))
                process.kill()
            coordinator.hold_acks = False
        async with a_process(tmp_path, coordinator.address):
            partials = await coordinator.completed("job")
            await until(lambda: not any((tmp_path / "a1" / "spool").iterdir()))

        assert reference_partials(spec) == partials
        assert 4 == len({request.incarnation for request in coordinator.registrations})

    run(body)


# ---------------------------------------------------------------- imports


def test_the_daemon_loads_no_torch_and_the_worker_no_grpc(tmp_path: Path) -> None:
    """At work, no library of torch is mapped into the daemon and none of grpc into the worker."""
    spec = fake_spec(shards=2, delay=600.0)

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.add_job("job", spec, reference_plan(spec))
        async with a_process(tmp_path, coordinator.address) as process:
            worker = await working(coordinator, process)
            daemon_maps = mapped(process.pid)
            worker_maps = mapped(worker)

        assert "cygrpc" in daemon_maps
        assert "torch" not in daemon_maps
        assert "cygrpc" not in worker_maps

    run(body)


def test_the_command_imports_nothing_heavy() -> None:
    """Importing the command brings in neither torch nor what comes with it."""
    heavy = ("torch", "transformers", "datasets", "tokenizers", "numpy", "eval_kernel.engine")
    code = f"import sys, agent.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)

    assert "[]\n" == done.stdout


# ---------------------------------------------------------------- exit codes


def test_an_unreachable_coordinator_is_one_line(tmp_path: Path) -> None:
    """With --give-up-after the exit code is 2 and the last line says who does not answer and what to do."""
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        arguments(tmp_path, address, "--give-up-after", "0.5"), capture_output=True, text=True, env=ENVIRONMENT
    )

    assert 2 == done.returncode
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"eval-agent: error: no coordinator answers at {address}")
    assert "eval-coordinator serve" in last


def test_a_refused_version_is_one_line(tmp_path: Path) -> None:
    """VERSION_REFUSED ends the process with the coordinator's words and exit code 2."""

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.refuse_versions = True
        async with a_process(tmp_path, coordinator.address) as process:
            code = await process.wait()

        assert 2 == code
        expected = "eval-agent: error: this coordinator speaks protocol 7 to 9; install a newer agent\n"
        assert expected == (tmp_path / "a1.log").read_text()

    run(body)


def test_a_locked_state_directory_is_one_line(tmp_path: Path) -> None:
    """A second agent on one state directory exits with 41 and names the first one's pid."""

    async def body(coordinator: FakeCoordinator) -> None:
        async with a_process(tmp_path, coordinator.address) as process:
            await until(lambda: coordinator.registrations)
            second = await asyncio.to_thread(
                subprocess.run,
                arguments(tmp_path, coordinator.address),
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
            )

        assert 41 == second.returncode
        assert f"pid {process.pid}" in only_line(second)

    run(body)


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--coordinator", "nonsense"], 2, "is not HOST:PORT"),
        (["--coordinator", "192.0.2.1:50051"], 2, "is not a loopback address"),
        (["--coordinator", "127.0.0.1:0"], 2, "is outside 1 to 65535"),
        (["--name", "two words"], 2, "the name 'two words' is not allowed"),
        (["--device", "abacus"], 2, "allowed: auto, cpu"),
        (["--threads", "0"], 2, "threads is 0; allowed: 1 to 4096"),
        (["--hang-seconds", "-1"], 2, "hang-seconds is -1.0"),
        (["--engine", "nothing"], 2, "is not MODULE:CLASS"),
        (["--state", "/dev/null"], 2, "is a file"),
        (["--state", "/dev/null/below"], 45, "name another one with --state"),
    ],
)
def test_wrong_options_are_one_line(options: list[str], code: int, text: str) -> None:
    """Each wrong option has its line and exit code, and nothing is started."""
    done = command("run", *options)

    assert code == done.returncode
    assert only_line(done).startswith("eval-agent: error: ")
    assert text in done.stderr


# ---------------------------------------------------------------- probe and check


def test_probe_prints_json(tmp_path: Path) -> None:
    """The probe's JSON has the machine's facts and the engine's."""
    done = command("probe", "--json", "--cache", str(tmp_path), "--engine", ENGINE)
    facts = json.loads(done.stdout)

    assert 0 == done.returncode
    assert ["float32"] == facts["engine"]["dtypes"]
    assert facts["memory_total"] > facts["memory_available"] > 0
    assert "grpcio" in facts["libraries"]


def test_probe_fails_with_its_engine(tmp_path: Path) -> None:
    """A broken engine or a device that is not there: the facts are printed, then one line and its exit code."""
    broken = command("probe", "--json", "--cache", str(tmp_path), "--engine", "no_such:Engine")
    absent = command("probe", "--json", "--cache", str(tmp_path), "--engine", ENGINE, "--device", "cuda:7")

    assert 46 == broken.returncode
    assert "WORKER_UNUSABLE" == json.loads(broken.stdout)["engine"]["code"]
    assert "pip install" in broken.stderr.splitlines()[-1]
    assert 2 == absent.returncode
    assert "CONFIG_INVALID" == json.loads(absent.stdout)["engine"]["code"]
    assert absent.stderr.splitlines()[-1].startswith("eval-agent: error: --device cuda:7: ")


def test_an_absent_device_ends_the_agent_with_a_line_about_the_option(tmp_path: Path) -> None:
    """`run --device cuda:7` without CUDA is a wrong option, exit code 2, not a node that fails its shards."""

    async def body(coordinator: FakeCoordinator) -> None:
        async with a_process(tmp_path, coordinator.address, "--device", "cuda:7") as process:
            code = await process.wait()

        last = (tmp_path / "a1.log").read_text().splitlines()[-1]
        assert 2 == code
        assert last.startswith("eval-agent: error: --device cuda:7: ")

    run(body)


def test_a_stopped_agent_does_not_register_again(tmp_path: Path) -> None:
    """After the good-bye the last line is that it stopped, whatever was still being asked."""

    async def body(coordinator: FakeCoordinator) -> None:
        async with a_process(tmp_path, coordinator.address) as process:
            await until(lambda: len(coordinator.renewals) >= 3)
            process.send_signal(signal.SIGTERM)
            code = await process.wait()

        log = (tmp_path / "a1.log").read_text()
        assert 0 == code
        assert ["a1"] == coordinator.left
        assert "registering again" not in log
        assert "stopped" in log.splitlines()[-1]

    run(body)


def test_check_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    """With a coordinator and an engine every finding is good and without a remedy, and no node was registered."""

    async def body(coordinator: FakeCoordinator) -> None:
        words = ["--coordinator", coordinator.address, "--state", str(tmp_path / "s"), "--cache", str(tmp_path / "c")]
        done = await asyncio.to_thread(command, "check", "--json", *words, "--engine", ENGINE)
        result = json.loads(done.stdout)

        assert [] == [f for f in result["findings"] if not f["ok"] and f["name"] != "devices"]
        assert all(f["ok"] != ("remedy" in f) for f in result["findings"])
        assert [] == coordinator.registrations

    run(body)


def test_check_tells_a_version_from_a_missing_coordinator(tmp_path: Path) -> None:
    """A coordinator of another protocol is to be replaced, not to be started."""

    async def body(coordinator: FakeCoordinator) -> None:
        coordinator.refuse_versions = True
        words = ["--coordinator", coordinator.address, "--state", str(tmp_path / "s"), "--cache", str(tmp_path / "c")]
        done = await asyncio.to_thread(command, "check", "--json", *words, "--engine", ENGINE)
        (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["name"] == "coordinator"]

        assert 1 == done.returncode
        assert "speaks protocol 7 to 9, this agent 1 to 1" in finding["detail"]
        assert "install the same version of fedeval on both sides" == finding["remedy"]

    run(body)


def test_check_names_each_failure_with_a_remedy(tmp_path: Path) -> None:
    """Without a coordinator, engine or directory the exit code is 1 and each failing line has a remedy."""
    (tmp_path / "file").write_text("")
    words = ["--coordinator", f"127.0.0.1:{free_port()}", "--state", str(tmp_path / "file" / "below")]
    words += ["--cache", str(tmp_path / "c"), "--root", str(tmp_path / "nowhere"), "--engine", "no_such:Engine"]
    done = command("check", *words)
    lines = done.stdout.splitlines()
    failing = [line.split()[1] for line in lines if line.startswith("FAIL")]

    assert 1 == done.returncode
    assert ["state", "roots", "coordinator", "engine"] == [name for name in failing if name != "devices"]
    assert len(failing) == sum("remedy: " in line for line in lines)
    assert "Traceback" not in done.stdout
