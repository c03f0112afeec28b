"""AdminService: join strings, revocation, users and the CA, for those who look after a coordinator."""

from __future__ import annotations

import time

from fedeval.v1 import admin_pb2, admin_pb2_grpc
from fedeval.wire.access import CALLER

from coordinator.rpc.guard import Context, guarded, required
from coordinator.runtime import Runtime
from coordinator.security.security import Security


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The servicer."""

    def __init__(self, runtime: Runtime, security: Security) -> None:
        """Answer with ``security``; what a revoked agent held returns to the scheduler of ``runtime``."""
        self._runtime = runtime
        self._security = security

    @guarded
    async def CreateToken(
        self, request: admin_pb2.CreateTokenRequest, context: Context
    ) -> admin_pb2.CreateTokenResponse:
        """Shown once."""
        made = await self._security.create_token(
            request.site, tuple(request.roles), tuple(request.hosts), request.valid_seconds, str(CALLER.get())
        )
        return admin_pb2.CreateTokenResponse(invitation=made.text())

    @guarded
    async def ListAgents(self, request: admin_pb2.ListAgentsRequest, context: Context) -> admin_pb2.ListAgentsResponse:
        """By name."""
        now = time.time()
        members = [
            admin_pb2.Member(
                name=member.owner.name,
                site=member.owner.site,
                roles=member.roles,
                expires_seconds=member.expires - now,
                revoked=member.revoked,
                root=member.root,
            )
            for member in await self._security.members()
        ]
        return admin_pb2.ListAgentsResponse(members=members)

    @guarded
    async def RevokeAgent(
        self, request: admin_pb2.RevokeAgentRequest, context: Context
    ) -> admin_pb2.RevokeAgentResponse:
        """At once, on open streams too."""
        name = required(request.name, "name")
        count = await self._security.revoke(name, request.reason[:1000])
        self._runtime.dismiss(name)
        return admin_pb2.RevokeAgentResponse(certificates=count)

    @guarded
    async def AddUser(self, request: admin_pb2.AddUserRequest, context: Context) -> admin_pb2.AddUserResponse:
        """Its token is shown once."""
        token = await self._security.add_user(request.name, request.role, str(CALLER.get()))
        return admin_pb2.AddUserResponse(token=token)

    @guarded
    async def RemoveUser(self, request: admin_pb2.RemoveUserRequest, context: Context) -> admin_pb2.RemoveUserResponse:
        """Its token is good for nothing from now on."""
        await self._security.remove_user(request.name)
        return admin_pb2.RemoveUserResponse()

    @guarded
    async def ListUsers(self, request: admin_pb2.ListUsersRequest, context: Context) -> admin_pb2.ListUsersResponse:
        """By name."""
        users = [admin_pb2.User(name=name, role=role) for name, role in self._security.users()]
        return admin_pb2.ListUsersResponse(users=users)

    @guarded
    async def RotateCa(self, request: admin_pb2.RotateCaRequest, context: Context) -> admin_pb2.RotateCaResponse:
        """The second root signs from now on."""
        return admin_pb2.RotateCaResponse(pins=await self._security.rotate())

    @guarded
    async def RetireCa(self, request: admin_pb2.RetireCaRequest, context: Context) -> admin_pb2.RetireCaResponse:
        """The first root is trusted no more."""
        return admin_pb2.RetireCaResponse(pin=await self._security.retire(force=request.force))
