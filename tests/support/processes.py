"""Waiting for processes and conditions, with a deadline instead of a sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


async def until(condition: Callable[[], object], seconds: float = 20.0, every: float = 0.005) -> None:
    """Return as soon as ``condition()`` is true, looked at ``every`` so many seconds; else raise ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {condition}")
        await asyncio.sleep(every)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted({int(child) for task in tasks for child in task.read_text().split()})
