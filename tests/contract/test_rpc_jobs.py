"""JobService over a real channel: what each RPC promises, status codes included."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from fedeval.v1 import jobs_pb2
from fedeval.wire.messages import scored_to_message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from coordinator.journal import MemoryJournal
from coordinator.live import line
from coordinator.status import JobState
from eval_kernel.errors import (
    JobIncomplete,
    JobKeyConflict,
    JournalFull,
    RequestInvalid,
    SpecError,
    Unavailable,
    UnknownJob,
)
from eval_kernel.partial import Execution, ScoredShard
from eval_kernel.spec import parse_spec
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan, reference_tally
from tests.support.faulty_journal import FaultyJournal
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.served import HandAgent, Served, served

SPEC = fake_spec("a job", shards=4)


def serving(test: Callable[[Served], Awaitable[None]], journal: object | None = None) -> None:
    """Run a test against a coordinator of its own."""

    async def main() -> None:
        async with served(journal or MemoryJournal("identity")) as there:
            await test(there)

    asyncio.run(main())


async def finish(agent: HandAgent, job: str) -> None:
    """Plan and score a whole job by hand."""
    await agent.acquire()
    await agent.plan(job, reference_plan(SPEC))
    scored = [ScoredShard(partial, Execution(seconds=0.5, device="cpu")) for partial in reference_partials(SPEC)]
    await agent.report([agent.message(job, scored=scored_to_message(item)) for item in scored])


def test_submitting_is_idempotent_by_key() -> None:
    """The same key and specification return the job made the first time."""

    async def test(there: Served) -> None:
        first = await there.client.submit(SPEC, "k")
        again = await there.client.submit(SPEC, "k")
        other = await there.client.submit(SPEC, "another")

        assert (False, True, False) == (first.existed, again.existed, other.existed)
        assert first.status.job == again.status.job != other.status.job
        assert "a job" == first.status.name
        assert JobState.PLANNING == first.status.state

    serving(test)


def test_a_key_used_with_another_specification_already_exists() -> None:
    """ALREADY_EXISTS with reason JOB_KEY_CONFLICT, and nothing is made."""

    async def test(there: Served) -> None:
        await there.client.submit(SPEC, "k")
        request = jobs_pb2.SubmitJobRequest(key="k", spec_json=fake_spec(shards=5).canonical())
        code, reason, _ = await status_of(there.jobs.SubmitJob(request))

        assert (grpc.StatusCode.ALREADY_EXISTS, "JOB_KEY_CONFLICT") == (code, reason)
        with pytest.raises(JobKeyConflict):
            await there.client.submit(fake_spec(shards=5), "k")
        assert 1 == len(await there.client.jobs())

    serving(test)


@pytest.mark.parametrize(
    ("key", "spec_json", "named"),
    [
        ("", SPEC.canonical(), "key is missing"),
        ("k" * 201, SPEC.canonical(), "key has 201 characters"),
        ("k", "", "spec_json is missing"),
        ("k", "{", "not JSON"),
        ("k", '{"model": "hub:a/b"}', "'dataset' is required"),
        ("k", '{"model": "hub:a/b", "dataset": "pydoc:topics", "windw": 1}', "did you mean 'window'"),
    ],
)
def test_a_wrong_submission_is_an_invalid_argument_that_names_the_field(key: str, spec_json: str, named: str) -> None:
    """INVALID_ARGUMENT, and the details say what to correct."""

    async def test(there: Served) -> None:
        request = jobs_pb2.SubmitJobRequest(key=key, spec_json=spec_json)
        code, _, details = await status_of(there.jobs.SubmitJob(request))

        assert grpc.StatusCode.INVALID_ARGUMENT == code
        assert named in details
        assert [] == await there.client.jobs()

    serving(test)


def test_a_specification_error_reaches_the_client_as_itself() -> None:
    """The text of the job file's check goes through the wire unchanged."""

    async def test(there: Served) -> None:
        request = jobs_pb2.SubmitJobRequest(key="k", spec_json='{"model": 3, "dataset": "pydoc:topics"}')
        code, reason, details = await status_of(there.jobs.SubmitJob(request))

        assert (grpc.StatusCode.INVALID_ARGUMENT, SpecError.code) == (code, reason)
        assert details.startswith("job: model")

    serving(test)


def test_unknown_jobs_are_not_found_by_every_rpc() -> None:
    """NOT_FOUND with reason UNKNOWN_JOB from GetJob, GetReport, CancelJob and WatchJob."""

    async def test(there: Served) -> None:
        calls = [
            there.jobs.GetJob(jobs_pb2.GetJobRequest(job="nix")),
            there.jobs.GetReport(jobs_pb2.GetReportRequest(job="nix")),
            there.jobs.CancelJob(jobs_pb2.CancelJobRequest(job="nix")),
            there.jobs.WatchJob(jobs_pb2.WatchJobRequest(job="nix")).read(),
        ]
        for call in calls:
            code, reason, _ = await status_of(call)

            assert (grpc.StatusCode.NOT_FOUND, "UNKNOWN_JOB") == (code, reason)
        with pytest.raises(UnknownJob):
            await there.client.job("nix")

    serving(test)


def test_a_job_is_found_by_an_unambiguous_beginning_of_its_id() -> None:
    """GetJob takes a prefix; an empty one is refused."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job

        assert job == (await there.client.job(job[:6])).job
        code, _, _ = await status_of(there.jobs.GetJob(jobs_pb2.GetJobRequest()))
        assert grpc.StatusCode.INVALID_ARGUMENT == code

    serving(test)


def test_jobs_are_listed_newest_first_and_say_why_they_wait() -> None:
    """ListJobs orders by age; a job no agent can plan says so."""

    async def test(there: Served) -> None:
        old, new = [(await there.client.submit(SPEC)).status.job for _ in range(2)]
        listed = await there.client.jobs()

        assert [new, old] == [status.job for status in listed]
        assert all("no agent" in status.waiting[0] for status in listed)

    serving(test)


def test_only_the_answer_about_one_job_carries_its_specification() -> None:
    """A list of many jobs with long specifications stays within a message; GetJob has the whole one."""

    async def test(there: Served) -> None:
        files = [f"/data/{i:05d}-{'x' * 80}.jsonl" for i in range(500)]
        spec = parse_spec({"model": "hub:a/b", "dataset": {"source": files}}, where="job")
        jobs = [(await there.client.submit(spec)).status.job for _ in range(3)]
        listed = (await there.jobs.ListJobs(jobs_pb2.ListJobsRequest())).jobs
        call = there.jobs.WatchJob(jobs_pb2.WatchJobRequest(job=jobs[0]))
        watched = await call.read()
        call.cancel()

        assert 3 == len(listed)
        assert {""} == {status.spec_json for status in listed} | {watched.job.spec_json}
        assert spec.canonical() == (await there.client.job(jobs[0])).spec_json

    serving(test)


def test_a_report_needs_a_manifest() -> None:
    """FAILED_PRECONDITION while planning; afterwards the report says what is missing."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        code, _, details = await status_of(there.jobs.GetReport(jobs_pb2.GetReportRequest(job=job)))

        assert grpc.StatusCode.FAILED_PRECONDITION == code
        assert "not planned yet (PLANNING)" in details
        with pytest.raises(JobIncomplete):
            await there.client.report(job)

        agent = await there.agent()
        await agent.acquire()
        await agent.plan(job, reference_plan(SPEC))
        report = await there.client.report(job)

        assert not report["complete"]
        assert "partial_metrics" in report

    serving(test)


def test_a_finished_job_reports_the_exact_tally() -> None:
    """SUCCEEDED: the report's totals are those of the reference, and it names who worked."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        await finish(await there.agent("worker-7"), job)
        report = await there.client.report(job)

        assert report["complete"]
        assert reference_tally(SPEC).digest() == report["totals"]["digest"]
        assert reference_plan(SPEC).digest == report["provenance"]["plan_digest"]
        assert [("worker-7", 4, "cpu")] == [(n["node"], n["shards"], n["device"]) for n in report["nodes"]]
        assert 4 == report["accounting"]["accepted"]

    serving(test)


def test_cancelling_is_repeatable_and_leaves_settled_jobs_alone() -> None:
    """CancelJob returns CANCELLED twice, and SUCCEEDED for a job that had succeeded."""

    async def test(there: Served) -> None:
        first, second = [(await there.client.submit(SPEC)).status.job for _ in range(2)]
        await finish(await there.agent(), first)

        assert JobState.SUCCEEDED == (await there.client.cancel(first, "too late")).state
        assert JobState.CANCELLED == (await there.client.cancel(second, "a reason")).state
        again = await there.client.cancel(second, "another")
        assert JobState.CANCELLED == again.state
        assert again.failure is not None
        assert "a reason" in again.failure.message

    serving(test)


def test_a_cancelled_job_says_why_once() -> None:
    """With a reason and without one; the state is not said twice, and no colon is left with nothing behind it."""

    async def test(there: Served) -> None:
        agent = await there.agent()
        said, ended = [], []
        for reason in ("", "wrong data"):
            job = (await there.client.submit(SPEC)).status.job
            await agent.acquire()
            await agent.plan(job, reference_plan(SPEC))
            said.append(line(await there.client.cancel(job, reason)))
            ended.append((await there.client.report(job))["missing"]["summary"][0])

        assert [
            "a job: cancelled, 0/4 shards, no reason was given",
            "a job: cancelled, 0/4 shards, wrong data",
        ] == said
        assert [
            "the job ended with CANCELLED: no reason was given",
            "the job ended with CANCELLED: wrong data",
        ] == ended

    serving(test)


def test_a_job_cancelled_before_its_plan_has_no_report_and_says_so() -> None:
    """It was never planned, which is another thing than not yet."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        await there.client.cancel(job, "wrong data")
        with pytest.raises(JobIncomplete, match=r"it was never planned \(it is CANCELLED: wrong data\)"):
            await there.client.report(job)

    serving(test)


def test_an_empty_key_is_refused() -> None:
    """It is not taken for none."""

    async def test(there: Served) -> None:
        with pytest.raises(RequestInvalid, match="key is missing"):
            await there.client.submit(SPEC, "")

    serving(test)


def test_the_log_says_when_a_job_succeeds() -> None:
    """Once, with the job's id."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        agent = await there.agent()
        with capture_logs() as entries:
            await finish(agent, job)

        assert [job] == [entry["job"] for entry in entries if entry["event"] == "job succeeded"]

    serving(test)


def test_a_watch_begins_with_the_present_and_ends_with_the_settled_state() -> None:
    """The first message is the present state, the last one SUCCEEDED, and the stream ends with OK."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        call = there.jobs.WatchJob(jobs_pb2.WatchJobRequest(job=job), timeout=20)
        messages = [(await call.read()).job]
        work = asyncio.create_task(finish(await there.agent(), job))
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message.job)
        await work

        assert jobs_pb2.JOB_STATE_PLANNING == messages[0].state
        assert jobs_pb2.JOB_STATE_SUCCEEDED == messages[-1].state
        assert 4 == messages[-1].shards_done
        assert messages[-1].HasField("bits_per_byte")
        assert grpc.StatusCode.OK == await call.code()

    serving(test)


def test_a_watch_of_a_settled_job_is_one_message() -> None:
    """A settled job's watch says so and ends."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        await there.client.cancel(job)

        assert [JobState.CANCELLED] == [status.state async for status in there.client.watch(job)]
        assert JobState.CANCELLED == (await there.client.settled(job)).state

    serving(test)


def test_a_watch_is_quiet_while_nothing_changes_and_bounded_while_much_does() -> None:
    """Messages follow changes, and are never closer than the interval, however many results arrive."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        times: list[float] = []
        loop = asyncio.get_running_loop()

        async def watch() -> None:
            async for _ in there.client.watch(job):
                times.append(loop.time())

        watching = asyncio.create_task(watch())
        await until(lambda: len(times) == 1)
        agent = await there.agent()
        for number in range(30):
            await agent.renew(activity=f"doing {number}")
        await there.client.cancel(job)
        await watching
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]

        assert min(gaps) > 0.5 * there.runtime.timings.watch_interval
        assert len(times) < 30

    serving(test)


def test_a_stopping_coordinator_ends_watches_with_unavailable() -> None:
    """UNAVAILABLE "the coordinator is stopping", so that the client calls again."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        call = there.jobs.WatchJob(jobs_pb2.WatchJobRequest(job=job), timeout=20)
        await call.read()
        there.runtime.stop()
        code, reason, details = await status_of(call.read())

        assert (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE") == (code, reason)
        assert "stopping" in details

    serving(test)


def test_nodes_are_listed_with_what_they_announced() -> None:
    """ListNodes shows site, incarnation, capabilities, activity and holdings."""

    async def test(there: Served) -> None:
        job = (await there.client.submit(SPEC)).status.job
        agent = await there.agent("n1")
        await agent.acquire()
        await agent.renew(activity="indexing")
        (node,) = await there.client.nodes()

        assert ("n1", "here", "1", "indexing") == (node.node, node.site, node.incarnation, node.activity)
        assert '{"device": "none"}' == node.capabilities_json

        await agent.plan(job, reference_plan(SPEC))
        await agent.acquire()
        (node,) = await there.client.nodes()

        assert (f"{job}/0",) == node.held

    serving(test)


def test_the_handshake_names_the_journal_and_the_protocol() -> None:
    """GetCoordinator answers who is there."""

    async def test(there: Served) -> None:
        info = await there.client.info()

        assert ("identity", 1, 1) == (info.coordinator, info.protocol_min, info.protocol_max)

    serving(test)


def test_a_full_journal_makes_calls_unavailable_and_health_not_serving_until_there_is_space() -> None:
    """Nothing is acknowledged while the disk is full; the coordinator recovers by itself and keeps what was decided."""
    journal = FaultyJournal()

    async def test(there: Served) -> None:
        health = health_pb2_grpc.HealthStub(there.channel)

        async def serving_status() -> int:
            return int((await health.Check(health_pb2.HealthCheckRequest(service="fedeval.v1.JobService"))).status)

        assert health_pb2.HealthCheckResponse.SERVING == await serving_status()

        journal.always = JournalFull("no space is left")
        request = jobs_pb2.SubmitJobRequest(key="k", spec_json=SPEC.canonical())
        code, reason, details = await status_of(there.jobs.SubmitJob(request))

        assert (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE") == (code, reason)
        assert "no space is left" in details
        assert health_pb2.HealthCheckResponse.NOT_SERVING == await serving_status()
        with pytest.raises(Unavailable):
            await there.client.jobs()
        assert (await there.client.info()).coordinator

        journal.always = None
        submitted = await there.client.submit(SPEC, "k")

        assert submitted.existed
        assert health_pb2.HealthCheckResponse.SERVING == await serving_status()
        assert 1 == journal.count

    serving(test, journal)


def test_a_bug_in_one_call_costs_that_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception is INTERNAL for its caller, without its text; the next call works."""

    async def test(there: Served) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(there.runtime.scheduler, "jobs", lambda: 1 / 0)
            code, _, details = await status_of(there.jobs.ListJobs(jobs_pb2.ListJobsRequest()))

        assert grpc.StatusCode.INTERNAL == code
        assert "division" not in details
        assert [] == await there.client.jobs()

    serving(test)


def test_reflection_lists_the_services_on_loopback() -> None:
    """Generic tools find the services by reflection."""

    async def test(there: Served) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(there.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()

        assert {"fedeval.v1.JobService", "fedeval.v1.AgentService", "grpc.health.v1.Health"} <= names

    serving(test)
