"""What an agent does besides scoring, by its roles. Which roles it has is for its configuration to say."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agent.config import AgentConfig, Role
from agent.logs import Logger
from agent.relay.relay import Relay
from agent.relay.sitelog import SiteLog


def works(roles: Iterable[Role]) -> bool:
    """Whether these roles need a worker."""
    return any(role is not Role.AGGREGATE for role in roles)


def open_relay(config: AgentConfig, state: Path, name: str, log: Logger) -> Relay | None:
    """Return the relay of an agent that aggregates, its port taken; ``None`` for any other.

    Raises ``PortTaken``, ``DirectoryUnusable``.
    """
    if Role.AGGREGATE not in config.roles:
        return None
    return Relay(config.listen, config.coordinator, name, SiteLog(state / "sitelog"), log, config.membership)
