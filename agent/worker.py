"""The child process that owns the devices: takes one request at a time over a pipe, answers with JSON lines.

Knows the engine by name only; never imports grpc. Requests come on the standard input, answers go to a private
copy of the standard output, and whatever a library prints goes to the standard error. It dies with its parent.

Requests: ``{"op": "probe" | "plan" | "score" | "pack" | "cancel", "id": n, ...}``. Each is answered by ``begun``, any
number of ``progress``, ``beat``, ``rows`` and ``made``, and one of ``probed``, ``planned``, ``scored``, ``packed``,
``failed``, ``cancelled``. Before the first, ``ready`` or ``unusable``.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import queue
import signal
import threading
import time
import traceback
from pathlib import Path
from typing import IO, Any

from agent.work import INSTALL
from eval_kernel.errors import DataChanged, FedevalError, OutOfMemory, RankLost, ShardError, WorkerUnusable
from eval_kernel.lifetime import die_with_parent
from eval_kernel.plan import Manifest, ShardPlan
from eval_kernel.spec import JobSpec

#: Rows of a shard table in one line, so that no line grows with the job.
ROWS_PER_LINE = 2000
#: Beats come for every batch; the parent needs to hear one now and then.
BEAT_SECONDS = 0.2


class _Cancelled(BaseException):
    """The parent called the request off. Not an ``Exception``, so that no engine's handler takes it for its own."""


class Pipe:
    """The protocol's two ends, taken from the standard streams so that nothing else can write or read there."""

    def __init__(self) -> None:
        """Move the protocol to private descriptors; the standard output becomes the standard error."""
        self._out = os.dup(1)
        os.dup2(2, 1)
        self.requests: IO[bytes] = os.fdopen(os.dup(0), "rb")
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Write one line; safe from any thread."""
        line = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]


class Requests:
    """Reads requests in a thread of its own, so that a cancel, or the parent's death, is noticed at any time."""

    def __init__(self, pipe: Pipe) -> None:
        """Start reading."""
        self._pipe = pipe
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled = -1
        self.keep = False  #: whether what was called off leaves the model loaded
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Wait for the next request."""
        return self._queue.get()

    def check(self, request: int) -> None:
        """Raise ``_Cancelled`` if this request was called off."""
        if self._cancelled == request:
            raise _Cancelled

    def _read(self) -> None:
        for line in self._pipe.requests:
            message = json.loads(line)
            if message["op"] == "cancel":
                self.keep = message.get("keep", False)
                self._cancelled = message["id"]
            else:
                self._queue.put(message)
        end_group()


def end_group() -> None:
    """End this process and, where it leads a group of its own, the processes that libraries started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


class Server:
    """Answers requests with one engine, and keeps the last job's evaluation open for the shards to come."""

    def __init__(self, pipe: Pipe, requests: Requests, engine: Any) -> None:
        """``engine`` has ``probe``, ``plan`` and ``open``, or ``pack``."""
        self._pipe = pipe
        self._requests = requests
        self._engine = engine
        self._job: tuple[str, str] | None = None  # job id and manifest of the open evaluation
        self._evaluation: Any = None
        self._textless = False  # whether the open evaluation scores packs only
        self._id = 0
        self._last_beat = 0.0

    def serve(self) -> None:
        """Answer requests until the input ends, or an error leaves the process in doubt."""
        while True:
            request = self._requests.next()
            self._id = request["id"]
            self._send("begun")
            try:
                self._requests.check(self._id)
                getattr(self, "_" + request["op"])(request)
            except _Cancelled:
                if not self._requests.keep:
                    self._close()
                self._send("cancelled")
            except FedevalError as error:
                if isinstance(error, (OutOfMemory, RankLost)):
                    self._close()  # gives the memory back, or a broken group up
                self._fail(error)
            except Exception as error:  # noqa: BLE001 - whatever a library raises costs one try of one shard
                traceback.print_exc()
                line = f"{type(error).__name__}: {error}"
                if is_out_of_memory(error):
                    self._close()
                    self._fail(OutOfMemory(f"the device had no room ({line})"))
                else:
                    # A device may be left unusable by such an error: the next request gets a fresh process.
                    self._fail(ShardError(line), fatal=True)
                    return

    # ---------------------------------------------------------------- requests

    def _probe(self, request: dict[str, Any]) -> None:
        self._send("probed", facts=self._engine.probe())

    def _plan(self, request: dict[str, Any]) -> None:
        plan = self._engine.plan(JobSpec.from_canonical(request["spec"]), self._progress)
        for first in range(0, len(plan.shards), ROWS_PER_LINE):
            rows = [shard.to_row() for shard in plan.shards[first : first + ROWS_PER_LINE]]
            self._send("rows", rows=rows)
        self._send("planned", manifest=plan.manifest.to_json())

    def _score(self, request: dict[str, Any]) -> None:
        job = (request["job"], request["manifest"])
        shard = ShardPlan.from_row(request["shard"])
        pack, problem = self._pack_of(request.get("pack", ""), shard)
        packs = {} if pack is None else {"pack": pack}
        if self._job != job or (self._textless and not packs):
            self._close()
            manifest = Manifest.from_json(json.loads(request["manifest"]))
            spec = JobSpec.from_canonical(request["spec"])
            self._evaluation = self._engine.open(spec, manifest, self._progress, **({"packs": True} if packs else {}))
            self._job, self._textless = job, bool(packs)
        self._progress("scoring")
        scored = self._evaluation.score(shard, self._beat, **packs)
        partial, execution = scored.partial.to_json(), scored.execution.to_json()
        self._send("scored", partial=partial, execution=execution, pack_problem=problem)

    def _pack(self, request: dict[str, Any]) -> None:
        given = JobSpec.from_canonical(request["spec"]), Manifest.from_json(json.loads(request["manifest"]))
        shard, directory = ShardPlan.from_row(request["shard"]), Path(request["directory"])
        for made, name, size in self._engine.pack(*given, shard, request["ahead"], directory, self._progress):
            self._requests.check(self._id)
            self._send("made", row=made.to_row(), name=name, size=size)
        self._send("packed")

    # ---------------------------------------------------------------- inside

    def _pack_of(self, path: str, shard: ShardPlan) -> tuple[Any, str]:
        """Read a pack; ``None`` and why, if it is no use: the shard is then scored from this node's own text."""
        if not path:
            return None, ""
        pack = importlib.import_module("eval_kernel.pack")  # loads numpy, which not every engine needs
        try:
            return pack.Pack.decode(Path(path).read_bytes(), shard), ""
        except (OSError, DataChanged) as error:
            return None, str(error)

    def _close(self) -> None:
        evaluation, self._evaluation, self._job = self._evaluation, None, None
        if evaluation is not None:
            evaluation.close()

    def _progress(self, text: str) -> None:
        self._requests.check(self._id)
        self._send("progress", text=text)

    def _beat(self) -> None:
        self._requests.check(self._id)
        now = time.monotonic()
        if now - self._last_beat >= BEAT_SECONDS:
            self._last_beat = now
            self._send("beat")

    def _send(self, event: str, **fields: Any) -> None:
        self._pipe.send(event=event, id=self._id, **fields)

    def _fail(self, error: FedevalError, fatal: bool = False) -> None:
        self._send("failed", code=error.code, message=str(error), fatal=fatal)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, judged by name: this module does not import torch."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    return "RuntimeError" in names and any(
        sign in str(error) for sign in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def load_engine(name: str, options: dict[str, Any]) -> Any:
    """Import and build the engine ``MODULE:CLASS``. Raises ``WorkerUnusable`` where it cannot be imported."""
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
        config = module.EngineConfig(
            cache=Path(options["cache"]),
            roots=None if options["roots"] is None else tuple(Path(root) for root in options["roots"]),
            device=options["device"],
            threads=options["threads"],
            **{name: options[name] for name in ("ranks", "watchdog") if name in options},
        )
        return getattr(module, class_name)(config)
    except FedevalError:
        raise
    except Exception as error:  # noqa: BLE001 - a broken library may raise anything at import
        traceback.print_exc()
        raise WorkerUnusable(
            f"the engine {name} cannot start ({type(error).__name__}: {error}); install what agents need: {INSTALL}"
        ) from None


def main(arguments: list[str] | None = None) -> None:
    """Run the worker until its input ends."""
    parser = argparse.ArgumentParser(prog="python -m agent.worker", description=__doc__)
    parser.add_argument("--engine", required=True, help="MODULE:CLASS")
    parser.add_argument("--parent", type=int, required=True, help="pid of the agent")
    parser.add_argument("--options", type=json.loads, required=True, help="JSON: the engine's configuration")
    given = parser.parse_args(arguments)
    pipe = Pipe()
    die_with_parent(given.parent)
    # A service manager signals every process of a service; when to stop is the agent's to say.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    # The parent sends it before it ends a hung worker, so that the log says where it hung.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    requests = Requests(pipe)
    try:
        engine = load_engine(given.engine, given.options)
    except FedevalError as error:
        pipe.send(event="unusable", id=0, code=error.code, message=str(error))
        return
    pipe.send(event="ready", id=0)
    Server(pipe, requests, engine).serve()


if __name__ == "__main__":
    main()
