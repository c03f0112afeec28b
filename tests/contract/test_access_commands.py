"""The commands token, agents, user, ca and join, as a person sees them: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fedeval.wire.credentials import TOKEN_VARIABLE, joined_path, local_path, withdraw
from fedeval.wire.invitation import Invitation
from structlog.testing import capture_logs

from coordinator import cli
from tests.support.secure import Secured, secured


def test_the_commands_about_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as the administrator of a coordinator would, and then as a person on another machine."""

    async def main() -> None:
        with capture_logs():  # the coordinator's own, which is in this process
            async with secured(tmp_path) as there:
                await asyncio.wait_for(body(there), 60)

    async def body(there: Secured) -> None:
        address = there.server.address

        async def run(*words: str) -> tuple[int, str, str]:
            capsys.readouterr()
            code = await asyncio.to_thread(cli.run, [*words, "--coordinator", address])
            return code, *capsys.readouterr()

        code, out, _ = await run("token", "create", "--site", "lab", "--for", "15m")
        made = Invitation.parse(out)
        assert (0, "lab", False, there.security.pin) == (code, made.site, made.client, made.pin)
        refused = await run("token", "create", "--site", "lab", "--for", "soon")
        assert (2, 1) == (refused[0], len(lines(refused)))
        assert "such as 90s, 15m, 1h or 2d" in refused[2]
        assert 2 == (await run("token", "create", "--site", "lab", "--role", "king"))[0]

        await there.joined("one")
        assert ["one", "lab", "forward,"] == lines(await run("agents", "list"), 1)[1].split()[:3]
        (member,) = json.loads((await run("agents", "list", "--json"))[1])
        assert ("one", "lab", ["forward", "preprocess"], False, 1) == tuple(
            member[key] for key in ("name", "site", "roles", "revoked", "root")
        )
        assert (0, "one: 1 certificate revoked\n") == (await run("agents", "revoke", "one", "--reason", "test"))[:2]
        assert "revoked" in (await run("agents", "list"))[1]
        code, _, error = await run("agents", "revoke", "nobody")
        assert 2 == code
        assert "no certificate was given to 'nobody'" in error

        token = (await run("user", "add", "eve", "--role", "viewer"))[1].strip()
        assert [{"name": "eve", "role": "viewer"}] == json.loads((await run("user", "list", "--json"))[1])
        assert "eve" in (await run("user", "list"))[1]

        client = (await run("token", "create", "--site", "office", "--role", "client"))[1].strip()
        withdraw(address)  # from here on as on another machine
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        assert 54 == (await run("jobs"))[0]
        capsys.readouterr()
        assert 2 == await asyncio.to_thread(cli.run, ["join", made.text()])
        assert "for a node" in capsys.readouterr().err
        assert 0 == await asyncio.to_thread(cli.run, ["join", client, "--name", "eve"])
        assert f"--coordinator {address}" in capsys.readouterr().out
        try:
            assert (0, "no jobs\n") == (await run("jobs"))[:2]
            code, _, error = await run("user", "list")
            assert (51, 1) == (code, len(error.splitlines()))
            assert "ListUsers is for users with the role admin; user eve (viewer) is not one" in error
            monkeypatch.delenv(TOKEN_VARIABLE)
            assert 51 == (await run("jobs"))[0]
        finally:
            joined_path(address).unlink()
        there.server._publish()
        assert local_path(address).exists()

        assert (0, "eve: removed\n") == (await run("user", "remove", "eve"))[:2]
        assert 2 == len(lines(await run("ca", "rotate"), 1))
        code, _, error = await run("ca", "retire")
        assert (2, True) == (code, "eve" in error)  # her certificate is of the older CA
        code, out, _ = await run("ca", "retire", "--force")
        assert (0, f"sha256:{there.security.pin}\n") == (code, out)
        assert 0 == (await run("jobs"))[0]

    asyncio.run(main())


def lines(result: tuple[int, str, str], stream: int = 2) -> list[str]:
    """Return the lines of an output: 1 the standard output, 2 the standard error."""
    return str(result[stream]).splitlines()
