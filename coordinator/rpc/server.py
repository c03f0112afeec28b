"""The gRPC servers: the service port, and with TLS the enrolment port. Whether to serve is the runtime's to say."""

from __future__ import annotations

import asyncio
import errno
import socket

import grpc.aio
from fedeval.v1 import (
    admin_pb2_grpc,
    agents_pb2,
    agents_pb2_grpc,
    enrolment_pb2_grpc,
    jobs_pb2,
    jobs_pb2_grpc,
    relay_pb2,
    relay_pb2_grpc,
)
from fedeval.wire import credentials
from fedeval.wire.channel import is_loopback, server_options
from fedeval.wire.gate import Gate, LocalToken
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.core.calls import SchedulerConfig
from coordinator.rpc.admin import AdminService
from coordinator.rpc.agents import AgentService
from coordinator.rpc.calls import AgentCalls
from coordinator.rpc.enrolment import CertificateService, EnrolmentService
from coordinator.rpc.jobs import JobService
from coordinator.rpc.relay import RelayService
from coordinator.rpc.speaking import Speaking
from coordinator.runtime import Runtime
from coordinator.security.security import Security
from eval_kernel.errors import ConfigError, PortTaken

#: Names under which health is asked: the whole server, and each service.
SERVICES = (
    "",
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    agents_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
    relay_pb2.DESCRIPTOR.services_by_name["RelayService"].full_name,
)
#: The largest message on the enrolment port, where anybody may call.
_ENROLMENT_BYTES = 64 << 10


class Server:
    """One listening server. ``address`` is the real one, port included, once started.

    Without ``security`` it listens on this machine only, and knows its own user only.
    """

    def __init__(
        self, runtime: Runtime, config: SchedulerConfig, identity: str, security: Security | None = None
    ) -> None:
        """Put the services together; nothing listens yet."""
        self.address = self.enrolment_address = ""
        self._identity = identity
        self._security = security
        self._local = LocalToken()
        gate = Gate(self._local) if security is None else security.gate
        self._server = grpc.aio.server(options=server_options(), interceptors=[gate])
        self._enrolment: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stub lacks it
        jobs_pb2_grpc.add_JobServiceServicer_to_server(JobService(runtime, identity), self._server)
        speaking = Speaking() if security is None else Speaking(security.standing)
        calls = AgentCalls(runtime, config, identity, speaking, lambda: "" if security is None else security.trust)
        agents_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(runtime, calls), self._server)
        relay = RelayService(runtime, calls, identity, security)
        relay_pb2_grpc.add_RelayServiceServicer_to_server(relay, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if security is not None:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(runtime, security), self._server)
            certificates = CertificateService(security)
            enrolment_pb2_grpc.add_CertificateServiceServicer_to_server(certificates, self._server)

    @property
    def _tls(self) -> bool:
        return self._security is not None and self._security.authority is not None

    async def start(self, listen: str, enrolment: str = "") -> None:
        """Listen; with TLS also on ``enrolment``.

        Raises ``PortTaken``, after which it may be tried again, ``ConfigError`` or ``DirectoryUnusable``.
        """
        if self._tls:
            probe(enrolment)
        probe(listen)  # grpc would write lines of its own to standard error
        try:
            if self._security is not None and self._tls:
                port = self._server.add_secure_port(listen, self._security.service_credentials())
            else:
                port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise PortTaken(_taken(listen)) from None
        if is_loopback(listen):
            names = (*SERVICES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        if self._security is not None and self._tls:
            await self._start_enrolment(self._security, enrolment, port)
            self._security.on_trust = self._publish
        self._publish()  # before anyone can call
        await self._server.start()

    async def _start_enrolment(self, security: Security, listen: str, port: int) -> None:
        probe(listen)
        options = [option for option in server_options() if option[0] != "grpc.max_receive_message_length"]
        options.append(("grpc.max_receive_message_length", _ENROLMENT_BYTES))
        server = grpc.aio.server(options=options, interceptors=[security.enrolment_gate])
        service = EnrolmentService(security, self._identity, port)
        enrolment_pb2_grpc.add_EnrolmentServiceServicer_to_server(service, server)
        try:
            own = server.add_secure_port(listen, security.enrolment_credentials())
        except RuntimeError:
            raise PortTaken(_taken(listen)) from None
        security.enrolment_port = own
        self.enrolment_address = f"{listen.rpartition(':')[0]}:{own}"
        self._enrolment = server
        await server.start()

    def _publish(self) -> None:
        """Let the user who runs this in, from this machine."""
        local = self._security
        shown = credentials.Credentials(self._local.token) if local is None else local.local_credentials()
        credentials.publish(self.address, shown)

    async def serving(self, yes: bool) -> None:
        """Tell those who ask for health."""
        status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in SERVICES:
            await self._health.set(name, status)

    async def stop(self, grace: float | None) -> None:
        """End listening; calls in flight get ``grace`` seconds."""
        await asyncio.gather(
            self._server.stop(grace), *([] if self._enrolment is None else [self._enrolment.stop(grace)])
        )
        if self.address:
            credentials.withdraw(self.address)

    async def ended(self) -> None:
        """Wait until the server has stopped."""
        await self._server.wait_for_termination()


def probe(listen: str) -> None:
    """Try to listen on ``host:port`` and let go again. Raises ``PortTaken``, or ``ConfigError`` for another reason."""
    host, _, port = listen.rpartition(":")
    try:
        resolved = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from None
    family, kind, protocol, _name, place = resolved[0]
    with socket.socket(family, kind, protocol) as probing:
        probing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probing.bind(place)
            probing.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(_taken(listen)) from None
            raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from None


def _taken(listen: str) -> str:
    return (
        f"{listen} is in use by another program, perhaps another coordinator (`eval-coordinator check` tells); "
        f"choose another port with --listen"
    )
