"""Processes of a fleet end with it, whatever they are doing."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from coordinator.fleet import Fleet
from eval_kernel.errors import DirectoryUnusable
from tests.support.processes import alive, until

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
PARENT = (
    f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]).pid, flush=True); {SLEEPS}"
)


def test_leaving_ends_every_process_and_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that obeys, one that ignores SIGTERM, and the child of one that was killed: all are gone."""
    monkeypatch.setattr("coordinator.fleet.PATIENCE", 0.5)
    with Fleet(tmp_path / "fleet") as fleet:
        polite, stubborn, parent = (
            fleet.start(name, [sys.executable, "-c", code])
            for name, code in (("polite", SLEEPS), ("stubborn", STUBBORN), ("parent", PARENT))
        )
        asyncio.run(until(lambda: all(p.last_line() == "up" for p in (polite, stubborn, parent))))
        child = int(parent.log.read_text().split()[0])
        parent.kill()

        assert [parent] == fleet.dead()
        assert alive(child)

    assert not any(alive(pid) for pid in (polite.pid, stubborn.pid, parent.pid, child))
    assert (-15, -9) == (polite.code, stubborn.code)


def test_a_fleet_ends_when_its_command_fails(tmp_path: Path) -> None:
    """An exception in the middle leaves no process behind."""
    pids: list[int] = []

    def command() -> None:
        with Fleet(tmp_path / "fleet") as fleet:
            pids.append(fleet.start("one", [sys.executable, "-c", SLEEPS]).pid)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        command()

    assert not alive(pids[0])


def test_a_directory_that_cannot_be_made_is_one_error(tmp_path: Path) -> None:
    """DirectoryUnusable names the option to use."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DirectoryUnusable, match="--out"), Fleet(file / "below"):
        pass
