"""The client's own promises: addresses, reconnecting, and states it does not know."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fedeval.v1 import jobs_pb2

from coordinator.client import Client, call
from coordinator.journal import MemoryJournal
from coordinator.status import JobState, JobStatus, NodeState, NodeStatus
from eval_kernel.errors import ConfigError, Unreachable
from tests.support.fake_engine import fake_spec
from tests.support.served import Served, served


def test_a_wrong_address_is_refused_before_anything_is_sent() -> None:
    """ConfigError at birth."""
    for address in ("nowhere", "10.0.0.1:", "127.0.0.1:0"):
        with pytest.raises(ConfigError):
            Client(address)


def test_nobody_at_the_address_is_unreachable() -> None:
    """The error names the address and the command to run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for action in (Client.jobs, Client.nodes, Client.info):
        with pytest.raises(Unreachable, match=rf"{address}.*eval-coordinator serve"):
            call(address, action)
    with pytest.raises(Unreachable):
        call(address, lambda client: client.submit(fake_spec()))


def test_a_watch_goes_on_after_the_coordinator_came_back() -> None:
    """A stream that breaks is opened again at the same address, and the settled state arrives."""
    journal = MemoryJournal("identity")
    answers: list[bool] = []

    async def main() -> list[JobState]:
        seen: list[JobState] = []
        first = asyncio.Event()

        async def watch(client: Client, job: str) -> None:
            async for status in client.watch(job, on_answer=lambda silence: answers.append(silence is None)):
                seen.append(status.state)
                first.set()

        async with served(journal) as there:
            address = there.server.address
            job = (await there.client.submit(fake_spec())).status.job
            client = await Client(address).__aenter__()
            watching = asyncio.create_task(watch(client, job))
            await first.wait()
        async with served(journal, listen=address) as again:
            await again.client.cancel(job)
            await asyncio.wait_for(watching, 20)
        await client.__aexit__(None, None, None)
        return seen

    seen = asyncio.run(main())

    assert JobState.PLANNING == seen[0]
    assert JobState.CANCELLED == seen[-1]
    assert (True, True) == (answers[0], answers[-1])
    assert False in answers


def test_a_submission_is_repeated_with_its_key_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer makes no second job."""

    async def main() -> tuple[bool, int]:
        async with served(MemoryJournal("identity")) as there:
            lose_one_answer(there, monkeypatch)
            submitted = await there.client.submit(fake_spec())
            return submitted.existed, len(await there.client.jobs())

    assert (True, 1) == asyncio.run(main())


def lose_one_answer(there: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the coordinator decide a submission, and then not answer it once."""
    from eval_kernel.errors import Unavailable

    submit, lost = there.runtime.submit, []

    async def losing(*arguments: str) -> object:
        made = await submit(*arguments)
        if not lost:
            lost.append(made)
            raise Unavailable("the answer is lost")
        return made

    monkeypatch.setattr(there.runtime, "submit", losing)


def test_states_of_a_newer_coordinator_are_unspecified() -> None:
    """A number this version does not know is no crash."""
    job = JobStatus.from_message(jobs_pb2.JobStatus(job="j", state=99))  # type: ignore[arg-type]
    node = NodeStatus.from_message(jobs_pb2.Node(node="n", state=99))  # type: ignore[arg-type]

    assert (JobState.UNSPECIFIED, NodeState.UNSPECIFIED) == (job.state, node.state)
    assert not job.state.settled


def test_statuses_have_a_json_form() -> None:
    """Enums become words, absent values null, tuples lists."""
    message = jobs_pb2.JobStatus(job="j", state=jobs_pb2.JOB_STATE_RUNNING, waiting=["why"], bits_per_byte=0.5)
    json = JobStatus.from_message(message).to_json()

    assert ("running", ["why"], 0.5, None, None) == (
        json["state"],
        json["waiting"],
        json["bits_per_byte"],
        json["eta_seconds"],
        json["failure"],
    )
