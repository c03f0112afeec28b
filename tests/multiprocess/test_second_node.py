"""From nothing to a second node over mutual TLS: one command on each side, real processes, two loopback addresses."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.client import Client
from coordinator.fleet import Process
from coordinator.status import JobState
from tests.support.cluster import ENGINE, ROOT
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.processes import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@contextmanager
def process(directory: Path, name: str, *arguments: str, home: Path | None = None) -> Iterator[Process]:
    """Run ``python -m ARGUMENTS``; ``home``: the state home of another user."""
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(home or os.environ["XDG_STATE_HOME"])}
    started = Process(name, [sys.executable, "-m", *arguments], directory / f"{name}.log", environment)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(10)
        started.end_group()


def said(running: Process, pattern: str) -> str:
    """Return what a process has said, "" if it has not."""
    found = re.search(pattern, running.log.read_text(errors="replace"))
    return found[1] if found else ""


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a user with another state home."""
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, timeout=60
    )


def test_two_commands_make_a_second_node_over_mutual_tls(tmp_path: Path) -> None:
    """`serve --invite` on one side, `run --join` on the other: a job runs there, exactly.

    The other side shares no file with the first. Started again, it needs the join string no more, and revoking ends it
    with an exit code of its own.
    """
    elsewhere = tmp_path / "elsewhere"
    serve = ["coordinator", "serve", "--listen", "127.0.0.2:0", "--tls", "always", "--data-dir", str(tmp_path / "data")]
    node = ["agent", "run", "--engine", ENGINE, "--state", str(elsewhere / "node"), "--cache", str(tmp_path / "cache")]

    async def main() -> None:
        with process(tmp_path, "coordinator", *serve, "--invite", "lab") as coordinator:
            await until(lambda: said(coordinator, r"--join (\S+)") or coordinator.code is not None)
            address, invitation = said(coordinator, r"listening on (\S+)"), said(coordinator, r"--join (\S+)")
            with process(tmp_path, "node", *node, "--join", invitation, home=elsewhere) as agent:
                async with Client(address) as client:
                    spec = fake_spec()
                    job = (await client.submit(spec)).status.job
                    status = await asyncio.wait_for(client.settled(job), 60)
                    report = await client.report(job)
                    (remote,) = await client.nodes()
                assert JobState.SUCCEEDED == status.state, agent.log.read_text()
                assert "lab" == remote.site
                assert reference_tally(spec).steps == report["totals"]["loss_steps"]
                os.kill(agent.pid, signal.SIGTERM)
                assert 0 == await asyncio.to_thread(agent.wait, 20)

            refused = command(tmp_path / "third", "agent", "join", invitation, "--state", str(tmp_path / "third"))
            assert 56 == refused.returncode
            assert "used before" in refused.stderr

            with process(tmp_path, "again", *node, home=elsewhere) as agent:
                await until(lambda: said(agent, "(registered)") or agent.code is not None)
                revoked = command(
                    Path(os.environ["XDG_STATE_HOME"]),
                    "coordinator",
                    "agents",
                    "revoke",
                    remote.node,
                    "--coordinator",
                    address,
                )
                assert f"{remote.node}: 1 certificate revoked\n" == revoked.stdout, revoked.stderr
                assert 52 == await asyncio.to_thread(agent.wait, 20)
                assert "was revoked" in agent.last_line()

            stranger = command(tmp_path / "stranger", "coordinator", "jobs", "--coordinator", address)
            assert 54 == stranger.returncode
            assert "speaks TLS" in stranger.stderr
            assert 1 == len(stranger.stderr.splitlines())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["join", "nonsense"], 2, "this is no join string"),
        (["run", "--join", "fedeval-join-1-AAAA"], 2, "damaged"),
        (["run", "--coordinator", "192.0.2.1:50051"], 2, "eval-agent join"),
        (["run", "--role", "aggregate", "--listen", "10.0.0.1:1"], 2, "has joined no coordinator"),
    ],
)
def test_wrong_options_about_joining_are_one_line(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    """Each has its exit code, and the line says what to do."""
    done = command(tmp_path, "agent", *arguments)

    assert code == done.returncode
    assert text in done.stderr
    assert 1 == len(done.stderr.splitlines())
