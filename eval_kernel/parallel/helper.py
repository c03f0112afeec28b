"""The process of a rank other than the first: does what rank 0 tells it over a pipe, and ends with it.

Commands and answers are JSON lines. Each side tells the other every second that it lives; who hears nothing for the
watchdog's time ends the group. Rank 0's side is ``group``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from eval_kernel.errors import FedevalError, ShardError, reason
from eval_kernel.lifetime import die_with_parent

#: Seconds between two signs of life.
PULSE_SECONDS = 1.0


class Pipe:
    """The two ends, taken from the standard streams so that no library can write there."""

    def __init__(self, watchdog: float) -> None:
        """Listen and pulse from now on."""
        self._out, self._in = os.dup(1), os.dup(0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._watchdog = watchdog
        self.commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        threading.Thread(target=self._pulse, name="pulse", daemon=True).start()

    def send(self, event: str, **fields: Any) -> None:
        """Write a line."""
        line = memoryview(json.dumps({"event": event, **fields}).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]

    def _pulse(self) -> None:
        while True:
            try:
                self.send("pulse")
            except OSError:
                os._exit(0)  # rank 0 is gone
            time.sleep(PULSE_SECONDS)

    def _listen(self) -> None:
        rest = b""
        while True:
            if not select.select([self._in], [], [], self._watchdog)[0]:
                # Rank 0 is there, but stopped or stuck: whoever waits for it learns of it by its death.
                sys.stderr.write(f"rank 0 was silent for {self._watchdog:g} s: the group is ended\n")
                sys.stderr.flush()
                if os.getpgrp() == os.getppid():
                    os.killpg(0, signal.SIGKILL)
                os.kill(os.getppid(), signal.SIGKILL)  # the other ranks are its children
            data = os.read(self._in, 1 << 16)
            if not data:
                os._exit(0)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if command["op"] != "pulse":
                    self.commands.put(command)


def serve(pipe: Pipe, rank: int, options: dict[str, Any]) -> None:
    """Join the group, then open jobs and score shards until told to end."""
    from eval_kernel.engine import EngineConfig
    from eval_kernel.model import choose_device
    from eval_kernel.parallel.rankengine import RankEngine
    from eval_kernel.parallel.ranks import Ranks
    from eval_kernel.plan import Manifest, ShardPlan
    from eval_kernel.spec import JobSpec

    roots = None if options["roots"] is None else tuple(Path(root) for root in options["roots"])
    device = options["device"]
    ranks = Ranks(rank, options["world"], choose_device(device), options["timeout"], options["port"])
    engine = RankEngine(EngineConfig(Path(options["cache"]), roots, device, options["threads"]), ranks)
    ranks.join()
    pipe.send("ready")
    evaluation: Any = None
    while True:
        command = pipe.commands.get()
        match command["op"]:
            case "open":
                spec = JobSpec.from_canonical(command["spec"])
                manifest = Manifest.from_json(json.loads(command["manifest"]))
                evaluation = engine.open(spec, manifest, lambda _: None)
                pipe.send("opened")
            case "score":
                evaluation.score(ShardPlan.from_row(command["shard"]), lambda: None)
            case _:
                return


def main() -> None:
    """Run the rank until it is told to end, or fails."""
    parser = argparse.ArgumentParser(prog="python -m eval_kernel.parallel.helper", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of rank 0")
    parser.add_argument("--options", type=json.loads, required=True)
    given = parser.parse_args()
    die_with_parent(given.parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # when to stop is rank 0's to say
    faulthandler.enable()
    pipe = Pipe(given.options["watchdog"])
    try:
        serve(pipe, given.rank, given.options)
    except FedevalError as error:
        pipe.send("failed", code=error.code, message=f"rank {given.rank}: {error}")
    except Exception as error:  # noqa: BLE001 - whatever a library raises is told to rank 0, which ends the group
        traceback.print_exc()
        pipe.send("failed", code=ShardError.code, message=f"rank {given.rank}: {reason(error)}")
    # Library threads may still wait for peers; what was to be said is said.
    os._exit(0)


if __name__ == "__main__":
    main()
