"""Agents without processes: the real session and the real client, with a fake engine's partials made on the spot."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

from fedeval.wire.channel import PLAN_PART_SHARDS, REPORT_CREDIT

from agent.client import AgentClient
from agent.config import AgentConfig, Role
from agent.session import Session
from agent.spool import SpoolEntry
from agent.work import JobPlan, Work
from eval_kernel.errors import FedevalError, NotRegistered
from eval_kernel.partial import Execution, Partial, ScoredShard
from eval_kernel.spec import JobSpec
from tests.support.fake_engine import reference_partials, reference_plan

#: Facts of the length that a real worker reports.
EXECUTION = {
    "device": "NVIDIA H200",
    "dtype": "bfloat16",
    "threads": 16,
    "peak_bytes": 3_221_225_472,
    "software": {"torch": "2.13.0+cu130", "torchao": "0.15.0", "transformers": "5.3.0", "kernel": "tiled-head 3"},
    "precision": {"attention": "bfloat16", "mlp": "int8-dynamic", "weights": "sha256:" + 64 * "a"},
}


@lru_cache(maxsize=8)
def partials_of(spec_json: str) -> list[Partial]:
    """Return what each shard of a fake job yields."""
    return reference_partials(JobSpec.from_canonical(spec_json))


class LightAgent:
    """One agent; its spool is a dict that survives ``close``."""

    def __init__(
        self, address: str, name: str, *, seconds: float = 0.0, seed: int = 0, membership: Path | None = None
    ) -> None:
        """``seconds``: how long a shard takes; ``membership``: the file of one that has joined, as of site "here"."""
        self.name = name
        self.seconds = seconds
        self.disk: dict[tuple[str, int], SpoolEntry] = {}
        self.scored = 0
        self.registrations = 0
        self.errors: list[str] = []
        self.acknowledgement_seconds: list[float] = []
        self._sent: dict[int, float] = {}
        self._random = random.Random(f"{seed} {name}")
        roles = (Role.FORWARD, Role.PREPROCESS)
        config = AgentConfig(coordinator=address, site="here", roles=roles, membership=membership)
        self._client = AgentClient(config, name, uuid.uuid4().hex)
        self.session = Session(credit=REPORT_CREDIT, part_shards=PLAN_PART_SHARDS)
        self._changed = asyncio.Event()
        self._up = asyncio.Event()
        self._heartbeat = 1.0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops = (self._stay_registered, self._beat, self._acquire, self._work, self._report)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def check(self) -> None:
        """Raise what ended a loop, if anything did."""
        for task in self._tasks:
            if task.done():
                task.result()

    # ---------------------------------------------------------------- loops

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _failed(self, error: FedevalError) -> None:
        self.errors.append(f"{error.code}: {error}")
        if isinstance(error, NotRegistered):
            self._up.clear()
            self._wake()
        await asyncio.sleep(self._random.uniform(0.1, 0.5))

    async def _stay_registered(self) -> None:
        while True:
            if self._up.is_set():
                await self._changed.wait()
                continue
            try:
                answer = await self._client.register(json.dumps({"device": "light"}))
            except FedevalError as error:
                await self._failed(error)
                continue
            self.registrations += 1
            self._heartbeat = answer.heartbeat_seconds
            self.session.registered(answer.coordinator, list(self.disk.values()))
            self._up.set()
            self._wake()

    async def _beat(self) -> None:
        await self._up.wait()
        await asyncio.sleep(self._random.uniform(0, self._heartbeat))
        while True:
            await self._up.wait()
            beat = self.session.heartbeat()
            try:
                answer = await self._client.renew(beat, "scoring")
            except FedevalError as error:
                await self._failed(error)
                continue
            self.session.renewed(beat, answer.lost, answer.settled_jobs, answer.drain)
            self._wake()
            await asyncio.sleep(self._heartbeat)

    async def _acquire(self) -> None:
        while True:
            await self._up.wait()
            wanted = self.session.wanted()
            if wanted == 0:
                await self._changed.wait()
                continue
            try:
                works = await self._client.acquire(wanted, 20.0, "")
            except FedevalError as error:
                await self._failed(error)
                continue
            if works:
                self.session.assigned(works)
                self._wake()

    async def _work(self) -> None:
        while True:
            work = self.session.next_work()
            if work is None:
                await self._changed.wait()
                continue
            seconds = self.seconds * self._random.uniform(0.8, 1.2)
            if work.shard is not None and seconds:
                await asyncio.sleep(seconds)
            self.session.finished(self._outcome(work, seconds))
            for entry in self.session.to_store():
                self.disk[entry.key.job, entry.key.shard] = entry
            self.session.stored(e.key for e in self.session.to_store())
            self._wake()
            await asyncio.sleep(0)

    def _outcome(self, work: Work, seconds: float) -> ScoredShard | JobPlan:
        if work.shard is None:
            plan = reference_plan(JobSpec.from_canonical(work.spec_json))
            return JobPlan(json.dumps(plan.manifest.to_json()), plan.shards)
        self.scored += 1
        execution = Execution(seconds=max(seconds, 1e-3), **EXECUTION)  # type: ignore[arg-type]
        return ScoredShard(partials_of(work.spec_json)[work.shard.index], execution)

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._up.wait()
            if not self.session.has_results:
                await self._changed.wait()
                continue
            try:
                async with self._client.report() as stream:
                    self.session.stream_opened()
                    self._sent.clear()
                    reading = asyncio.create_task(self._acknowledged(stream.acknowledgements()))
                    reading.add_done_callback(lambda _: self._wake())
                    try:
                        while not reading.done():
                            for message in self.session.to_send():
                                self._sent[message.sequence] = loop.time()
                                await stream.send(message)
                            await self._changed.wait()
                        reading.result()
                    finally:
                        reading.cancel()
            except FedevalError as error:
                await self._failed(error)

    async def _acknowledged(self, answers: AsyncIterator[tuple[int, object, str]]) -> None:
        loop = asyncio.get_running_loop()
        async for sequence, verdict, detail in answers:
            self.acknowledgement_seconds.append(loop.time() - self._sent.pop(sequence, loop.time()))
            self.session.acknowledged(sequence, verdict, detail)  # type: ignore[arg-type]
            for key in self.session.to_remove():
                self.disk.pop((key.job, key.shard), None)
            self._wake()


@asynccontextmanager
async def light_agents(
    addresses: list[str] | Callable[[int], str], count: int, *, seconds: float = 0.0
) -> AsyncIterator[list[LightAgent]]:
    """Run agents; agent i calls address i (modulo their number)."""
    address = addresses if callable(addresses) else lambda i: addresses[i % len(addresses)]
    agents = [LightAgent(address(i), f"light-{i}", seconds=seconds) for i in range(count)]
    for agent in agents:
        agent.start()
    try:
        yield agents
        for agent in agents:
            agent.check()
    finally:
        await asyncio.gather(*(agent.close() for agent in agents))
