"""The engine of a node with several ranks: this process is rank 0, starts the others, and ends them all together.

To the worker that drives it, it is one engine. A rank that dies, fails, or is silent for longer than the watchdog
dissolves the group: the others are killed, so that nobody waits for a collective, and the shard fails with
``RankLost``. The worker then ends, and the next one forms a new group. What a rank does is ``rankengine``'s business.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from eval_kernel import engine as single
from eval_kernel.engine import Note
from eval_kernel.errors import ConfigError, FedevalError, RankLost, by_code
from eval_kernel.model import choose_device
from eval_kernel.parallel.helper import PULSE_SECONDS
from eval_kernel.parallel.rankengine import RankEngine
from eval_kernel.parallel.ranks import JOIN_SECONDS, Ranks
from eval_kernel.partial import ScoredShard
from eval_kernel.plan import Manifest, Plan, ShardPlan
from eval_kernel.roots import Roots
from eval_kernel.spec import JobSpec

#: After the ranks were killed, rank 0 gets so long to come back from what it waits for.
GRACE_SECONDS = 5.0
#: A collective waits longer than a silent rank lives, so that the watchdog is who says what happened.
COLLECTIVE_FACTOR = 60.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """As the engine's of one rank; ``watchdog``: seconds of silence after which a rank counts as lost."""

    cache: Path
    roots: Roots = None
    device: str = "auto"
    threads: int | None = None
    ranks: int = 1
    watchdog: float = 10.0


class GroupEngine:
    """Plans alone, and scores with all ranks."""

    def __init__(self, config: EngineConfig) -> None:
        """Check the devices; the other ranks start with the first job."""
        device = choose_device(config.device)
        if device.type == "cuda" and config.ranks > torch.cuda.device_count():
            raise ConfigError(
                f"{config.ranks} ranks need as many GPUs, and this node has {torch.cuda.device_count()}; lower --ranks"
            )
        cores = config.threads or torch.get_num_threads()
        self.config = config
        self._device = f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu"
        self._threads = max(1, cores // config.ranks) if device.type == "cpu" else cores
        self._alone = single.Engine(
            single.EngineConfig(config.cache, config.roots, config.device, config.threads)
        )  # plans, and says what this machine is
        self.formed: Group | None = None  #: the ranks, while there are any

    def probe(self) -> dict[str, Any]:
        """As the engine's of one rank, and the number of ranks."""
        return {**self._alone.probe(), "ranks": self.config.ranks, "packs": False}

    def plan(self, spec: JobSpec, note: Note) -> Plan:
        """As the engine's of one rank."""
        return self._alone.plan(spec, note)

    def open(self, spec: JobSpec, manifest: Manifest, note: Note) -> GroupEvaluation:
        """Form the group if there is none, and open the job on all ranks."""
        if self.formed is None or self.formed.lost is not None:
            note(f"starting {self.config.ranks} ranks")
            self.formed = Group(self.config, self._device, self._threads, note)
        group = self.formed
        try:
            return group.open(spec, manifest, note)
        except BaseException:
            self.formed = None
            raise

    def close(self) -> None:
        """End the other ranks."""
        if self.formed is not None:
            self.formed.dissolve()
            self.formed = None


class Group:
    """The ranks of this node. All are of this process's process group."""

    def __init__(self, config: EngineConfig, device: str, threads: int, note: Note) -> None:
        """Start the ranks and meet them. Raises ``RankLost``."""
        self.lost: FedevalError | None = None
        self._config, self._closing = config, False
        self._busy = threading.Event()
        torch.set_num_threads(threads)
        here = choose_device(device)
        self._ranks = Ranks(0, config.ranks, here, config.watchdog * COLLECTIVE_FACTOR)
        self._engine = RankEngine(single.EngineConfig(config.cache, config.roots, device, threads), self._ranks)
        self.helpers = [self._start(rank, device, threads) for rank in range(1, config.ranks)]
        self._ready: set[int] = set()
        self._opened: set[int] = set()
        self._changed = threading.Condition()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._watcher.start()
        with self._guarded():
            self._ranks.join()
            self._await(self._ready, note)

    def open(self, spec: JobSpec, manifest: Manifest, note: Note) -> GroupEvaluation:
        """Open a job on all ranks. Raises what the first rank to fail did; the group is then gone."""
        self._opened.clear()
        with self._guarded():
            text = json.dumps(manifest.to_json())
            self._tell(op="open", spec=spec.canonical(), manifest=text)
            evaluation = self._engine.open(spec, manifest, self._watched(note))
            self._await(self._opened, note)
        return GroupEvaluation(self, evaluation)

    def score(self, evaluation: Any, shard: ShardPlan, beat: Callable[[], None]) -> ScoredShard:
        """Score a shard with all ranks."""
        with self._guarded():
            self._tell(op="score", shard=shard.to_row())

            def watched() -> None:
                self._check()
                beat()

            scored: ScoredShard = evaluation.score(shard, watched)
        software = {**scored.execution.software, "ranks": str(self._config.ranks)}
        return ScoredShard(scored.partial, replace(scored.execution, software=software))

    def dissolve(self) -> None:
        """End all other ranks and reap them; leave the group."""
        self._closing = True
        for helper in self.helpers:
            helper.kill()
        self._watcher.join()
        for helper in self.helpers:
            helper.wait()
            for pipe in (helper.stdin, helper.stdout):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(RuntimeError):  # a broken group cannot be left in order
            self._ranks.leave()

    # ---------------------------------------------------------------- inside

    def _start(self, rank: int, device: str, threads: int) -> subprocess.Popen[bytes]:
        config = self._config
        options = {
            "cache": str(config.cache),
            "roots": None if config.roots is None else [str(root) for root in config.roots],
            "device": f"cuda:{rank}" if device.startswith("cuda") else "cpu",
            "threads": threads,
            "world": config.ranks,
            "port": self._ranks.port,
            "timeout": config.watchdog * COLLECTIVE_FACTOR,
            "watchdog": config.watchdog,
        }
        command = [sys.executable, "-P", "-m", "eval_kernel.parallel.helper", "--rank", str(rank)]
        command += ["--parent", str(os.getpid()), "--options", json.dumps(options)]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0)

    def _watched(self, note: Note) -> Note:
        def check_and_note(text: str) -> None:
            self._check()
            note(text)

        return check_and_note

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        """Whatever ends work in the group ends the group; what a rank failed with is the reason."""
        self._busy.set()
        try:
            yield
        except BaseException as error:
            # A peer's death and its message may race: the watchdog gets a moment to say who was first.
            if isinstance(error, Exception) and self.lost is None:
                with self._changed:
                    self._changed.wait_for(lambda: self.lost is not None, 2 * PULSE_SECONDS)
            lost = self.lost
            self._busy.clear()
            self.lost = lost or RankLost("the group was dissolved")
            self.dissolve()
            if lost is not None and isinstance(error, Exception):
                raise lost from None
            raise
        self._busy.clear()

    def _tell(self, **command: Any) -> None:
        for helper in self.helpers:
            _write(helper, command)

    def _await(self, known: set[int], note: Note) -> None:
        """Wait until every rank is in a set."""
        with self._changed:
            while len(known) < len(self.helpers):
                self._check()
                self._changed.wait(PULSE_SECONDS)

    def _watch(self) -> None:
        """Hear the ranks, and let them hear this one; end the group when one is lost."""
        started = time.monotonic()
        heard = dict.fromkeys(range(len(self.helpers)), started + JOIN_SECONDS)
        rests = dict.fromkeys(heard, b"")
        with selectors.DefaultSelector() as selector:
            for index, helper in enumerate(self.helpers):
                assert helper.stdout is not None
                selector.register(helper.stdout, selectors.EVENT_READ, index)
            pulsed = 0.0
            while not self._closing and self.lost is None:
                for key, _ in selector.select(PULSE_SECONDS / 2):
                    index = key.data
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        self._lose(RankLost(f"rank {index + 1} ended while the group worked"))
                        return
                    *lines, rests[index] = (rests[index] + data).split(b"\n")
                    for line in lines:
                        self._hear(index, json.loads(line))
                    if index in self._ready:
                        heard[index] = time.monotonic()
                now = time.monotonic()
                if now - pulsed >= PULSE_SECONDS:
                    pulsed = now
                    self._tell(op="pulse")
                for index, last in heard.items():
                    if now - last > self._config.watchdog:
                        self._lose(RankLost(f"rank {index + 1} gave no sign of life for {now - last:.0f} s"))
                        return

    def _hear(self, index: int, message: dict[str, Any]) -> None:
        if message["event"] == "failed":
            self._lose(by_code(message["code"])(message["message"]))
            return
        known = {"ready": self._ready, "opened": self._opened}.get(message["event"])
        if known is not None:
            with self._changed:
                known.add(index)
                self._changed.notify_all()

    def _lose(self, error: FedevalError) -> None:
        """Note why, and kill the other ranks: then no collective waits for them."""
        if self._closing or self.lost is not None:
            return
        with self._changed:
            self.lost = error
            self._changed.notify_all()
        for helper in self.helpers:
            helper.kill()
        deadline = time.monotonic() + GRACE_SECONDS
        while self._busy.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._busy.is_set():
            # It waits in a library that does not notice: the end of this process is noticed by all.
            sys.stderr.write(f"the group is ended: {error}\n")
            sys.stderr.flush()
            os._exit(1)


class GroupEvaluation:
    """A job that is open on all ranks."""

    def __init__(self, group: Group, evaluation: Any) -> None:
        self._group, self._evaluation = group, evaluation

    @property
    def broken(self) -> bool:
        """Whether the group is gone, so that the job must be opened anew."""
        return self._group.lost is not None

    def score(self, shard: ShardPlan, beat: Callable[[], None]) -> ScoredShard:
        """As ``Evaluation.score``, on all ranks. Raises ``RankLost`` too."""
        return self._group.score(self._evaluation, shard, beat)

    def close(self) -> None:
        """As ``Evaluation.close``; the group stays for the next job."""
        self._evaluation.close()


def _write(helper: subprocess.Popen[bytes], command: dict[str, Any]) -> None:
    """Write a line; a rank that is gone shows itself to the watchdog."""
    assert helper.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        helper.stdin.write(json.dumps(command).encode() + b"\n")
