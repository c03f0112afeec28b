"""The relay put together: it listens for its site, keeps one stream upstream, and has the site's log between them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
from fedeval.v1 import agents_pb2_grpc, enrolment_pb2_grpc, jobs_pb2_grpc, relay_pb2_grpc
from fedeval.wire import credentials
from fedeval.wire.channel import server_options
from fedeval.wire.gate import Gate

from agent.logs import Logger
from agent.relay.delivery import Delivery
from agent.relay.service import Forwarding, Greeting, SiteAgentService, SiteCertificateService, SiteRelayService
from agent.relay.site import Site
from agent.relay.sitelog import SiteLog
from agent.relay.upstream import Upstream
from eval_kernel.errors import PortTaken

#: Streams one connection may carry: a relay below, or a process that plays many agents, needs more than a coordinator.
_STREAMS = 4096
#: What calls in flight get when the relay stops.
GRACE_SECONDS = 0.5


class Relay:
    """One relay. ``address`` is where it listens, known at once; it serves from ``start`` on."""

    def __init__(
        self, listen: str, upstream: str, name: str, log: SiteLog, logger: Logger, membership: Path | None = None
    ) -> None:
        """Take the port. ``membership``: the file that joining made; beyond this machine its certificate is shown.

        Raises ``PortTaken``, ``DirectoryUnusable``, ``ConfigError``.
        """
        self._logger = logger.bind(relay=name)
        self.upstream = Upstream(upstream, name, self._logger, membership)
        site = Site.of(listen, membership)
        self.secure, self.server_name = site.secure, site.server_name
        self._log = log
        self.delivery = Delivery(log, self.upstream, self._logger)
        forwarding = Forwarding(self.upstream, self.delivery)
        options = [(key, value) for key, value in server_options() if key != "grpc.max_concurrent_streams"]
        options.append(("grpc.max_concurrent_streams", _STREAMS))
        self._server = grpc.aio.server(options=options, interceptors=[Gate(site.authenticate)])
        agents_pb2_grpc.add_AgentServiceServicer_to_server(SiteAgentService(forwarding), self._server)
        relay_pb2_grpc.add_RelayServiceServicer_to_server(SiteRelayService(forwarding), self._server)
        certificates = SiteCertificateService(forwarding)
        enrolment_pb2_grpc.add_CertificateServiceServicer_to_server(certificates, self._server)
        greeting = Greeting(self.upstream)  # type: ignore[abstract]  # the rest of the service is the coordinator's alone
        jobs_pb2_grpc.add_JobServiceServicer_to_server(greeting, self._server)
        try:
            port = site.listen(self._server, listen)
        except RuntimeError:
            raise PortTaken(
                f"{listen} is in use by another program; choose another address for the relay with --listen"
            ) from None
        self.address = site.called(f"{listen.rpartition(':')[0]}:{port}")
        if not site.secure:
            credentials.publish(self.address, credentials.Credentials(site.local.token))
        self._forwarding = forwarding

    @property
    def activity(self) -> str:
        """What the relay does, for people."""
        count = len(self._forwarding.agents)
        return f"relaying for {count} agent{'s' * (count != 1)}, {self.delivery.pending} results on their way"

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._server.start()
        self._logger.info("the relay listens for its site", address=self.address)
        tasks = [asyncio.create_task(self.upstream.serve()), asyncio.create_task(self.delivery.run())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._server.stop(GRACE_SECONDS)
            if not self.secure:
                credentials.withdraw(self.address)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.upstream.close()
            self._log.close()
