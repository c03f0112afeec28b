"""Joining over real TLS: a join string is good once, for what it says, and towards its own coordinator only."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from fedeval.v1 import enrolment_pb2, enrolment_pb2_grpc, jobs_pb2, jobs_pb2_grpc
from fedeval.wire.invitation import Invitation
from fedeval.wire.joining import join
from fedeval.wire.pki import Owner, key_pem, make_request, new_key

from coordinator.journal import MemoryJournal
from coordinator.security.authority import Authority
from coordinator.security.names import Names
from coordinator.security.security import Security
from eval_kernel.errors import (
    CaMismatch,
    ConfigError,
    JoinRefused,
    PlainText,
    RequestInvalid,
    Unreachable,
)
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.secure import Secured, membership, secured, shown
from tests.support.served import served


def run(directory: Path, body: Callable[[Secured], Awaitable[None]]) -> None:
    """Run ``body`` with a secured coordinator."""

    async def main() -> None:
        async with secured(directory) as there:
            await asyncio.wait_for(body(there), 60)

    asyncio.run(main())


def test_joining_gives_a_certificate_of_a_week_and_a_key_that_never_travelled(tmp_path: Path) -> None:
    """The file has mode 0600; the certificate names site and agent once; nothing of it is at the coordinator's."""

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        joined = membership(path)
        certificate = joined.membership.certificate

        assert 0o600 == stat.S_IMODE(path.stat().st_mode)
        assert Owner("lab", "a") == certificate.owner
        assert {"forward", "preprocess"} == certificate.roles
        assert timedelta(days=7).total_seconds() == pytest.approx(joined.life, abs=60)
        assert there.server.address == joined.membership.address
        key = joined.membership.credentials.key
        everything = b"".join(file.read_bytes() for file in there.directory.glob("coordinator/**/*") if file.is_file())
        assert not any(line in everything for line in key.splitlines()[1:-1])
        assert ["a"] == [member.name for member in await there.admin.members()]

    run(tmp_path, body)


def test_a_join_string_is_good_once(tmp_path: Path) -> None:
    """A second node is refused; the same key gets the same certificate again, should the answer have been lost."""

    async def body(there: Secured) -> None:
        invitation, key = await there.invitation(), new_key()
        first = await join(invitation, "a", key)
        again = await join(invitation, "a", key)
        with pytest.raises(JoinRefused, match="used before"):
            await join(invitation, "b")
        with pytest.raises(JoinRefused, match="used before"):
            await join(invitation, "a")

        assert first.credentials.certificate == again.credentials.certificate

    run(tmp_path, body)


def test_a_join_string_is_used_once_when_many_try_at_a_time(tmp_path: Path) -> None:
    """Of eight nodes that race, one joins."""

    async def body(there: Secured) -> None:
        invitation = await there.invitation()
        tries = await asyncio.gather(*(join(invitation, f"n{i}") for i in range(8)), return_exceptions=True)

        assert 1 == sum(not isinstance(outcome, BaseException) for outcome in tries)
        assert 7 == sum(isinstance(outcome, JoinRefused) for outcome in tries)
        assert 1 == len(await there.admin.members())

    run(tmp_path, body)


def test_a_used_join_string_stays_used_across_a_restart(tmp_path: Path) -> None:
    """So do the CA, unused join strings and who has joined; secrets are nowhere in the files."""

    async def main() -> None:
        async with secured(tmp_path) as there:
            used, unused = await there.invitation(), await there.invitation()
            await join(used, "a")
            pin = there.security.pin
        async with secured(tmp_path) as there:
            assert pin == there.security.pin
            port = there.server.enrolment_address
            with pytest.raises(JoinRefused, match="used before"):
                await join(replace(used, addresses=(port,)), "b")
            await join(replace(unused, addresses=(port,)), "c")
            assert ["a", "c"] == [member.name for member in await there.admin.members()]
        data = b"".join(path.read_bytes() for path in (tmp_path / "coordinator").rglob("*") if path.is_file())
        assert used.secret.encode() not in data
        assert unused.secret.encode() not in data
        modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "coordinator").rglob("*") if path.is_file()}
        assert {0o600} == modes

    asyncio.run(main())


def test_expired_unknown_and_wrong_site_join_strings_are_refused(tmp_path: Path) -> None:
    """Each with its reason; a wrong site does not use the string up."""

    async def body(there: Secured) -> None:
        good = await there.invitation("lab")
        short = await there.invitation(seconds=0.01)
        await asyncio.sleep(0.02)
        for invitation, text in (
            (replace(good, site="clinic"), "another site than clinic"),
            (replace(good, secret="guessed"), "no such join string"),
            (replace(good, hosts=("coordinator.example",)), "does not allow the hosts coordinator.example"),
            (short, "expired"),
        ):
            with pytest.raises(JoinRefused, match=text):
                await join(invitation, "a")
        await join(good, "a")

    run(tmp_path, body)


def test_a_name_that_is_taken_is_refused_until_it_is_revoked(tmp_path: Path) -> None:
    """Neither its own site nor another one can take an agent's name away."""

    async def body(there: Secured) -> None:
        await there.joined("a", "lab")
        for site in ("lab", "clinic"):
            with pytest.raises(JoinRefused, match="a is the name of a node that has joined"):
                await join(await there.invitation(site), "a")
        await there.admin.revoke("a")
        await join(await there.invitation("clinic"), "a")

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("site", "roles", "hosts", "seconds", "text"),
    [
        ("", ("forward",), (), 60.0, "the site"),
        ("a/b", ("forward",), (), 60.0, "the site"),
        ("lab", (), (), 60.0, "the roles"),
        ("lab", ("king",), (), 60.0, "the roles"),
        ("lab", ("local",), (), 60.0, "the roles"),
        ("lab", ("client", "forward"), (), 60.0, "the roles"),
        ("lab", ("forward",), ("h",), 60.0, "--host"),
        ("lab", ("forward",), (), 0.0, "seconds"),
        ("lab", ("forward",), (), 1e9, "seconds"),
    ],
)
def test_senseless_join_strings_are_refused(
    tmp_path: Path, site: str, roles: tuple[str, ...], hosts: tuple[str, ...], seconds: float, text: str
) -> None:
    """Nobody can be given the role local, or hosts without being a relay."""

    async def body(there: Secured) -> None:
        with pytest.raises(RequestInvalid, match=text):
            await there.admin.create_token(site, roles, hosts, seconds)

    run(tmp_path, body)


@pytest.mark.parametrize("text", ["", "hello", "fedeval-join-1-", "fedeval-join-1-AAAA", "fedeval-join-1-!!!"])
def test_what_is_no_join_string_is_one_line(text: str) -> None:
    """So is one that is cut off or has a letter changed; spaces and line ends of copying do no harm."""
    with pytest.raises(ConfigError, match="join string"):
        Invitation.parse(text)
    good = Invitation(("h:1",), 64 * "a", "s", "lab")
    whole = good.text()
    assert good == Invitation.parse(f" {whole[:20]}\n{whole[20:]} \n")
    for damaged in (whole[:-3], whole[:30] + ("A" if whole[30] != "A" else "B") + whole[31:]):
        with pytest.raises(ConfigError, match="damaged"):
            Invitation.parse(damaged)


# ---------------------------------------------------------------- the man in the middle


@asynccontextmanager
async def man_in_the_middle(directory: Path, chain: bytes, key: bytes) -> AsyncIterator[tuple[str, bytearray]]:
    """Terminate TLS with another key, and keep every byte: those on the wire and those that were decrypted."""
    pair = directory / "mitm.pem"
    pair.write_bytes(key + chain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    context.set_alpn_protocols(["h2"])
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            # The answer of a server of HTTP/2 that grants everything: whoever trusts it sends the request at once.
            writer.write(b"\0\0\0\x04\0\0\0\0\0")
            while data := await reader.read(1 << 16):
                heard.extend(data)
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.2", 0, ssl=context)
    try:
        yield f"127.0.0.2:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()


def test_a_man_in_the_middle_with_another_ca_never_hears_the_secret(tmp_path: Path) -> None:
    """The pin is compared before anything is sent; the join string is still good for the honest coordinator."""

    async def body(there: Secured) -> None:
        invitation = await there.invitation()
        other = Authority(tmp_path / "other")
        key, chain = other.for_server(Owner("coordinator", "coordinator"), ["127.0.0.2"])
        async with man_in_the_middle(tmp_path, chain, key) as (address, heard):
            with pytest.raises(CaMismatch, match="nothing secret was sent"):
                await join(replace(invitation, addresses=(address,)), "a")
            assert invitation.secret.encode() not in heard
            # The control: to somebody who was told to trust him the man in the middle does listen.
            fooled = replace(invitation, addresses=(address,), pin=other.serving.pin)
            joining = asyncio.create_task(join(fooled, "a"))
            await until(lambda: invitation.secret.encode() in heard)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        await join(invitation, "a")

    run(tmp_path, body)


def test_a_man_in_the_middle_who_shows_the_true_ca_too_never_hears_the_secret(tmp_path: Path) -> None:
    """The pinned root in the chain is not enough: the server's own certificate must be of it."""

    async def body(there: Secured) -> None:
        invitation = await there.invitation()
        assert there.security.authority is not None
        other = Authority(tmp_path / "other")
        key, chain = other.for_server(Owner("coordinator", "coordinator"), ["127.0.0.2"])
        leaf = x509.load_pem_x509_certificates(chain)[0]
        forged = leaf.public_bytes(serialization.Encoding.PEM)
        async with man_in_the_middle(tmp_path, forged + there.security.authority.bundle, key) as (address, heard):
            with pytest.raises(CaMismatch, match="not the one that was joined"):
                await join(replace(invitation, addresses=(address,)), "a")
        assert invitation.secret.encode() not in heard

    run(tmp_path, body)


def test_an_agents_certificate_is_not_a_coordinators(tmp_path: Path) -> None:
    """A node that has joined cannot play the coordinator to others with its own certificate, though the CA is right."""

    async def body(there: Secured) -> None:
        invitation = await there.invitation()
        mine = shown(await there.joined("a"))
        async with man_in_the_middle(tmp_path, mine.certificate + mine.ca, mine.key) as (address, heard):
            with pytest.raises((CaMismatch, Unreachable)):
                await join(replace(invitation, addresses=(address,)), "b")
        assert invitation.secret.encode() not in heard

    run(tmp_path, body)


def test_joining_what_speaks_plain_text_says_so(tmp_path: Path) -> None:
    """No secret goes there either."""

    async def main() -> None:
        async with served(MemoryJournal("plain")) as there:
            invitation = Invitation((there.server.address,), 64 * "a", "secret", "lab")
            with pytest.raises(PlainText, match="speaks plain text"):
                await join(invitation, "a")

    asyncio.run(main())


# ---------------------------------------------------------------- the two ports


def test_the_enrolment_port_offers_nothing_but_enrolment(tmp_path: Path) -> None:
    """Other services are not there, whatever one shows."""

    async def body(there: Secured) -> None:
        mine = shown(await there.joined("a"))
        tls = grpc.ssl_channel_credentials(mine.ca, mine.key, mine.certificate)
        async with grpc.aio.secure_channel(there.server.enrolment_address, tls) as channel:
            code, _, _ = await status_of(jobs_pb2_grpc.JobServiceStub(channel).ListJobs(jobs_pb2.ListJobsRequest()))
            assert grpc.StatusCode.UNIMPLEMENTED == code
            stub = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
            for request in (b"", b"junk", b"x" * 20_000, make_request(new_key(), Owner("lab", "a"))[:-1] + b"\0"):
                code, reason, _ = await status_of(stub.Enrol(enrolment_pb2.EnrolRequest(secret="s", request=request)))
                assert (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID") == (code, reason)

    run(tmp_path, body)


def test_the_service_port_lets_nobody_in_without_a_certificate(tmp_path: Path) -> None:
    """No certificate, one that the node made itself, or one of another CA: the handshake fails, token or not."""

    async def body(there: Secured) -> None:
        mine = shown(await there.joined("a"))
        other = Authority(tmp_path / "other")
        foreign_key, foreign = other.for_local_user(Owner("local", "x"))
        key = key_pem(new_key())
        for tls in (
            grpc.ssl_channel_credentials(mine.ca),
            grpc.ssl_channel_credentials(mine.ca, foreign_key, foreign),
            grpc.ssl_channel_credentials(mine.ca, key, mine.certificate),
        ):
            async with grpc.aio.secure_channel(there.server.address, tls) as channel:
                stub = jobs_pb2_grpc.JobServiceStub(channel)
                code, _, _ = await status_of(stub.GetCoordinator(jobs_pb2.GetCoordinatorRequest(), timeout=10))
                assert grpc.StatusCode.UNAVAILABLE == code

    run(tmp_path, body)


def test_a_coordinator_on_its_own_machine_makes_no_join_strings(tmp_path: Path) -> None:
    """It has no CA; the line says how to get one."""

    async def main() -> None:
        security = Security(tmp_path, None)
        with pytest.raises(RequestInvalid, match="--listen HOST:PORT"):
            await security.create_token("lab", ("forward",), (), 60.0, "me")
        security.close()

    asyncio.run(main())


def test_join_strings_name_what_others_call() -> None:
    """Advertised names first; a wildcard stands for this machine's own names, which the certificate has all."""
    names = Names.of("0.0.0.0:50051", ("coordinator.example", "2001:db8::1"))
    assert ("coordinator.example:50052", "[2001:db8::1]:50052") == names.addresses(50052)
    assert {"coordinator.example", "localhost", "127.0.0.1"} <= set(names.hosts)
    assert ("10.0.0.7:50052",) == Names.of("10.0.0.7:50051", ()).addresses(50052)
    assert "0.0.0.0" not in Names.of("0.0.0.0:1", ()).hosts
