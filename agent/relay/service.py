"""What the relay serves: AgentService to agents, RelayService to relays below, the coordinator's greeting to both.

Scored shards are taken over by ``Delivery``; every other call waits for its answer from above.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from fedeval.v1 import (
    agents_pb2,
    agents_pb2_grpc,
    enrolment_pb2,
    enrolment_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    relay_pb2,
    relay_pb2_grpc,
)
from fedeval.wire.access import CALLER
from fedeval.wire.channel import REPORT_CREDIT
from fedeval.wire.gather import Gatherer
from fedeval.wire.messages import failure_to_message
from fedeval.wire.pki import read_request
from fedeval.wire.status import abort

from agent.relay.delivery import Delivery
from agent.relay.upstream import Upstream
from eval_kernel.errors import FedevalError, RequestInvalid, Unreachable

_S = TypeVar("_S")
_In = TypeVar("_In")
_Out = TypeVar("_Out")
Context = grpc.aio.ServicerContext[Any, Any]
#: Reports of one relay below that may be unanswered before it is read no further.
_BELOW_CREDIT = 2048


def _guarded(
    handler: Callable[[_S, _In, Context], Awaitable[_Out]],
) -> Callable[[_S, _In, Context], Awaitable[_Out]]:
    """Wrap a handler: an error from above ends the call with the status that it would have had there."""

    @functools.wraps(handler)
    async def wrapped(self: _S, request: _In, context: Context) -> _Out:
        try:
            return await handler(self, request, context)
        except FedevalError as error:
            failure = error
        await abort(context, failure)

    return wrapped


class Forwarding:
    """The calls of agents, wherever they come from."""

    def __init__(self, upstream: Upstream, delivery: Delivery) -> None:
        """Forward to ``upstream``."""
        self.upstream = upstream
        self.agents: set[str] = set()  #: those that have registered and not said good-bye
        self._delivery = delivery

    async def register(self, request: agents_pb2.RegisterRequest) -> agents_pb2.RegisterResponse:
        """Forward. Raises what comes from above."""
        answer: agents_pb2.RegisterResponse = await self.upstream.send(request)
        self.agents.add(request.agent)
        return answer

    async def acquire(self, request: agents_pb2.AcquireRequest) -> agents_pb2.AcquireResponse:
        """Forward; called off above when it is here."""
        answer: agents_pb2.AcquireResponse = await self.upstream.send(request)
        return answer

    async def renew(self, request: agents_pb2.RenewRequest) -> agents_pb2.RenewResponse:
        """Forward, naming also the shards whose results this relay holds: the agent thinks that they are done."""
        named = {(holding.job, holding.shard) for holding in request.holdings}
        ours = self._delivery.pending_of(request.agent) - named
        request.holdings.extend(agents_pb2.Holding(job=job, shard=shard) for job, shard in sorted(ours))
        answer: agents_pb2.RenewResponse = await self.upstream.send(request)
        if request.leaving:
            self.agents.discard(request.agent)
        if ours:
            lost = [holding for holding in answer.lost if (holding.job, holding.shard) not in ours]
            del answer.lost[:]
            answer.lost.extend(lost)
        return answer

    def report(self, request: agents_pb2.ReportRequest) -> asyncio.Future[agents_pb2.ReportResponse]:
        """Take a scored shard over, or forward anything else; return the answer to come. Keeps the order."""
        if request.WhichOneof("result") != "scored":
            return self.upstream.send(request)

        async def taken() -> agents_pb2.ReportResponse:
            return agents_pb2.ReportResponse(verdict=await self._delivery.take(request))

        future = asyncio.ensure_future(taken())
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # its agent may be gone
        return future


class SiteAgentService(agents_pb2_grpc.AgentServiceServicer):
    """AgentService, as a coordinator gives it."""

    def __init__(self, forwarding: Forwarding) -> None:
        """Serve by forwarding."""
        self._forwarding = forwarding

    @_guarded
    async def Register(self, request: agents_pb2.RegisterRequest, context: Context) -> agents_pb2.RegisterResponse:
        """See ``Forwarding``."""
        caller = CALLER.get()
        caller.speaks_as(request.agent, request.site)
        known = (role for role in request.roles if role in agents_pb2.Role.values())  # others are refused above
        caller.may_be(agents_pb2.Role.Name(role).removeprefix("ROLE_").lower() for role in known)
        return await self._forwarding.register(request)

    @_guarded
    async def Acquire(self, request: agents_pb2.AcquireRequest, context: Context) -> agents_pb2.AcquireResponse:
        """See ``Forwarding``."""
        CALLER.get().speaks_as(request.agent)
        return await self._forwarding.acquire(request)

    @_guarded
    async def Renew(self, request: agents_pb2.RenewRequest, context: Context) -> agents_pb2.RenewResponse:
        """See ``Forwarding``."""
        CALLER.get().speaks_as(request.agent)
        return await self._forwarding.renew(request)

    @_guarded
    async def Report(  # type: ignore[override]  # the stub knows generators only; grpc.aio also takes context.write
        self, request: Any, context: Context
    ) -> None:
        """Results up, acknowledgements down, in order."""
        upstream = self._forwarding.upstream
        generation = upstream.generation
        answers: asyncio.Queue[tuple[int, asyncio.Future[agents_pb2.ReportResponse]] | None]
        answers = asyncio.Queue(REPORT_CREDIT)

        async def read() -> None:
            async for message in request:
                CALLER.get().speaks_as(message.agent)
                sequence = message.sequence
                await answers.put((sequence, self._forwarding.report(message)))
            await answers.put(None)

        async def write() -> None:
            while (waiting := await answers.get()) is not None:
                sequence, future = waiting
                answer = await future
                await context.write(
                    agents_pb2.ReportResponse(sequence=sequence, verdict=answer.verdict, detail=answer.detail)
                )

        async def cut() -> None:
            # Parts of a plan that went up before the break are lost: the agent has to begin again.
            await upstream.broken(generation)
            raise Unreachable(f"the relay lost {upstream.address}; send again what was not acknowledged")

        await _first_of(read(), write(), cut(), until_done=1)


class SiteCertificateService(enrolment_pb2_grpc.CertificateServiceServicer):
    """CertificateService, for the agents of the site."""

    def __init__(self, forwarding: Forwarding) -> None:
        """Serve by forwarding."""
        self._forwarding = forwarding

    @_guarded
    async def RenewCertificate(
        self, request: enrolment_pb2.RenewCertificateRequest, context: Context
    ) -> enrolment_pb2.RenewCertificateResponse:
        """Forward an agent's request for itself; above it is known only that this relay asks."""
        try:
            owner = read_request(request.request).owner
        except ValueError as error:
            raise RequestInvalid(f"the certificate request is wrong: {error}") from None
        CALLER.get().speaks_as(owner.name, owner.site)
        answer: enrolment_pb2.RenewCertificateResponse = await self._forwarding.upstream.send(request)
        return answer


class SiteRelayService(relay_pb2_grpc.RelayServiceServicer):
    """RelayService, for relays below."""

    def __init__(self, forwarding: Forwarding) -> None:
        """Serve by forwarding."""
        self._forwarding = forwarding

    @_guarded
    async def Relay(  # type: ignore[override]  # the stub knows generators only; grpc.aio also takes context.write
        self, request: Any, context: Context
    ) -> None:
        """Calls up, answers down."""
        context.set_compression(grpc.Compression.Gzip)
        await _RelayBelow(self._forwarding, context).run(request)


class _RelayBelow:
    """One stream of a relay below."""

    def __init__(self, forwarding: Forwarding, context: Context) -> None:
        self._forwarding = forwarding
        self._context = context
        self._answers: Gatherer[relay_pb2.RelayAnswer] = Gatherer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._credit = asyncio.Semaphore(_BELOW_CREDIT)

    async def run(self, requests: AsyncIterator[relay_pb2.RelayRequest]) -> None:
        upstream = self._forwarding.upstream
        await upstream.ready()
        generation = upstream.generation
        await self._context.write(relay_pb2.RelayResponse(coordinator=upstream.coordinator))

        async def cut() -> None:
            await upstream.broken(generation)
            raise Unreachable(f"the relay lost {upstream.address}; send again what was not answered")

        try:
            await _first_of(self._read(requests), self._answers.run(self._write), cut(), until_done=0)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _read(self, requests: AsyncIterator[relay_pb2.RelayRequest]) -> None:
        async for request in requests:
            for call in request.calls:
                match call.WhichOneof("call"):
                    case "cancel":
                        if (task := self._tasks.get(call.cancel)) is not None:
                            task.cancel()
                    case "register":
                        self._begin(call, functools.partial(self._forwarding.register, call.register))
                    case "acquire":
                        self._begin(call, functools.partial(self._forwarding.acquire, call.acquire))
                    case "renew":
                        self._begin(call, functools.partial(self._forwarding.renew, call.renew))
                    case "renew_certificate":
                        self._begin(call, functools.partial(self._forwarding.upstream.send, call.renew_certificate))
                    case "report":
                        await self._credit.acquire()
                        future = self._forwarding.report(call.report)  # now, to keep the order
                        future.add_done_callback(lambda _: self._credit.release())
                        self._begin(call, functools.partial(_itself, future))
                    case _:
                        raise RequestInvalid("a call is missing in a relay's message")

    def _begin(self, call: relay_pb2.RelayCall, forward: Callable[[], Awaitable[Any]]) -> None:
        # Not a coroutine: a task that is cancelled before it begins would leave one that nobody ever awaits.
        task = asyncio.create_task(self._call(call.id, str(call.WhichOneof("call")), forward))
        self._tasks[call.id] = task
        task.add_done_callback(functools.partial(self._ended, call.id))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]

    async def _call(self, number: int, kind: str, forward: Callable[[], Awaitable[Any]]) -> None:
        try:
            self._answers.put(relay_pb2.RelayAnswer(id=number, **{kind: await forward()}))
        except FedevalError as error:
            self._answers.put(relay_pb2.RelayAnswer(id=number, error=failure_to_message(error)))

    async def _write(self, answers: Sequence[relay_pb2.RelayAnswer]) -> None:
        await self._context.write(relay_pb2.RelayResponse(answers=answers))


class Greeting(jobs_pb2_grpc.JobServiceServicer):
    """Of JobService, who is above: what an agent asks before it begins."""

    def __init__(self, upstream: Upstream) -> None:
        """Ask ``upstream``."""
        self._upstream = upstream

    @_guarded
    async def GetCoordinator(
        self, request: jobs_pb2.GetCoordinatorRequest, context: Context
    ) -> jobs_pb2.GetCoordinatorResponse:
        """Ask above."""
        return await self._upstream.greet()


def _itself(future: asyncio.Future[_Out]) -> asyncio.Future[_Out]:
    return future


async def _first_of(*works: Awaitable[None], until_done: int) -> None:
    """Run all until work ``until_done`` ends in order, or any fails; end the others and raise that error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    watched = {tasks[until_done]}
    try:
        waiting = set(tasks)
        while watched & waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
