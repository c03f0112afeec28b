"""Certificates in the life of an agent: renewed in the middle of a job, exchanged with their CA, refused with words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from fedeval.wire.credentials import Credentials
from fedeval.wire.diagnosis import diagnose, own_certificate
from fedeval.wire.pki import Owner

from agent.config import AgentConfig
from agent.daemon import Daemon
from agent.logs import make_logger
from agent.membership import load, store
from agent.probe import probe
from agent.spool import StateDirectory
from coordinator.core.calls import SchedulerConfig
from coordinator.core.states import JobState
from coordinator.journal import MemoryJournal
from coordinator.security.names import Names
from coordinator.status import JobStatus
from eval_kernel.errors import AccessError, CaMismatch, CertificateExpired, PlainText, RequestInvalid, Revoked
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.processes import until
from tests.support.secure import Secured, local, membership, secured, shown
from tests.support.served import served

ENGINE = "tests.support.fake_engine:FakeEngine"
CONFIG = SchedulerConfig(heartbeat_seconds=0.2, suspect_after_seconds=1.0, lease_seconds=3.0, target_seconds=0.2)


def config_of(path: Path, **changes: object) -> AgentConfig:
    """Return how the daemon of a node that has joined runs."""
    member = membership(path).membership
    config = AgentConfig(
        coordinator=member.address,
        membership=path,
        name=member.owner.name,
        site=member.owner.site,
        state=path.parent,
        cache=path.parent / "cache",
        roots=(path.parent,),
        threads=1,
        engine=ENGINE,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def a_node(config: AgentConfig) -> AsyncIterator[asyncio.Task[None]]:
    """Run the real daemon beside the test; give the task, which fails as the process would."""
    with StateDirectory(config.state) as state, (config.state / "log").open("a") as stream:
        daemon = Daemon(config, state, probe(config.cache), make_logger(as_json=True, stream=stream))
        running = asyncio.create_task(daemon.run())
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def log_of(path: Path) -> str:
    """Return what a node has logged."""
    return (path.parent / "log").read_text()


def test_certificates_expire_and_the_ca_changes_in_the_middle_of_a_job_without_a_lost_lease(tmp_path: Path) -> None:
    """A job outlives its node's certificates, of 4 s here, and the CA: every shard is scored once, by one registration.

    The older CA is retired while the job runs; the connection is replaced each time, and nothing is given to others.
    """
    tell = tmp_path / "tell"
    spec = fake_spec(shards=80, delay=0.08, seed=8, tell=str(tell))

    async def reach(there: Secured, job: str, condition: Callable[[JobStatus], bool]) -> JobStatus:
        async with asyncio.timeout(60):
            async for status in there.admin.watch(job):
                if condition(status):
                    return status
        raise AssertionError("the watch ended early")

    async def body(there: Secured) -> None:
        path = await there.joined("a")
        first = membership(path).membership.certificate
        async with a_node(config_of(path)) as running:
            job = (await there.admin.submit(spec)).status.job
            await reach(there, job, lambda status: status.shards_done >= 5)
            assert 2 == len(await there.admin.rotate_ca())
            with pytest.raises(RequestInvalid, match="being exchanged already"):
                await there.admin.rotate_ca()
            await until(lambda: len(membership(path).membership.credentials.ca.split(b"BEGIN")) == 3)
            (member,) = await there.admin.members()
            assert 2 == member.root
            await there.admin.retire_ca()
            await until(lambda: len(membership(path).membership.credentials.ca.split(b"BEGIN")) == 2)
            status = await reach(there, job, lambda status: status.state.settled)
            assert not running.done()
        last = membership(path)
        assert JobState.SUCCEEDED.name == status.state.name
        assert first.expires < last.received, "the job was to outlive its first certificate"
        assert 80 == len(tell.read_text().splitlines()), "a shard was scored again: its lease was lost"
        report = await there.admin.report(job)
        assert reference_tally(spec).digest() == report["totals"]["digest"]
        assert 0 == report["accounting"]["failures"]
        audit = [json.loads(line) for line in there.security.audit.path.read_text().splitlines()]
        whats = [line["what"] for line in audit if line["outcome"] == "ok"]
        assert 2 == whats.count("AgentService/Register"), "once, and again with what its probe found"
        assert whats.count("CertificateService/RenewCertificate") >= 3
        assert "registering again" not in log_of(path)

    async def main() -> None:
        async with secured(tmp_path, life=timedelta(seconds=4), config=CONFIG) as there:
            await asyncio.wait_for(body(there), 100)

    asyncio.run(main())


def test_the_old_ca_is_not_retired_under_those_who_know_no_other(tmp_path: Path) -> None:
    """They are named; with force they are cut off, and told why in words."""

    async def main() -> None:
        async with secured(tmp_path) as there:
            path = await there.joined("away")
            with pytest.raises(RequestInvalid, match="one CA only"):
                await there.admin.retire_ca()
            old, new = await there.admin.rotate_ca()
            with pytest.raises(RequestInvalid, match="away"):
                await there.admin.retire_ca()
            assert [] == await there.admin.jobs()
            assert new == await there.admin.retire_ca(force=True) != old
            error = await asyncio.to_thread(diagnose, there.server.address, shown(path))
            assert isinstance(error, CaMismatch)
            assert "not the one that was joined" in str(error)
            # The user who runs it goes on over a new connection, and so does whoever joins now.
            assert [] == await there.admin.jobs()
            await there.joined("here")

    asyncio.run(main())


# ---------------------------------------------------------------- words


def test_an_expired_certificate_ends_the_agent_with_its_date(tmp_path: Path) -> None:
    """By its own clock before anything is sent, and by the coordinator's if the clocks differ."""

    async def main() -> None:
        async with secured(tmp_path, life=timedelta(seconds=1)) as there:
            path = await there.joined("a")
            expires = membership(path).membership.certificate.expires
            await until(lambda: own_certificate(shown(path)) is not None)
            error = own_certificate(shown(path))
            assert isinstance(error, CertificateExpired)
            assert "this node's certificate expired on 20" in str(error)
            assert expires == membership(path).membership.certificate.expires
            async with a_node(config_of(path)) as running:
                with pytest.raises(CertificateExpired, match=r"expired on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"):
                    await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_an_agent_ends_when_its_coordinator_comes_back_in_plain_text(tmp_path: Path) -> None:
    """It does not knock for ever: the line says which side speaks what."""

    async def main() -> None:
        async with secured(tmp_path) as there:
            path, address = await there.joined("a"), there.server.address
        async with served(MemoryJournal("plain"), listen=address), a_node(config_of(path)) as running:
            with pytest.raises(PlainText, match=f"the coordinator at {address} speaks plain text"):
                await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_an_agent_ends_when_another_ca_answers_in_its_coordinators_place(tmp_path: Path) -> None:
    """Made anew, or somebody in between: either way nothing more is sent there."""

    async def main() -> None:
        async with secured(tmp_path / "one") as there:
            path, address = await there.joined("a"), there.server.address
        async with secured(tmp_path / "two", listen=address), a_node(config_of(path)) as running:
            with pytest.raises(CaMismatch, match="not the one that was joined"):
                await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_every_other_way_to_fail_has_its_words(tmp_path: Path) -> None:
    """A name that the certificate lacks; plain text towards TLS; a certificate of a CA that was retired."""

    async def main() -> None:
        async with secured(tmp_path, names=Names(("coordinator.example",), ("coordinator.example",))) as there:
            address, mine = there.server.address, there.security.local_credentials()
            expected: list[tuple[Credentials, type[AccessError], str]] = [
                (mine, CaMismatch, "--advertise 127.0.0.2"),
                (Credentials(), PlainText, "speaks TLS, and this side plain text"),
            ]
            for credentials, kind, text in expected:
                error = await asyncio.to_thread(diagnose, address, credentials)
                assert type(error) is kind
                assert text in str(error)
        async with secured(tmp_path / "two") as there:
            assert there.security.authority is not None
            good = local(there.server.address)
            assert await asyncio.to_thread(diagnose, there.server.address, good) is None
            # Its roots are right, its own certificate is of none of them.
            other = secured(tmp_path / "three", listen="127.0.0.3:0")
            async with other as elsewhere:
                assert elsewhere.security.authority is not None
                key, certificate = elsewhere.security.authority.for_local_user(Owner("local", "x"))
                foreign = replace(good, key=key, certificate=certificate)
                error = await asyncio.to_thread(diagnose, there.server.address, foreign)
                assert isinstance(error, Revoked)
                assert "retired or made anew" in str(error)
            assert await asyncio.to_thread(diagnose, "127.0.0.2:1", good) is None, "nobody there: that may heal"

    asyncio.run(main())


def test_a_damaged_membership_is_one_line(tmp_path: Path) -> None:
    """Cut off, open to others, or of another form: what to do is said."""

    async def main() -> Path:
        async with secured(tmp_path) as there:
            return await there.joined("a")

    path = asyncio.run(main())
    member = membership(path).membership
    path.chmod(0o644)
    with pytest.raises(Exception, match="chmod 600"):
        load(path)
    store(path, member)
    assert 0o600 == path.stat().st_mode & 0o777
    path.write_text(path.read_text()[:100])
    with pytest.raises(Exception, match="join"):
        load(path)
    path.write_text("{}")
    with pytest.raises(Exception, match="cannot be read"):
        load(path)
    path.unlink()
    assert load(path) is None
