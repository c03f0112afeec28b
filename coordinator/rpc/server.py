"""The gRPC server: services, health and reflection on one address. Whether to serve is the runtime's to say."""

from __future__ import annotations

import errno
import socket

import grpc.aio
from fedeval.v1 import agents_pb2, agents_pb2_grpc, jobs_pb2, jobs_pb2_grpc, relay_pb2, relay_pb2_grpc
from fedeval.wire import credentials
from fedeval.wire.channel import is_loopback, server_options
from fedeval.wire.gate import Gate, LocalToken
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from coordinator.core.calls import SchedulerConfig
from coordinator.rpc.agents import AgentService
from coordinator.rpc.calls import AgentCalls
from coordinator.rpc.jobs import JobService
from coordinator.rpc.relay import RelayService
from coordinator.runtime import Runtime
from eval_kernel.errors import ConfigError, PortTaken

#: Names under which health is asked: the whole server, and each service.
SERVICES = (
    "",
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name,
    agents_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
    relay_pb2.DESCRIPTOR.services_by_name["RelayService"].full_name,
)


class Server:
    """One listening server. ``address`` is the real one, port included, once started."""

    def __init__(self, runtime: Runtime, config: SchedulerConfig, identity: str) -> None:
        """Put the services together; nothing listens yet."""
        self.address = ""
        self._local = LocalToken()
        self._server = grpc.aio.server(options=server_options(), interceptors=[Gate(self._local)])
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stub lacks it
        jobs_pb2_grpc.add_JobServiceServicer_to_server(JobService(runtime, identity), self._server)
        calls = AgentCalls(runtime, config, identity)
        agents_pb2_grpc.add_AgentServiceServicer_to_server(AgentService(runtime, calls), self._server)
        relay_pb2_grpc.add_RelayServiceServicer_to_server(RelayService(runtime, calls, identity), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, listen: str) -> None:
        """Listen. Raises ``PortTaken``, ``ConfigError`` or ``DirectoryUnusable``."""
        probe(listen)  # grpc would write lines of its own to standard error
        if is_loopback(listen):
            names = (*SERVICES[1:], health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError:
            raise PortTaken(_taken(listen)) from None
        self.address = f"{listen.rpartition(':')[0]}:{port}"
        credentials.publish(self.address, credentials.Credentials(self._local.token))  # before anyone can call
        await self._server.start()

    async def serving(self, yes: bool) -> None:
        """Tell those who ask for health."""
        status = health_pb2.HealthCheckResponse.SERVING if yes else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in SERVICES:
            await self._health.set(name, status)

    async def stop(self, grace: float | None) -> None:
        """End listening; calls in flight get ``grace`` seconds."""
        await self._server.stop(grace)
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
