"""In whose name a caller may speak: an agent in its own, a relay in those of its site's agents. Certificates tell."""

from __future__ import annotations

from collections.abc import Callable

from fedeval.wire.access import CALLER
from fedeval.wire.pki import Certificate

from coordinator.security.store import revoked
from eval_kernel.errors import NotPermitted

#: A member's site, and whether its certificate was revoked; ``None`` for a name that never joined.
Standing = Callable[[str], tuple[str, bool] | None]


class Speaking:
    """Remembers at which site each name has registered, so that no site can speak in another's."""

    def __init__(self, standing: Standing = lambda name: None) -> None:
        """Nobody has registered yet."""
        self._standing = standing
        self._sites: dict[str, str] = {}

    def directly(self, agent: str, site: str | None = None) -> None:
        """Check an agent's own call; ``site`` is named by one that registers. Raises ``NotPermitted``."""
        CALLER.get().speaks_as(agent, site)
        certificate = _certificate()
        if certificate is not None:
            self._sites[agent] = certificate.owner.site

    def relayed(self, agent: str, site: str | None = None) -> None:
        """Check a call that a relay carries. Raises ``NotPermitted``, ``Revoked``."""
        certificate = _certificate()
        if certificate is None:
            return
        own = certificate.owner.site
        joined = self._standing(agent)
        if joined is not None and joined[1]:
            raise revoked(agent)
        there = joined[0] if joined is not None else self._sites.get(agent, own)
        if there != own or site not in (None, own):
            raise NotPermitted(f"relay {certificate.owner} speaks for {agent[:100]}, which is not of its site")
        self._sites[agent] = own


def _certificate() -> Certificate | None:
    """Whose connection it is; ``None`` where names are not bound to certificates: the local user's own."""
    caller = CALLER.get()
    return None if caller.local else caller.certificate
