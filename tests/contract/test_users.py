"""People and their tokens: each role may do what it says, a token is shown once, and who did what is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fedeval.wire.credentials import TOKEN_VARIABLE, joined_path, local_path, token_path, withdraw, write
from fedeval.wire.joining import join

from coordinator.admin import AdminClient
from coordinator.security.audit import AuditLog
from eval_kernel.errors import ConfigError, DirectoryUnusable, NotPermitted, RequestInvalid, Unauthenticated
from tests.support.fake_engine import fake_spec
from tests.support.secure import Secured, secured

ROLES = ("viewer", "submitter", "operator", "admin")


def run(directory: Path, body: Callable[[Secured], Awaitable[None]], *, plain: bool = True) -> None:
    """Run ``body`` with a coordinator, in plain text on loopback unless said otherwise."""

    async def main() -> None:
        async with secured(directory, plain=plain) as there:
            await asyncio.wait_for(body(there), 60)

    asyncio.run(main())


async def refused(call: Awaitable[object]) -> bool:
    """Whether a call is not permitted; any other failure is none of access."""
    try:
        await call
    except NotPermitted:
        return True
    except RequestInvalid:
        return False
    return False


def test_each_role_may_do_what_it_says_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """viewer < submitter < operator < admin, over the wire, on the coordinator's own machine."""

    async def body(there: Secured) -> None:
        tokens = {role: await there.admin.add_user(role, role) for role in ROLES}
        job = (await there.admin.submit(fake_spec())).status.job
        for role, token in tokens.items():
            monkeypatch.setenv(TOKEN_VARIABLE, token)
            client = there.admin
            allowed = [
                not await refused(call)
                for call in (
                    client.jobs(),
                    client.submit(fake_spec(), key=role),
                    client.revoke("nobody"),
                    client.create_token("lab", ("forward",)),
                    client.add_user("viewer", "viewer"),
                    client.rotate_ca(),
                )
            ]
            rank = ROLES.index(role)
            assert [True, rank >= 1, rank >= 2, rank >= 2, rank >= 3, rank >= 3] == allowed, role
        monkeypatch.setenv(TOKEN_VARIABLE, tokens["viewer"])
        with pytest.raises(
            NotPermitted, match=r"CancelJob is for users with the role submitter; user viewer \(viewer\)"
        ):
            await there.admin.cancel(job)

    run(tmp_path, body)


def test_a_token_is_kept_as_a_hash_and_ends_with_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It survives a restart, and works no more from the moment in which its user is removed."""

    async def main() -> None:
        async with secured(tmp_path, plain=True) as there:
            token = await there.admin.add_user("eve", "viewer")
            with pytest.raises(RequestInvalid, match="there is a user eve already"):
                await there.admin.add_user("eve", "admin")
        files = [path for path in (tmp_path / "coordinator").rglob("*") if path.is_file()]
        assert token.encode() not in b"".join(path.read_bytes() for path in files)
        async with secured(tmp_path, plain=True) as there:
            assert [("eve", "viewer")] == await there.admin.users()
            with monkeypatch.context() as patch:
                patch.setenv(TOKEN_VARIABLE, token)
                assert [] == await there.admin.jobs()
            await there.admin.remove_user("eve")
            with pytest.raises(RequestInvalid, match="no user"):
                await there.admin.remove_user("eve")
            monkeypatch.setenv(TOKEN_VARIABLE, token)
            with pytest.raises(Unauthenticated, match="its user was removed"):
                await there.admin.jobs()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "role", "text"), [("", "viewer", "is not a name"), ("eve", "king", "is no role")])
def test_senseless_users_are_refused(tmp_path: Path, name: str, role: str, text: str) -> None:
    """The line says what is allowed."""

    async def body(there: Secured) -> None:
        with pytest.raises(RequestInvalid, match=text):
            await there.admin.add_user(name, role)

    run(tmp_path, body)


def test_commands_find_a_token_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment first, then what the listener published, then the file, which must be this user's alone."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    async def body(there: Secured) -> None:
        token = await there.admin.add_user("eve", "viewer")
        token_path().parent.mkdir(parents=True)
        token_path().write_text(token + "\n")
        withdraw(there.server.address)
        assert not local_path(there.server.address).exists()
        async with AdminClient(there.server.address) as client:
            with pytest.raises(ConfigError, match="chmod 600"):
                await client.jobs()
            token_path().chmod(0o600)
            assert [] == await client.jobs()
            with pytest.raises(NotPermitted):
                await client.users()
            monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
            with pytest.raises(Unauthenticated):
                await client.jobs()

    run(tmp_path, body)


def test_a_person_elsewhere_needs_a_certificate_and_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate lets in, and the token says what for."""

    async def body(there: Secured) -> None:
        token = await there.admin.add_user("eve", "submitter")
        member = await join(await there.invitation("office", "client"), "eve")
        address = there.server.address
        local = local_path(address).read_bytes()
        withdraw(address)  # as on another machine
        write(joined_path(address), member.to_json())
        try:
            async with AdminClient(address) as client:
                with pytest.raises(NotPermitted, match="ListJobs is for users; client office/eve is not one"):
                    await client.jobs()
                monkeypatch.setenv(TOKEN_VARIABLE, token)
                assert [] == await client.jobs()
                assert (await client.submit(fake_spec())).status.job
                with pytest.raises(NotPermitted):
                    await client.revoke("eve")
        finally:
            joined_path(address).unlink()
        monkeypatch.delenv(TOKEN_VARIABLE)
        write(local_path(address), json.loads(local))
        await there.admin.revoke("eve")

    run(tmp_path, body, plain=False)


# ---------------------------------------------------------------- the audit log


def test_the_audit_log_says_who_did_what_and_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submissions, cancellations and what administrators do; refusals too; reads are not worth a line."""

    async def body(there: Secured) -> None:
        token = await there.admin.add_user("eve", "submitter")
        with monkeypatch.context() as patch:
            patch.setenv(TOKEN_VARIABLE, token)
            job = (await there.admin.submit(fake_spec(), key="k")).status.job
            await there.admin.jobs()
            await there.admin.cancel(job, "no more\nneeded")
            with pytest.raises(NotPermitted):
                await there.admin.users()
            with pytest.raises(RequestInvalid):
                await there.admin.submit(fake_spec(), key="")
        text = there.security.audit.path.read_text()
        assert token not in text
        lines = [json.loads(line) for line in text.splitlines()]
        shown = [(line["who"], line["what"], line["outcome"].partition(":")[0]) for line in lines]
        eve = "user eve (submitter)"
        assert [
            (eve, "JobService/SubmitJob", "ok"),
            (eve, "JobService/CancelJob", "ok"),
            (eve, "AdminService/ListUsers", "NOT_PERMITTED"),
            (eve, "JobService/SubmitJob", "REQUEST_INVALID"),
        ] == shown[1:]
        assert ("eve", "submitter") == (lines[0]["name"], lines[0]["role"])
        assert (job, "no more\nneeded") == (lines[2]["job"], lines[2]["reason"])

    run(tmp_path, body)


def test_the_audit_log_is_only_appended_to(tmp_path: Path) -> None:
    """A later process goes on behind the lines of the earlier one; where it cannot be written the coordinator stops."""
    for outcome in ("first", "second"):
        log = AuditLog(tmp_path)
        log.write(outcome, "here", "Call", {}, None)
        log.close()
    assert ["first", "second"] == [
        json.loads(line)["who"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()
    ]
    (tmp_path / "audit.jsonl").unlink()
    (tmp_path / "audit.jsonl").mkdir()
    with pytest.raises(DirectoryUnusable, match="audit log"):
        AuditLog(tmp_path)
