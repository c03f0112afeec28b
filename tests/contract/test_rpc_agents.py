"""AgentService over a real channel: what each RPC promises, status codes included, driven by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from fedeval.v1 import agents_pb2, evaluation_pb2
from fedeval.wire.channel import PROTOCOL_MAX
from fedeval.wire.messages import manifest_from_json, scored_to_message

from coordinator.core.calls import SchedulerConfig
from coordinator.journal import MemoryJournal
from coordinator.planning import MAX_OPEN
from coordinator.status import JobState, NodeState
from eval_kernel.errors import JournalFull
from eval_kernel.partial import Execution, ScoredShard
from eval_kernel.spec import JobSpec
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan, reference_tally
from tests.support.faulty_journal import FaultyJournal
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.served import HandAgent, Served, served

SPEC = fake_spec(shards=6)
V = agents_pb2.Verdict


def serving(
    test: Callable[[Served], Awaitable[None]], journal: object | None = None, config: SchedulerConfig | None = None
) -> None:
    """Run a test against a coordinator of its own."""

    async def main() -> None:
        async with served(journal or MemoryJournal("identity"), config=config) as there:
            await test(there)

    asyncio.run(main())


async def planned(there: Served, agent: HandAgent, spec: JobSpec = SPEC) -> str:
    """Submit a job, let the agent plan it, and return its id."""
    job = (await there.client.submit(spec)).status.job
    assert job == (await agent.acquire()).plan.job
    (answer,) = await agent.plan(job, reference_plan(spec))
    assert V.VERDICT_ACCEPTED == answer.verdict
    return job


def partial(shard: int, spec: JobSpec = SPEC) -> ScoredShard:
    """Return what a shard must yield."""
    return ScoredShard(reference_partials(spec)[shard], Execution(seconds=0.1, device="cpu", dtype="float32"))


# ---------------------------------------------------------------- Register


def test_registering_answers_identity_protocol_and_timings() -> None:
    """The agent learns the journal's identity, the version to speak, and how often to report."""

    async def test(there: Served) -> None:
        agent = await there.agent()

        timings = {"heartbeat_seconds": 5.0, "lease_seconds": 30.0}
        wanted = agents_pb2.RegisterResponse(protocol=1, coordinator="identity", site=agents_pb2.Site(), **timings)
        assert wanted == agent.registered

    serving(test)


def test_an_agent_of_another_protocol_is_refused_with_the_versions() -> None:
    """FAILED_PRECONDITION with reason VERSION_REFUSED, naming both ranges."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        beyond = PROTOCOL_MAX + 1
        code, reason, details = await status_of(agent.register(protocol_min=beyond, protocol_max=beyond + 2))

        assert (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_REFUSED") == (code, reason)
        assert f"{beyond} to {beyond + 2}" in details
        assert f"1 to {PROTOCOL_MAX}" in details

    serving(test)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"agent": ""}, "agent"),
        ({"agent": "a b"}, "agent"),
        ({"agent": "\x1b[31m"}, "agent"),
        ({"incarnation": ""}, "incarnation"),
        ({"site": ""}, "site"),
        ({"roles": []}, "roles"),
        ({"roles": [agents_pb2.ROLE_UNSPECIFIED]}, "roles"),
        ({"roles": [77]}, "roles"),
        ({"protocol_min": 0}, "protocol_min"),
        ({"protocol_min": 2, "protocol_max": 1}, "protocol_min"),
        ({"capabilities_json": "{"}, "capabilities_json"),
        ({"capabilities_json": "[]"}, "capabilities_json"),
        ({"capabilities_json": '{"a":NaN}'}, "capabilities_json"),
        ({"capabilities_json": '{"a":1e999}'}, "capabilities_json"),
        ({"capabilities_json": '{"a":"\\ud800"}'}, "capabilities_json"),
        ({"capabilities_json": '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"}, "capabilities_json"),
        ({"capabilities_json": '"' + "x" * (300 << 10) + '"'}, "capabilities_json"),
    ],
)
def test_a_wrong_registration_is_an_invalid_argument_that_names_the_field(
    changes: dict[str, object], named: str
) -> None:
    """INVALID_ARGUMENT: unset enums, empty and ill-formed fields are refused, and nothing is registered."""

    async def test(there: Served) -> None:
        agent = HandAgent(there, "a", "1")
        code, _, details = await status_of(agent.register(**changes))

        assert grpc.StatusCode.INVALID_ARGUMENT == code
        assert details.startswith(named)
        assert [] == await there.client.nodes()

    serving(test)


def test_an_earlier_life_of_an_agent_is_told_to_stop_by_every_rpc() -> None:
    """FAILED_PRECONDITION with reason STALE_INCARNATION from Register, Acquire, Renew and Report."""

    async def test(there: Served) -> None:
        old = await there.agent("a", "1")
        await there.agent("a", "2")
        message = old.message("job", shard_failure=agents_pb2.ShardFailure(failure=evaluation_pb2.Failure(code="X")))
        for call in (old.register(), old.acquire(), old.renew(), old.report([message])):
            code, reason, _ = await status_of(call)

            assert (grpc.StatusCode.FAILED_PRECONDITION, "STALE_INCARNATION") == (code, reason)

    serving(test)


def test_an_agent_that_never_registered_is_told_to_by_every_rpc() -> None:
    """NOT_FOUND with reason NOT_REGISTERED from Acquire, Renew and Report."""

    async def test(there: Served) -> None:
        agent = HandAgent(there, "a", "1")
        message = agent.message("job", plan_failure=evaluation_pb2.Failure(code="X"))
        for call in (agent.acquire(), agent.renew(), agent.report([message])):
            code, reason, _ = await status_of(call)

            assert (grpc.StatusCode.NOT_FOUND, "NOT_REGISTERED") == (code, reason)

    serving(test)


# ---------------------------------------------------------------- Acquire and Renew


def test_acquire_waits_for_work_and_answers_when_it_appears() -> None:
    """A long poll that is open when a job is submitted gets it at once."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        asking = asyncio.create_task(agent.acquire(wait_ms=5000))
        await there.client.info()
        begin = there.runtime.now()
        job = (await there.client.submit(SPEC)).status.job
        answer = await asking

        assert job == answer.plan.job
        assert SPEC.canonical() == answer.plan.spec_json
        assert there.runtime.now() - begin < 2

    serving(test)


def test_acquire_without_work_answers_without_an_assignment() -> None:
    """When the wait is over the answer is empty: ask again."""

    async def test(there: Served) -> None:
        agent = await there.agent()

        assert not (await agent.acquire(wait_ms=50)).HasField("plan")
        assert (await agent.acquire()).WhichOneof("work") is None

    serving(test)


def test_negative_amounts_are_invalid_arguments() -> None:
    """INVALID_ARGUMENT for a negative max_shards or wait."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        for call in (agent.acquire(max_shards=-1), agent.acquire(wait_ms=-1)):
            code, _, _ = await status_of(call)

            assert grpc.StatusCode.INVALID_ARGUMENT == code

    serving(test)


def test_shards_come_with_the_manifest_and_are_given_once() -> None:
    """Two agents share a job's shards: none is given to both while its lease runs."""

    async def test(there: Served) -> None:
        one, two = await there.agent("one"), await there.agent("two")
        job = await planned(there, one)
        first, second = (await one.acquire()).score, (await two.acquire()).score

        assert job == first.job == second.job
        assert reference_plan(SPEC).manifest == manifest_from_json(first.manifest_json)
        assert {shard.index for shard in first.shards}.isdisjoint({shard.index for shard in second.shards})

    serving(test)


def test_renew_tells_which_holdings_are_lost_and_which_jobs_are_settled() -> None:
    """A holding of another agent is lost; a cancelled job, and an unknown one, is settled."""

    async def test(there: Served) -> None:
        one, two = await there.agent("one"), await there.agent("two")
        job = await planned(there, one)
        index = (await one.acquire(max_shards=1)).score.shards[0].index
        mine = agents_pb2.Holding(job=job, shard=index)
        stranger = agents_pb2.Holding(job="unknown", shard=0)

        assert [] == list((await one.renew(holdings=[mine])).lost)
        answer = await two.renew(holdings=[mine, stranger])
        assert [mine] == list(answer.lost)
        assert ["unknown"] == list(answer.settled_jobs)

        await there.client.cancel(job)

        assert [job] == list((await one.renew(holdings=[mine])).settled_jobs)

    serving(test)


def test_a_leaving_agent_gives_its_work_back_at_once() -> None:
    """After the good-bye another agent's long poll gets the shard without waiting for the lease."""

    async def test(there: Served) -> None:
        one, two = await there.agent("one"), await there.agent("two")
        job = await planned(there, one, fake_spec(shards=1))
        shard = (await one.acquire()).score.shards[0]
        asking = asyncio.create_task(two.acquire(wait_ms=5000))
        await one.renew(leaving=True)

        assert (job, shard.index) == ((await asking).score.job, shard.index)
        states = {node.node: node.state for node in await there.client.nodes()}
        assert NodeState.LEFT == states["one"]

    serving(test)


def test_a_heartbeat_counts_even_when_the_journal_is_full() -> None:
    """Renew is UNAVAILABLE while nothing can be written, but the agent was heard and keeps its lease."""
    journal = FaultyJournal()
    config = SchedulerConfig(lease_seconds=0.6, heartbeat_seconds=0.1, suspect_after_seconds=0.5)

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        index = (await agent.acquire(max_shards=1)).score.shards[0].index
        mine = agents_pb2.Holding(job=job, shard=index)
        journal.always = JournalFull("no space is left")
        there.runtime.record(there.runtime.scheduler.submit("other", "k", "{}", "", 0.0).facts)
        for _ in range(4):
            code, _, _ = await status_of(agent.renew(holdings=[mine], running=mine))

            assert grpc.StatusCode.UNAVAILABLE == code
        journal.always = None
        await there.runtime.barrier(patient=True)

        assert [] == list((await agent.renew(holdings=[mine], running=mine)).lost)

    serving(test, journal, config)


# ---------------------------------------------------------------- Report


def test_results_are_acknowledged_by_sequence_and_counted_once() -> None:
    """Accepted the first time, duplicate the second, on the same stream or another; the tally is the reference's."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        messages = [agent.message(job, scored=scored_to_message(partial(shard))) for shard in range(6)]
        answers = await agent.report([*messages, messages[0]])
        again = await agent.report(messages)

        assert [V.VERDICT_ACCEPTED] * 6 + [V.VERDICT_DUPLICATE] == [answer.verdict for answer in answers]
        assert [m.sequence for m in [*messages, messages[0]]] == [answer.sequence for answer in answers]
        assert [V.VERDICT_DUPLICATE] * 6 == [answer.verdict for answer in again]
        assert JobState.SUCCEEDED == (await there.client.job(job)).state
        report = await there.client.report(job)
        assert reference_tally(SPEC).digest() == report["totals"]["digest"]
        assert (6, 7) == (report["accounting"]["accepted"], report["accounting"]["duplicates"])

    serving(test)


def test_an_acknowledgement_is_sent_only_once_the_result_is_durable() -> None:
    """While the journal blocks, a result is judged but not acknowledged."""
    journal = FaultyJournal()

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        before = journal.count
        journal.gate.clear()
        call = there.agents.Report(timeout=20)
        await call.write(agent.message(job, scored=scored_to_message(partial(0))))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: there.runtime.scheduler.job(job).shards_done == 1)
        done, _ = await asyncio.wait([reading], timeout=0.1)

        assert set() == done
        assert before == journal.count

        journal.gate.set()

        assert V.VERDICT_ACCEPTED == (await reading).verdict
        assert before + 1 == journal.count
        await call.done_writing()
        assert grpc.aio.EOF is await call.read()

    serving(test, journal)


def test_a_full_journal_holds_acknowledgements_back_and_gives_them_when_there_is_space() -> None:
    """The stream survives want of space: what was sent is acknowledged later, in order."""
    journal = FaultyJournal()

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        journal.always = JournalFull("no space is left")
        messages = [agent.message(job, scored=scored_to_message(partial(shard))) for shard in range(6)]
        reporting = asyncio.create_task(agent.report(messages))
        await until(lambda: len(journal.attempts) > 6)

        assert not reporting.done()

        journal.always = None
        answers = await reporting

        assert [m.sequence for m in messages] == [answer.sequence for answer in answers]
        assert {V.VERDICT_ACCEPTED} == {answer.verdict for answer in answers}

    serving(test, journal)


def test_an_unequal_second_result_is_divergent_and_changes_no_sum() -> None:
    """DIVERGENT: the first one stays, the report shows who differed from whom, and by how much."""

    async def test(there: Served) -> None:
        one, two = await there.agent("one"), await there.agent("two")
        job = await planned(there, one)
        scored = partial(0)
        rows = (replace(scored.partial.rows[0], steps=scored.partial.rows[0].steps + 1024), *scored.partial.rows[1:])
        other = replace(scored.partial, steps=scored.partial.steps + 1024, rows=rows)
        await one.report([one.message(job, scored=scored_to_message(scored))])
        (answer,) = await two.report([two.message(job, scored=scored_to_message(replace(scored, partial=other)))])

        assert V.VERDICT_DIVERGENT == answer.verdict
        (kept,) = (await there.client.report(job))["accounting"]["divergent"]
        assert ("two", "one", 0, 1024 / 2**30) == (
            kept["node"],
            kept["accepted_node"],
            kept["shard"],
            kept["difference_nats"],
        )

    serving(test)


def test_results_of_settled_and_unknown_jobs_are_unwanted() -> None:
    """UNWANTED: the agent forgets them."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        await there.client.cancel(job)
        answers = await agent.report(
            [
                agent.message(job, scored=scored_to_message(partial(0))),
                agent.message("unknown", scored=scored_to_message(partial(0))),
            ]
        )

        assert [V.VERDICT_UNWANTED] * 2 == [answer.verdict for answer in answers]

    serving(test)


@pytest.mark.parametrize("nll", [0.1, float("nan"), float("inf"), -1.0, 2.0**23])
def test_a_sum_that_is_off_the_grid_is_refused_and_counts_as_a_failure(nll: float) -> None:
    """REFUSED with the reason; the shard is not committed, and the report counts a failed try."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        index = (await agent.acquire(max_shards=1)).score.shards[0].index
        message = scored_to_message(partial(index))
        message.partial.nll = nll
        (answer,) = await agent.report([agent.message(job, scored=message)])
        report = await there.client.report(job)

        assert V.VERDICT_REFUSED == answer.verdict
        assert "nats" in answer.detail or "finite" in answer.detail
        assert 0 == report["totals"]["shards"]
        assert 1 == report["accounting"]["failures"]

    serving(test)


def test_a_partial_that_contradicts_its_plan_is_refused() -> None:
    """REFUSED names the contradiction; what came before and after it on the stream is accepted."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        wrong = scored_to_message(partial(1))
        wrong.partial.tokens += 1
        unknown = scored_to_message(partial(1))
        unknown.partial.shard = 99
        answers = await agent.report(
            [
                agent.message(job, scored=scored_to_message(partial(0))),
                agent.message(job, scored=wrong),
                agent.message(job, scored=unknown),
                agent.message(job, scored=scored_to_message(partial(2))),
            ]
        )

        expected = [V.VERDICT_ACCEPTED, V.VERDICT_REFUSED, V.VERDICT_REFUSED, V.VERDICT_ACCEPTED]
        assert expected == [answer.verdict for answer in answers]
        assert "tokens" in answers[1].detail
        assert "no shard 99" in answers[2].detail

    serving(test)


def test_a_failed_shard_is_given_to_another_agent() -> None:
    """A failure is accepted, and the other agent's long poll gets the shard."""

    async def test(there: Served) -> None:
        one, two = await there.agent("one"), await there.agent("two")
        job = await planned(there, one, fake_spec(shards=1))
        shard = (await one.acquire()).score.shards[0]
        asking = asyncio.create_task(two.acquire(wait_ms=5000))
        failure = evaluation_pb2.Failure(code="SHARD_FAILED", message="it\nbroke")
        (answer,) = await one.report(
            [one.message(job, shard_failure=agents_pb2.ShardFailure(shard=shard.index, failure=failure))]
        )

        assert V.VERDICT_ACCEPTED == answer.verdict
        assert [shard.index] == [given.index for given in (await asking).score.shards]

    serving(test)


def test_a_failure_that_is_the_jobs_fault_fails_the_job() -> None:
    """The job is FAILED with the code and text of the failure."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        await agent.acquire()
        failure = evaluation_pb2.Failure(code="DATASET_EMPTY", message="no document has a token")
        (answer,) = await agent.report([agent.message(job, plan_failure=failure)])
        status = await there.client.job(job)

        assert V.VERDICT_ACCEPTED == answer.verdict
        assert JobState.FAILED == status.state
        assert status.failure is not None
        assert "DATASET_EMPTY" == status.failure.code
        assert "no document has a token" in status.failure.message

    serving(test)


@pytest.mark.parametrize("result", [{}, {"plan_failure": evaluation_pb2.Failure()}])
def test_a_message_without_a_result_ends_the_stream_after_the_acknowledgements(result: dict[str, object]) -> None:
    """INVALID_ARGUMENT, once everything before it has been acknowledged."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        call = there.agents.Report(timeout=20)
        await call.write(agent.message(job, scored=scored_to_message(partial(0))))
        await call.write(agent.message(job, **result))

        assert V.VERDICT_ACCEPTED == (await call.read()).verdict
        code, _, _ = await status_of(call.read())
        assert grpc.StatusCode.INVALID_ARGUMENT == code

    serving(test)


def test_a_plan_takes_effect_with_its_last_part() -> None:
    """Parts are acknowledged one by one; the job runs once the last one has come."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        await agent.acquire()
        messages = agent.plan_messages(job, reference_plan(SPEC), 2)
        call = there.agents.Report(timeout=20)
        for message in messages[:-1]:
            await call.write(message)

            assert V.VERDICT_ACCEPTED == (await call.read()).verdict
            assert JobState.PLANNING == (await there.client.job(job)).state
        await call.write(messages[-1])

        assert V.VERDICT_ACCEPTED == (await call.read()).verdict
        assert JobState.RUNNING == (await there.client.job(job)).state
        await call.done_writing()

    serving(test)


def test_a_plan_begins_anew_on_another_stream() -> None:
    """Parts of a broken stream are forgotten; the whole plan sent again takes effect."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        await agent.acquire()
        messages = agent.plan_messages(job, reference_plan(SPEC), 2)
        call = there.agents.Report(timeout=20)
        await call.write(messages[0])
        await call.read()
        call.cancel()
        answers = await agent.report(messages)

        assert [V.VERDICT_ACCEPTED] * 3 == [answer.verdict for answer in answers]
        assert JobState.RUNNING == (await there.client.job(job)).state

    serving(test)


def test_parts_that_make_no_plan_are_refused_and_count_as_a_failed_try() -> None:
    """A manifest that changes, shards in the wrong order, too many shards, and no manifest at all."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        good = agent.plan_messages(job, reference_plan(SPEC), 3)
        other = agent.plan_messages(job, reference_plan(fake_spec(shards=7)), 4)
        nonsense = agent.message(job, plan_part=agents_pb2.PlanPart(manifest_json="{}", last=True))
        for messages in ([good[0], other[1]], [good[1]], [good[0], good[0], good[0]], [nonsense]):
            await agent.acquire()
            answers = await agent.report(messages)

            assert V.VERDICT_REFUSED == answers[-1].verdict
            assert answers[-1].detail
            assert JobState.PLANNING == (await there.client.job(job)).state

    serving(test, config=SchedulerConfig(max_tries=10))


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"parameters": float("nan")}, "parameters is nan"),
        ({"model_type": "\ud800"}, "model_type holds half a surrogate pair"),
        ({"documents": 10**400}, "documents is a number of 1329 bits"),
        ({"bytes": None}, "bytes is None"),
        ({"context": {"a": 1}}, "context is {'a': 1}"),
        ({"zz": 1}, "unexpected keyword argument 'zz'"),
        ({"precision_plan": "{}"}, "precision_plan is no plan of a precision"),
        ({"precision_plan": "[" * 100_000}, "precision_plan is no plan of a precision"),
    ],
)
def test_a_manifest_that_no_engine_makes_is_refused_and_the_job_goes_on(
    changes: dict[str, object], detail: str
) -> None:
    """The refusal names the field; a sound plan is accepted after it and the job runs to its exact end."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        await agent.acquire()
        (message,) = agent.plan_messages(job, reference_plan(SPEC), 1000)
        manifest = json.loads(message.plan_part.manifest_json)
        message.plan_part.manifest_json = json.dumps({**manifest, **changes})
        (answer,) = await agent.report([message])

        assert V.VERDICT_REFUSED == answer.verdict
        assert detail in answer.detail
        assert "\n" not in answer.detail

        await agent.acquire()
        await agent.plan(job, reference_plan(SPEC))
        messages = [agent.message(job, scored=scored_to_message(partial(i))) for i in range(6)]
        await agent.report(messages)
        report = await there.client.report(job)

        assert reference_tally(SPEC).digest() == report["totals"]["digest"]

    serving(test)


@pytest.mark.parametrize(
    ("manifest_json", "changes", "detail"),
    [
        ("[" * 100_000, {}, "not a manifest"),
        ("null", {}, "not a manifest"),
        (None, {"input_tokens": 1 << 62}, "shard 0: input_tokens is a number of 63 bits"),
        (None, {"bytes": -1}, "shard 0: bytes is -1"),
    ],
)
def test_a_plan_of_impossible_parts_is_refused(manifest_json: str | None, changes: dict[str, int], detail: str) -> None:
    """Nesting beyond reason, no mapping at all, and counts whose sum would not fit 64 bits."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = (await there.client.submit(SPEC)).status.job
        await agent.acquire()
        (message,) = agent.plan_messages(job, reference_plan(SPEC), 1000)
        if manifest_json is not None:
            message.plan_part.manifest_json = manifest_json
        for name, value in changes.items():
            setattr(message.plan_part.shards[0], name, value)
        (answer,) = await agent.report([message])

        assert V.VERDICT_REFUSED == answer.verdict
        assert detail in answer.detail
        assert JobState.PLANNING == (await there.client.job(job)).state

    serving(test)


def test_an_agent_streams_only_so_many_plans_at_a_time() -> None:
    """The memory that unfinished plans take is bounded."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        jobs = [(await there.client.submit(SPEC)).status.job for _ in range(MAX_OPEN + 1)]
        answers = await agent.report([agent.plan_messages(job, reference_plan(SPEC), 3)[0] for job in jobs])

        assert [V.VERDICT_ACCEPTED] * MAX_OPEN + [V.VERDICT_REFUSED] == [answer.verdict for answer in answers]

    serving(test)


def test_a_stopping_coordinator_acknowledges_what_it_has_judged_and_ends_the_stream() -> None:
    """UNAVAILABLE after the last acknowledgement, so that the agent sends the rest again later."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        call = there.agents.Report(timeout=20)
        await call.write(agent.message(job, scored=scored_to_message(partial(0))))
        await until(lambda: there.runtime.scheduler.job(job).shards_done == 1)
        there.runtime.stop()

        assert V.VERDICT_ACCEPTED == (await call.read()).verdict
        code, _, details = await status_of(call.read())
        assert grpc.StatusCode.UNAVAILABLE == code
        assert "stopping" in details

    serving(test)


def test_an_agent_that_vanishes_in_the_middle_of_a_stream_harms_nobody() -> None:
    """A cancelled stream keeps what was accepted, and the next one goes on."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        job = await planned(there, agent)
        call = there.agents.Report(timeout=20)
        await call.write(agent.message(job, scored=scored_to_message(partial(0))))
        await until(lambda: there.runtime.scheduler.job(job).shards_done == 1)
        call.cancel()
        answers = await agent.report(
            [agent.message(job, scored=scored_to_message(partial(shard))) for shard in range(6)]
        )

        assert V.VERDICT_DUPLICATE == answers[0].verdict
        assert [V.VERDICT_ACCEPTED] * 5 == [answer.verdict for answer in answers[1:]]

    serving(test)
