"""Who may call what: every RPC has a rule, and a caller without the token of the user who serves is refused."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import stat
from collections.abc import Iterator
from typing import Any

import fedeval.v1
import grpc
import grpc.aio
import pytest
from fedeval.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from fedeval.wire.access import ANONYMOUS, RULES, Access, Principal, Rule, UserRole
from fedeval.wire.channel import open_channel
from fedeval.wire.credentials import NOBODY, Credentials, local_path, local_source
from fedeval.wire.gate import Context, Gate
from fedeval.wire.pki import Certificate, Owner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator.client import call
from coordinator.journal import MemoryJournal
from eval_kernel.errors import ConfigError, NotPermitted, Unauthenticated
from tests.support.rpc import status_of
from tests.support.served import served


def rpcs() -> Iterator[str]:
    """Every RPC of every service that there is."""
    names = [name for _, name, _ in pkgutil.iter_modules(fedeval.v1.__path__) if name.endswith("_pb2")]
    modules: list[Any] = [importlib.import_module(f"fedeval.v1.{name}") for name in names]
    for module in [*modules, health_pb2, reflection_pb2]:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"


def test_every_rpc_of_every_service_has_a_rule_and_no_rule_is_of_another() -> None:
    """Deny by default: an RPC without an explicit rule does not pass this test, nor the gate."""
    assert sorted(rpcs()) == sorted(RULES)


def test_an_rpc_without_a_rule_is_refused_to_the_local_user_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate admits nobody to what its table lacks."""
    monkeypatch.delitem(RULES, "/fedeval.v1.JobService/ListJobs")

    async def main() -> None:
        async with served(MemoryJournal("m")) as there:
            await there.jobs.GetCoordinator(jobs_pb2.GetCoordinatorRequest())
            code, reason, details = await status_of(there.jobs.ListJobs(jobs_pb2.ListJobsRequest()))
            assert (grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED") == (code, reason)
            assert "ListJobs has no rule" in details

    asyncio.run(main())


@pytest.mark.parametrize("token", ["", "guessed"])
def test_who_lacks_the_token_is_refused_everything_but_health(token: str) -> None:
    """Another user of the machine can connect, and that is all: unary calls and streams, jobs and agents."""

    async def main() -> None:
        async with (
            served(MemoryJournal("m")) as there,
            open_channel(there.server.address, lambda: Credentials(token)) as channel,
        ):
            jobs, agents = jobs_pb2_grpc.JobServiceStub(channel), agents_pb2_grpc.AgentServiceStub(channel)
            calls: list[Any] = [
                jobs.GetCoordinator(jobs_pb2.GetCoordinatorRequest()),
                jobs.SubmitJob(jobs_pb2.SubmitJobRequest(key="k", spec_json="{}")),
                jobs.WatchJob(jobs_pb2.WatchJobRequest(job="j")).read(),
                agents.Register(agents_pb2.RegisterRequest(agent="a")),
                agents.Report(None).read(),
            ]
            for attempt in calls:
                code, reason, details = await status_of(attempt)
                assert (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED") == (code, reason)
                assert "FEDEVAL_TOKEN" in details
            health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            answer = await health.Check(health_pb2.HealthCheckRequest())
            assert health_pb2.HealthCheckResponse.SERVING == answer.status

    asyncio.run(main())


def test_the_token_is_in_a_file_that_only_its_user_reads_and_that_goes_with_the_server() -> None:
    """Mode 0600 in a directory of mode 0700; a later server at the same port makes another token."""

    async def main() -> tuple[str, str]:
        async with served(MemoryJournal("m")) as there:
            path = local_path(there.server.address)
            assert 0o600 == stat.S_IMODE(path.stat().st_mode)
            assert 0o700 == stat.S_IMODE(path.parent.stat().st_mode)
            first, address = local_source(there.server.address)().token, there.server.address
        assert not path.exists()
        async with served(MemoryJournal("m"), listen=address):
            return first, local_source(address)().token

    first, second = asyncio.run(main())
    assert first != second


def test_a_token_file_that_others_can_read_is_not_used() -> None:
    """The command stops with the remedy."""

    async def main() -> None:
        async with served(MemoryJournal("m")) as there:
            local_path(there.server.address).chmod(0o644)
            with pytest.raises(ConfigError, match="chmod 600"):
                await asyncio.to_thread(call, there.server.address, lambda client: client.jobs())

    asyncio.run(main())


def test_a_channel_off_this_machine_needs_a_certificate() -> None:
    """Without one nothing is sent."""

    async def main() -> None:
        async with open_channel("192.0.2.1:1", lambda: NOBODY) as channel:
            with pytest.raises(Unauthenticated, match="join"):
                await jobs_pb2_grpc.JobServiceStub(channel).ListJobs(jobs_pb2.ListJobsRequest())

    asyncio.run(main())


_ALLOWED = {
    Access.KNOWN: 1,
    Access.VIEWER: UserRole.VIEWER,
    Access.SUBMITTER: UserRole.SUBMITTER,
    Access.OPERATOR: UserRole.OPERATOR,
    Access.ADMIN: UserRole.ADMIN,
}


@pytest.mark.parametrize("access", Access)
def test_a_role_may_do_what_the_roles_before_it_may_and_no_more(access: Access) -> None:
    """viewer < submitter < operator < admin; none of them is an agent or a relay; strangers have what is open."""
    for role in UserRole:
        user = Principal("u", user=role)
        if access is Access.OPEN or role >= _ALLOWED.get(access, 99):
            user.check(Rule(access), "/s/Call")
        else:
            with pytest.raises(NotPermitted, match=f"Call is for {access.value}"):
                user.check(Rule(access), "/s/Call")
    if access is not Access.MEMBER:  # it has no certificate that could be renewed
        Principal("me", local=True).check(Rule(access), "/s/Call")
    if access is not Access.OPEN:
        with pytest.raises(Unauthenticated):
            ANONYMOUS.check(Rule(access), "/s/Call")


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        ("forward", {Access.OPEN, Access.KNOWN, Access.MEMBER, Access.AGENT}),
        ("aggregate", {Access.OPEN, Access.KNOWN, Access.MEMBER, Access.AGENT, Access.RELAY}),
        ("client", {Access.OPEN, Access.KNOWN, Access.MEMBER}),
        ("", {Access.OPEN, Access.KNOWN, Access.MEMBER}),
    ],
)
def test_a_certificate_lets_in_for_what_it_says_and_is_no_user(role: str, allowed: set[Access]) -> None:
    """An agent is no relay, a relay is an agent too, a person's certificate is neither; jobs need a token besides."""
    certificate = Certificate(Owner("lab", "a"), frozenset({role} - {""}), "1", 0.0, 1e12)
    for access in Access:
        caller = Principal("a", certificate=certificate)
        if access in allowed:
            caller.check(Rule(access), "/s/Call")
        else:
            with pytest.raises(NotPermitted, match="lab/a is not one"):
                caller.check(Rule(access), "/s/Call")


def test_the_gate_serves_handlers_that_generate_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators, writers and plain handlers pass alike."""
    monkeypatch.setitem(RULES, "/s/Count", Rule(Access.VIEWER))

    async def count(request: bytes, context: Context) -> Any:
        for number in range(3):
            yield bytes([number])

    def authenticate(token: str, context: Context) -> Principal:
        return Principal("u", user=UserRole.VIEWER) if token == "good" else ANONYMOUS

    async def main() -> None:
        server = grpc.aio.server(interceptors=[Gate(authenticate)])
        handlers = {"Count": grpc.unary_stream_rpc_method_handler(count)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with open_channel(f"127.0.0.1:{port}", lambda: Credentials("good")) as channel:
                answers = [answer async for answer in channel.unary_stream("/s/Count")(b"")]
                assert [b"\0", b"\1", b"\2"] == answers
            async with open_channel(f"127.0.0.1:{port}", lambda: Credentials("bad")) as channel:
                code, _, _ = await status_of(channel.unary_stream("/s/Count")(b"").read())
                assert grpc.StatusCode.UNAUTHENTICATED == code
        finally:
            await server.stop(None)

    asyncio.run(main())
