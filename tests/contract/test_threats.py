"""The threat table, row by row, against a coordinator with mutual TLS: what is refused, and that honest agents go on.

Joining (used, expired and wrong join strings, the man in the middle) is in test_enrolment.py; certificates that expire
and a CA that changes in the middle of a job are in test_certificates.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fedeval.v1 import agents_pb2, agents_pb2_grpc, enrolment_pb2, relay_pb2, relay_pb2_grpc
from fedeval.wire.channel import MAX_MESSAGE_BYTES, open_channel
from fedeval.wire.credentials import FileSource
from fedeval.wire.joining import renew
from fedeval.wire.pki import Owner, make_request, new_key

from agent.client import AgentClient
from agent.config import AgentConfig, Role
from agent.work import Failed, Heartbeat, Outgoing
from coordinator.core.calls import SchedulerConfig
from eval_kernel.errors import FedevalError, NotPermitted, Revoked, ShardError, StaleIncarnation, Unauthenticated
from tests.support.fake_engine import fake_spec
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.secure import Recorder, Secured, membership, secured

HEARTBEAT = 1.0
CONFIG = SchedulerConfig(heartbeat_seconds=HEARTBEAT, suspect_after_seconds=3.0, lease_seconds=30.0)
BEAT = Heartbeat((), None, False, 0)


def run(directory: Path, body: Callable[[Secured], Awaitable[None]]) -> None:
    """Run ``body`` with a secured coordinator."""

    async def main() -> None:
        async with secured(directory, config=CONFIG) as there:
            await asyncio.wait_for(body(there), 60)

    asyncio.run(main())


async def calls(client: AgentClient) -> list[FedevalError | None]:
    """Make each call of an agent once, and return what it failed with."""

    async def report() -> None:
        async with client.report() as stream:
            await stream.send(Outgoing(1, "job", Failed(0, ShardError("x"))))
            async for _ in stream.acknowledgements():
                return

    outcomes: list[FedevalError | None] = []
    for call in (client.register("{}"), client.renew(BEAT, "idle"), client.acquire(1, 0.0, ""), report()):
        try:
            await call  # type: ignore[misc]
            outcomes.append(None)
        except FedevalError as error:
            outcomes.append(error)
    return outcomes


# ---------------------------------------------------------------- revoked


def test_a_revoked_agent_is_cut_within_one_heartbeat_on_open_streams_too(tmp_path: Path) -> None:
    """A stream and a long poll that are open end at once, nothing is let in any more, others take over its work."""

    async def body(there: Secured) -> None:
        bad, good = there.agent(await there.joined("bad")), there.agent(await there.joined("good"))
        await bad.register("{}")
        await there.admin.submit(fake_spec())
        (work,) = await bad.acquire(1, 5.0, "")
        await good.register("{}")
        async with bad.report() as stream:
            await stream.send(Outgoing(1, "unknown", Failed(0, ShardError("x"))))
            answers = stream.acknowledgements()
            await anext(answers)  # it is open
            reading = asyncio.ensure_future(anext(answers))
            polling = asyncio.create_task(bad.acquire(1, 20.0, ""))
            taking = asyncio.create_task(good.acquire(1, 20.0, ""))
            begun = time.monotonic()
            assert 1 == await there.admin.revoke("bad", "stolen")
            for waiting in (reading, polling):
                with pytest.raises(Revoked, match="certificate of bad was revoked"):
                    await waiting
            assert time.monotonic() - begun < HEARTBEAT
            assert [work] == await taking
        assert all(isinstance(error, Revoked) for error in await calls(bad))
        with pytest.raises(Revoked):
            await renew(bad.channel, membership(tmp_path / "bad" / "membership.json").membership)
        assert await good.renew(BEAT, "idle")
        await bad.close()
        await good.close()

    run(tmp_path, body)


def test_a_revoked_agent_stays_out_after_a_restart(tmp_path: Path) -> None:
    """The list of what is revoked is durable."""

    async def main() -> None:
        async with secured(tmp_path) as there:
            path = await there.joined("bad")
            await there.admin.revoke("bad")
        async with secured(tmp_path) as there:
            config = AgentConfig(coordinator=there.server.address, membership=path, site="lab")
            client = AgentClient(config, "bad", "1")
            with pytest.raises(Revoked):
                await client.register("{}")
            await client.close()

    asyncio.run(main())


# ---------------------------------------------------------------- another's name


def test_an_agent_speaks_in_its_own_name_only(tmp_path: Path) -> None:
    """With the name, site or roles of another every call is refused, and the other one notices nothing."""

    async def body(there: Secured) -> None:
        mine, path = await there.joined("mine"), await there.joined("other", "clinic")
        other = there.agent(path)
        assert [None, None, None] == (await calls(other))[:3]
        forged = there.agent(mine, "other")
        assert 4 * [NotPermitted] == [type(error) for error in await calls(forged)]
        for change in ({"site": "clinic"}, {"roles": (Role.AGGREGATE,)}):
            config = AgentConfig(coordinator=there.server.address, membership=mine, site="lab")
            client = AgentClient(replace(config, **change), "mine", "1")  # type: ignore[arg-type]
            with pytest.raises(NotPermitted):
                await client.register("{}")
            await client.close()
        with pytest.raises(NotPermitted, match="asks for a certificate of clinic/other"):
            await renew(forged.channel, replace(membership(mine).membership, owner=Owner("clinic", "other")))
        assert await other.renew(BEAT, "idle")
        (node,) = await there.admin.nodes()
        assert ("other", "clinic") == (node.node, node.site)
        await other.close()
        await forged.close()

    run(tmp_path, body)


def test_one_identity_has_one_life(tmp_path: Path) -> None:
    """A copy of an agent's certificate and key fences the original, which then says so: a theft is seen."""

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        first, second = there.agent(path, incarnation="1"), there.agent(path, incarnation="2")
        await first.register("{}")
        await second.register("{}")
        with pytest.raises(StaleIncarnation):
            await first.renew(BEAT, "idle")
        await first.close()
        await second.close()

    run(tmp_path, body)


def test_a_relay_speaks_for_its_own_site_only(tmp_path: Path) -> None:
    """Agents of other sites are refused call by call; an agent's certificate opens no relay's stream at all."""

    async def body(there: Secured) -> None:
        await there.joined("far", "clinic")
        await there.joined("gone")
        await there.admin.revoke("gone")
        relay = await there.joined("relay", "lab", "aggregate")
        plain = await there.joined("plain")

        def register(agent: str, site: str) -> agents_pb2.RegisterRequest:
            return agents_pb2.RegisterRequest(
                agent=agent, incarnation="1", protocol_min=1, protocol_max=1, site=site, roles=[agents_pb2.ROLE_FORWARD]
            )

        requests: list[dict[str, Any]] = [
            {"register": register("near", "lab")},
            {"register": register("near2", "clinic")},
            {"register": register("far", "clinic")},
            {"register": register("far", "lab")},
            {"register": register("gone", "lab")},
            {"renew": agents_pb2.RenewRequest(agent="far", incarnation="1")},
            {"report": agents_pb2.ReportRequest(agent="far", incarnation="1", job="j")},
            {
                "renew_certificate": enrolment_pb2.RenewCertificateRequest(
                    request=make_request(new_key(), Owner("clinic", "far"))
                )
            },
        ]
        async with open_channel(there.server.address, FileSource(relay)) as channel:
            call = relay_pb2_grpc.RelayServiceStub(channel).Relay(None)
            await call.write(relay_pb2.RelayRequest(relay="relay"))
            await call.read()
            await call.write(
                relay_pb2.RelayRequest(calls=[relay_pb2.RelayCall(id=i + 1, **r) for i, r in enumerate(requests)])
            )
            answers: dict[int, str] = {}
            while len(answers) < len(requests):
                for answer in (await call.read()).answers:
                    answers[answer.id] = answer.error.code if answer.WhichOneof("answer") == "error" else "ok"
            call.cancel()
        expected = ["ok", *3 * ["NOT_PERMITTED"], "REVOKED", *3 * ["NOT_PERMITTED"]]
        assert expected == [answers[i + 1] for i in range(len(requests))]
        async with open_channel(there.server.address, FileSource(plain)) as channel:
            stream = relay_pb2_grpc.RelayServiceStub(channel).Relay(None)
            code, reason, _ = await status_of(stream.read())
            assert (grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED") == (code, reason)

    run(tmp_path, body)


def test_an_agents_certificate_is_no_users_token(tmp_path: Path) -> None:
    """A node can neither list, submit or cancel jobs, nor let others in; the local certificate alone is nobody."""

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        client = there.agent(path)
        async with open_channel(there.server.address, FileSource(path)) as channel:
            for rpc in (
                "JobService/ListJobs",
                "JobService/SubmitJob",
                "JobService/CancelJob",
                "AdminService/CreateToken",
            ):
                code, reason, _ = await status_of(channel.unary_unary(f"/fedeval.v1.{rpc}")(b""))
                assert (grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED") == (code, reason)
        assert await client.greet()
        await client.close()
        local = there.security.local_credentials()
        for token, kind in (("", Unauthenticated), ("guessed", Unauthenticated)):
            async with open_channel(there.server.address, lambda: replace(local, token=token)) as channel:  # noqa: B023
                code, reason, _ = await status_of(channel.unary_unary("/fedeval.v1.JobService/ListJobs")(b""))
                assert (grpc.StatusCode.UNAUTHENTICATED, kind.code) == (code, reason)

    run(tmp_path, body)


# ---------------------------------------------------------------- bytes on the wire


def test_a_recorded_session_that_is_played_again_changes_nothing(tmp_path: Path) -> None:
    """Nothing readable is in the record; sent again, it gets no further than the handshake."""

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        async with Recorder(there.server.address) as recorder:
            config = AgentConfig(coordinator=recorder.address, membership=path, site="lab")
            client = AgentClient(config, "a", "incarnation-of-the-test")
            assert [None, None, None] == (await calls(client))[:3]
            await client.close()
        assert b"incarnation-of-the-test" not in recorder.up + recorder.down
        assert len(recorder.up) > 1000
        facts, audit = there.journal.count, there.security.audit.path.read_bytes()
        host, _, port = there.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(recorder.up)
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 20)  # until it is closed
        writer.close()
        assert facts == there.journal.count
        assert audit == there.security.audit.path.read_bytes()

    run(tmp_path, body)


def test_oversized_and_malformed_messages_cost_their_call_only(tmp_path: Path) -> None:
    """Too large is refused before it is parsed, junk when it is; the agent's next call is answered."""

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        client = there.agent(path)
        await client.register("{}")
        register = "/fedeval.v1.AgentService/Register"
        async with open_channel(there.server.address, FileSource(path)) as channel:
            for data, code in (
                (b"\xff" * 100, grpc.StatusCode.INVALID_ARGUMENT),
                (b"\x0a\xff\xff\xff\xff\x7f", grpc.StatusCode.INVALID_ARGUMENT),
                (agents_pb2.RegisterRequest(agent="a" * 200).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
                (
                    agents_pb2.RegisterRequest(agent="a", site="lab").SerializeToString(),
                    grpc.StatusCode.INVALID_ARGUMENT,
                ),
            ):
                found, _, _ = await status_of(channel.unary_unary(register)(data, timeout=10))
                assert code == found
        mine = FileSource(path)()
        tls = grpc.ssl_channel_credentials(mine.ca, mine.key, mine.certificate)
        unlimited = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.secure_channel(there.server.address, tls, options=unlimited) as raw:
            found, _, _ = await status_of(raw.unary_unary(register)(b"\0" * (MAX_MESSAGE_BYTES + 1), timeout=20))
            assert grpc.StatusCode.RESOURCE_EXHAUSTED == found
            stub = agents_pb2_grpc.AgentServiceStub(raw)
            answer = await stub.Acquire(agents_pb2.AcquireRequest(agent="a", incarnation="1"), timeout=10)
            assert answer.WhichOneof("work") is None
        async with grpc.aio.secure_channel(there.server.enrolment_address, tls, options=unlimited) as raw:
            call = raw.unary_unary("/fedeval.v1.EnrolmentService/Enrol")(b"\0" * 100_000, timeout=10)
            assert grpc.StatusCode.RESOURCE_EXHAUSTED == (await status_of(call))[0]
        assert await client.renew(BEAT, "idle")
        await client.close()

    run(tmp_path, body)


@pytest.mark.slow
def test_two_thousand_idle_connections_disturb_nobody(tmp_path: Path) -> None:
    """Half say nothing, half say junk; heartbeats stay below a second, and the idle ones are closed in the end."""

    async def body(there: Secured) -> None:
        client = there.agent(await there.joined("a"))
        await client.register("{}")
        host, _, port = there.server.address.rpartition(":")
        idle = []
        for number in range(2000):
            reader, writer = await asyncio.open_connection(host, int(port))
            if number % 2:
                writer.write(b"\x16\x03\x01\x40\x00" + b"x" * 100)  # the beginning of a long record
            idle.append((reader, writer))
        worst = 0.0
        for _ in range(50):
            begun = time.monotonic()
            await client.renew(BEAT, "idle")
            worst = max(worst, time.monotonic() - begun)
        begun = time.monotonic()
        late = there.agent(await there.joined("b"))
        await late.register("{}")
        joined = time.monotonic() - begun
        print(f"2,000 idle connections: worst heartbeat {worst * 1e3:.0f} ms, a node joins in {joined:.2f} s")
        assert worst < 1.0
        assert joined < 5.0
        await until(lambda: all(reader.at_eof() for reader, _ in idle), 40)
        for _, writer in idle:
            writer.close()
        await client.close()
        await late.close()

    run(tmp_path, body)


def test_refusals_are_in_the_audit_log_once_a_minute_and_without_secrets(tmp_path: Path) -> None:
    """Who, what, when and how it ended; a storm of equal refusals is one line."""

    async def body(there: Secured) -> None:
        invitation = await there.invitation()
        path = await there.joined("a")
        forged = there.agent(path, "b")
        for _ in range(5):
            with pytest.raises(NotPermitted):
                await forged.register("{}")
        await there.admin.revoke("a", "seen elsewhere")
        text = there.security.audit.path.read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        refused = [line for line in lines if line["outcome"] != "ok"]
        assert 1 == len([line for line in refused if line["what"] == "AgentService/Register"])
        assert refused[0]["who"] == "agent lab/a"
        assert refused[0]["outcome"].startswith("NOT_PERMITTED: agent lab/a speaks as lab/b")
        (revoking,) = [line for line in lines if line["what"] == "AdminService/RevokeAgent"]
        assert ("a", "seen elsewhere", "ok") == (revoking["name"], revoking["reason"], revoking["outcome"])
        assert revoking["who"].startswith("local user")
        assert {"time", "from"} <= set(revoking)
        assert {"AdminService/CreateToken", "EnrolmentService/Enrol"} <= {line["what"] for line in lines}
        assert invitation.secret not in text
        assert there.security.local_credentials().token not in text
        await forged.close()

    run(tmp_path, body)
