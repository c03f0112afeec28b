"""`eval-coordinator check`: each finding is true, and each failure has a remedy."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections import namedtuple
from pathlib import Path

import pytest

from coordinator import check
from coordinator.config import ServeConfig
from coordinator.journal import MemoryJournal
from tests.support.served import served

JOB = "model: {model}\ndataset: [pydoc:topics, {data}]\n"


def test_a_good_environment_is_good(tmp_path: Path) -> None:
    """Every finding is ok, and looking leaves nothing behind."""
    findings = asyncio.run(check.examine(ServeConfig(listen=free_address(), data_dir=tmp_path / "data"), None))

    assert ["python", "libraries", "sqlite", "data directory", "clock", "address"] == [f.name for f in findings]
    assert 0 == check.exit_code(findings), findings
    assert [] == list(tmp_path.iterdir())


def test_every_failure_is_written_with_its_remedy() -> None:
    """A failing line is followed by what to do."""
    written: list[str] = []
    check.lines([check.Finding("a", True, "fine"), check.Finding("b", False, "bad", "mend it")], written.append)

    assert ["ok   a: fine", "FAIL b: bad", "     remedy: mend it"] == written
    assert 1 == check.exit_code([check.Finding("b", False, "bad", "mend it")])


def test_a_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    """Below a file nothing can be made."""
    file = tmp_path / "file"
    file.write_text("")
    found = check.directory(file / "below")

    assert not found.ok
    assert "--data-dir" in found.remedy


def test_a_nearly_full_disk_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is a failure that says how much there is."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 5 << 20))
    found = check.directory(tmp_path)

    assert not found.ok
    assert "5 MiB free" in found.detail


def test_an_impossible_date_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that shows 1970 fails."""
    steady = time.monotonic
    monkeypatch.setattr(time, "time", steady)
    found = check.clock()

    assert not found.ok
    assert "1970" in found.detail


def test_a_stepping_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps while it is watched fails."""
    real, calls = time.time, iter((0.0, 5.0, 5.0, 5.0))
    monkeypatch.setattr(time, "time", lambda: real() + next(calls))

    assert not check.clock().ok


def test_a_coordinator_that_answers_is_recognised() -> None:
    """A port that is in use by a coordinator of our protocol is fine, and its identity is shown."""

    async def main() -> check.Finding:
        async with served(MemoryJournal("the identity")) as there:
            return await check.address(there.server.address)

    found = asyncio.run(main())

    assert found.ok
    assert "the identity" in found.detail


def test_a_port_of_another_program_is_found() -> None:
    """A port in use by something else fails, with what to do."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        found = asyncio.run(check.address(f"127.0.0.1:{other.getsockname()[1]}"))

    assert not found.ok
    assert "--listen" in found.remedy


def test_a_job_file_is_checked_and_its_paths_are_looked_for(tmp_path: Path) -> None:
    """Local paths and globs are reported as here or elsewhere; that they are elsewhere is no failure."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(model="missing.gguf", data="texts/*.txt"))
    found = check.job(file)

    assert all(finding.ok for finding in found)
    assert [f"{tmp_path}/missing.gguf is not on this machine", f"{tmp_path}/texts/*.txt is on this machine"] == [
        finding.detail.partition(":")[0] for finding in found[1:]
    ]


def test_a_wrong_job_file_is_found(tmp_path: Path) -> None:
    """The finding carries the job file's own message."""
    file = tmp_path / "job.yaml"
    file.write_text("modle: x\n")
    (found,) = check.job(file)

    assert not found.ok
    assert "did you mean 'model'" in found.detail


def free_address() -> str:
    """Return an address nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
