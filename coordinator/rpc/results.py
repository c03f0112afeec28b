"""Results: judged in the order in which they come up, and acknowledged in it, each once it is durable."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import structlog
from fedeval.v1 import agents_pb2, evaluation_pb2
from fedeval.wire.channel import REPORT_CREDIT
from fedeval.wire.messages import scored_from_message, shard_from_message

from coordinator.core.calls import Outcome, Verdict
from coordinator.planning import PlanAssembly
from coordinator.rpc.convert import verdict
from coordinator.rpc.guard import Context, required
from coordinator.runtime import Runtime
from eval_kernel.errors import FedevalError, PartialRefused, PlanRefused, RequestInvalid, Unavailable

_log = structlog.get_logger("coordinator.rpc")

#: What an acknowledgement needs: the message's sequence, the outcome, and the fact that must be durable first.
_Ack = tuple[int, Outcome, int]
Check = Callable[[str], None]


class ResultStream:
    """The life of one stream. While ``REPORT_CREDIT`` results wait for the disk, the agent is read no further."""

    def __init__(self, runtime: Runtime, check: Check, context: Context) -> None:
        """Begin with nothing received; ``check`` raises for agents in whose name the caller may not speak."""
        self._runtime = runtime
        self._context = context
        self._judge = Judge(runtime, check)
        self._acks: asyncio.Queue[_Ack | None] = asyncio.Queue(REPORT_CREDIT)

    async def run(self, requests: AsyncIterator[agents_pb2.ReportRequest]) -> None:
        """Serve until the agent closes its side, or the coordinator stops.

        What was judged is acknowledged before an error ends the stream. Raises that error.
        """
        reader = asyncio.create_task(self._read(requests))
        writer = asyncio.create_task(self._acknowledge())
        stopping = asyncio.create_task(self._runtime.stopping.wait())
        try:
            await asyncio.wait((reader, writer, stopping), return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()  # changes nothing where it has ended
            await asyncio.wait((reader,))
            if not writer.done():
                await self._acks.put(None)
            await writer
        finally:
            for task in (reader, writer, stopping):
                task.cancel()
        if reader.cancelled():
            raise Unavailable("the coordinator is stopping; repeat what was not acknowledged once it is back")
        reader.result()

    async def _read(self, requests: AsyncIterator[agents_pb2.ReportRequest]) -> None:
        async for request in requests:
            outcome, number = await self._judge.outcome(request)
            await self._acks.put((request.sequence, outcome, number))

    async def _acknowledge(self) -> None:
        while (ack := await self._acks.get()) is not None:
            sequence, outcome, number = ack
            await self._runtime.barrier(number, patient=True)
            await self._context.write(
                agents_pb2.ReportResponse(sequence=sequence, verdict=verdict(outcome.verdict), detail=outcome.detail)
            )


class Judge:
    """Has the scheduler judge results; keeps the unfinished plans of one stream, which are lost with it."""

    def __init__(self, runtime: Runtime, check: Check) -> None:
        """Begin with no plan begun; ``check`` as for ``ResultStream``."""
        self._check = check
        self._runtime = runtime
        self._plans: defaultdict[str, PlanAssembly] = defaultdict(PlanAssembly)  # by agent

    async def outcome(self, request: agents_pb2.ReportRequest) -> tuple[Outcome, int]:
        """Return the outcome of one message and the fact to wait for.

        Raises ``RequestInvalid``, ``Unavailable``, ``AccessError``.
        """
        agent = required(request.agent, "agent")
        self._check(agent)
        incarnation = required(request.incarnation, "incarnation")
        job = required(request.job, "job")
        match request.WhichOneof("result"):
            case "scored":
                return await self._scored(agent, incarnation, job, request.scored)
            case "shard_failure":
                shard, failure = request.shard_failure.shard, _failure(request.shard_failure.failure)
                return await self._shard_failed(agent, incarnation, job, shard, *failure)
            case "plan_part":
                return await self._plan_part(agent, incarnation, job, request.plan_part)
            case "plan_failure":
                self._plans[agent].drop(job)
                return await self._plan_failed(agent, incarnation, job, *_failure(request.plan_failure))
            case _:
                raise RequestInvalid("result is missing: a partial, a failure or a part of a plan is required")

    async def _scored(
        self, agent: str, incarnation: str, job: str, message: agents_pb2.ScoredShard
    ) -> tuple[Outcome, int]:
        try:
            scored = scored_from_message(message)
        except PartialRefused as error:
            failed = self._shard_failed(agent, incarnation, job, message.partial.shard, error.code, str(error))
            return _refused(agent, job, error, await failed)
        return await self._runtime.outcome(lambda s, now: s.scored(agent, incarnation, job, scored, now))

    async def _plan_part(
        self, agent: str, incarnation: str, job: str, message: agents_pb2.PlanPart
    ) -> tuple[Outcome, int]:
        # Read where a wrong one is refused as a part of the plan.
        shards = (shard_from_message(shard) for shard in message.shards)
        try:
            plan = self._plans[agent].add(job, message.manifest_json, shards, last=message.last)
        except PlanRefused as error:
            failed = self._plan_failed(agent, incarnation, job, error.code, str(error))
            return _refused(agent, job, error, await failed)
        if plan is None:
            # A part alone is no result: it is acknowledged so that the next one may come, and stays with this stream.
            return Outcome(Verdict.ACCEPTED, "part of a plan"), self._runtime.decided
        return await self._runtime.outcome(lambda s, now: s.planned(agent, incarnation, job, plan, now))

    async def _shard_failed(
        self, agent: str, incarnation: str, job: str, shard: int, code: str, message: str
    ) -> tuple[Outcome, int]:
        _log.warning("shard failed", job=job, shard=shard, agent=agent, code=code, reason=message)
        return await self._runtime.outcome(
            lambda s, now: s.shard_failed(agent, incarnation, job, shard, code, message, now)
        )

    async def _plan_failed(
        self, agent: str, incarnation: str, job: str, code: str, message: str
    ) -> tuple[Outcome, int]:
        _log.warning("planning failed", job=job, agent=agent, code=code, reason=message)
        return await self._runtime.outcome(lambda s, now: s.plan_failed(agent, incarnation, job, code, message, now))


def _refused(agent: str, job: str, error: FedevalError, failed: tuple[Outcome, int]) -> tuple[Outcome, int]:
    """Answer REFUSED where the scheduler took note of the failure; an unwanted job stays unwanted."""
    outcome, number = failed
    if outcome.verdict is Verdict.UNWANTED:
        return failed
    _log.warning("result refused", job=job, agent=agent, code=error.code, reason=str(error))
    return Outcome(Verdict.REFUSED, str(error), outcome.facts), number


def _failure(message: evaluation_pb2.Failure) -> tuple[str, str]:
    """Return code and text, within bounds; raises ``RequestInvalid`` where there is no code."""
    return required(message.code, "failure.code"), message.message[:2000]
