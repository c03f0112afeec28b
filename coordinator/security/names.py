"""Under which names a coordinator is called: what its certificate says, and what join strings name."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from dataclasses import dataclass

#: An address of a documentation network (RFC 5737): asking for the way there sends nothing.
_FAR_AWAY = ("192.0.2.1", 9)
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}")


@dataclass(frozen=True, slots=True)
class Names:
    """``hosts``: every name in the server's certificate; ``called``: those of them that join strings name."""

    hosts: tuple[str, ...]
    called: tuple[str, ...]

    @classmethod
    def of(cls, listen: str, advertised: tuple[str, ...]) -> Names:
        """Return the names of a coordinator that listens on ``host:port``; ``advertised`` come first."""
        host = listen.rpartition(":")[0].strip("[]")
        own = machine() if is_wildcard(host) else (host,)
        called = advertised or own
        return cls(tuple(dict.fromkeys((*called, *own, "localhost", "127.0.0.1", "::1"))), called)

    def addresses(self, port: int) -> tuple[str, ...]:
        """Return the addresses of a port for those who call from elsewhere."""
        return tuple(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in self.called)


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every address of this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return False


def machine() -> tuple[str, ...]:
    """Return this machine's address on the way out, where it has one, and its name."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_FAR_AWAY)
        found.append(probe.getsockname()[0])
    name = socket.gethostname()
    return (*found, name) if _HOST.fullmatch(name) else tuple(found)
