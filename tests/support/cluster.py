"""A coordinator and agents as real processes, to be killed and restarted; leaving it proves that none is left."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.client import Client
from coordinator.fleet import Process
from coordinator.serve import ADDRESS_FILE
from coordinator.status import JobStatus
from eval_kernel.spec import JobSpec
from tests.support.processes import alive, until

ROOT = Path(__file__).resolve().parents[2]
COORDINATOR = ("-m", "coordinator")
ENGINE = "tests.support.fake_engine:FakeEngine"
#: Environment variable that marks every process of a cluster, whoever started it.
MARK = "FEDEVAL_TEST_CLUSTER"
#: Seconds a process gets to end by itself once it should.
PATIENCE = 20.0


def marked(mark: str) -> dict[int, str]:
    """Return the living processes whose environment has this mark, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if alive(int(entry.name)):
                    found[int(entry.name)] = command
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended, or is somebody else's
    return found


class Cluster:
    """Use it as ``async with Cluster(tmp_path) as cluster``.

    Heartbeats and leases are short, so that what a killed agent held is given to others within two seconds.
    """

    def __init__(
        self,
        directory: Path,
        *,
        heartbeat: float = 0.2,
        lease: float = 1.5,
        coordinator: Sequence[str] = COORDINATOR,
        serve: Sequence[str] = (),
    ) -> None:
        """``coordinator``: what Python is told to run before ``serve``; ``serve``: more options of that command."""
        self.directory = directory
        self._coordinator = coordinator
        self.address = "127.0.0.1:0"
        self.coordinator: Process | None = None
        self.agents: dict[str, Process] = {}
        self.before_coordinator: Sequence[str] = ()
        self._mark = uuid.uuid4().hex
        self._serve = ["--heartbeat", str(heartbeat), "--lease", str(lease), *serve]
        self._all: list[Process] = []

    async def __aenter__(self) -> Cluster:
        await self.start_coordinator()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        try:
            for process in reversed(self._all):
                process.terminate()
            deadline = time.monotonic() + PATIENCE
            while self.marked() and time.monotonic() < deadline:
                for process in self._all:
                    process.wait(0)
                await asyncio.sleep(0.05)
            orphans = self.marked()
        finally:
            for process in self._all:
                process.end_group()
        if kind is None:
            assert {} == orphans, f"processes outlived the cluster:\n{orphans}\n{self.logs()}"

    # ------------------------------------------------------------ processes

    @property
    def data(self) -> Path:
        return self.directory / "coordinator"

    @property
    def standby_data(self) -> Path:
        return self.directory / "standby"

    async def start_coordinator(self) -> None:
        """Start the coordinator, at the same address as before, and wait until it listens."""
        file = self.data / ADDRESS_FILE
        file.unlink(missing_ok=True)
        command = [*self._coordinator, "serve", "--listen", self.address, "--data-dir", str(self.data), *self._serve]
        process = self.coordinator = self._start("coordinator", command, self.before_coordinator)
        await until(lambda: file.exists() or process.code is not None, 30)
        assert process.code is None, f"the coordinator ended with {process.code}: {process.last_line()}"
        self.address = file.read_text().strip()

    def start_standby(self, name: str = "standby") -> Process:
        """Start another coordinator for the same address, with a directory of its own; it waits until it leads."""
        command = [*self._coordinator, "serve", "--listen", self.address, "--data-dir", str(self.directory / name)]
        return self._start(name, [*command, *self._serve])

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.kill()

    def start_agent(self, name: str, *options: str, address: str | None = None, before: Sequence[str] = ()) -> Process:
        """Start an agent, or start it again: its state directory stays. ``address``: of a proxy, say.

        ``before``: a command that runs the agent's, with something changed.
        """
        command = ["-m", "agent", "run", "--coordinator", address or self.address, "--name", name, "--engine", ENGINE]
        command += ["--state", str(self.directory / name), "--cache", str(self.directory / "cache"), "--threads", "1"]
        process = self.agents[name] = self._start(name, [*command, *options], before)
        return process

    def kill_agent(self, name: str) -> None:
        """Kill the daemon alone: its worker must end by itself."""
        self.agents.pop(name).kill()

    def marked(self) -> dict[int, str]:
        """Return the living processes of this cluster, workers included, with their command lines."""
        return marked(self._mark)

    def logs(self) -> str:
        """Return the end of every process's log, for the message of a failing test."""
        parts = []
        for log in sorted(self.directory.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {log.name}", *lines]))
        return "\n".join(parts)

    def _start(self, name: str, arguments: list[str], before: Sequence[str] = ()) -> Process:
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, MARK: self._mark, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = Process(name, [*before, sys.executable, *arguments], self.directory / f"{name}.log", environment)
        self._all.append(process)
        return process

    # ------------------------------------------------------------ jobs

    async def submit(self, spec: JobSpec) -> str:
        async with Client(self.address) as client:
            return (await client.submit(spec)).status.job

    async def done(self, job: str) -> int:
        """Return how many shards of a job are done."""
        return (await self.status(job)).shards_done

    async def status(self, job: str) -> JobStatus:
        async with Client(self.address) as client:
            return await client.job(job)

    async def reach(self, job: str, shards: int, seconds: float = 60.0) -> None:
        """Wait until so many shards are done."""
        async with Client(self.address) as client:
            async with asyncio.timeout(seconds):
                async for status in client.watch(job):
                    if status.shards_done >= shards or status.state.settled:
                        return

    async def report(self, job: str, seconds: float = 120.0) -> dict[str, Any]:
        """Wait until a job is settled and return its report."""
        async with Client(self.address) as client:
            try:
                async with asyncio.timeout(seconds):
                    status = await client.settled(job)
            except TimeoutError:
                status = await client.job(job)
                raise AssertionError(f"not settled after {seconds} s: {status}\n{self.logs()}") from None
            return await client.report(status.job)
