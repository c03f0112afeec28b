"""Supervises the worker process: starts it when there is work, notices its death or silence, ends it with its group.

One request at a time. Whatever happens to the worker becomes an error of the request that was running; the next
one gets a fresh process. Knows the worker's protocol and nothing of leases or networks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.config import AgentConfig
from agent.logs import Logger, WorkerLog
from agent.work import JobPlan, Work
from eval_kernel.errors import ConfigError, PrecisionUnsupported, WorkerCrashed, WorkerHung, WorkerUnusable, by_code
from eval_kernel.partial import Execution, Partial, ScoredShard
from eval_kernel.plan import ShardPlan

#: Longest line a worker may send: a partial with thousands of rows is far below.
MAX_LINE_BYTES = 16 << 20
#: A worker that was told to stop its work gets so long before it is killed.
CANCEL_SECONDS = 10.0
#: A hung worker gets so long to write where it hangs into the log.
DUMP_SECONDS = 0.5
#: Starts that may fail in a row, and the pause after the k-th crash: FIRST * 2^(k-1), at most LONGEST.
START_TRIES = 3
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 30.0


_Take = Callable[[dict[str, Any]], None]


class _Process:
    """One worker process with its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, log: WorkerLog) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._log = log
        self._copying = asyncio.create_task(self._copy_stderr())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def _copy_stderr(self) -> None:
        while data := await self._stderr.read(1 << 16):
            self._log.write(data)

    async def send(self, message: dict[str, Any]) -> None:
        """Write a line. A worker that is gone shows itself at the next ``receive``."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._stdin.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            await self._stdin.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, ``None`` at the end."""
        try:
            line = await self._stdout.readline()
        except ValueError:  # a line beyond the limit: the stream is lost
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and whatever it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS says EPERM of a zombie
            os.killpg(self._process.pid, number)

    async def end(self) -> str:
        """Make sure that it is gone, with its group, and return how it ended."""
        try:
            async with asyncio.timeout(1.0):
                await self._process.wait()
        except TimeoutError:
            pass  # its output ended but it has not: it is killed below
        finally:
            self.signal(signal.SIGKILL)
        code = await self._process.wait()
        self._stdin.close()
        with contextlib.suppress(TimeoutError):  # a process that left the group may still hold the pipe
            async with asyncio.timeout(1.0):
                await self._copying
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL (probably by the system, for want of memory)"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    async def kill(self) -> None:
        """End it at once."""
        self.signal(signal.SIGKILL)
        await self.end()


class Executor:
    """Runs work in a worker process. Call one method at a time, except ``cancel``."""

    def __init__(self, config: AgentConfig, worker_log: WorkerLog, log: Logger) -> None:
        """Start nothing yet."""
        self._config = config
        self._worker_log = worker_log
        self._log = log
        self._process: _Process | None = None
        self._id = 0
        self._running = False
        self._begun = False  # the worker has the running request
        self._cancelled = -1  # the request that was called off
        self._keep = False  # whether its model stays loaded
        self._crashes = 0  # in a row
        self.activity = "idle"  #: for people
        self.pack_problem = ""  #: why the pack of the last shard was no use; "" if it was, or there was none
        self.loaded_job = ""  #: the job whose model the worker has loaded, or ""

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, ``None`` while there is none."""
        return self._process.pid if self._process is not None and self._process.alive else None

    async def start(self) -> None:
        """Start the worker now rather than at the first request. Raises ``WorkerUnusable`` or the engine's refusal."""
        await self._ready()

    async def probe(self) -> dict[str, Any]:
        """Return what the engine says of this machine.

        Raises ``ConfigError`` for a device that is not there, ``WorkerUnusable`` or another ``FedevalError``.
        """
        try:
            message = await self._request({"op": "probe"}, "probing this machine")
        except PrecisionUnsupported as error:
            # No job asked for this device: the command line did.
            raise ConfigError(f"--device {self._config.device}: {error}") from None
        assert message is not None, "a probe is never called off"
        facts: dict[str, Any] = message["facts"]
        return facts

    async def run(self, work: Work, pack: Path | None = None) -> ScoredShard | JobPlan | None:
        """Do a piece of work; ``None`` when it was called off. Raises the ``FedevalError`` that it ended in.

        ``pack``: the shard's tokens, from another node. One that is no use costs time only (``pack_problem``).
        """
        self.pack_problem = ""
        if work.shard is None:
            return await self._plan(work)
        message = await self._request(
            {
                "op": "score",
                "job": work.job,
                "spec": work.spec_json,
                "manifest": work.manifest_json,
                "shard": work.shard.to_row(),
                **({} if pack is None else {"pack": str(pack)}),
            },
            f"scoring shard {work.shard.index} of job {work.job}",
        )
        if message is None:
            return None
        self.loaded_job = work.job
        self.pack_problem = message.get("pack_problem", "")
        return ScoredShard(Partial.from_json(message["partial"]), Execution.from_json(message["execution"]))

    async def pack(self, work: Work, ahead: int, directory: Path, made: Callable[[ShardPlan, str, int], None]) -> None:
        """Have a shard's pack made, and up to ``ahead`` that follow; ``made`` is called for each: shard, name, bytes.

        Raises as ``run``.
        """
        assert work.shard is not None, "only shards have packs"

        def take(message: dict[str, Any]) -> None:
            made(ShardPlan.from_row(message["row"]), message["name"], message["size"])

        request = {
            "op": "pack",
            "spec": work.spec_json,
            "manifest": work.manifest_json,
            "shard": work.shard.to_row(),
            "ahead": ahead,
            "directory": str(directory),
        }
        await self._request(request, f"packing shard {work.shard.index} of job {work.job}", take)

    async def cancel(self, patience: float = CANCEL_SECONDS, *, keep: bool = False) -> None:
        """Call the running request off: politely, and after ``patience`` seconds by killing the worker.

        ``keep``: the job goes on, so its model stays loaded.
        """
        if not self._running:
            return
        self._cancelled = called_off = self._id
        self._keep = keep
        process = self._process
        if process is None or not self._begun:
            return  # looked at before the request is sent

        def insist() -> None:
            if self._running and self._id == called_off:
                process.signal(signal.SIGKILL)

        await process.send({"op": "cancel", "id": called_off, "keep": keep})

        asyncio.get_running_loop().call_later(patience, insist)

    async def close(self) -> None:
        """End the worker."""
        await self._drop()

    def kill(self) -> None:
        """End the worker without waiting: for a process that is about to end itself."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    # ---------------------------------------------------------------- requests

    async def _plan(self, work: Work) -> JobPlan | None:
        shards: list[ShardPlan] = []

        def take(message: dict[str, Any]) -> None:
            shards.extend(ShardPlan.from_row(row) for row in message["rows"])

        request = {"op": "plan", "job": work.job, "spec": work.spec_json}
        message = await self._request(request, f"planning job {work.job}", take)
        if message is None:
            return None
        manifest_json = json.dumps(message["manifest"], sort_keys=True, separators=(",", ":"))
        return JobPlan(manifest_json, tuple(shards))

    async def _request(self, request: dict[str, Any], doing: str, take: _Take | None = None) -> dict[str, Any] | None:
        """Send a request and return its last message; ``None`` when it was called off."""
        self._id += 1
        self._running, self._begun = True, False
        try:
            for last_try in (False, True):
                process = await self._ready()
                self.activity = doing
                if self._cancelled == self._id:
                    return None
                await process.send({**request, "id": self._id})
                message = await self._answer(process, doing, take)
                if message is not None:
                    return self._outcome(message)
                how = await self._drop()
                if self._cancelled == self._id:
                    return None
                if not self._begun and not last_try:
                    continue  # it died of something else before this request came: not the request's fault
                self._crashes += 1
                self._log.warning("the worker died", how=how, doing=doing, last_lines=self._worker_log.tail())
                where = f"; see {self._worker_log.path}" if self._worker_log.path else ""
                raise WorkerCrashed(f"the worker {how} while {doing}{where}")
            raise AssertionError("not reached")
        finally:
            self._running = self._begun = False
            self.activity = "idle"

    async def _answer(self, process: _Process, doing: str, take: _Take | None) -> dict[str, Any] | None:
        """Read up to a request's last message and return it; ``None``: the worker died."""
        while (message := await self._receive(process, doing)) is not None:
            match message["event"]:
                case "begun":
                    self._begun = True
                    if self._cancelled == self._id:
                        await process.send({"op": "cancel", "id": self._id})
                case "progress":
                    self.activity = message["text"]
                case "rows" | "made" if take is not None:
                    take(message)
                case "beat":
                    pass
                case _:
                    if message.get("fatal"):
                        await self._drop()
                    return message
        return None

    def _outcome(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Return a last message that is good, ``None`` for a cancelled one; raise what a failed one names."""
        self._crashes = 0
        match message["event"]:
            case "cancelled":
                if not self._keep:
                    self.loaded_job = ""
                return None
            case "failed":
                raise by_code(message["code"])(message["message"])
            case _:
                return message

    async def _receive(self, process: _Process, doing: str) -> dict[str, Any] | None:
        """Return the next message; a silent worker is killed. Raises ``WorkerHung``."""
        silence = self._config.hang_seconds
        try:
            async with asyncio.timeout(silence):
                return await process.receive()
        except TimeoutError:
            process.signal(signal.SIGUSR1)
            await asyncio.sleep(DUMP_SECONDS)
            process.signal(signal.SIGKILL)
            await self._drop()
            self._crashes += 1
            self._log.warning("the worker hung", doing=doing, last_lines=self._worker_log.tail())
            raise WorkerHung(f"the worker showed no progress for {silence:g} s while {doing}; it was killed") from None

    # ---------------------------------------------------------------- the process

    async def _ready(self) -> _Process:
        """Return a worker that waits for a request. Raises ``WorkerUnusable`` or what the engine refused with."""
        if self._process is not None and self._process.alive:
            return self._process
        how = ""
        for _ in range(START_TRIES):
            await self._drop()
            if self._crashes:
                pause = min(FIRST_PAUSE_SECONDS * 2 ** (self._crashes - 1), LONGEST_PAUSE_SECONDS)
                self.activity = f"waiting {pause:g} s before the worker is started again"
                await asyncio.sleep(pause)
            self.activity = "starting the worker"
            process = self._process = await self._spawn()
            message = await self._receive(process, "starting")
            if message is not None and message["event"] == "ready":
                return process
            how = await self._drop()
            if message is not None:
                raise by_code(message["code"])(message["message"])
            self._crashes += 1
            self._log.warning("the worker did not start", how=how, last_lines=self._worker_log.tail())
        raise WorkerUnusable(
            f"the worker {how} each of {START_TRIES} times before it was ready; "
            f"`eval-agent check` says what this machine lacks"
        )

    async def _drop(self) -> str:
        """End the process, if there is one, and return how it ended."""
        process, self._process = self._process, None
        self.loaded_job = ""
        if process is None:
            return "ended"
        if not self._running:
            process.signal(signal.SIGKILL)  # nobody waits for what it might still say
        return await process.end()

    async def _spawn(self) -> _Process:
        config = self._config
        options = {
            "cache": str(config.cache),
            "roots": [str(root) for root in config.roots],
            "device": config.device,
            "threads": config.threads,
        }
        if config.ranks > 1:
            options |= {"ranks": config.ranks, "watchdog": config.watchdog_seconds}
        command = [sys.executable, "-P", "-m", "agent.worker", "--engine", config.worker_engine]
        command += ["--parent", str(os.getpid()), "--options", json.dumps(options)]
        # -P keeps the working directory, which may hold a datasets/ or a tokenizers.py, out of the worker's path;
        # what this process imports from, the worker does too.
        paths = os.pathsep.join(path for path in sys.path if path)
        # Nobody watches a worker: progress bars would only fill its log.
        environment = {"TQDM_DISABLE": "1", **os.environ, "PYTHONPATH": paths}
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=MAX_LINE_BYTES,
                env=environment,
            )
        except OSError as error:
            raise WorkerUnusable(
                f"the worker process cannot be started ({error.strerror}); free memory or raise the process limit"
            ) from None
        return _Process(process, self._worker_log)
