"""The client of those who look after a coordinator: join strings, revocation, users and the CA."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from fedeval.v1 import admin_pb2, admin_pb2_grpc

from coordinator.client import Client

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """An agent or client that has joined. ``root``: number of the root that signed its latest certificate."""

    name: str
    site: str
    roles: tuple[str, ...]
    expires_seconds: float
    revoked: bool
    root: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)


class AdminClient(Client):
    """Use it as ``Client``; every method raises ``NotPermitted`` where the caller's role is too low."""

    @property
    def _admin(self) -> admin_pb2_grpc.AdminServiceAsyncStub:
        assert self._channel is not None, "use the client as `async with AdminClient(...) as client`"
        return admin_pb2_grpc.AdminServiceStub(self._channel)

    async def create_token(
        self, site: str, roles: tuple[str, ...], hosts: tuple[str, ...] = (), valid_seconds: float = 3600.0
    ) -> str:
        """Return a new join string. Raises ``RequestInvalid``."""
        request = admin_pb2.CreateTokenRequest(site=site, roles=roles, hosts=hosts, valid_seconds=valid_seconds)
        return (await self._call(self._admin.CreateToken(request, timeout=self._timeout))).invitation

    async def members(self) -> list[MemberStatus]:
        """Return who has joined, by name."""
        m = await self._call(self._admin.ListAgents(admin_pb2.ListAgentsRequest(), timeout=self._timeout))
        return [
            MemberStatus(item.name, item.site, tuple(item.roles), item.expires_seconds, item.revoked, item.root)
            for item in m.members
        ]

    async def revoke(self, name: str, reason: str = "") -> int:
        """Revoke a name's certificates; return how many were good. Raises ``RequestInvalid``."""
        request = admin_pb2.RevokeAgentRequest(name=name, reason=reason)
        return (await self._call(self._admin.RevokeAgent(request, timeout=self._timeout))).certificates

    async def add_user(self, name: str, role: str) -> str:
        """Make a user and return its API token. Raises ``RequestInvalid``."""
        request = admin_pb2.AddUserRequest(name=name, role=role)
        return (await self._call(self._admin.AddUser(request, timeout=self._timeout))).token

    async def remove_user(self, name: str) -> None:
        """Forget a user and its token. Raises ``RequestInvalid``."""
        await self._call(self._admin.RemoveUser(admin_pb2.RemoveUserRequest(name=name), timeout=self._timeout))

    async def users(self) -> list[tuple[str, str]]:
        """Return the users' names and roles."""
        m = await self._call(self._admin.ListUsers(admin_pb2.ListUsersRequest(), timeout=self._timeout))
        return [(user.name, user.role) for user in m.users]

    async def rotate_ca(self) -> list[str]:
        """Make a second root; return the pins of both. Raises ``RequestInvalid``."""
        return list((await self._call(self._admin.RotateCa(admin_pb2.RotateCaRequest(), timeout=self._timeout))).pins)

    async def retire_ca(self, *, force: bool = False) -> str:
        """End the trust in the older root; return the pin of the other. Raises ``RequestInvalid``."""
        request = admin_pb2.RetireCaRequest(force=force)
        return (await self._call(self._admin.RetireCa(request, timeout=self._timeout))).pin


def administer(address: str, action: Callable[[AdminClient], Awaitable[_T]]) -> _T:
    """Run ``action`` from synchronous code, as ``coordinator.client.call`` does."""

    async def main() -> _T:
        async with AdminClient(address) as client:
            return await action(client)

    return asyncio.run(main())
