"""A coordinator served in this process on a real loopback port, with its stubs and a hand-driven agent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from fedeval.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2_grpc
from fedeval.wire.channel import open_channel
from fedeval.wire.messages import manifest_to_json, shard_to_message

from coordinator.client import Client
from coordinator.config import Timings
from coordinator.core.calls import SchedulerConfig
from coordinator.core.scheduler import Scheduler
from coordinator.rpc.server import Server
from coordinator.runtime import Runtime
from eval_kernel.errors import FedevalError
from eval_kernel.plan import Plan

TIMINGS = Timings(tick=0.02, barrier=0.3, journal_retry=0.02, watch_interval=0.02, long_poll=5.0, grace=0.2, drain=1.0)


@dataclass
class Served:
    """A running coordinator and ways to talk to it."""

    runtime: Runtime
    server: Server
    channel: grpc.aio.Channel
    jobs: Any
    agents: Any
    client: Client

    async def agent(self, name: str = "a", incarnation: str = "1") -> HandAgent:
        agent = HandAgent(self, name, incarnation)
        await agent.register()
        return agent


@dataclass
class HandAgent:
    """An agent whose every call is made by the test."""

    served: Served
    name: str
    incarnation: str
    sequence: int = 0
    registered: agents_pb2.RegisterResponse = field(default_factory=agents_pb2.RegisterResponse)

    @property
    def who(self) -> dict[str, str]:
        return {"agent": self.name, "incarnation": self.incarnation}

    async def register(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            **self.who,
            "protocol_min": 1,
            "protocol_max": 1,
            "version": "0",
            "site": "here",
            "roles": [agents_pb2.ROLE_FORWARD, agents_pb2.ROLE_PREPROCESS],
            "capabilities_json": json.dumps({"device": "none"}),
            **changes,
        }
        self.registered = await self.served.agents.Register(agents_pb2.RegisterRequest(**fields), timeout=10)

    async def acquire(
        self, *, max_shards: int = 4, wait_ms: int = 0, loaded_job: str = ""
    ) -> agents_pb2.AcquireResponse:
        request = agents_pb2.AcquireRequest(**self.who, max_shards=max_shards, wait_ms=wait_ms, loaded_job=loaded_job)
        answer: agents_pb2.AcquireResponse = await self.served.agents.Acquire(request, timeout=10)
        return answer

    async def renew(self, **fields: Any) -> agents_pb2.RenewResponse:
        request = agents_pb2.RenewRequest(**self.who, **fields)
        answer: agents_pb2.RenewResponse = await self.served.agents.Renew(request, timeout=10)
        return answer

    def message(self, job: str, **result: Any) -> agents_pb2.ReportRequest:
        self.sequence += 1
        return agents_pb2.ReportRequest(sequence=self.sequence, **self.who, job=job, **result)

    async def report(self, messages: Iterable[agents_pb2.ReportRequest]) -> list[agents_pb2.ReportResponse]:
        """Send messages on one stream, close it, and return every acknowledgement."""
        call = self.served.agents.Report(iter(list(messages)), timeout=10)
        return [answer async for answer in call]

    async def plan(self, job: str, plan: Plan, part: int = 1000) -> list[agents_pb2.ReportResponse]:
        return await self.report(self.plan_messages(job, plan, part))

    def plan_messages(self, job: str, plan: Plan, part: int) -> list[agents_pb2.ReportRequest]:
        starts = range(0, len(plan.shards), part)
        return [
            self.message(
                job,
                plan_part=agents_pb2.PlanPart(
                    manifest_json=manifest_to_json(plan.manifest),
                    shards=[shard_to_message(shard) for shard in plan.shards[start : start + part]],
                    last=start == starts[-1],
                ),
            )
            for start in starts
        ]


@asynccontextmanager
async def served(
    journal: Any, *, timings: Timings = TIMINGS, config: SchedulerConfig | None = None, listen: str = "127.0.0.1:0"
) -> AsyncIterator[Served]:
    """Serve a scheduler that has replayed ``journal`` (one with ``facts``) until the context is left."""
    config = config or SchedulerConfig()
    scheduler = Scheduler(config)
    scheduler.replay(journal.facts())
    tasks: set[asyncio.Task[None]] = set()

    def serving(yes: bool) -> None:
        task = asyncio.get_running_loop().create_task(server.serving(yes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    runtime = Runtime(scheduler, journal, timings, on_serving=serving)
    server = Server(runtime, config, journal.identity)
    await server.start(listen)
    await server.serving(True)
    running = asyncio.create_task(runtime.run())
    channel = open_channel(server.address)
    try:
        async with Client(server.address) as client:
            yield Served(
                runtime,
                server,
                channel,
                jobs_pb2_grpc.JobServiceStub(channel),
                agents_pb2_grpc.AgentServiceStub(channel),
                client,
            )
    finally:
        await channel.close(None)
        runtime.stop()
        await server.stop(0.2)
        running.cancel()
        with suppress(asyncio.CancelledError, FedevalError):
            await running
        runtime.shutdown()
        if tasks:
            await asyncio.wait(tasks)
