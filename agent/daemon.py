"""The agent's life: loops that carry events between the session (which decides), wire, worker and disk.

Each loop waits for something of its own, tells the session, and does what the session says; none waits for another
longer than one event. The heartbeat therefore goes on whatever the worker does. Decides nothing by itself.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from contextlib import suppress
from dataclasses import replace

from fedeval.wire.channel import PLAN_PART_SHARDS, REPORT_CREDIT

from agent.client import AgentClient, Registration, ReportStream
from agent.config import AgentConfig
from agent.executor import Executor
from agent.link import Backoff, Link
from agent.logs import Logger, WorkerLog
from agent.membership import Keeper
from agent.packs.fetching import PackFetcher
from agent.probe import Capabilities
from agent.pulse import Pulse, first_of
from agent.roles import open_pack_server, open_relay, works
from agent.session import Session
from agent.spool import Corrupted, ResultKey, Spool, SpoolEntry, StateDirectory, remedy
from agent.work import PLANNING, Held, JobPlan, Settled, Verdict, Work
from eval_kernel.errors import DirectoryUnusable, FedevalError, StaleIncarnation

#: How long one Acquire may wait at the coordinator.
POLL_SECONDS = 20.0
#: Results that go to the disk with one flush of the directory.
STORE_BATCH = 32
#: Pause before a refused write is tried again.
STORE_PAUSE_SECONDS = 1.0
#: When stopping: what a worker that is told to stop gets, and what the last reports get.
STOP_SECONDS, LAST_WORDS_SECONDS = 2.0, 5.0
#: How often an agent that stops looks whether the coordinator is still there.
LINK_GLANCE_SECONDS = 0.5


def _named(held: Held) -> dict[str, str | int]:
    """What a log line calls a piece of work."""
    job, index = held
    return {"job": job, "doing": "planning"} if index == PLANNING else {"job": job, "shard": index}


class Daemon:
    """One agent, from its start to its orderly end."""

    def __init__(self, config: AgentConfig, state: StateDirectory, capabilities: Capabilities, log: Logger) -> None:
        """Open the spool and the channel. Raises ``DirectoryUnusable``."""
        self.name = config.name or state.name()
        self._config = config
        self._capabilities = capabilities
        self._log = log.bind(agent=self.name)
        self._spool = Spool(state.path / "spool")
        self._relay = open_relay(config, state.path, self.name, self._log)
        if self._relay is not None:
            own = config.membership if self._relay.secure else None
            config = replace(
                config, coordinator=self._relay.address, membership=own
            )  # it is one of those it speaks for
        server_name = "" if self._relay is None else self._relay.server_name
        self._client = AgentClient(config, self.name, uuid.uuid4().hex, server_name)
        upward = self._client.channel if self._relay is None else self._relay.upstream.channel
        path = self._config.membership
        self._keeper = None if path is None else Keeper(path, upward, self._log)
        self._packs = PackFetcher(state.path / "fetched", self._log)
        self._pack_server = open_pack_server(config, state.path, self._log)
        if self._pack_server is not None:
            self._client.pack_address = self._pack_server.address
        self._executor = Executor(config, WorkerLog(state.path / "worker.log"), self._log)
        self._session = Session(credit=REPORT_CREDIT, part_shards=PLAN_PART_SHARDS)
        self._link = Link(self._client, self._log, self._registered, config.give_up_after)
        self._pulse = Pulse()
        self._stopping = asyncio.Event()
        self._probed = asyncio.Event()
        self._disk = asyncio.Lock()  # one spool operation at a time: loading sweeps up unfinished writes
        self._unneeded: list[ResultKey] = []  # files in the spool that are about to be removed

    async def run(self) -> None:
        """Live until told to stop. Raises the ``FedevalError`` that makes going on senseless."""
        try:
            await first_of(
                self._link.serve(),
                self._heartbeat(),
                self._acquire(),
                self._work(),
                self._store(),
                self._report(),
                self._stop_in_order(),
                self._link.diagnose(),
                *([] if self._keeper is None else [self._keeper.run()]),
                self._packs.run(self._session.upcoming, self._pulse.wait),
                *(service.run() for service in (self._relay, self._pack_server) if service is not None),
            )
        except StaleIncarnation as error:
            raise StaleIncarnation(
                f"{error}; another agent runs under the name {self.name}: give each its own with --name"
            ) from None
        finally:
            await self._executor.close()
            await self._client.close()

    def stop(self) -> None:
        """Ask for the orderly end; asked a second time, end at once, which is as safe as SIGKILL."""
        if self._stopping.is_set():
            self._executor.kill()
            os._exit(130)
        self._log.info("stopping", running=self._executor.activity, at_most_seconds=self._config.drain_seconds)
        self._stopping.set()
        self._session.drain()
        self._pulse.fire()

    # ---------------------------------------------------------------- registration

    async def _registered(self, answer: Registration) -> None:
        leftovers: list[SpoolEntry] = []
        if answer.coordinator != self._session.coordinator:
            entries, corrupted = await self._load()
            for item in corrupted:
                self._log.error("a spooled result is damaged", reason=item.reason, kept_as=str(item.moved_to))
            leftovers = [entry for entry in entries if entry.key.coordinator == answer.coordinator]
            others = sorted({entry.key.coordinator for entry in entries} - {answer.coordinator})
            if others:
                count = len(entries) - len(leftovers)
                self._log.warning("results of other coordinators stay in the spool", count=count, owners=others)
        self._packs.found(answer.packs)
        must_stop = self._session.registered(answer.coordinator, leftovers)
        self._log.info("registered", coordinator=answer.coordinator, leftovers=len(leftovers))
        if must_stop:
            await self._executor.cancel()
        self._pulse.fire()

    async def _load(self) -> tuple[list[SpoolEntry], list[Corrupted]]:
        try:
            async with self._disk:
                return await asyncio.to_thread(self._spool.load)
        except OSError as error:
            raise DirectoryUnusable(
                f"the spool {self._spool.directory} cannot be read ({error.strerror}); repair the disk or use --state"
            ) from None

    # ---------------------------------------------------------------- the loops

    async def _heartbeat(self) -> None:
        backoff = Backoff()
        while True:
            generation = await self._link.ready()
            begun = time.monotonic()
            coordinator, beat = self._session.coordinator, self._session.heartbeat()
            try:
                answer = await self._client.renew(beat, self.activity)
            except FedevalError as error:
                self._link.failed(error, generation)
                await backoff.wait()
                continue
            self._link.answered()
            backoff.reset()
            if self._keeper is not None:
                self._keeper.heard(answer.trust)
            if answer.packs is not None:
                self._packs.found(answer.packs)
            if coordinator == self._session.coordinator:
                settled = self._session.renewed(beat, answer.lost, answer.settled_jobs, answer.drain)
                if not settled and self._session.runs_in_vain(answer.done):
                    self._log.info("another agent has done the running shard: it stops", shards=answer.done)
                    await self._executor.cancel(keep=True)
                if settled:
                    self._log.info("a job was settled: its work stops", jobs=answer.settled_jobs)
                    await self._executor.cancel()
                self._pulse.fire()
            # The wish to stop cuts the pause short, so that the coordinator hears of it at once.
            pause = begun + self._link.heartbeat_seconds - time.monotonic()
            if beat.draining:
                await asyncio.sleep(pause)
            else:
                await self._pulse.until(lambda: self._session.draining, pause)

    async def _acquire(self) -> None:
        backoff = Backoff()
        await self._probed.wait()
        while True:
            generation = await self._link.ready()
            wanted = self._session.wanted()
            if wanted == 0:
                await self._pulse.wait()
                continue
            begun, coordinator = time.monotonic(), self._session.coordinator
            try:
                works = await self._client.acquire(wanted, POLL_SECONDS, self._executor.loaded_job)
            except FedevalError as error:
                self._link.failed(error, generation)
                await backoff.wait()
                continue
            self._link.answered()
            if works:
                backoff.reset()
                # A registration in between changes nothing: if these leases are gone, the heartbeat will say so.
                if coordinator == self._session.coordinator:
                    self._session.assigned(works)
                    self._pulse.fire()
            elif time.monotonic() - begun < 0.5:
                await backoff.wait()  # it did not wait for us: do not spin

    async def _work(self) -> None:
        if not works(self._config.roles):
            self._link.announce(self._capabilities.to_json())
            await asyncio.Event().wait()  # a relay alone needs no worker
        # The worker is started at once: its libraries take seconds to load, and an agent without them is no use.
        facts = await self._executor.probe()
        self._link.announce(replace(self._capabilities, engine=facts).to_json())
        self._packs.enabled = bool(facts.get("packs"))
        self._probed.set()
        job = ""
        while True:
            work = self._session.next_work()
            if work is None:
                await self._pulse.wait()
                continue
            if work.job != job:
                job = work.job
                self._log.info("working on a job", job=job, doing="planning" if work.shard is None else "scoring")
            await self._do(work)
            self._pulse.fire()

    async def _do(self, work: Work) -> None:
        pack = await self._packs.of(work)
        try:
            outcome = await self._executor.run(work, pack)
        except FedevalError as error:
            self._log.warning("failed", **_named(work.held), code=error.code, reason=str(error))
            self._session.finished(error)
            return
        finally:
            self._packs.done(work, pack, self._executor.pack_problem)
        if isinstance(outcome, JobPlan) and self._pack_server is not None:
            self._pack_server.planned(work, outcome)
        if outcome is None:
            self._session.cancelled()
        else:
            self._session.finished(outcome)

    async def _store(self) -> None:
        while True:
            entries = self._session.to_store()[:STORE_BATCH]
            self._unneeded += self._session.to_remove()
            if not entries and not self._unneeded:
                await self._pulse.wait()
                continue
            try:
                async with self._disk:
                    await asyncio.to_thread(self._spool.remove, self._unneeded)
                    self._unneeded.clear()
                    if entries:
                        await asyncio.to_thread(self._spool.put, entries)
            except OSError as error:
                reason = f"the spool {self._spool.directory} cannot be written ({error.strerror})"
                if reason != self._session.storage_problem:
                    self._log.error("work pauses", reason=reason, remedy=remedy(error))
                if given_back := self._session.store_failed(reason):
                    self._log.warning("shards are given back while results cannot be stored", count=given_back)
                await asyncio.sleep(STORE_PAUSE_SECONDS)
                continue
            if self._session.storage_problem:
                self._log.info("the spool can be written again")
            self._session.stored(entry.key for entry in entries)
            self._pulse.fire()

    async def _report(self) -> None:
        backoff = Backoff()
        while True:
            generation = await self._link.ready()
            if not self._session.has_results:
                await self._pulse.wait()
                continue
            try:
                async with self._client.report() as stream:
                    connection = self._client.channel.generation
                    self._session.stream_opened()
                    await first_of(
                        self._send_results(stream),
                        self._take_acknowledgements(stream, backoff),
                        self._link.replaced(generation),
                        self._client.channel.replaced(connection),
                    )
            except FedevalError as error:
                self._link.failed(error, generation)
            await backoff.wait()

    async def _send_results(self, stream: ReportStream) -> None:
        while True:
            messages = self._session.to_send()
            for message in messages:
                await stream.send(message)
            if not messages:
                await self._pulse.wait()

    async def _take_acknowledgements(self, stream: ReportStream, backoff: Backoff) -> None:
        async for sequence, verdict, detail in stream.acknowledgements():
            self._link.answered()
            backoff.reset()
            settled = self._session.acknowledged(sequence, verdict, detail)
            if verdict is None:
                self._log.error("an acknowledgement is not understood: is the coordinator newer than this agent?")
            if settled is not None:
                self._note(settled)
            self._pulse.fire()

    def _note(self, settled: Settled) -> None:
        if settled.verdict in (Verdict.REFUSED, Verdict.DIVERGENT):
            words = {**_named((settled.job, settled.shard)), "detail": settled.detail}
            self._log.warning("the coordinator has an objection to a result", verdict=settled.verdict.value, **words)

    # ---------------------------------------------------------------- the end

    async def _stop_in_order(self) -> None:
        """Finish the running shard, report, say good-bye; each within its time."""
        await self._stopping.wait()
        end = time.monotonic() + self._config.drain_seconds
        session = self._session
        if not await self._pulse.until(lambda: session.running is None, self._config.drain_seconds):
            self._log.warning("the running work is given up", doing=self._executor.activity)
            await self._executor.cancel(STOP_SECONDS)
            await self._pulse.until(lambda: session.running is None, STOP_SECONDS + 1.0)
        left = max(end - time.monotonic(), 0.0)
        await self._pulse.until(lambda: not session.to_store(), LAST_WORDS_SECONDS)
        end = time.monotonic() + max(left, LAST_WORDS_SECONDS)
        # What is not acknowledged is on the disk: without a coordinator to say so there is nothing to wait for.
        while self._link.up and session.has_results and time.monotonic() < end:
            await self._pulse.until(lambda: not session.has_results, LINK_GLANCE_SECONDS)
        await self._pulse.until(lambda: not (session.has_removals or self._unneeded), LAST_WORDS_SECONDS)
        if self._link.answers:
            # It may be announcing itself anew, with what its probe has just found.
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._link.ready()
        if self._link.up:
            self._link.retire()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._client.renew(session.heartbeat(), "stopped", leaving=True)
            except (FedevalError, TimeoutError) as error:
                self._log.info("left without a good-bye", reason=str(error) or "no answer in time")
        waited = round(self._packs.waited_seconds, 3)
        self._log.info("stopped", unacknowledged=session.num_results, packs=self._packs.fetched, waited_seconds=waited)

    @property
    def stopping(self) -> bool:
        """Whether the orderly end has begun."""
        return self._stopping.is_set()

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id, ``None`` while there is none."""
        return self._executor.worker_pid

    @property
    def activity(self) -> str:
        """What the agent does, for people."""
        if self._session.storage_problem:
            return f"paused: {self._session.storage_problem}"
        if self._executor.activity == "idle" and self._session.draining:
            return "stopping"
        if self._executor.activity == "idle" and self._relay is not None:
            return self._relay.activity
        return self._executor.activity
