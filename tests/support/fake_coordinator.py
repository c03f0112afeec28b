"""A coordinator in the test's own process: hands out shards, keeps what it is told, and misbehaves when asked to.

Leases run out after `lease_seconds`; results are kept by (job, shard) and outlive `stop` and `start`, as a
journal would. It checks nothing about results that a test cannot check better.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
import grpc.aio
from fedeval.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN, server_options
from fedeval.wire.messages import (
    manifest_from_json,
    manifest_to_json,
    scored_from_message,
    shard_from_message,
    shard_to_message,
)
from fedeval.wire.status import abort

from eval_kernel.errors import FedevalError, NotRegistered, StaleIncarnation, VersionRefused
from eval_kernel.partial import Partial
from eval_kernel.plan import Plan, ShardPlan
from eval_kernel.spec import JobSpec
from tests.support.processes import until


@dataclass
class FakeJobState:
    """What is known of a job."""

    spec: JobSpec
    plan: Plan | None = None
    parts: list[ShardPlan] = field(default_factory=list)
    partials: dict[int, Partial] = field(default_factory=dict)
    arrivals: Counter[int] = field(default_factory=Counter)  # how often each shard's partial came
    failures: list[tuple[int, str, str]] = field(default_factory=list)  # shard (-1: planning), code, message
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    settled: bool = False
    planning_given: bool = False

    @property
    def complete(self) -> bool:
        return self.plan is not None and len(self.partials) == len(self.plan.shards)


class _Handshake(jobs_pb2_grpc.JobServiceServicer):
    """Answers GetCoordinator, and nothing else of the service."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self._coordinator = coordinator

    async def GetCoordinator(self, request, context):  # type: ignore[no-untyped-def]
        low, high = (7, 9) if self._coordinator.refuse_versions else (PROTOCOL_MIN, PROTOCOL_MAX)
        return jobs_pb2.GetCoordinatorResponse(
            coordinator=self._coordinator.identity, version="fake", protocol_min=low, protocol_max=high
        )


class FakeCoordinator(agents_pb2_grpc.AgentServiceServicer):
    """Set an attribute to make it misbehave; read the others to see what agents did."""

    def __init__(self, identity: str = "coordinator-1", heartbeat: float = 0.1, lease: float = 2.0) -> None:
        self.identity = identity
        self.heartbeat_seconds = heartbeat
        self.lease_seconds = lease
        self.jobs: dict[str, FakeJobState] = {}
        self.port = 0
        # what agents did
        self.agents: dict[str, str] = {}  # name -> incarnation, since the last start
        self.registrations: list[agents_pb2.RegisterRequest] = []
        self.renewals: list[tuple[float, agents_pb2.RenewRequest]] = []
        self.left: list[str] = []
        self.max_unacknowledged = 0
        self.part_sizes: list[int] = []
        # how it misbehaves
        self.refuse_versions = False
        self.hold_acks = False  # results are kept, but not acknowledged
        self.break_streams_after: int | None = None  # results in one stream, then it is aborted unanswered
        self.retry_failures = True  # a shard that failed is given again
        self.drain_agents = False
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    # ---------------------------------------------------------------- for tests

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen; on the same port as before when it was started before."""
        self.agents.clear()
        for job in self.jobs.values():
            job.leases.clear()
            job.parts.clear()
            job.planning_given = False
        self._server = grpc.aio.server(options=server_options())
        agents_pb2_grpc.add_AgentServiceServicer_to_server(self, self._server)
        jobs_pb2_grpc.add_JobServiceServicer_to_server(_Handshake(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Stop as a crash would: at once, with everything in flight unanswered."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def __aenter__(self) -> FakeCoordinator:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def add_job(self, name: str, spec: JobSpec, plan: Plan | None = None) -> FakeJobState:
        """Submit a job, planned already or not."""
        self.jobs[name] = FakeJobState(spec, plan)
        self.wake()
        return self.jobs[name]

    def forget_agents(self) -> None:
        """Lose all registrations, as a restart would."""
        self.agents.clear()

    def wake(self) -> None:
        """Have waiting calls look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def completed(self, job: str, seconds: float = 60.0) -> list[Partial]:
        """Wait until every shard of a job has a partial; return them in order."""
        state = self.jobs[job]
        try:
            await until(lambda: state.complete, seconds)
        except TimeoutError:
            raise TimeoutError(f"{job}: {sorted(state.partials)} of {state.plan and len(state.plan.shards)}") from None
        return [state.partials[shard] for shard in sorted(state.partials)]

    # ---------------------------------------------------------------- the service

    async def Register(self, request, context):  # type: ignore[no-untyped-def]
        if self.refuse_versions:
            await abort(context, VersionRefused("this coordinator speaks protocol 7 to 9; install a newer agent"))
        self.registrations.append(request)
        self.agents[request.agent] = request.incarnation
        for job in self.jobs.values():
            job.leases = {shard: lease for shard, lease in job.leases.items() if lease[0] != request.agent}
        return agents_pb2.RegisterResponse(
            protocol=1,
            coordinator=self.identity,
            heartbeat_seconds=self.heartbeat_seconds,
            lease_seconds=self.lease_seconds,
        )

    async def Acquire(self, request, context):  # type: ignore[no-untyped-def]
        await self._known(request, context)
        end = time.monotonic() + request.wait_ms / 1000
        while time.monotonic() < end and self.agents.get(request.agent) == request.incarnation:
            if not self.drain_agents and (answer := self._assignment(request)) is not None:
                return answer
            changed = self._changed
            try:
                async with asyncio.timeout(min(0.2, self.lease_seconds / 4)):
                    await changed.wait()
            except TimeoutError:
                continue  # leases may have run out meanwhile
        return agents_pb2.AcquireResponse()

    async def Renew(self, request, context):  # type: ignore[no-untyped-def]
        await self._known(request, context)
        self.renewals.append((time.monotonic(), request))
        answer = agents_pb2.RenewResponse(drain=self.drain_agents)
        for holding in request.holdings:
            job = self.jobs.get(holding.job)
            if job is None or job.settled:
                if holding.job not in answer.settled_jobs:
                    answer.settled_jobs.append(holding.job)
            elif holding.shard >= 0:
                owner, _ = job.leases.get(holding.shard, ("", 0.0))
                if owner == request.agent:
                    job.leases[holding.shard] = (owner, time.monotonic() + self.lease_seconds)
                else:
                    answer.lost.append(holding)
        if request.leaving:
            self.left.append(request.agent)
            del self.agents[request.agent]
        return answer

    async def Report(self, request_iterator, context) -> AsyncIterator[agents_pb2.ReportResponse]:  # type: ignore[no-untyped-def, override]
        received, waiting = 0, []
        async for request in request_iterator:
            await self._known(request, context)
            received += 1
            if self.break_streams_after is not None and received > self.break_streams_after:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream breaks, as asked for")
            verdict, detail = self._take(request)
            waiting.append(agents_pb2.ReportResponse(sequence=request.sequence, verdict=verdict, detail=detail))
            self.wake()
            self.max_unacknowledged = max(self.max_unacknowledged, len(waiting))
            while waiting and not self.hold_acks:
                yield waiting.pop(0)

    # ---------------------------------------------------------------- inside

    async def _known(self, request, context) -> None:  # type: ignore[no-untyped-def]
        incarnation = self.agents.get(request.agent)
        error: FedevalError | None = None
        if incarnation is None:
            error = NotRegistered(f"agent {request.agent} is not registered here")
        elif incarnation != request.incarnation:
            error = StaleIncarnation(f"agent {request.agent} has registered again since")
        if error is not None:
            await abort(context, error)

    def _assignment(self, request: agents_pb2.AcquireRequest) -> agents_pb2.AcquireResponse | None:
        now = time.monotonic()
        for name, job in self.jobs.items():
            if job.settled:
                continue
            if job.plan is None:
                if not job.planning_given:
                    job.planning_given = True
                    plan = agents_pb2.PlanAssignment(job=name, spec_json=job.spec.canonical())
                    return agents_pb2.AcquireResponse(plan=plan)
                continue
            failed = {shard for shard, _, _ in job.failures} if not self.retry_failures else set()
            free = [
                shard
                for shard in job.plan.shards
                if shard.index not in job.partials
                and shard.index not in failed
                and job.leases.get(shard.index, ("", 0.0))[1] < now
            ][: request.max_shards]
            if free:
                for shard in free:
                    job.leases[shard.index] = (request.agent, now + self.lease_seconds)
                score = agents_pb2.ScoreAssignment(
                    job=name,
                    spec_json=job.spec.canonical(),
                    manifest_json=manifest_to_json(job.plan.manifest),
                    shards=[shard_to_message(shard) for shard in free],
                )
                return agents_pb2.AcquireResponse(score=score)
        return None

    def _take(self, request: agents_pb2.ReportRequest) -> tuple[agents_pb2.Verdict, str]:
        job = self.jobs.get(request.job)
        if job is None or job.settled:
            return agents_pb2.VERDICT_UNWANTED, "the job is settled or unknown"
        match request.WhichOneof("result"):
            case "scored":
                partial = scored_from_message(request.scored).partial
                job.arrivals[partial.shard] += 1
                first = job.partials.setdefault(partial.shard, partial)
                if job.arrivals[partial.shard] == 1:
                    return agents_pb2.VERDICT_ACCEPTED, ""
                if first == partial:
                    return agents_pb2.VERDICT_DUPLICATE, ""
                return agents_pb2.VERDICT_DIVERGENT, "another result was there first"
            case "shard_failure":
                failure = request.shard_failure
                job.leases.pop(failure.shard, None)
                job.failures.append((failure.shard, failure.failure.code, failure.failure.message))
            case "plan_failure":
                job.failures.append((-1, request.plan_failure.code, request.plan_failure.message))
                job.planning_given = not self.retry_failures
            case "plan_part":
                if job.plan is not None:
                    return agents_pb2.VERDICT_DUPLICATE, ""
                self.part_sizes.append(len(request.plan_part.shards))
                job.parts.extend(shard_from_message(shard) for shard in request.plan_part.shards)
                if request.plan_part.last:
                    shards = {shard.index: shard for shard in job.parts}
                    manifest = manifest_from_json(request.plan_part.manifest_json)
                    job.plan = Plan(manifest, tuple(shards[index] for index in sorted(shards)))
        return agents_pb2.VERDICT_ACCEPTED, ""


def beats_of(coordinator: FakeCoordinator) -> list[float]:
    """Return the seconds between successive heartbeats."""
    times = [moment for moment, _ in coordinator.renewals]
    return [later - earlier for earlier, later in pairwise(times)]


def activities(coordinator: FakeCoordinator) -> dict[str, set[str]]:
    """Return what each agent said that it does."""
    found: dict[str, set[str]] = defaultdict(set)
    for _, request in coordinator.renewals:
        found[request.agent].add(request.activity)
    return found
