"""The relay's one stream to what is above it: calls go up gathered, answers come down by number.

Keeps the stream open, and says when it is. A call that is not answered before a break fails as ``Unreachable``; whether
to repeat it is the caller's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from fedeval.v1 import agents_pb2, enrolment_pb2, jobs_pb2, jobs_pb2_grpc, relay_pb2, relay_pb2_grpc
from fedeval.wire.channel import open_channel
from fedeval.wire.diagnosis import diagnose
from fedeval.wire.gather import GATHER_SECONDS, Gatherer
from fedeval.wire.messages import failure_from_message
from fedeval.wire.status import from_rpc

from agent.link import Backoff
from agent.logs import Logger
from agent.membership import source
from agent.pulse import first_of
from eval_kernel.errors import AccessError, CertificateExpired, FedevalError, Unauthenticated, Unavailable, Unreachable

#: Seconds a greeting may take, and the first answer of a stream.
CALL_SECONDS = 10.0
#: How long a stream that is to move to another connection waits for those who ask for work.
MOVE_SECONDS = 2.0
#: What may go up as a call.
Call = (
    agents_pb2.RegisterRequest
    | agents_pb2.AcquireRequest
    | agents_pb2.RenewRequest
    | agents_pb2.ReportRequest
    | enrolment_pb2.RenewCertificateRequest
)
_KINDS = {
    agents_pb2.RegisterRequest: "register",
    agents_pb2.AcquireRequest: "acquire",
    agents_pb2.RenewRequest: "renew",
    agents_pb2.ReportRequest: "report",
    enrolment_pb2.RenewCertificateRequest: "renew_certificate",
}


class Upstream:
    """Calls to the coordinator, or to another relay, in the agents' names."""

    def __init__(self, address: str, name: str, log: Logger, membership: Path | None = None) -> None:
        """``name`` is this relay's, ``membership`` its file. Opens a channel; sends nothing yet."""
        self.address = address
        self.coordinator = ""  #: identity of the coordinator above; "" before the first stream
        self.generation = 0  #: counts the streams
        self._name = name
        self._log = log
        self._source = source(address, membership)
        self.channel = open_channel(address, self._source)
        self._stub: relay_pb2_grpc.RelayServiceAsyncStub = relay_pb2_grpc.RelayServiceStub(self.channel)
        self._jobs: jobs_pb2_grpc.JobServiceAsyncStub = jobs_pb2_grpc.JobServiceStub(self.channel)
        self._calls: Gatherer[relay_pb2.RelayCall] = Gatherer()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._asking: set[int] = set()  # those of them that wait for work
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()
        self._texts: dict[str, tuple[str, str]] = {}  # job -> specification and manifest, as told in this stream
        self._number = 0
        self._moves = False
        self._up = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()

    async def close(self) -> None:
        """Close the channel."""
        await self.channel.close()

    # ---------------------------------------------------------------- calls

    def send(self, call: Call) -> asyncio.Future[Any]:
        """Send a call, after those sent before; return its answer to come.

        The future raises ``Unreachable``, or what the coordinator named; cancelling it calls the call off.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._up.is_set() or (self._moves and isinstance(call, agents_pb2.AcquireRequest)):
            future.set_exception(Unreachable(f"the relay {self._name} does not reach {self.address}"))
            return future
        self._number += 1
        number = self._number
        self._pending[number] = future
        future.add_done_callback(lambda done: self._ended(number, done))
        if isinstance(call, agents_pb2.AcquireRequest):
            self._asking.add(number)
            self._nobody_asks.clear()
        body: dict[str, Any] = {_KINDS[type(call)]: call}
        self._calls.put(relay_pb2.RelayCall(id=number, **body))
        return future

    async def ready(self) -> None:
        """Wait until the stream is open."""
        await self._up.wait()

    async def broken(self, generation: int) -> None:
        """Wait until a stream is no longer the present one."""
        while self.generation == generation and self._up.is_set():
            await self._down.wait()

    async def greet(self) -> jobs_pb2.GetCoordinatorResponse:
        """Ask who is there. Raises ``Unreachable``."""
        try:
            answer = await self._jobs.GetCoordinator(jobs_pb2.GetCoordinatorRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from None
        return answer

    # ---------------------------------------------------------------- the stream

    async def serve(self) -> None:
        """Keep a stream open until cancelled. Raises the errors that another try would meet too."""
        backoff = Backoff()
        noted = ""
        refused = False
        while True:
            generation = self.generation
            try:
                await first_of(self._stream(), self._renewed())
                refused = False
                if self._moves:
                    self._log.info("the relay's stream moves to a connection with the renewed certificate")
                    continue
                reason = f"{self.address} ended the relay's stream"
            except grpc.aio.AioRpcError as error:
                cause = await self._reason(error)
                if isinstance(cause, AccessError) and (
                    refused or not isinstance(cause, Unauthenticated | CertificateExpired)
                ):
                    raise cause from None
                refused = isinstance(cause, AccessError)
                reason = str(cause)
            except (asyncio.InvalidStateError, TimeoutError) as error:
                reason = f"{self.address} ended the relay's stream ({type(error).__name__})"
            finally:
                self._lose()
            if self.generation != generation:
                backoff.reset()
                noted = ""
            if reason != noted:
                self._log.warning("the relay is cut off from above", reason=reason)
                noted = reason
            await backoff.wait()

    async def _reason(self, error: grpc.aio.AioRpcError) -> FedevalError:
        """Return what a broken stream stands for; why nobody answers, where that is nothing that heals."""
        cause = from_rpc(error, self.address)
        if isinstance(cause, Unreachable) and not isinstance(cause, Unavailable):
            found = await asyncio.to_thread(diagnose, self.address, self._source())
            return cause if found is None else found
        return cause

    async def _renewed(self) -> None:
        """Wait until another connection has taken the place of this one: the stream moves over, once it was open.

        Nobody may be asking for work then: an answer that is lost is a lease that has to run out.
        """
        self._moves = False
        await self.ready()
        await self.channel.replaced(self.channel.generation)
        self._moves = True
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVE_SECONDS):
                await self._nobody_asks.wait()
        for number in self._asking:  # for these there is no work
            self._number += 1
            self._calls.put(relay_pb2.RelayCall(id=self._number, cancel=number))
        await asyncio.sleep(2 * GATHER_SECONDS)

    async def _stream(self) -> None:
        call: grpc.aio.StreamStreamCall[Any, Any] = self._stub.Relay(None, compression=grpc.Compression.Gzip)
        writing: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await call.write(relay_pb2.RelayRequest(relay=self._name))
                first = await call.read()
            if not isinstance(first, relay_pb2.RelayResponse):
                return  # it ended before it began
            self._open(first.coordinator)

            async def write(calls: Sequence[relay_pb2.RelayCall]) -> None:
                await call.write(relay_pb2.RelayRequest(calls=calls))

            writing = asyncio.create_task(self._calls.run(write))
            # Reading learns of a break too, whichever side made it: what the writer dies of needs no one's attention.
            while isinstance(response := await call.read(), relay_pb2.RelayResponse):
                for answer in response.answers:
                    self._take(answer)
        finally:
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            call.cancel()  # an abandoned call is never collected

    def _open(self, coordinator: str) -> None:
        self.generation += 1
        self.coordinator = coordinator
        self._calls = Gatherer()
        self._texts.clear()
        self._down.clear()
        self._up.set()
        self._log.info("the relay reaches the coordinator", address=self.address, coordinator=coordinator)

    def _lose(self) -> None:
        self._up.clear()
        self._down.set()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(Unreachable(f"the relay {self._name} lost {self.address}"))

    def _ended(self, number: int, future: asyncio.Future[Any]) -> None:
        self._asking.discard(number)
        if not self._asking:
            self._nobody_asks.set()
        if self._pending.pop(number, None) is not None and future.cancelled() and self._up.is_set():
            self._number += 1
            self._calls.put(relay_pb2.RelayCall(id=self._number, cancel=number))
        if not future.cancelled():
            future.exception()  # whoever asked may be gone

    def _take(self, answer: relay_pb2.RelayAnswer) -> None:
        kind = answer.WhichOneof("answer")
        if kind == "acquire":
            self._complete(answer.acquire)  # also where nobody waits any more: later answers build on it
        future = self._pending.get(answer.id)
        if future is None or future.done():
            return
        if kind == "error":
            future.set_exception(failure_from_message(answer.error))
        elif kind is None:
            future.set_exception(FedevalError(f"{self.address} gave an answer that this version does not know"))
        else:
            future.set_result(getattr(answer, kind))

    def _complete(self, answer: agents_pb2.AcquireResponse) -> None:
        """Put in what is told once in a stream only."""
        if answer.WhichOneof("work") != "score":
            return
        score = answer.score
        if score.spec_json:
            self._texts[score.job] = (score.spec_json, score.manifest_json)
        else:
            score.spec_json, score.manifest_json = self._texts.get(score.job, ("", ""))
