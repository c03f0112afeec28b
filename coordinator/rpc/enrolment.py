"""EnrolmentService and CertificateService: messages in, ``Security`` asked, messages out."""

from __future__ import annotations

from fedeval.v1 import enrolment_pb2, enrolment_pb2_grpc
from fedeval.wire.access import CALLER, Principal

from coordinator.rpc.guard import Context, guarded, required
from coordinator.security.security import Security
from eval_kernel.errors import FedevalError


class EnrolmentService(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """The servicer. ``port`` is that of the service."""

    def __init__(self, security: Security, identity: str, port: int) -> None:
        """Answer with ``security``."""
        self._security = security
        self._identity = identity
        self._port = port

    @guarded
    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Context) -> enrolment_pb2.EnrolResponse:
        """Good once."""
        secret = required(request.secret, "secret")
        try:
            certificate, roles, owner = await self._security.enrol(secret, request.request)
        except FedevalError as error:
            self._security.audit.write("an unknown caller", context.peer(), "EnrolmentService/Enrol", {}, error)
            raise
        who = {"name": owner.name, "site": owner.site, "roles": list(roles)}
        self._security.audit.write("the holder of a join string", context.peer(), "EnrolmentService/Enrol", who, None)
        assert self._security.authority is not None
        return enrolment_pb2.EnrolResponse(
            certificate=certificate.decode(),
            ca=self._security.authority.bundle.decode(),
            port=self._port,
            roles=roles,
            coordinator=self._identity,
        )


class CertificateService(enrolment_pb2_grpc.CertificateServiceServicer):
    """The servicer."""

    def __init__(self, security: Security) -> None:
        """Answer with ``security``."""
        self._security = security

    @guarded
    async def RenewCertificate(
        self, request: enrolment_pb2.RenewCertificateRequest, context: Context
    ) -> enrolment_pb2.RenewCertificateResponse:
        """For the caller itself."""
        return await renewed(self._security, CALLER.get(), request)


async def renewed(
    security: Security,
    caller: Principal,
    request: enrolment_pb2.RenewCertificateRequest,
    *,
    agent_of_relay: bool = False,
) -> enrolment_pb2.RenewCertificateResponse:
    """Renew a certificate. Raises as ``Security.renew``."""
    certificate = await security.renew(caller, request.request, agent_of_relay)
    assert security.authority is not None
    return enrolment_pb2.RenewCertificateResponse(
        certificate=certificate.decode(), ca=security.authority.bundle.decode()
    )
