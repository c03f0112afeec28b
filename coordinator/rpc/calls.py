"""Registering, asking for work, heartbeats, as plain calls: messages in and out, errors raised.

``AgentService`` and a relay's stream both answer with these; neither has rules of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import structlog
from fedeval.v1 import agents_pb2
from fedeval.wire.access import CALLER
from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN

from coordinator.core.calls import NodeInfo, SchedulerConfig
from coordinator.core.states import Role
from coordinator.rpc.convert import assignment, holding, holding_message
from coordinator.rpc.guard import name, required
from coordinator.rpc.speaking import Speaking
from coordinator.runtime import Runtime
from eval_kernel.errors import RequestInvalid, VersionRefused, reason

_log = structlog.get_logger("coordinator.rpc")

#: Holdings one heartbeat may name.
_MAX_HOLDINGS = 100_000
_MAX_CAPABILITIES = 256 << 10
_MAX_ADDRESS = 300
#: Member of a node's capabilities that the coordinator adds: the relay that speaks for it.
RELAY = "relay"


class AgentCalls:
    """What an agent may call. Every method raises the ``FedevalError`` that the call fails with."""

    def __init__(
        self,
        runtime: Runtime,
        config: SchedulerConfig,
        identity: str,
        speaking: Speaking,
        trust: Callable[[], str] = lambda: "",
    ) -> None:
        """Serve from a runtime; ``identity`` is that of the journal, ``trust`` names the roots that are trusted."""
        self.speaking = speaking
        self._trust = trust
        self._runtime = runtime
        self._config = config
        self._identity = identity
        self._told: dict[str, tuple[str, ...]] = {}  # agent -> pack addresses that it was told last

    async def register(self, request: agents_pb2.RegisterRequest, relay: str = "") -> agents_pb2.RegisterResponse:
        """Replaces whatever the agent had announced before; ``relay`` names the relay that speaks for it, if any."""
        protocol = _protocol(request)
        info = NodeInfo(
            agent=name(request.agent, "agent"),
            incarnation=required(request.incarnation, "incarnation"),
            site=name(request.site, "site"),
            roles=frozenset(_role(role) for role in request.roles),
            version=request.version[:100],
            capabilities={**_capabilities(request.capabilities_json), **({RELAY: relay} if relay else {})},
            pack_address=_address(request.pack_address),
        )
        self._check(info.agent, relay, info.site)
        if not relay:  # a relay looks at the certificates of those it speaks for
            CALLER.get().may_be(role.name.lower() for role in info.roles)
        if not info.roles:
            raise RequestInvalid("roles is empty; an agent needs at least one role")
        await self._runtime.room()
        self._runtime.record(self._runtime.scheduler.register(info, self._runtime.now()))
        _log.info("agent registered", agent=info.agent, site=info.site, version=info.version, relay=relay or None)
        await self._runtime.barrier()
        packs = self._told[info.agent] = self._runtime.scheduler.pack_addresses(info.agent)
        return agents_pb2.RegisterResponse(
            protocol=protocol,
            coordinator=self._identity,
            heartbeat_seconds=self._config.heartbeat_seconds,
            lease_seconds=self._config.lease_seconds,
            site=agents_pb2.Site(pack_addresses=packs),
        )

    async def acquire(self, request: agents_pb2.AcquireRequest, relay: str = "") -> agents_pb2.AcquireResponse:
        """A long poll. Nothing is leased while the journal is stuck: the lease could not be told anyone."""
        agent, incarnation = _who(request)
        self._check(agent, relay)
        if request.max_shards < 0 or request.wait_ms < 0:
            raise RequestInvalid("max_shards and wait_ms must not be negative")
        runtime = self._runtime
        end = runtime.now() + min(request.wait_ms / 1000, runtime.timings.long_poll)
        while True:
            await runtime.room()
            await runtime.barrier()
            work = runtime.scheduler.acquire(agent, incarnation, request.max_shards, request.loaded_job, runtime.now())
            left = end - runtime.now()
            if work is not None or left <= 0:
                break
            await runtime.work(agent, left)
        if work is not None:
            runtime.touch()
        await runtime.barrier()
        return assignment(work)

    async def renew(self, request: agents_pb2.RenewRequest, relay: str = "") -> agents_pb2.RenewResponse:
        """The heartbeat: counts even when it cannot be answered, since the agent was heard."""
        agent, incarnation = _who(request)
        self._check(agent, relay)
        if len(request.holdings) > _MAX_HOLDINGS:
            raise RequestInvalid(f"holdings names {len(request.holdings)} items; at most {_MAX_HOLDINGS} are allowed")
        answer = self._runtime.scheduler.renew(
            agent,
            incarnation,
            [holding(item) for item in request.holdings],
            request.activity[:200],
            holding(request.running) if request.HasField("running") else None,
            request.draining,
            request.leaving,
            self._runtime.now(),
        )
        self._runtime.touch()
        await self._runtime.barrier()
        packs = self._runtime.scheduler.pack_addresses(agent)
        news = packs != self._told.get(agent)
        self._told[agent] = packs
        return agents_pb2.RenewResponse(
            site=agents_pb2.Site(pack_addresses=packs) if news else None,
            lost=[holding_message(item) for item in answer.lost],
            settled_jobs=answer.settled_jobs,
            drain=answer.drain,
            done=[holding_message(item) for item in answer.done],
            trust=self._trust(),
        )

    def _check(self, agent: str, relay: str, site: str | None = None) -> None:
        """Raise ``NotPermitted`` or ``Revoked`` unless the caller may speak as this agent."""
        if relay:
            self.speaking.relayed(agent, site)
        else:
            self.speaking.directly(agent, site)


def _who(request: agents_pb2.AcquireRequest | agents_pb2.RenewRequest) -> tuple[str, str]:
    return required(request.agent, "agent"), required(request.incarnation, "incarnation")


def _protocol(request: agents_pb2.RegisterRequest) -> int:
    """The highest version both speak. Raises ``VersionRefused``, ``RequestInvalid``."""
    if not 0 < request.protocol_min <= request.protocol_max:
        raise RequestInvalid(
            f"protocol_min {request.protocol_min} to protocol_max {request.protocol_max} is no range of versions"
        )
    highest = min(request.protocol_max, PROTOCOL_MAX)
    if highest < max(request.protocol_min, PROTOCOL_MIN):
        raise VersionRefused(
            f"agent {request.agent} speaks protocol {request.protocol_min} to {request.protocol_max}, this coordinator "
            f"{PROTOCOL_MIN} to {PROTOCOL_MAX}; install the same version of fedeval on both sides"
        )
    return highest


def _role(role: agents_pb2.Role.ValueType) -> Role:
    if role == agents_pb2.ROLE_UNSPECIFIED or role not in agents_pb2.Role.values():
        raise RequestInvalid(f"roles holds {role}, which is no role; use FORWARD, PREPROCESS or AGGREGATE")
    return Role[agents_pb2.Role.Name(role).removeprefix("ROLE_")]


def _address(text: str) -> str:
    """A pack address as announced. Raises ``RequestInvalid``."""
    host, _, port = text.rpartition(":")
    if text and not (len(text) <= _MAX_ADDRESS and host and port.isascii() and port.isdigit()):
        raise RequestInvalid(f"pack_address {text[:_MAX_ADDRESS]!r} is not HOST:PORT")
    return text


def _capabilities(text: str) -> dict[str, Any]:
    if not text:
        return {}
    if len(text) > _MAX_CAPABILITIES:
        raise RequestInvalid(f"capabilities_json has {len(text)} characters; at most {_MAX_CAPABILITIES} are allowed")
    try:
        value = json.loads(text)
        # What Python reads beyond JSON (NaN, half a surrogate pair) must not reach those who ask for the nodes.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestInvalid(f"capabilities_json is not JSON: {reason(error)}") from None
    if not isinstance(value, dict):
        raise RequestInvalid("capabilities_json is not a JSON object")
    return value
