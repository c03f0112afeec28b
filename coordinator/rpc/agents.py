"""AgentService: each call of one agent in a message of its own. What the calls do is in ``calls`` and ``results``."""

from __future__ import annotations

from typing import Any

from fedeval.v1 import agents_pb2, agents_pb2_grpc

from coordinator.rpc.calls import AgentCalls
from coordinator.rpc.guard import Context, guarded
from coordinator.rpc.results import ResultStream
from coordinator.runtime import Runtime


class AgentService(agents_pb2_grpc.AgentServiceServicer):
    """The servicer."""

    def __init__(self, runtime: Runtime, calls: AgentCalls) -> None:
        """Serve from a runtime."""
        self._runtime = runtime
        self._calls = calls

    @guarded
    async def Register(self, request: agents_pb2.RegisterRequest, context: Context) -> agents_pb2.RegisterResponse:
        """Replaces whatever the agent had announced before."""
        return await self._calls.register(request)

    @guarded
    async def Acquire(self, request: agents_pb2.AcquireRequest, context: Context) -> agents_pb2.AcquireResponse:
        """A long poll."""
        return await self._calls.acquire(request)

    @guarded
    async def Renew(self, request: agents_pb2.RenewRequest, context: Context) -> agents_pb2.RenewResponse:
        """The heartbeat."""
        return await self._calls.renew(request)

    @guarded
    async def Report(  # type: ignore[override]  # the stub knows generators only; grpc.aio also takes context.write
        self, request: Any, context: Context
    ) -> None:
        """Results up, acknowledgements down; ``request`` is the stream of requests."""
        await ResultStream(self._runtime, self._calls.speaking.directly, context).run(request)
