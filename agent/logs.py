"""Where the agent writes: structured logs to the standard error, and the worker's output to a rotating file."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import structlog

#: A worker's log is set aside at this size; one older file is kept.
WORKER_LOG_BYTES = 1 << 20
#: Lines of a worker's output that are shown when it dies.
TAIL_LINES = 12

Logger = structlog.typing.FilteringBoundLogger


def make_logger(*, as_json: bool, stream: TextIO | None = None) -> Logger:
    """Return a logger that writes to ``stream`` (the standard error): for people on a terminal, or JSON lines."""
    out = sys.stderr if stream is None else stream
    renderer: Any
    if as_json:
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=0, sort_keys=False)
    logger: Logger = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger("info"),
        context_class=dict,
        cache_logger_on_first_use=False,
    )
    return logger


class WorkerLog:
    """The workers' standard error: in a file that does not grow without end, its last lines in memory.

    Raises nothing: a full disk must not stop a worker. ``path`` is ``None`` to keep the last lines only.
    """

    def __init__(self, path: Path | None) -> None:
        """Open nothing yet."""
        self.path = path
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""

    def write(self, data: bytes) -> None:
        """Append what a worker wrote."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4096:]
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)  # what a terminal would still show
        self._tail.extend(line.decode("utf-8", "replace")[:500] for line in shown if line.strip())
        if self.path is None:
            return
        try:
            if self.path.exists() and self.path.stat().st_size + len(data) > WORKER_LOG_BYTES:
                self.path.replace(self.path.with_suffix(".log.1"))
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            self._tail.append(f"({self.path} cannot be written: {error.strerror})")

    def tail(self) -> list[str]:
        """Return the last lines."""
        last = self._rest.decode("utf-8", "replace")
        return [*self._tail, last[:500]] if last.strip() else list(self._tail)
