"""From an agent's result to the coordinator's acknowledgement: into the site's log first, then up until answered."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import grpc
from fedeval.v1 import agents_pb2
from fedeval.wire.status import code_of

from agent.logs import Logger
from agent.relay.sitelog import Record, SiteLog
from agent.relay.upstream import Upstream
from eval_kernel.errors import AccessError, FedevalError, Unavailable, Unreachable

#: Results of one flush of the log, and results that may wait for an answer from above.
FLUSH_RESULTS, CREDIT = 512, 1024
#: Pause before a refused write is tried again.
RETRY_SECONDS = 1.0

_Key = tuple[str, str, int]  # agent, job, shard
_BAD = (agents_pb2.VERDICT_REFUSED, agents_pb2.VERDICT_DIVERGENT)


class Delivery:
    """Takes results over from agents. What it has taken over is on the disk, and goes up until it is answered."""

    def __init__(self, log: SiteLog, upstream: Upstream, logger: Logger) -> None:
        """Begin with what an earlier life left in the log."""
        self._sitelog = log
        self._upstream = upstream
        self._logger = logger
        self._waiting: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._some = asyncio.Event()
        self._credit = asyncio.Semaphore(CREDIT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: list[int] = []
        self._pending: dict[_Key, bytes] = {}  # taken over, or about to be
        self._by_agent: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self.delivered = 0

    def pending_of(self, agent: str) -> set[tuple[str, int]]:
        """Return the shards whose results of this agent are on their way: its leases on them should go on."""
        return self._by_agent.get(agent, set())

    @property
    def pending(self) -> int:
        """Results that were taken over and not answered."""
        return len(self._pending)

    async def take(self, request: agents_pb2.ReportRequest) -> agents_pb2.Verdict.ValueType:
        """Return once a scored shard is durable here. Raises ``Unreachable`` where no coordinator was met yet."""
        if not self._upstream.coordinator:
            raise Unreachable(f"the relay has not reached {self._upstream.address} yet")
        request.sequence = 0
        key, data = _key(request), request.SerializeToString(deterministic=True)
        if self._pending.get(key) == data:
            return agents_pb2.VERDICT_DUPLICATE  # the agent has not heard our answer
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((self._upstream.coordinator, data, future))
        self._some.set()
        await future
        return agents_pb2.VERDICT_ACCEPTED

    async def run(self) -> None:
        """Write and deliver until cancelled."""
        try:
            if self._sitelog.leftovers:
                self._logger.info("the site's log holds results of before", count=len(self._sitelog.leftovers))
            for line in self._sitelog.damaged:
                self._logger.error("the site's log was damaged", reason=line)
            for record in self._sitelog.leftovers:
                self._deliver(record)
            self._sitelog.leftovers = []
            while True:
                await self._some.wait()
                self._some.clear()
                while self._waiting or self._answered:
                    await self._flush()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _flush(self) -> None:
        """One turn at the disk: forget what was answered, and make durable what came."""
        batch, self._waiting = self._waiting[:FLUSH_RESULTS], self._waiting[FLUSH_RESULTS:]
        answered, self._answered = self._answered, []

        def write() -> list[Record]:
            self._sitelog.acknowledged(answered)
            return self._sitelog.append([(owner, data) for owner, data, _ in batch]) if batch else []

        try:
            records = await asyncio.to_thread(write)
        except OSError as error:
            self._logger.error(
                "the site's log cannot be written", reason=str(error), remedy="free space or repair that disk"
            )
            # The agents keep what they are not answered for, and give back the leases if this goes on.
            failure = Unreachable(f"the relay cannot write its log ({error.strerror})")
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(failure)
            self._answered += answered
            await asyncio.sleep(RETRY_SECONDS)
            return
        for record, (_, _, future) in zip(records, batch, strict=True):
            self._deliver(record)
            if not future.done():
                future.set_result(None)

    def _deliver(self, record: Record) -> None:
        report = agents_pb2.ReportRequest.FromString(record.report)
        key = _key(report)
        self._pending[key] = record.report
        self._by_agent[report.agent].add((report.job, key[2]))
        task = asyncio.create_task(self._until_answered(record, report))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_answered(self, record: Record, report: agents_pb2.ReportRequest) -> None:
        key = _key(report)
        answer = await self._answer(record, report)
        words = {"agent": report.agent, "job": report.job, "shard": key[2]}
        if isinstance(answer, FedevalError):
            self._logger.error("a result was refused above and is dropped", reason=str(answer), **words)
        elif answer.verdict in _BAD:
            verdict = agents_pb2.Verdict.Name(answer.verdict)
            self._logger.warning(
                "the coordinator has an objection to a result", verdict=verdict, detail=answer.detail, **words
            )
        self.delivered += 1
        if self._pending.get(key) == record.report:
            del self._pending[key]
            self._by_agent[report.agent].discard((report.job, key[2]))
        self._answered.append(record.number)
        self._some.set()

    async def _answer(
        self, record: Record, report: agents_pb2.ReportRequest
    ) -> agents_pb2.ReportResponse | FedevalError:
        """Send a result until it is answered, or refused for what it says."""
        told = False
        while True:
            await self._upstream.ready()
            generation = self._upstream.generation
            if record.coordinator != self._upstream.coordinator:
                if not told:
                    told = True
                    self._logger.warning("a result of another coordinator stays in the log", owner=record.coordinator)
                await self._upstream.broken(generation)
                continue
            try:
                async with self._credit:
                    answer: agents_pb2.ReportResponse = await self._upstream.send(report)
                return answer
            except FedevalError as error:
                if code_of(error) is grpc.StatusCode.INVALID_ARGUMENT or isinstance(error, AccessError):
                    return error
                if isinstance(error, Unavailable) or not isinstance(error, Unreachable):
                    await asyncio.sleep(RETRY_SECONDS)  # it answers, but cannot take it now


def _key(report: agents_pb2.ReportRequest) -> _Key:
    return report.agent, report.job, report.scored.partial.shard
