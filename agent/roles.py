"""What an agent does besides scoring, by its roles. Which roles it has is for its configuration to say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from agent.config import PACK_ENGINE, AgentConfig, Role
from agent.executor import Executor
from agent.logs import Logger, WorkerLog
from agent.packs.service import PackServer
from agent.packs.store import PackStore
from agent.relay.relay import Relay
from agent.relay.sitelog import SiteLog


def works(roles: Iterable[Role]) -> bool:
    """Whether these roles need a worker."""
    return any(role is not Role.AGGREGATE for role in roles)


def open_pack_server(config: AgentConfig, state: Path, log: Logger) -> PackServer | None:
    """Return the service of an agent that prepares packs for its site, its port taken; ``None`` for any other.

    Raises ``PortTaken``, ``DirectoryUnusable``.
    """
    if not config.serves_packs:
        return None
    packer = Executor(replace(config, engine=PACK_ENGINE, ranks=1), WorkerLog(state / "packer.log"), log)
    return PackServer(config.pack_listen, PackStore(state / "packs", config.pack_disk_bytes), packer, log)


def open_relay(config: AgentConfig, state: Path, name: str, log: Logger) -> Relay | None:
    """Return the relay of an agent that aggregates, its port taken; ``None`` for any other.

    Raises ``PortTaken``, ``DirectoryUnusable``.
    """
    if Role.AGGREGATE not in config.roles:
        return None
    return Relay(config.listen, config.coordinator, name, SiteLog(state / "sitelog"), log, config.membership)
