"""The commands as a user meets them: bad input is one clear line with its own exit code, and never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.client import Client
from coordinator.fleet import Process
from coordinator.serve import ADDRESS_FILE
from eval_kernel.errors import Unreachable
from tests.support.fake_engine import fake_spec
from tests.support.processes import until

JOB = "model: hub:fake/model\ndataset: hub:fake?shards=4\n"


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `eval-coordinator` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "coordinator", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1", **environment},
        check=False,
    )


def assert_one_line(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Fail unless the command ended with ``code`` and one error line that holds ``words``."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("eval-coordinator: error: ")]

    assert "Traceback" not in result.stderr + result.stdout
    assert 1 == len(errors), result.stderr
    assert code == result.returncode, result.stderr
    for word in words:
        assert word in errors[0]


@contextlib.contextmanager
def coordinator(directory: Path, *prefix: str, listen: str = "127.0.0.1:0") -> Iterator[Process]:
    """Run a coordinator over ``directory``/data and wait until it listens; kill what is left of it on leaving."""
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / "data"
    serve = [sys.executable, "-m", "coordinator", "serve", "--listen", listen, "--data-dir", str(data)]
    process = Process("coordinator", [*prefix, *serve], directory / "coordinator.log", None)
    try:
        asyncio.run(until(lambda: "listening" in process.log.read_text() or process.code is not None, 30))
        yield process
    finally:
        process.end_group()


def address_of(process: Process) -> str:
    """Return the address a coordinator says it listens on."""
    return process.log.read_text().partition("coordinator listening on ")[2].split()[0]


# ---------------------------------------------------------------- wrong commands


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    """Exit code 40, and the line names the address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = command("serve", "--listen", address, "--data-dir", str(tmp_path))

    assert_one_line(result, 40, address, "in use", "--listen")
    assert [result.stderr.strip()] == result.stderr.splitlines()


def test_plain_text_beyond_this_machine_is_refused(tmp_path: Path) -> None:
    """Exit code 2: listening there needs mutual TLS."""
    result = command("serve", "--listen", "0.0.0.0:50051", "--tls", "never", "--data-dir", str(tmp_path))

    assert_one_line(result, 2, "0.0.0.0:50051", "mutual TLS", "127.0.0.1:50051")


@pytest.mark.parametrize(
    "verb", [("jobs",), ("nodes", "--json"), ("submit",), ("watch", "x"), ("wait", "x"), ("report", "x")]
)
def test_an_unreachable_coordinator_is_one_line_within_seconds(verb: tuple[str, ...], tmp_path: Path) -> None:
    """Exit code 2 for every command that asks one; the environment variable names the address."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    begin = time.monotonic()
    arguments = (*verb, str(file)) if verb == ("submit",) else verb
    result = command(*arguments, FEDEVAL_COORDINATOR="127.0.0.1:1")

    assert_one_line(result, 2, "127.0.0.1:1", "eval-coordinator serve")
    assert time.monotonic() - begin < 10


def test_a_wait_whose_time_ends_with_nobody_answering_is_unreachable() -> None:
    """Exit code 2, not 3: whether the job goes on, nobody said."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = command("wait", "x", "--timeout", "0.5", "--coordinator", address)

    assert_one_line(result, 2, "no coordinator answers", address)


def test_an_output_that_cannot_be_written_is_one_line() -> None:
    """A full disk behind standard output costs no traceback, also not from the interpreter's last flush."""
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "coordinator", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )

    assert 45 == result.returncode
    assert [
        "eval-coordinator: error: cannot write to standard output (No space left on device); make room there or "
        "send it elsewhere"
    ] == result.stderr.splitlines()


def test_a_program_that_is_no_coordinator_is_one_line() -> None:
    """Something that listens but does not speak gRPC is unreachable, within seconds."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        result = command("jobs", "--coordinator", f"127.0.0.1:{silent.getsockname()[1]}")

    assert_one_line(result, 2, "no coordinator answers")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("model: hub:a/b\n", "'dataset' is required"),
        ("model: hub:a/b\ndataset: pydoc:topics\nwindows: rolling\n", "did you mean 'window'"),
        ("model: [\n", "not valid YAML"),
        ("", "the file is empty"),
    ],
)
def test_a_wrong_job_file_is_one_line_that_names_it(text: str, word: str, tmp_path: Path) -> None:
    """Exit code 11, before anything is sent."""
    file = tmp_path / "job.yaml"
    file.write_text(text)

    assert_one_line(command("submit", str(file)), 11, str(file), word)


def test_wrong_options_are_one_line() -> None:
    """Exit code 2 for unknown commands and options, missing arguments, and values that make no sense."""
    assert_one_line(command("sumbit"), 2, "no such command", "submit")
    assert_one_line(command("jobs", "--jason"), 2, "--jason")
    assert_one_line(command("wait"), 2, "JOB")
    assert_one_line(command("serve", "--lease", "1"), 2, "lease", "heartbeat")
    assert_one_line(command("serve", "--lease", "soon"), 2, "--lease")
    assert_one_line(command("jobs", "--coordinator", "nowhere"), 2, "HOST:PORT")


def test_a_reader_that_goes_away_is_no_error() -> None:
    """Output into a closed pipe ends the command without a word."""
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=30)

    assert b"" == errors


# ---------------------------------------------------------------- wrong data directories


def test_a_locked_data_directory_is_one_line(tmp_path: Path) -> None:
    """Exit code 41, and the line names the process that has it."""
    with coordinator(tmp_path) as running:
        result = command("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"))

        assert_one_line(result, 41, str(tmp_path / "data"), str(running.pid))


def test_a_journal_of_a_newer_version_is_one_line(tmp_path: Path) -> None:
    """Exit code 42, and the journal is left as it is."""
    with coordinator(tmp_path) as running:
        running.terminate()
        assert 0 == running.wait(10)
    journal = tmp_path / "data" / "journal.db"
    with contextlib.closing(sqlite3.connect(journal)) as connection:
        connection.execute("PRAGMA user_version = 999")
    before = journal.read_bytes()

    assert_one_line(command("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")), 42, "999")
    assert before == journal.read_bytes()


def test_a_journal_that_is_none_is_one_line(tmp_path: Path) -> None:
    """Exit code 43 for a file that is no journal."""
    (tmp_path / "journal.db").write_bytes(b"something else" * 100)

    assert_one_line(command("serve", "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path)), 43, "journal.db")


def test_a_data_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    """Exit code 2 and the option to use."""
    file = tmp_path / "file"
    file.write_text("")

    assert_one_line(command("serve", "--listen", "127.0.0.1:0", "--data-dir", str(file)), 2, "--data-dir")


def test_a_full_disk_stops_acknowledgements_and_the_coordinator_recovers_by_itself(tmp_path: Path) -> None:
    """Calls are UNAVAILABLE with the reason while the disk is full, and work once there is space again."""
    (tmp_path / "data").mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/data"
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*isolated, mount], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs a mount namespace (unshare --map-root-user --mount) for a small file system")
    with coordinator(tmp_path, *isolated, f'{mount} && exec "$@"', "sh") as running:
        address = address_of(running)
        filler = Path(f"/proc/{running.pid}/root{tmp_path}/data/filler")
        filler.write_bytes(b"x" * (700 << 10))
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 512)
        job = tmp_path / "job.yaml"
        job.write_text(JOB)
        # The log file of the journal may have room for a few more facts.
        for number in range(2000):
            refused = command("submit", str(job), "--key", f"k{number}", "--coordinator", address)
            if refused.returncode:
                break

        assert_one_line(refused, 2, "journal", "no space is left")
        assert running.code is None

        filler.unlink()
        accepted = command("submit", str(job), "--key", f"k{number}", "--coordinator", address)

        assert 0 == accepted.returncode, accepted.stderr
        listed = json.loads(command("jobs", "--json", "--coordinator", address).stdout)
        assert number + 1 == len(listed)


# ---------------------------------------------------------------- right ones


def test_the_reading_commands_print_json(tmp_path: Path) -> None:
    """jobs, nodes, wait, cancel, check and submit each print one JSON text."""
    file = tmp_path / "job.yaml"
    file.write_text("name: n\n" + JOB)
    with coordinator(tmp_path) as running:
        there = ("--coordinator", address_of(running))
        submitted = json.loads(command("submit", str(file), "--key", "k", "--json", *there).stdout)
        again = json.loads(command("submit", str(file), "--key", "k", "--json", *there).stdout)
        jobs = json.loads(command("jobs", "--json", *there).stdout)
        nodes = json.loads(command("nodes", "--json", *there).stdout)
        explained = command("jobs", "--explain", *there).stdout
        late = command("wait", submitted["job"], "--timeout", "0", *there)
        no_report = command("report", submitted["job"], *there)
        cancelled = json.loads(command("cancel", submitted["job"], "--json", *there).stdout)
        waited = command("wait", submitted["job"], *there)
        watched = command("watch", submitted["job"], *there)
        checked = command("check", str(file), "--json", "--data-dir", str(tmp_path / "data"), *there)

    assert (False, True) == (submitted["existed"], again["existed"])
    assert [submitted["job"]] == [job["job"] for job in jobs]
    assert [] == nodes
    assert "no agent" in explained
    assert_one_line(late, 3, submitted["job"])
    assert_one_line(no_report, 1, "not planned yet (PLANNING)")
    assert "cancelled" == cancelled["state"]
    assert (1, 1) == (waited.returncode, watched.returncode)
    assert 0 == checked.returncode, checked.stdout
    assert {"python", "sqlite", "data directory", "address", "clock", "job file"} <= {
        finding["name"] for finding in json.loads(checked.stdout)
    }


def test_sigterm_ends_a_coordinator_with_open_calls_in_time_and_a_restart_knows_everything(tmp_path: Path) -> None:
    """Exit code 0 within 5 seconds; the watch is told UNAVAILABLE; the job is there after the restart."""

    async def watch(process: Process, address: str) -> tuple[str, float, str]:
        async with Client(address) as client:
            job = (await client.submit(fake_spec(shards=4))).status.job
            watching = client.watch(job, patience=0.0)
            await anext(watching)
            begin = time.monotonic()
            process.terminate()
            with pytest.raises(Unreachable, match="stopping") as caught:
                await anext(watching)
            await until(lambda: process.code is not None, 10)
        return job, time.monotonic() - begin, str(caught.value)

    with coordinator(tmp_path) as running:
        job, took, _ = asyncio.run(watch(running, address_of(running)))

        assert 0 == running.code
        assert took < 5
        assert not (tmp_path / "data" / ADDRESS_FILE).exists()
        assert "Traceback" not in running.log.read_text()

    (tmp_path / "coordinator.log").unlink()
    with coordinator(tmp_path) as running:
        listed = json.loads(command("jobs", "--json", "--coordinator", address_of(running)).stdout)

        assert [job] == [status["job"] for status in listed]
        assert "jobs=1" in running.log.read_text()


def test_a_second_sigterm_ends_a_coordinator_at_once(tmp_path: Path) -> None:
    """The second signal is as good as a crash, which is harmless."""
    with coordinator(tmp_path) as running:
        os.kill(running.pid, signal.SIGTERM)
        asyncio.run(until(lambda: "stopping" in running.log.read_text()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)

        assert running.wait(5) in (0, 128 + signal.SIGTERM, -signal.SIGTERM)
