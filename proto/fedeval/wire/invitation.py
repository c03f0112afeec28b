"""Join strings: where to enrol, which CA to expect there, and a secret that is good once."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import dataclass
from typing import Any

from eval_kernel.errors import ConfigError

PREFIX = "fedeval-join-1-"
_PIN = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Invitation:
    """``addresses``: HOST:PORT of the enrolment port; ``pin``: SHA-256 of the CA's public key, hexadecimal."""

    addresses: tuple[str, ...]
    pin: str
    secret: str
    site: str
    client: bool = False  # for a person, not for a node
    hosts: tuple[str, ...] = ()  # under which a relay will answer

    def text(self) -> str:
        """Return the join string."""
        value: dict[str, Any] = {"a": list(self.addresses), "p": self.pin, "k": self.secret, "s": self.site}
        if self.client:
            value["c"] = True
        if self.hosts:
            value["h"] = list(self.hosts)
        data = json.dumps(value, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(zlib.crc32(data).to_bytes(4, "big") + data).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Read a join string. Raises ``ConfigError`` for one that is cut off or mistyped."""
        text = "".join(text.split())
        if not text.startswith(PREFIX):
            raise ConfigError(f"this is no join string (it would begin with {PREFIX}); copy the whole of it")
        body = text.removeprefix(PREFIX)
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            data = raw[4:]
            if zlib.crc32(data).to_bytes(4, "big") != raw[:4]:
                raise ValueError("its check sum is wrong")
            value = json.loads(data)
            made = cls(
                tuple(value["a"]), value["p"], value["k"], value["s"], bool(value.get("c")), tuple(value.get("h", ()))
            )
            if not (made.addresses and all(map(_is_address, made.addresses)) and _PIN.fullmatch(made.pin)):
                raise ValueError("its address or pin is wrong")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError("the join string is damaged: cut off or mistyped; copy the whole of it") from None
        return made


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    return bool(host and colon) and port.isdigit() and 0 < int(port) < 65536
