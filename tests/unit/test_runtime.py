"""The runtime records, then replies: on a journal that blocks, is full, or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from coordinator.committer import MAX_BATCH, MAX_PENDING, Committer
from coordinator.config import Timings
from coordinator.core.calls import NodeInfo, PlanWork, SchedulerConfig
from coordinator.core.facts import JobCancelled, JobSubmitted
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import NodeState, Role
from coordinator.runtime import Runtime, anchored_clock
from eval_kernel.errors import JournalCorrupt, JournalFull, JournalPaused, JournalUnreachable, Unavailable
from tests.support.faulty_journal import FaultyJournal
from tests.support.processes import until

TIMINGS = Timings(tick=0.01, barrier=5.0, journal_retry=0.01, watch_interval=0.01, grace=0.1, drain=5.0)
FULL = JournalFull("the disk is full")


def fact(number: int) -> JobSubmitted:
    """Return a fact of a job of its own."""
    return JobSubmitted(f"job{number}", f"key{number}", "", "{}", 0.0)


@asynccontextmanager
async def running(job: Awaitable[None]) -> AsyncIterator[asyncio.Future[None]]:
    """Keep a job running while the context lasts."""
    task = asyncio.ensure_future(job)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, JournalCorrupt):
            await task


@asynccontextmanager
async def runtime(
    journal: FaultyJournal,
    *,
    clock: Callable[[], float] | None = None,
    serving: list[bool] | None = None,
    timings: Timings = TIMINGS,
) -> AsyncIterator[Runtime]:
    """Give a runtime over a fresh scheduler that writes and ticks; it is closed on leaving."""
    heard = [] if serving is None else serving
    made = Runtime(Scheduler(SchedulerConfig()), journal, timings, clock=clock, on_serving=heard.append)
    async with running(made.run()):
        yield made
        journal.gate.set()
        await made.close()
    made.shutdown()


async def submit(made: Runtime, number: int) -> str:
    """Submit a job of its own and return its id."""
    return (await made.submit(f"job{number}", f"key{number}", "{}", "")).job


def test_a_submission_is_answered_only_once_it_is_durable() -> None:
    """Nobody is told of a job while the journal's write of it has not returned."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.gate.clear()
        async with runtime(journal) as made:
            asked = asyncio.create_task(submit(made, 1))
            await asyncio.to_thread(journal.entered.acquire)
            await asyncio.sleep(0)

            assert not asked.done()
            assert [] == journal.written

            journal.gate.set()

            assert "job1" == await asked
            assert ["job1"] == [written.job for written in journal.written]

    asyncio.run(main())


def test_a_read_waits_for_what_it_shows() -> None:
    """A read that sees a decided job is answered only once that job is durable."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.gate.clear()
        async with runtime(journal) as made:
            asked = asyncio.create_task(submit(made, 1))
            await asyncio.to_thread(journal.entered.acquire)
            seen = asyncio.create_task(made.read(lambda scheduler, now: len(scheduler.jobs())))
            await asyncio.sleep(0.01)

            assert not seen.done()

            journal.gate.set()

            assert 1 == await seen
            await asked

    asyncio.run(main())


def test_what_is_decided_while_a_write_is_under_way_is_written_together_and_in_order() -> None:
    """Decisions that pile up behind one write go into the next one, whole and in their order."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.gate.clear()
        committer = Committer(journal, retry_seconds=0.01, barrier_seconds=5)
        async with running(committer.run()):
            committer.put((fact(0),))
            await asyncio.to_thread(journal.entered.acquire)
            for number in range(1, 11):
                committer.put((fact(number), JobCancelled(f"job{number}", "", 0.0)))
            journal.gate.set()
            await committer.barrier()

            assert [1, 20] == [len(batch) for batch in journal.batches]
            assert [f"job{n}" for n in range(11)] == list(dict.fromkeys(f.job for f in journal.written))
            assert await committer.close(1.0)
        committer.shutdown()

    asyncio.run(main())


def test_batches_hold_no_more_than_their_bound_and_never_split_a_decision() -> None:
    """A batch ends before the decision that would take it beyond the bound; a larger decision goes alone."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.gate.clear()
        committer = Committer(journal, retry_seconds=0.01, barrier_seconds=5)
        async with running(committer.run()):
            committer.put((fact(0),))
            await asyncio.to_thread(journal.entered.acquire)
            committer.put(tuple(fact(n) for n in range(MAX_BATCH - 1)))
            committer.put((fact(1), fact(2)))
            committer.put(tuple(fact(n) for n in range(MAX_BATCH + 5)))
            journal.gate.set()
            await committer.barrier()

            assert [1, MAX_BATCH - 1, 2, MAX_BATCH + 5] == [len(batch) for batch in journal.batches]
            assert await committer.close(1.0)
        committer.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("trouble", [FULL, JournalUnreachable("no server answers")])
def test_a_full_journal_acknowledges_nothing_and_is_tried_again_with_the_same_facts(trouble: JournalPaused) -> None:
    """Without space, or a server, the same batch is tried again, in order; then everything goes on by itself."""

    async def main() -> None:
        journal, serving = FaultyJournal(), list[bool]()
        journal.errors = [trouble] * 3
        async with runtime(journal, serving=serving) as made:
            first = asyncio.create_task(submit(made, 1))
            await until(lambda: not made.serving)

            assert not first.done()

            second = asyncio.create_task(submit(made, 2))
            await asyncio.gather(first, second)

            assert ["job1", "job2"] == [written.job for written in journal.written]
            assert [journal.attempts[0]] * 4 == journal.attempts[:4]
            assert [False, True] == serving
            assert made.serving

    asyncio.run(main())


def test_a_call_during_want_of_space_ends_with_the_reason() -> None:
    """A caller is not kept longer than the barrier's time, and learns that the disk is full."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.always = FULL
        async with runtime(journal, timings=Timings(tick=0.01, barrier=0.05, journal_retry=0.01, drain=0.05)) as made:
            with pytest.raises(Unavailable, match="the disk is full"):
                await submit(made, 1)
            with pytest.raises(Unavailable, match="the disk is full"):
                await made.read(lambda scheduler, now: scheduler.jobs())
            journal.always = None
            await made.barrier(patient=True)

            assert ["job1"] == [written.job for written in journal.written]

    asyncio.run(main())


def test_any_other_journal_error_ends_the_runtime_and_whoever_waits() -> None:
    """The runtime ends with the journal's error; the caller whose fact was not written is told to come again."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.always = JournalCorrupt("row 7 fails its checksum")
        made = Runtime(Scheduler(SchedulerConfig()), journal, TIMINGS)
        run = asyncio.create_task(made.run())

        with pytest.raises(Unavailable, match="row 7"):
            await submit(made, 1)
        with pytest.raises(JournalCorrupt):
            await run
        with pytest.raises(Unavailable, match="row 7"):
            await submit(made, 2)

        assert not await made.close()

        made.shutdown()

    asyncio.run(main())


def test_nothing_more_is_decided_while_too_much_waits_to_be_written() -> None:
    """With the queue at its bound a decision waits, and is refused when that takes too long."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.gate.clear()
        async with runtime(journal, timings=Timings(barrier=0.05, tick=0.01, drain=5.0)) as made:
            made.record(tuple(fact(n) for n in range(MAX_PENDING)))

            with pytest.raises(Unavailable, match="has not answered"):
                await submit(made, 1)

            assert () == made.scheduler.jobs()

    asyncio.run(main())


def test_ticks_take_work_from_a_silent_agent_and_wake_whoever_waits_for_it() -> None:
    """When the clock passes a lease's end, the node is lost and its work is there for another."""

    async def main() -> None:
        journal, now = FaultyJournal(), [1000.0]
        async with runtime(journal, clock=lambda: now[0]) as made:
            await submit(made, 1)
            for name in ("a", "b"):
                info = NodeInfo(name, "1", "s", frozenset({Role.PREPROCESS}), "0")
                made.scheduler.register(info, now[0])

            assert PlanWork("job1", "{}") == made.scheduler.acquire("a", "1", 1, "", now[0])
            assert made.scheduler.acquire("b", "1", 1, "", now[0]) is None

            now[0] += 29
            made.scheduler.renew("b", "1", [], "idle", None, False, False, now[0])
            now[0] += 2
            await until(lambda: made.scheduler.nodes(now[0])[0].state is NodeState.LOST)

            assert PlanWork("job1", "{}") == made.scheduler.acquire("b", "1", 1, "", now[0])

    asyncio.run(main())


def test_stopping_ends_whoever_waits_and_refuses_whoever_comes() -> None:
    """A stopping coordinator says so to long polls, watches and new submissions."""

    async def main() -> None:
        journal, serving = FaultyJournal(), list[bool]()
        async with runtime(journal, serving=serving) as made:
            waiting = [asyncio.create_task(made.work("a1", 30)), asyncio.create_task(made.change(30))]
            await asyncio.sleep(0)
            made.stop()
            for task in waiting:
                with pytest.raises(Unavailable, match="stopping"):
                    await task
            with pytest.raises(Unavailable, match="stopping"):
                await submit(made, 1)

            assert [False] == serving

    asyncio.run(main())


def test_closing_says_whether_everything_was_written() -> None:
    """A journal that stays full until the end leaves facts behind, and the caller is told."""

    async def main() -> None:
        journal = FaultyJournal()
        journal.always = FULL
        committer = Committer(journal, retry_seconds=0.01, barrier_seconds=0.05)
        async with running(committer.run()):
            committer.put((fact(1),))

            assert not await committer.close(0.05)
        committer.shutdown()

    asyncio.run(main())


def test_the_clock_starts_at_wall_time_and_does_not_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock set back by a day changes nothing for the scheduler."""
    import time

    wall = time.time()
    clock = anchored_clock()
    monkeypatch.setattr(time, "time", lambda: wall - 86_400)

    assert 0 <= clock() - wall < 5
