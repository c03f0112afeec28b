"""The typed client of a coordinator: what the commands and Python users call. Translates errors; prints nothing."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Self, TypeVar

import grpc.aio
from fedeval.v1 import jobs_pb2, jobs_pb2_grpc
from fedeval.wire.channel import open_channel
from fedeval.wire.credentials import user_source
from fedeval.wire.diagnosis import diagnose
from fedeval.wire.status import from_rpc

from coordinator.config import DEFAULT_ADDRESS, checked_address
from coordinator.status import CoordinatorInfo, JobStatus, NodeStatus, Submitted
from eval_kernel.errors import FedevalError, Unavailable, Unreachable
from eval_kernel.spec import JobSpec

_T = TypeVar("_T")

#: Hears whether the coordinator answers: ``None`` when it did, else why it did not.
OnAnswer = Callable[[Unreachable | None], None]
#: Seconds a call may take: a little more than the coordinator waits for its journal.
CALL_SECONDS = 8.0


class Client:
    """An asynchronous client; use it as ``async with Client(address) as client``.

    Every method raises ``Unreachable`` when nothing answers within ``timeout`` seconds, and otherwise the
    error the coordinator named (``UnknownJob``, ``SpecError``, ``JobKeyConflict``, ...).
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, timeout: float = CALL_SECONDS) -> None:
        """Remember the address. Raises ``ConfigError`` for one that is not ``host:port``."""
        self.address = checked_address(address, listening=False)
        self._timeout = timeout
        self._source = user_source(self.address)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        """Open the channel; nothing is sent before the first call."""
        self._channel = open_channel(self.address, self._source)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the channel."""
        assert self._channel is not None
        await self._channel.close(None)
        self._channel = None

    @property
    def _stub(self) -> jobs_pb2_grpc.JobServiceAsyncStub:
        assert self._channel is not None, "use the client as `async with Client(...) as client`"
        return jobs_pb2_grpc.JobServiceStub(self._channel)

    async def info(self) -> CoordinatorInfo:
        """Return who answers: the handshake."""
        m = await self._call(self._stub.GetCoordinator(jobs_pb2.GetCoordinatorRequest(), timeout=self._timeout))
        return CoordinatorInfo(self.address, m.coordinator, m.version, m.protocol_min, m.protocol_max, m.uptime_seconds)

    async def submit(self, spec: JobSpec, key: str | None = None, *, patience: float = 5.0) -> Submitted:
        """Submit a job and return it once it is durable.

        Without ``key`` a new one is made, so that a repetition after a lost answer finds the same job: an
        unreachable coordinator that answered before is tried again for ``patience`` seconds.
        Raises ``JobKeyConflict`` when the key was used with another specification.
        """
        request = jobs_pb2.SubmitJobRequest(key=uuid.uuid4().hex if key is None else key, spec_json=spec.canonical())
        await self.info()  # a wrong address is found out at once; only what comes after is worth patience
        retry = _Backoff(patience)
        while True:
            try:
                m = await self._call(self._stub.SubmitJob(request, timeout=self._timeout))
                return Submitted(JobStatus.from_message(m.job), m.existed)
            except Unreachable:
                if not await retry.again():
                    raise

    async def job(self, job: str) -> JobStatus:
        """Return a job's present status; ``job`` is its id or an unambiguous prefix."""
        m = await self._call(self._stub.GetJob(jobs_pb2.GetJobRequest(job=job), timeout=self._timeout))
        return JobStatus.from_message(m.job)

    async def jobs(self) -> list[JobStatus]:
        """Return all jobs, newest first; ``spec_json`` is empty in them."""
        m = await self._call(self._stub.ListJobs(jobs_pb2.ListJobsRequest(), timeout=self._timeout))
        return [JobStatus.from_message(job) for job in m.jobs]

    async def nodes(self) -> list[NodeStatus]:
        """Return every node known since the coordinator started."""
        m = await self._call(self._stub.ListNodes(jobs_pb2.ListNodesRequest(), timeout=self._timeout))
        return [NodeStatus.from_message(node) for node in m.nodes]

    async def report(self, job: str) -> dict[str, Any]:
        """Return a job's report as it stands now (see ``eval_kernel.report``)."""
        m = await self._call(self._stub.GetReport(jobs_pb2.GetReportRequest(job=job), timeout=30.0))
        report: dict[str, Any] = json.loads(m.report_json)
        return report

    async def cancel(self, job: str, reason: str = "") -> JobStatus:
        """Cancel a job and return its status; a settled job stays as it is."""
        request = jobs_pb2.CancelJobRequest(job=job, reason=reason)
        m = await self._call(self._stub.CancelJob(request, timeout=self._timeout))
        return JobStatus.from_message(m.job)

    async def watch(
        self, job: str, *, patience: float = 120.0, on_answer: OnAnswer = lambda silence: None
    ) -> AsyncGenerator[JobStatus]:
        """Yield a job's status now, on every change, and last when it is settled.

        A broken stream is opened again for up to ``patience`` seconds, once the first message has come. ``on_answer``
        hears of every answer (``None``) and of every try that nobody answered (the error).
        """
        retry: _Backoff | None = None
        status = await self.job(job)
        on_answer(None)
        while True:
            call = self._stub.WatchJob(jobs_pb2.WatchJobRequest(job=status.job))
            try:
                async for m in call:
                    retry = None
                    on_answer(None)
                    # The specification stays the same, and a watch does not repeat it.
                    status = replace(JobStatus.from_message(m.job), spec_json=status.spec_json)
                    yield status
                    if status.state.settled:
                        return
            except grpc.aio.AioRpcError as error:
                cause = await self._reason(error)
                if not isinstance(cause, Unreachable):
                    raise cause from None
            else:
                cause = Unreachable(f"the coordinator at {self.address} ended the watch of job {status.job} early")
            finally:
                call.cancel()  # an abandoned call is never collected
            on_answer(cause)
            retry = retry or _Backoff(patience)
            if not await retry.again():
                raise cause

    async def settled(
        self, job: str, *, patience: float = 120.0, on_answer: OnAnswer = lambda silence: None
    ) -> JobStatus:
        """Wait until a job is settled and return its status; ``patience`` and ``on_answer`` as for ``watch``."""
        status = await self.job(job)
        on_answer(None)
        if not status.state.settled:
            async for later in self.watch(status.job, patience=patience, on_answer=on_answer):
                status = later
        return status

    async def _call(self, call: Awaitable[_T]) -> _T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise await self._reason(error) from None

    async def _reason(self, error: grpc.aio.AioRpcError) -> FedevalError:
        """Return what a failed call stands for; why nobody answers, where that can be found out."""
        failure = from_rpc(error, self.address)
        if not isinstance(failure, Unreachable) or isinstance(failure, Unavailable):
            return failure
        found = await asyncio.to_thread(diagnose, self.address, self._source())
        return failure if found is None else found


class _Backoff:
    """Jittered waits of 0.1 to 2 seconds, until the patience is used up."""

    def __init__(self, patience: float) -> None:
        self._end = asyncio.get_running_loop().time() + patience
        self._wait = 0.1

    async def again(self) -> bool:
        """Wait a little; return whether another try is due."""
        wait = self._wait * random.uniform(0.5, 1.0)
        self._wait = min(2.0, self._wait * 2)
        if asyncio.get_running_loop().time() + wait > self._end:
            return False
        await asyncio.sleep(wait)
        return True


def call(address: str, action: Callable[[Client], Awaitable[_T]]) -> _T:
    """Run ``action`` from synchronous code: ``call(address, lambda client: client.job("ab12"))``.

    Raises what the action raises. The event loop is this call's own: not for use inside one.
    """

    async def main() -> _T:
        async with Client(address) as client:
            return await action(client)

    return asyncio.run(main())
