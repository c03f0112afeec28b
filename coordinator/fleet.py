"""Child processes of a command, each with its log file and its own process group; none outlives the command."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from eval_kernel.errors import DirectoryUnusable

#: Seconds a process gets to end after SIGTERM before its whole group is killed.
PATIENCE = 8.0


class Process:
    """One child process, leader of its group."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None) -> None:
        """Start it; everything it prints goes to ``log``."""
        self.name = name
        self.log = log
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, which is its group's."""
        return self._child.pid

    @property
    def code(self) -> int | None:
        """Its exit code, ``None`` while it runs."""
        return self._child.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        if self.code is None:
            self._child.terminate()

    def kill(self) -> None:
        """Kill it alone, as a power cut would; what it had started is left to end by itself."""
        self._child.kill()
        self._child.wait()

    def wait(self, timeout: float) -> int | None:
        """Return its exit code, or ``None`` if it still runs after ``timeout`` seconds."""
        try:
            return self._child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end_group(self) -> None:
        """Kill whatever is left of its group, and reap it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left
            os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()

    def last_line(self) -> str:
        """Return the last line of its log that is not empty."""
        lines = [line for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"


class Fleet:
    """The processes of one run, in a directory made anew; leaving the context ends them all."""

    def __init__(self, directory: Path) -> None:
        """Nothing is touched before the context is entered."""
        self.directory = directory
        self._processes: list[Process] = []

    def __enter__(self) -> Fleet:
        """Make the directory anew. Raises ``DirectoryUnusable``."""
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.mkdir(parents=True)
        except OSError as error:
            raise DirectoryUnusable(
                f"cannot write to {self.directory} ({error.strerror}); name another --out"
            ) from None
        return self

    def __exit__(self, *exc: object) -> None:
        """End all that is left."""
        self.end()

    def end(self) -> None:
        """End all processes: newest first, politely, then by force."""
        for process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + PATIENCE
        for process in reversed(self._processes):
            process.wait(max(0.0, deadline - time.monotonic()))
            process.end_group()
        self._processes.clear()

    def start(self, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> Process:
        """Start a process whose log is ``name``.log."""
        process = Process(name, command, self.directory / f"{name}.log", environment)
        self._processes.append(process)
        return process

    def dead(self) -> list[Process]:
        """Return the processes that have ended, whoever ended them."""
        return [process for process in self._processes if process.code is not None]
