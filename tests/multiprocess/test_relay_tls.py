"""A relay that listens beyond its machine: mutual TLS on both sides, certificates of one CA, each in its own name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fedeval.v1 import agents_pb2, agents_pb2_grpc
from fedeval.wire.channel import open_channel
from fedeval.wire.credentials import FileSource
from fedeval.wire.diagnosis import chain
from fedeval.wire.joining import renew
from fedeval.wire.pki import Owner

from agent.client import AgentClient
from agent.config import AgentConfig
from agent.logs import make_logger
from agent.membership import path_in, store
from agent.relay.relay import Relay
from agent.relay.sitelog import SiteLog
from agent.work import Heartbeat
from coordinator.core.calls import SchedulerConfig
from coordinator.core.states import JobState
from eval_kernel.errors import ConfigError, NotPermitted, Revoked
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.light_agents import LightAgent
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.secure import Secured, membership, secured

CONFIG = SchedulerConfig(heartbeat_seconds=0.2, suspect_after_seconds=1.0, lease_seconds=4.0, target_seconds=0.2)
BEAT = Heartbeat((), None, False, 0)


@asynccontextmanager
async def relaying(there: Secured, path: Path) -> AsyncIterator[tuple[Relay, asyncio.Task[None]]]:
    """Run the relay of a node that has joined as one."""
    address = there.server.address
    log = SiteLog(path.parent / "sitelog")
    relay = Relay("127.0.0.1:0", address, "relay", log, make_logger(as_json=True), path)
    running = asyncio.create_task(relay.run())
    try:
        await until(lambda: relay.upstream.generation > 0 or running.done())
        yield relay, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def run(directory: Path, body: Callable[[Secured, Relay, asyncio.Task[None]], Awaitable[None]]) -> None:
    """Run ``body`` with a secured coordinator and the relay of the site "here"."""

    async def main() -> None:
        async with secured(directory, config=CONFIG) as there:
            path = await there.joined("relay", "here", "aggregate")
            async with relaying(there, path) as (relay, running):
                assert relay.secure
                await asyncio.wait_for(body(there, relay, running), 60)

    asyncio.run(main())


def agent_of(relay: Relay, path: Path, name: str = "") -> AgentClient:
    """Return the client of an agent that calls the relay."""
    owner = membership(path).membership.owner
    return AgentClient(
        AgentConfig(coordinator=relay.address, site=owner.site, membership=path), name or owner.name, "1"
    )


def test_a_job_goes_through_a_relay_over_mutual_tls(tmp_path: Path) -> None:
    """Two agents behind it score it exactly, each known above by its own name; the relay's certificate is exchanged
    while they do, and its stream moves to a new connection.
    """
    spec = fake_spec(shards=60, seed=3)

    async def body(there: Secured, relay: Relay, running: asyncio.Task[None]) -> None:
        paths = {name: await there.joined(name, "here") for name in ("one", "two")}
        agents = [LightAgent(relay.address, name, seconds=0.03, membership=path) for name, path in paths.items()]
        for agent in agents:
            agent.start()
        job = (await there.admin.submit(spec)).status.job
        await until(lambda: there.runtime.scheduler.job(job).shards_done >= 10)
        path = path_in(tmp_path / "relay")
        store(path, await renew(relay.upstream.channel, membership(path).membership))
        generation = relay.upstream.generation
        relay.upstream.channel.present()
        await until(lambda: relay.upstream.generation > generation)
        serial = membership(path).membership.certificate.serial
        leaf = await asyncio.to_thread(lambda: chain(relay.address)[0])
        assert serial == f"{leaf.serial_number:x}"
        status = await asyncio.wait_for(there.admin.settled(job), 40)
        for agent in agents:
            agent.check()
            await agent.close()
        assert JobState.SUCCEEDED.name == status.state.name
        report = await there.admin.report(job)
        assert reference_tally(spec).digest() == report["totals"]["digest"]
        assert {"one": "relay", "two": "relay"} == {
            node.agent: node.capabilities["relay"] for node in there.runtime.scheduler.nodes(there.runtime.now())
        }

    run(tmp_path, body)


def test_a_relay_lets_its_own_sites_agents_in_and_nobody_else(tmp_path: Path) -> None:
    """Another site's certificate, another agent's name, another role, and no certificate at all are refused there."""

    async def body(there: Secured, relay: Relay, running: asyncio.Task[None]) -> None:
        here, far = await there.joined("near", "here"), await there.joined("far", "clinic")
        near = agent_of(relay, here)
        assert await near.register("{}")
        for client in (agent_of(relay, far), agent_of(relay, here, "other")):
            with pytest.raises(NotPermitted):
                await client.register("{}")
            with pytest.raises(NotPermitted):
                await client.renew(BEAT, "idle")
            await client.close()
        async with open_channel(
            relay.address, lambda: replace(FileSource(here)(), certificate=b"", key=b"")
        ) as channel:
            call = agents_pb2_grpc.AgentServiceStub(channel).Register(agents_pb2.RegisterRequest(agent="near"))
            assert grpc.StatusCode.UNAVAILABLE == (await status_of(call))[0]
        assert await near.renew(BEAT, "idle")
        await near.close()

    run(tmp_path, body)


def test_certificates_are_renewed_through_a_relay(tmp_path: Path) -> None:
    """The new one is as good above as here; one agent cannot have another's renewed."""

    async def body(there: Secured, relay: Relay, running: asyncio.Task[None]) -> None:
        path, other = await there.joined("near", "here"), await there.joined("other", "here")
        client = agent_of(relay, path)
        await client.register("{}")
        fresh = await renew(client.channel, membership(path).membership)
        assert fresh.certificate.serial != membership(path).membership.certificate.serial
        assert there.security.trust == fresh.trust
        with pytest.raises(NotPermitted, match="near speaks as here/other"):
            await renew(client.channel, replace(membership(path).membership, owner=Owner("here", "other")))
        store(path, fresh)
        assert await client.renew(BEAT, "idle")
        assert await client.renew(BEAT, "idle")
        await client.close()
        assert membership(other).membership.owner.name == "other"

    run(tmp_path, body)


def test_a_revoked_agent_is_cut_behind_a_relay_and_a_revoked_relay_ends(tmp_path: Path) -> None:
    """The one with its next heartbeat, the other at once."""

    async def body(there: Secured, relay: Relay, running: asyncio.Task[None]) -> None:
        bad = agent_of(relay, await there.joined("bad", "here"))
        good = agent_of(relay, await there.joined("good", "here"))
        await bad.register("{}")
        await good.register("{}")
        await there.admin.revoke("bad")
        with pytest.raises(Revoked):
            await bad.renew(BEAT, "idle")
        assert await good.renew(BEAT, "idle")
        await there.admin.revoke("relay")
        with pytest.raises(Revoked, match="certificate of relay was revoked"):
            await asyncio.wait_for(running, 10)
        await bad.close()
        await good.close()

    run(tmp_path, body)


def test_a_relay_beyond_its_machine_needs_a_join_string_with_hosts(tmp_path: Path) -> None:
    """Otherwise the port is not even opened."""

    async def main() -> None:
        async with secured(tmp_path) as there:
            path = await there.joined("a")
            log = SiteLog(tmp_path / "log")
            with pytest.raises(ConfigError, match=r"token create --role aggregate --host HOST"):
                Relay("0.0.0.0:0", there.server.address, "a", log, make_logger(as_json=True), path)

    asyncio.run(main())
