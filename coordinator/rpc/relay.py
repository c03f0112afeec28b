"""RelayService: many agents' calls over one stream, each answered as AgentService would.

One stream, four kinds of tasks: one reads, one judges reports in order, one writes answers, and each other call, which
may wait long, has its own.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import grpc
import structlog
from fedeval.v1 import agents_pb2, enrolment_pb2, relay_pb2, relay_pb2_grpc
from fedeval.wire.access import CALLER
from fedeval.wire.gather import Gatherer
from fedeval.wire.messages import failure_to_message

from coordinator.rpc.calls import AgentCalls
from coordinator.rpc.convert import verdict
from coordinator.rpc.enrolment import renewed
from coordinator.rpc.guard import Context, guarded, name
from coordinator.rpc.results import Judge
from coordinator.runtime import Runtime
from coordinator.security.security import Security
from eval_kernel.errors import FedevalError, NotPermitted, RequestInvalid, Unavailable

_log = structlog.get_logger("coordinator.rpc")

#: Reports of one relay that wait for the disk before it is read no further; and other calls that may be open.
_REPORTS, _CALLS = 2048, 20_000


class RelayService(relay_pb2_grpc.RelayServiceServicer):
    """The servicer. ``identity`` is that of the journal."""

    def __init__(self, runtime: Runtime, calls: AgentCalls, identity: str, security: Security | None = None) -> None:
        """Serve from a runtime; ``security`` renews certificates, where there are any."""
        self._security = security
        self._runtime = runtime
        self._calls = calls
        self._identity = identity

    @guarded
    async def Relay(  # type: ignore[override]  # the stub knows generators only; grpc.aio also takes context.write
        self, request: Any, context: Context
    ) -> None:
        """Calls up, answers down."""
        context.set_compression(grpc.Compression.Gzip)
        await RelayStream(self._runtime, self._calls, self._identity, self._security, context).run(request)


class RelayStream:
    """The life of one relay's stream."""

    def __init__(
        self, runtime: Runtime, calls: AgentCalls, identity: str, security: Security | None, context: Context
    ) -> None:
        """Nothing has come yet."""
        self._security = security
        self._runtime = runtime
        self._agent_calls = calls
        self._identity = identity
        self._context = context
        self._relay = ""
        self._told: set[str] = set()  # jobs whose specification and manifest this relay has
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._reports: asyncio.Queue[relay_pb2.RelayCall] = asyncio.Queue(_REPORTS)
        self._answers: Gatherer[relay_pb2.RelayAnswer] = Gatherer()

    async def run(self, requests: AsyncIterator[relay_pb2.RelayRequest]) -> None:
        """Serve until the relay closes its side, or the coordinator stops. Raises what ends the stream in disorder."""
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._read(requests),
                self._runtime.stopping.wait(),
                self._judge(),
                self._answers.run(self._write),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in [*tasks, *self._calls.values()]:
                task.cancel()
            await asyncio.gather(*tasks, *self._calls.values(), return_exceptions=True)
            _log.info("relay gone", relay=self._relay)
        if self._runtime.stopping.is_set():
            raise Unavailable("the coordinator is stopping; repeat what was not answered once it is back")

    async def _read(self, requests: AsyncIterator[relay_pb2.RelayRequest]) -> None:
        async for request in requests:
            if not self._relay:
                self._relay = name(request.relay, "relay")
                self._agent_calls.speaking.directly(self._relay)
                _log.info("relay connected", relay=self._relay)
                await self._context.write(relay_pb2.RelayResponse(coordinator=self._identity))
            for call in request.calls:
                await self._take(call)

    async def _take(self, call: relay_pb2.RelayCall) -> None:
        match call.WhichOneof("call"):
            case "report":
                await self._reports.put(call)
            case "cancel":
                if (task := self._calls.get(call.cancel)) is not None:
                    task.cancel()
            case None:
                raise RequestInvalid("a call is missing: one of register, acquire, renew, report or cancel is required")
            case _:
                if len(self._calls) >= _CALLS:
                    raise RequestInvalid(f"relay {self._relay} has {_CALLS} calls open; use more relays")
                task = self._calls[call.id] = asyncio.create_task(self._call(call))
                task.add_done_callback(functools.partial(self._ended, call.id))

    def _ended(self, call: int, task: asyncio.Task[None]) -> None:
        if self._calls.get(call) is task:
            del self._calls[call]

    async def _call(self, call: relay_pb2.RelayCall) -> None:
        calls = self._agent_calls
        match call.WhichOneof("call"):
            case "register":
                answer = await self._answered(call, calls.register(call.register, self._relay))
            case "acquire":
                answer = await self._answered(call, calls.acquire(call.acquire, self._relay))
                self._shorten(answer.acquire)
            case "renew":
                answer = await self._answered(call, calls.renew(call.renew, self._relay))
            case _:
                answer = await self._answered(call, self._renew_certificate(call.renew_certificate))
        self._answers.put(answer)

    async def _renew_certificate(
        self, request: enrolment_pb2.RenewCertificateRequest
    ) -> enrolment_pb2.RenewCertificateResponse:
        caller = CALLER.get()
        if self._security is None or caller.certificate is None or caller.local:
            raise NotPermitted("this relay did not join with a certificate: it cannot renew those of others")
        return await renewed(self._security, caller, request, agent_of_relay=True)

    async def _judge(self) -> None:
        """Judge reports in order; many wait for the disk together."""
        judge = Judge(self._runtime, self._agent_calls.speaking.relayed)
        while True:
            waiting: list[tuple[relay_pb2.RelayAnswer, int]] = []
            call = await self._reports.get()
            while True:
                number = 0

                async def judged(report: agents_pb2.ReportRequest = call.report) -> agents_pb2.ReportResponse:
                    nonlocal number
                    outcome, number = await judge.outcome(report)
                    return agents_pb2.ReportResponse(verdict=verdict(outcome.verdict), detail=outcome.detail)

                waiting.append((await self._answered(call, judged()), number))
                if self._reports.empty() or len(waiting) >= _REPORTS:
                    break
                call = self._reports.get_nowait()
            await self._runtime.barrier(max(number for _, number in waiting), patient=True)
            for answer, _ in waiting:
                self._answers.put(answer)

    async def _answered(self, call: relay_pb2.RelayCall, answer: Awaitable[Any]) -> relay_pb2.RelayAnswer:
        """Await an answer and wrap it; a failure is an answer too, and costs no other call."""
        kind = call.WhichOneof("call")
        assert kind is not None, "looked at before"
        try:
            return relay_pb2.RelayAnswer(id=call.id, **{kind: await answer})
        except FedevalError as error:
            failure = error
        except Exception:  # noqa: BLE001 - a bug in one call must not end the coordinator; the log has the trace
            _log.exception("unexpected error in a call", call=kind, relay=self._relay)
            failure = FedevalError("the coordinator met an unexpected error in this call; its log has the details")
        return relay_pb2.RelayAnswer(id=call.id, error=failure_to_message(failure))

    def _shorten(self, answer: agents_pb2.AcquireResponse) -> None:
        """Leave out what the relay has been told in this stream."""
        if answer.WhichOneof("work") == "score":
            score = answer.score
            if score.job in self._told:
                score.ClearField("spec_json")
                score.ClearField("manifest_json")
            self._told.add(score.job)

    async def _write(self, answers: Sequence[relay_pb2.RelayAnswer]) -> None:
        await self._context.write(relay_pb2.RelayResponse(answers=answers))
