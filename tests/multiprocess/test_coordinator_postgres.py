"""A coordinator on a PostgreSQL journal as a user meets it: its errors, its server's restarts, its orderly end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator import cli
from coordinator.journal import postgres_upkeep
from coordinator.journal.postgres import open_database
from coordinator.serve import ADDRESS_FILE
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.postgres import PASSWORD, PASSWORD_IN_URL, PostgresServer, server_of_its_own
from tests.support.processes import until

#: Runs the command line in an interpreter that lacks the extra `postgres`.
BARE = """
import runpy, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "psycopg":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
runpy.run_module("coordinator", run_name="__main__", alter_sys=True)
"""


SECRETS = (PASSWORD, PASSWORD_IN_URL, "hunter2")


def bare(*arguments: str, url: str = "") -> tuple[int, str]:
    """Run `eval-coordinator` to its end where the driver is missing; return its exit code and all it printed."""
    environment = {**os.environ, "NO_COLOR": "1", "FEDEVAL_JOURNAL": url}
    done = subprocess.run(
        [sys.executable, "-c", BARE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_wrong_journal_is_one_line_with_its_own_code(
    tmp_path: Path, postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No URL, no server, a refused login, an address in use: each says what to do, and none repeats the password."""
    # It would hand this test's standard error to every later test of this process.
    monkeypatch.setattr("coordinator.commands.serve.configure_log", lambda *, as_json: None)
    url = postgres_server.journal()
    wrong_password = url.replace(PASSWORD_IN_URL, "hunter2")
    nowhere = url.replace(str(postgres_server.port), "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        serve = ("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--data-dir", str(tmp_path / "data"))
        for arguments, journal, code, text in (
            (serve, "mysql://user:hunter2@host/db", 2, "does not begin with postgresql://"),
            (serve, "postgresql://user:hunter2@[host/db", 2, "cannot be read as one of PostgreSQL"),
            (serve, nowhere, 61, "no PostgreSQL server answers at postgresql://fedeval@127.0.0.1:1/journals"),
            (serve, wrong_password, 62, "password authentication failed"),
            (("journal", "verify"), wrong_password, 62, "password authentication failed"),
            (("journal", "verify"), url, 2, "holds no journal"),
            (("journal", "salvage"), url, 2, "pg_dump"),
            (("journal", "verify", "--data-dir", str(tmp_path)), url, 2, "name one"),
            (serve, url, 40, "in use by another program"),
        ):
            monkeypatch.setenv("FEDEVAL_JOURNAL", journal)
            exit_code = cli.run(arguments)
            printed = "".join(capfd.readouterr())
            (line,) = [line for line in printed.splitlines() if line.startswith("eval-coordinator: error: ")]

            assert (code, text) == (exit_code, text if text in line else line)
            assert not any(secret in printed for secret in (*SECRETS, "Traceback"))


def test_the_check_says_what_is_in_the_database_or_why_not(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`check` connects as `serve` would: an empty place, a journal and its leader, or what is wrong."""
    url = postgres_server.journal()

    def found(journal: str) -> tuple[bool, str]:
        monkeypatch.setenv("FEDEVAL_JOURNAL", journal)
        cli.run(["check", "--json"])
        printed = capfd.readouterr().out
        assert not any(secret in printed for secret in SECRETS)
        (finding,) = [finding for finding in json.loads(printed) if finding["name"] == "journal"]
        return finding["ok"], finding["detail"]

    empty = found(url)
    open_database(url).close()
    led = found(url)
    refused = found(url.replace(PASSWORD_IN_URL, "hunter2"))

    assert (True, True, False) == (empty[0], led[0], refused[0])
    assert "no journal yet" in empty[1]
    assert f":{os.getpid()} in epoch 1" in led[1]
    assert "password authentication failed" in refused[1]


def test_without_the_driver_it_is_named_and_everything_else_works(tmp_path: Path) -> None:
    """A journal in PostgreSQL is one line with its own code; help, and journals in files, need no extra."""
    url = "postgresql://user:hunter2@127.0.0.1:1/db"
    for arguments, journal, code, text in (
        (("serve", "--data-dir", str(tmp_path)), url, 60, "pip install 'fedeval[postgres]'"),
        (("journal", "verify"), url, 60, "pip install 'fedeval[postgres]'"),
        (("journal", "verify", "--data-dir", str(tmp_path)), "", 2, "holds no journal"),
        (("serve", "--help"), "", 0, "--journal"),
    ):
        exit_code, printed = bare(*arguments, url=journal)

        assert code == exit_code, printed
        assert text in printed
        assert "hunter2" not in printed


def test_a_leader_that_is_stopped_hands_over_at_once(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """SIGTERM: exit code 0, and the one that stood by leads; a second one that stands by ends with 0 too."""
    url = postgres_server.journal()

    async def main() -> tuple[int | None, int | None, float]:
        async with Cluster(tmp_path, serve=("--journal", url)) as cluster:
            job = await cluster.submit(fake_spec("kept", shards=4))
            standby = cluster.start_standby()
            await until(lambda: "standing by" in standby.log.read_text() or standby.code is not None)
            leader = cluster.coordinator
            assert leader is not None
            begin = time.monotonic()
            leader.terminate()
            await until((cluster.standby_data / ADDRESS_FILE).exists, 10)
            seconds = time.monotonic() - begin
            other = cluster.start_standby("other")
            await until(lambda: "standing by" in other.log.read_text() or other.code is not None)
            other.terminate()
            await cluster.status(job)  # it is known still
            return leader.wait(10), other.wait(10), seconds

    leader, other, seconds = asyncio.run(main())
    print(f"the standby listened {seconds:.2f} s after SIGTERM of the leader")

    assert (0, 0) == (leader, other)


@pytest.mark.timeout(120)
def test_a_server_that_crashes_under_load_pauses_the_job_and_no_more(tmp_path: Path) -> None:
    """The coordinator says that it waits, and goes on when the server is back; its journal verifies meanwhile."""
    spec = fake_spec("crashed", shards=40, delay=0.1, span=5, seed=9)

    async def main(server: PostgresServer, url: str) -> dict[str, object]:
        async with Cluster(tmp_path, serve=("--journal", url)) as cluster:
            leader = cluster.coordinator
            assert leader is not None
            for name in ("one", "two"):
                cluster.start_agent(name)
            job = await cluster.submit(spec)
            await cluster.reach(job, 10)
            await asyncio.to_thread(server.kill)
            await until(lambda: "journal not writable" in leader.log.read_text())
            await asyncio.to_thread(server.start)
            report = await cluster.report(job)

            assert ["SUCCEEDED"] == [job.state for job in postgres_upkeep.verify(url).jobs]
            assert "journal writable again" in leader.log.read_text()
            return report

    with server_of_its_own() as server:
        report = asyncio.run(main(server, server.journal()))

    assert reference_tally(spec).digest() == report["totals"]["digest"]  # type: ignore[index]
