"""The agent's side of the wire: typed calls to the coordinator, whose errors are our errors. Keeps no state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple, TypedDict, TypeVar

import grpc
import grpc.aio
from fedeval.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN, open_channel
from fedeval.wire.credentials import Credentials
from fedeval.wire.diagnosis import diagnose, own_certificate
from fedeval.wire.messages import (
    failure_to_message,
    scored_to_message,
    shard_from_message,
    shard_to_message,
)
from fedeval.wire.status import from_rpc

from agent.config import AgentConfig
from agent.membership import source
from agent.work import Failed, Heartbeat, Held, Outgoing, PlanPart, Verdict, Work
from eval_kernel.errors import FedevalError, Unreachable, VersionRefused

_T = TypeVar("_T")

#: Seconds a call may take; a long poll may take its wait besides.
CALL_SECONDS = 10.0

_VERDICTS = {
    agents_pb2.VERDICT_ACCEPTED: Verdict.ACCEPTED,
    agents_pb2.VERDICT_DUPLICATE: Verdict.DUPLICATE,
    agents_pb2.VERDICT_DIVERGENT: Verdict.DIVERGENT,
    agents_pb2.VERDICT_UNWANTED: Verdict.UNWANTED,
    agents_pb2.VERDICT_REFUSED: Verdict.REFUSED,
}


class _Who(TypedDict):
    agent: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Registration:
    """What the coordinator answered: its journal's identity, and its durations in seconds."""

    coordinator: str
    heartbeat_seconds: float
    lease_seconds: float
    packs: tuple[str, ...] = ()  # addresses at which agents of this site serve packs


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who answers, without having been registered with."""

    coordinator: str
    version: str
    protocol_min: int
    protocol_max: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The heartbeat's answer."""

    lost: tuple[Held, ...]
    settled_jobs: tuple[str, ...]
    drain: bool
    done: tuple[Held, ...] = ()  # running here, and done by another agent
    trust: str = ""  # what names the roots that the coordinator trusts
    packs: tuple[str, ...] | None = None  # as in ``Registration``; None: no change


class Acknowledgement(NamedTuple):
    """An answer to a result; ``verdict`` is ``None`` for one that this version does not know."""

    sequence: int
    verdict: Verdict | None
    detail: str


class AgentClient:
    """Calls under one name and incarnation. Every method raises ``Unreachable`` or what the coordinator named."""

    def __init__(self, config: AgentConfig, name: str, incarnation: str, server_name: str = "") -> None:
        """Open the channel; nothing is sent yet. ``server_name``: see ``open_channel``; for a relay's own agent."""
        self.pack_address = ""  #: where this agent serves packs; announced when it registers
        self._server_name = server_name
        self._config = config
        self._who = _Who(agent=name, incarnation=incarnation)
        self._source = source(config.coordinator, config.membership)
        self.channel = open_channel(config.coordinator, self._source, server_name)
        self._stub: agents_pb2_grpc.AgentServiceAsyncStub = agents_pb2_grpc.AgentServiceStub(self.channel)

    async def close(self) -> None:
        """Close the channel."""
        await self.channel.close()

    async def diagnosis(self) -> FedevalError | None:
        """Return why nobody answers, where that is something that cannot heal by itself."""
        if self._server_name:
            return None  # the relay of this very process; it looks for itself at what is above it
        return await asyncio.to_thread(diagnose, self._config.coordinator, self._source())

    def shown(self) -> Credentials:
        """Return what this agent shows now."""
        return self._source()

    def certificate_problem(self) -> FedevalError | None:
        """Return what is wrong with the certificate that this agent shows now."""
        return own_certificate(self._source())

    async def greet(self) -> Greeting:
        """Ask who is there, leaving no trace. Raises ``VersionRefused`` if no protocol version is common."""
        stub: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(self.channel)
        m = await self._call(stub.GetCoordinator(jobs_pb2.GetCoordinatorRequest(), timeout=CALL_SECONDS))
        if m.protocol_min > PROTOCOL_MAX or m.protocol_max < PROTOCOL_MIN:
            raise VersionRefused(
                f"the coordinator at {self._config.coordinator} (version {m.version}) speaks protocol {m.protocol_min} "
                f"to {m.protocol_max}, this agent {PROTOCOL_MIN} to {PROTOCOL_MAX}; install the same version on both"
            )
        return Greeting(m.coordinator, m.version, m.protocol_min, m.protocol_max)

    async def register(self, capabilities_json: str) -> Registration:
        """Announce this agent. Raises ``VersionRefused`` too."""
        request = agents_pb2.RegisterRequest(
            **self._who,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            version=version("fedeval"),
            site=self._config.site,
            roles=[agents_pb2.Role.Value(f"ROLE_{role.name}") for role in self._config.roles],
            capabilities_json=capabilities_json,
            pack_address=self.pack_address,
        )
        answer = await self._call(self._stub.Register(request, timeout=CALL_SECONDS))
        # A coordinator that names no interval must not make us spin.
        heartbeat = max(answer.heartbeat_seconds, 0.05)
        packs = tuple(answer.site.pack_addresses)
        return Registration(answer.coordinator, heartbeat, answer.lease_seconds, packs)

    async def acquire(self, max_shards: int, wait_seconds: float, loaded_job: str) -> list[Work]:
        """Ask for work and wait for some; an empty list means: ask again."""
        request = agents_pb2.AcquireRequest(
            **self._who, max_shards=max_shards, wait_ms=round(wait_seconds * 1000), loaded_job=loaded_job
        )
        answer = await self._call(self._stub.Acquire(request, timeout=wait_seconds + CALL_SECONDS))
        match answer.WhichOneof("work"):
            case "plan":
                return [Work(answer.plan.job, answer.plan.spec_json)]
            case "score":
                score = answer.score
                shards = [shard_from_message(shard) for shard in score.shards]
                return [Work(score.job, score.spec_json, score.manifest_json, shard) for shard in shards]
            case _:
                return []

    async def renew(self, beat: Heartbeat, activity: str, *, leaving: bool = False) -> Renewal:
        """Send the heartbeat."""
        request = agents_pb2.RenewRequest(
            **self._who,
            holdings=[_holding(held) for held in beat.holdings],
            activity=activity[:200],
            draining=beat.draining,
            leaving=leaving,
            running=None if beat.running is None else _holding(beat.running),
        )
        answer = await self._call(self._stub.Renew(request, timeout=CALL_SECONDS))
        lost = tuple((held.job, held.shard) for held in answer.lost)
        done = tuple((held.job, held.shard) for held in answer.done)
        packs = tuple(answer.site.pack_addresses) if answer.HasField("site") else None
        return Renewal(lost, tuple(answer.settled_jobs), answer.drain, done, answer.trust, packs)

    @asynccontextmanager
    async def report(self) -> AsyncIterator[ReportStream]:
        """Open a report stream; it ends with the block."""
        call: grpc.aio.StreamStreamCall[Any, Any] = self._stub.Report(None)
        try:
            yield ReportStream(call, self._who, self._config.coordinator)
        finally:
            call.cancel()  # an abandoned call is never collected

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._config.coordinator) from None


class ReportStream:
    """Results up, acknowledgements down."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any], who: _Who, address: str) -> None:
        self._call = call
        self._who = who
        self._address = address

    async def send(self, message: Outgoing) -> None:
        """Write one result; waits while the connection is full."""
        request = agents_pb2.ReportRequest(sequence=message.sequence, job=message.job, **self._who)
        match message.body:
            case Failed(shard=-1, error=error):
                request.plan_failure.CopyFrom(failure_to_message(error))
            case Failed(shard=shard, error=error):
                request.shard_failure.shard = shard
                request.shard_failure.failure.CopyFrom(failure_to_message(error))
            case PlanPart() as part:
                request.plan_part.manifest_json = part.manifest_json
                request.plan_part.shards.extend(shard_to_message(shard) for shard in part.shards)
                request.plan_part.last = part.last
            case scored:
                request.scored.CopyFrom(scored_to_message(scored))
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._address) from None
        except asyncio.InvalidStateError:
            raise Unreachable(f"the coordinator at {self._address} ended the report stream") from None

    async def acknowledgements(self) -> AsyncIterator[Acknowledgement]:
        """Yield what comes down; returns when the coordinator ends the stream in order."""
        try:
            async for answer in self._call:
                yield Acknowledgement(answer.sequence, _VERDICTS.get(answer.verdict), answer.detail)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self._address) from None


def _holding(held: Held) -> agents_pb2.Holding:
    return agents_pb2.Holding(job=held[0], shard=held[1])
