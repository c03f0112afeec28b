"""One PostgreSQL database as the journal's place: sessions, and what its errors mean. Its password is shown nowhere.

Importing this needs psycopg, the extra ``postgres``; what is stored, and who may write it, are other modules' affairs.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from eval_kernel.errors import (
    ConfigError,
    DriverMissing,
    FedevalError,
    JournalCorrupt,
    JournalFull,
    JournalRefused,
    JournalUnreachable,
)

try:
    import psycopg
    from psycopg import conninfo, errors, pq
except ImportError as _error:  # not there, or there without a libpq that loads
    raise DriverMissing(
        f"a journal in PostgreSQL needs the library psycopg ({' '.join(str(_error).split())}); "
        "pip install 'fedeval[postgres]'"
    ) from None

# Under these names for the modules around it: only here is the driver's absence told.
Connection = psycopg.Connection[tuple[Any, ...]]
DriverError = psycopg.Error
UniqueViolation = errors.UniqueViolation
#: So that a server that has gone without a word is given up within about 12 seconds; the URL may say otherwise.
DEFAULTS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
#: SQLSTATE classes and codes after which the same call may succeed: lost connections, shutdowns, too many sessions or
#: too little memory, time-outs of locks and statements, deadlocks, a server that is read-only since a fail-over.
_PASSING = ("08", "57", "53200", "53300", "53400", "55P03", "40001", "40P01", "25006")
#: Longest part of a server's own text that is repeated.
_MAX_SAID = 300

_SETTINGS = """
SELECT current_schema(), pg_is_in_recovery(), current_setting('fsync'),
       set_config('default_transaction_isolation', 'read committed', false),
       -- Whatever the server's default: a commit is on its disk when it is reported. What is stronger stays.
       CASE WHEN current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')
            THEN set_config('synchronous_commit', 'on', false) END
"""


class Database:
    """Where a journal is. ``str`` names it without the password."""

    def __init__(self, url: str) -> None:
        """Take a URL apart. Raises ``ConfigError``, whose text never repeats it: it may hold a password."""
        try:
            parts = conninfo.conninfo_to_dict(url)
            ports = [port for port in f"{parts.get('port', '')}".split(",") if port]
            if not all(port.isascii() and port.isdigit() and int(port) < 1 << 16 for port in ports):
                raise psycopg.ProgrammingError
        except psycopg.ProgrammingError:
            raise ConfigError(
                "the journal's URL cannot be read as one of PostgreSQL; write postgresql://USER@HOST:PORT/DATABASE, "
                "with %XX for special characters in a name or password"
            ) from None
        self._conninfo = conninfo.make_conninfo(**{**DEFAULTS, **parts})
        self._secrets = [
            form for name in ("password", "sslpassword") if parts.get(name) for form in _forms(f"{parts[name]}")
        ]
        host = parts.get("host") or parts.get("hostaddr") or "localhost"
        user = f"{parts['user']}@" if parts.get("user") else ""
        port = f":{parts['port']}" if parts.get("port") else ""
        self._shown = f"postgresql://{user}{host}{port}/{parts.get('dbname', '')}"

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"Database({self._shown!r})"

    def connect(self, name: str = "fedeval", *, writing: bool = True) -> Connection:
        """Open a session that commits each statement, and commits durably.

        Raises ``JournalUnreachable`` where no server answers, ``JournalRefused`` where it does but lets this user not
        in, or cannot keep a journal.
        """
        try:
            connection = psycopg.connect(self._conninfo, autocommit=True, application_name=name, client_encoding="utf8")
        except DriverError as error:
            raise self._not_connected(error) from None
        try:
            found = connection.execute(_SETTINGS).fetchone()
            assert found is not None, "a SELECT without FROM has a row"
            schema, standby, fsync = found[:3]
            if schema is None:
                raise JournalRefused(f"{self} has no schema to make tables in; check its search_path")
            if writing and standby:
                raise JournalRefused(f"{self} is a read-only replica; name the primary server in the journal's URL")
            if writing and fsync == "off":
                raise JournalRefused(
                    f"{self} runs with fsync=off, so that a power cut loses what was acknowledged; turn it on there"
                )
        except DriverError as error:
            connection.close()
            raise self.translate(error) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def translate(self, error: DriverError) -> FedevalError:
        """Return what an error of a session means to the user."""
        state = error.sqlstate or ""
        if isinstance(error, errors.DiskFull):
            return JournalFull(
                f"{self} cannot grow: its server has no space left; free some there ({self.said(error)})"
            )
        if isinstance(error, UniqueViolation):
            return JournalCorrupt(
                f"{self} holds a first commit of this shard already ({self.said(error)}); start the coordinator again"
            )
        if isinstance(error, errors.InsufficientPrivilege):
            return JournalRefused(f"{self} does not allow what the journal needs: {self.said(error)}")
        lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not state
        if lost or state.startswith(_PASSING):
            return JournalUnreachable(f"{self} does not answer as it should: {self.said(error)}")
        return JournalCorrupt(f"{self} cannot be read and written ({self.said(error)}); restore it from a backup")

    def said(self, error: DriverError) -> str:
        """Return the library's or the server's own text: one line, and no password in it."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text if len(text) <= _MAX_SAID else text[: _MAX_SAID - 3] + "..."

    def _not_connected(self, error: DriverError) -> FedevalError:
        # The server's text is in its own language: whether it would let others in tells the two cases apart.
        if pq.PGconn.ping(self._conninfo.encode()) == pq.Ping.OK and not isinstance(error, errors.ConnectionTimeout):
            return JournalRefused(
                f"{self} refuses the connection: {self.said(error)}; check user, password (PGPASSWORD or ~/.pgpass "
                "keep it off the command line) and the database's name"
            )
        return JournalUnreachable(f"no PostgreSQL server answers at {self}: {self.said(error)}")


def _forms(secret: str) -> list[str]:
    """Return a secret as it is, and as it is written in a URL."""
    return list(dict.fromkeys((secret, quote(secret, safe=""))))
