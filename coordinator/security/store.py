"""Join tokens, certificates and users in a small SQLite file beside the journal. Secrets are kept as hashes only.

Every method is one transaction, durable when it returns, and may be called from any thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedeval.wire.access import UserRole
from fedeval.wire.pki import Owner, Request

from coordinator.security.authority import Issued
from eval_kernel.errors import DirectoryUnusable, JoinRefused, NotPermitted, RequestInvalid, Revoked

FILE = "security.db"
_VERSION = 1
_SCHEMA = """
CREATE TABLE token (
  hash TEXT PRIMARY KEY, site TEXT NOT NULL, roles TEXT NOT NULL, hosts TEXT NOT NULL, made_by TEXT NOT NULL,
  made_at REAL NOT NULL, expires_at REAL NOT NULL, used_at REAL, pin TEXT, serial TEXT
) STRICT;
CREATE TABLE certificate (
  serial TEXT PRIMARY KEY, site TEXT NOT NULL, name TEXT NOT NULL, roles TEXT NOT NULL, hosts TEXT NOT NULL,
  root INTEGER NOT NULL, issued_at REAL NOT NULL, expires_at REAL NOT NULL, revoked_at REAL, reason TEXT,
  pem BLOB NOT NULL
) STRICT;
CREATE INDEX certificate_name ON certificate (name);
CREATE TABLE user (
  name TEXT PRIMARY KEY, role TEXT NOT NULL, hash TEXT NOT NULL UNIQUE, made_by TEXT NOT NULL, made_at REAL NOT NULL
) STRICT;
"""


def digest(secret: str) -> str:
    """Return the form in which a secret is kept. They have 128 bits and more: no salt, no stretching is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def revoked(name: str) -> Revoked:
    """Return the error of a caller whose certificate was revoked."""
    return Revoked(f"the certificate of {name} was revoked; its owner needs a new join string to come back")


@dataclass(frozen=True, slots=True)
class Token:
    """What a join token is good for. ``hosts``: names under which a relay may answer."""

    site: str
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    expires: float


@dataclass(frozen=True, slots=True)
class Member:
    """An agent or client that was given a certificate: the latest one."""

    owner: Owner
    roles: tuple[str, ...]
    hosts: tuple[str, ...]
    serial: str
    root: int
    issued: float
    expires: float
    revoked: bool


@dataclass(frozen=True, slots=True)
class User:
    """A person with an API token."""

    name: str
    role: UserRole
    made: float


class Store:
    """The file, open."""

    def __init__(self, directory: Path) -> None:
        """Open or make it. Raises ``DirectoryUnusable``."""
        self.path = directory / FILE
        self._lock = threading.Lock()
        try:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA synchronous = FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
            elif version != _VERSION:
                raise DirectoryUnusable(f"{self.path} was written by a newer version of fedeval; install that one")
        except (OSError, sqlite3.Error) as error:
            raise DirectoryUnusable(f"cannot use {self.path} ({error}); put a copy back, or make room there") from None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise DirectoryUnusable(f"cannot write {self.path} ({error})") from None
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # ------------------------------------------------------------ join tokens

    def add_token(self, secret: str, token: Token, made_by: str) -> None:
        """Keep a token's hash."""
        row = (digest(secret), token.site, _list(token.roles), _list(token.hosts), made_by, time.time(), token.expires)
        with self._transaction() as db:
            db.execute("DELETE FROM token WHERE expires_at < ?", (time.time() - 30 * 86_400,))
            db.execute("INSERT INTO token VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)", row)

    def look_up(self, secret: str, request: Request) -> tuple[Token, bytes | None]:
        """Return what a token is good for, and the certificate that this very key was given for it, if it was.

        Raises ``JoinRefused`` for a token that is unknown, used by another key, or expired.
        """
        with self._transaction() as db:
            return self._look_up(db, secret, request)

    def _look_up(self, db: sqlite3.Connection, secret: str, request: Request) -> tuple[Token, bytes | None]:
        row = db.execute(
            "SELECT site, roles, hosts, expires_at, used_at, pin, serial FROM token WHERE hash = ?", (digest(secret),)
        ).fetchone()
        if row is None:
            raise JoinRefused("this coordinator has made no such join string; ask for a new one")
        token = Token(row[0], tuple(json.loads(row[1])), tuple(json.loads(row[2])), row[3])
        if row[4] is not None:
            if row[5] != request.pin:
                raise JoinRefused("the join string was used before, and is good once; ask for a new one")
            (pem,) = db.execute("SELECT pem FROM certificate WHERE serial = ?", (row[6],)).fetchone()
            return token, pem
        if token.expires <= time.time():
            raise JoinRefused("the join string has expired; ask for a new one")
        return token, None

    def redeem(self, secret: str, request: Request, roles: tuple[str, ...], issued: Issued) -> bytes:
        """Use a token up and keep the certificate that it was used for, or neither; return the certificate.

        Raises ``JoinRefused`` as ``look_up`` does, and where the name is somebody's already.
        """
        with self._transaction() as db:
            _, earlier = self._look_up(db, secret, request)
            if earlier is not None:
                return earlier
            other = self._latest(db, request.owner.name)
            if other is not None and not other.revoked and other.expires > time.time():
                raise JoinRefused(
                    f"{request.owner.name} is the name of a node that has joined (site {other.owner.site}): choose "
                    f"another with --name, or first run `eval-coordinator agents revoke {request.owner.name}`"
                )
            self._insert(db, request, roles, issued)
            db.execute(
                "UPDATE token SET used_at = ?, pin = ?, serial = ? WHERE hash = ?",
                (time.time(), request.pin, issued.serial, digest(secret)),
            )
        return issued.pem

    # ------------------------------------------------------------ certificates

    def renewed(self, request: Request, roles: tuple[str, ...], issued: Issued) -> None:
        """Keep a certificate that takes another one's place, and forget those that ended long ago.

        Raises ``NotPermitted`` where there is none that could be renewed any more, ``Revoked`` where it was revoked.
        """
        with self._transaction() as db:
            member = self._latest(db, request.owner.name)
            if member is None or member.owner != request.owner or member.expires <= time.time():
                raise NotPermitted(f"{request.owner} has no certificate that could be renewed; it has to join")
            if member.revoked:
                raise revoked(member.owner.name)
            if not set(request.hosts) <= set(member.hosts):
                raise NotPermitted(f"{request.owner} asks for hosts that its join string did not allow")
            self._insert(db, request, roles, issued)
            db.execute("DELETE FROM certificate WHERE expires_at < ?", (time.time() - 30 * 86_400,))

    def _insert(self, db: sqlite3.Connection, request: Request, roles: tuple[str, ...], issued: Issued) -> None:
        row = (
            issued.serial,
            request.owner.site,
            request.owner.name,
            _list(roles),
            _list(request.hosts),
            issued.root,
            time.time(),
            issued.expires,
            issued.pem,
        )
        db.execute("INSERT INTO certificate VALUES (?, ?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?)", row)

    def members(self) -> list[Member]:
        """Return who was given a certificate, by name."""
        with self._transaction() as db:
            names = [name for (name,) in db.execute("SELECT DISTINCT name FROM certificate ORDER BY name")]
            return [member for name in names if (member := self._latest(db, name)) is not None]

    def member(self, name: str) -> Member | None:
        """Return the latest certificate of a name."""
        with self._transaction() as db:
            return self._latest(db, name)

    def _latest(self, db: sqlite3.Connection, name: str) -> Member | None:
        row = db.execute(
            "SELECT site, name, roles, hosts, serial, root, issued_at, expires_at, revoked_at FROM certificate "
            "WHERE name = ? ORDER BY issued_at DESC, rowid DESC LIMIT 1",
            (name,),
        ).fetchone()
        if row is None:
            return None
        roles, hosts = tuple(json.loads(row[2])), tuple(json.loads(row[3]))
        return Member(Owner(row[0], row[1]), roles, hosts, row[4], row[5], row[6], row[7], row[8] is not None)

    def revoke(self, name: str, reason: str) -> list[str]:
        """Revoke every certificate of a name; return the serials of those that were good until now.

        Raises ``RequestInvalid`` where the name has none.
        """
        with self._transaction() as db:
            if self._latest(db, name) is None:
                raise RequestInvalid(
                    f"no certificate was given to {name[:100]!r}; `eval-coordinator agents list` shows all"
                )
            good = "FROM certificate WHERE name = ? AND revoked_at IS NULL"
            serials = [serial for (serial,) in db.execute(f"SELECT serial {good}", (name,))]
            db.execute(
                "UPDATE certificate SET revoked_at = ?, reason = ? WHERE name = ? AND revoked_at IS NULL",
                (time.time(), reason, name),
            )
            return serials

    def revoked(self) -> set[str]:
        """Return the serials of all revoked certificates."""
        with self._transaction() as db:
            return {serial for (serial,) in db.execute("SELECT serial FROM certificate WHERE revoked_at IS NOT NULL")}

    # ------------------------------------------------------------ users

    def add_user(self, name: str, role: UserRole, token: str, made_by: str) -> None:
        """Keep a user. Raises ``RequestInvalid`` for a name that is there."""
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM user WHERE name = ?", (name,)).fetchone():
                raise RequestInvalid(f"there is a user {name} already; remove that one first to give a new token")
            row = (name, role.name.lower(), digest(token), made_by, time.time())
            db.execute("INSERT INTO user VALUES (?, ?, ?, ?, ?)", row)

    def remove_user(self, name: str) -> None:
        """Forget a user, and so its token. Raises ``RequestInvalid`` for one that is not there."""
        with self._transaction() as db:
            if db.execute("DELETE FROM user WHERE name = ?", (name,)).rowcount == 0:
                raise RequestInvalid(f"there is no user {name[:100]!r}; `eval-coordinator user list` shows all")

    def users(self) -> dict[str, User]:
        """Return the users by the hash of their tokens."""
        with self._transaction() as db:
            rows = db.execute("SELECT name, role, made_at, hash FROM user ORDER BY name").fetchall()
        return {row[3]: User(row[0], UserRole[row[1].upper()], row[2]) for row in rows}


def _list(values: Any) -> str:
    return json.dumps(list(values))
