"""The audit log: one JSON line for each call that changes something or was refused. Only ever appended to.

No secret gets into it: of a request it shows the fields that the call's rule names, and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from fedeval.wire.access import Principal, Rule
from fedeval.wire.gate import Context

from eval_kernel.errors import DirectoryUnusable, FedevalError

FILE = "audit.jsonl"
#: Refusals that look alike are written once in so many seconds, with how many there were: they must not fill the disk.
QUIET_SECONDS = 60.0
#: Kinds of refusals that are remembered for that, and characters of a field that are shown.
_KINDS, _SHOWN = 1000, 200

_log = structlog.get_logger("coordinator.security")


class AuditLog:
    """The file, open for appending."""

    def __init__(self, directory: Path) -> None:
        """Open or make it, for this user alone. Raises ``DirectoryUnusable``."""
        self.path = directory / FILE
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DirectoryUnusable(f"cannot write {self.path} ({error.strerror}), the audit log") from None
        self._refused: dict[tuple[str, ...], tuple[float, int]] = {}  # when last written, and how many since

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __call__(
        self, who: Principal, context: Context, method: str, rule: Rule | None, request: Any, error: FedevalError | None
    ) -> None:
        """Write down a call: see ``fedeval.wire.gate.Audit``."""
        shown = {} if rule is None or request is None else _fields(request, rule.audit or ())
        self.write(str(who), context.peer(), method.rpartition(".")[2], shown, error)

    def write(self, who: str, peer: str, what: str, shown: dict[str, Any], error: FedevalError | None) -> None:
        """Append a line. A full disk costs the line and leaves a word in the log: the call goes on."""
        again = 0
        if error is not None:
            kind = (who, peer.rpartition(":")[0], what, type(error).__name__)
            last, again = self._refused.get(kind, (0.0, 0))
            now = time.monotonic()
            if last and now - last < QUIET_SECONDS:
                self._refused[kind] = (last, again + 1)
                return
            if len(self._refused) >= _KINDS:
                self._refused.clear()
            self._refused[kind] = (now, 0)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "who": who,
            "from": peer,
            "what": what,
            **shown,
            "outcome": "ok" if error is None else f"{error.code}: {error}",
            **({"repeated": again} if again else {}),
        }
        try:
            os.write(self._file, json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        except OSError as failure:
            _log.error("the audit log cannot be written", reason=failure.strerror, call=what, who=who)


def _fields(request: Any, names: Iterable[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name in names:
        value = getattr(request, name)
        if isinstance(value, str):
            shown[name] = value[:_SHOWN]
        elif isinstance(value, bool | int | float):
            shown[name] = value
        else:
            shown[name] = [str(item)[:_SHOWN] for item in list(value)[:20]]
    return shown
