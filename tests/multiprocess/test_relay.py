"""A relay between agents and coordinator over real gRPC: the same total as without it, whatever breaks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fedeval.v1 import agents_pb2, agents_pb2_grpc, evaluation_pb2
from fedeval.wire.channel import open_channel
from fedeval.wire.messages import scored_to_message

from agent.logs import make_logger
from agent.relay.relay import Relay
from agent.relay.sitelog import SiteLog
from coordinator.client import Client
from coordinator.core.calls import SchedulerConfig
from coordinator.core.states import JobState
from coordinator.journal import MemoryJournal
from coordinator.rpc.calls import RELAY
from eval_kernel.partial import Execution, ScoredShard
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_partials, reference_plan, reference_tally
from tests.support.light_agents import light_agents
from tests.support.processes import until
from tests.support.rpc import status_of
from tests.support.served import HandAgent, Served, served

QUICK = SchedulerConfig(heartbeat_seconds=0.2, suspect_after_seconds=1.0, lease_seconds=4.0, target_seconds=0.2)


@asynccontextmanager
async def relaying(
    directory: Path, upstream: str, name: str = "relay", listen: str = "127.0.0.1:0"
) -> AsyncIterator[Relay]:
    """Run a relay in this process until the context is left, as abruptly as a crash would end it."""
    relay = Relay(listen, upstream, name, SiteLog(directory / name), make_logger(as_json=True))
    running = asyncio.create_task(relay.run())
    try:
        await until(lambda: relay.upstream.generation > 0 or running.done())
        yield relay
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def free_address() -> str:
    """Return an address that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


async def finished(there: Served, job: str) -> int:
    """Wait until a job has succeeded and return its sum in steps."""
    scheduler = there.runtime.scheduler
    await until(lambda: scheduler.state(job).settled, 60)
    view = scheduler.job(job)
    assert JobState.SUCCEEDED is view.state, view
    return view.tally.steps


def test_twenty_agents_through_a_relay_come_to_the_same_bits_with_fewer_messages(tmp_path: Path) -> None:
    """Through a relay the job has the reference's sum, one stream goes up, and each node is known by its own name."""

    async def main() -> None:
        spec = fake_spec(shards=200, delay=0.0)
        async with (
            served(MemoryJournal("identity"), config=QUICK) as there,
            relaying(tmp_path, there.server.address) as relay,
            light_agents([relay.address], 20, seconds=0.02) as agents,
        ):
            job = (await there.client.submit(spec)).status.job
            assert reference_tally(spec).steps == await finished(there, job)
            nodes = there.runtime.scheduler.nodes(there.runtime.now())
            assert {agent.name for agent in agents} == {node.agent for node in nodes}
            assert {"relay"} == {node.capabilities[RELAY] for node in nodes}
            commits = there.runtime.scheduler.commits(job)
            assert {c.agent for c in commits} <= {agent.name for agent in agents}
            await until(lambda: relay.delivery.pending == 0)
            assert [] == sorted((tmp_path / "relay").glob("*.damaged"))

    asyncio.run(main())


def test_a_relay_that_restarts_and_a_coordinator_that_restarts_lose_nothing(tmp_path: Path) -> None:
    """What the relay has acknowledged goes up after its restart; agents register again through it by themselves."""

    async def main() -> None:
        spec = fake_spec(shards=150)
        journal = MemoryJournal("identity")
        async with served(journal, config=QUICK) as there:
            address = there.server.address
            relay_address = "127.0.0.1:0"
            async with relaying(tmp_path, address) as relay:
                relay_address = relay.address
                # Not in the relay's context: the agents stay when it goes.
                agents = light_agents([relay_address], 6, seconds=0.05)
                crew = await agents.__aenter__()
                job = (await there.client.submit(spec)).status.job
                await until(lambda: there.runtime.scheduler.job(job).shards_done > 20)
            try:
                async with relaying(tmp_path, address, listen=relay_address):
                    await until(lambda: there.runtime.scheduler.job(job).shards_done > 60)
            finally:
                done = there.runtime.scheduler.job(job).shards_done
        assert done < 150
        try:
            async with (
                served(journal, config=QUICK, listen=address) as there,
                relaying(tmp_path, address, listen=relay_address) as relay,
            ):
                assert reference_tally(spec).steps == await finished(there, job)
                await until(lambda: relay.delivery.pending == 0 and not any(agent.disk for agent in crew))
        finally:
            await agents.__aexit__(None, None, None)

    asyncio.run(main())


def test_relays_below_relays_come_to_the_same_bits(tmp_path: Path) -> None:
    """Two relays under one, ten agents: the sum is the reference's and every node is known at the top."""

    async def main() -> None:
        spec = fake_spec(shards=80)
        async with (
            served(MemoryJournal("identity"), config=QUICK) as there,
            relaying(tmp_path, there.server.address, "top") as top,
            relaying(tmp_path, top.address, "left") as left,
            relaying(tmp_path, top.address, "right") as right,
            light_agents([left.address, right.address], 10, seconds=0.02),
        ):
            job = (await there.client.submit(spec)).status.job
            assert reference_tally(spec).steps == await finished(there, job)
            assert 10 == len(there.runtime.scheduler.nodes(there.runtime.now()))
            await until(lambda: top.delivery.pending + left.delivery.pending + right.delivery.pending == 0)

    asyncio.run(main())


@asynccontextmanager
async def by_hand(there: Served, relay: Relay, name: str = "a") -> AsyncIterator[HandAgent]:
    """Yield an agent whose calls go through the relay and are made by the test."""
    channel = open_channel(relay.address)
    try:
        agent = HandAgent(there, name, "1")
        agent.served = Served(
            there.runtime, there.server, channel, there.jobs, agents_pb2_grpc.AgentServiceStub(channel), there.client
        )
        await agent.register()
        yield agent
    finally:
        await channel.close(None)


def test_errors_from_above_reach_the_agent_as_they_were(tmp_path: Path) -> None:
    """An agent gets the status and the reason that the coordinator gave, and nobody else's stream suffers."""

    async def main() -> None:
        async with (
            served(MemoryJournal("identity"), config=QUICK) as there,
            relaying(tmp_path, there.server.address) as relay,
            by_hand(there, relay) as agent,
        ):
            agent.incarnation = "never registered"
            assert (grpc.StatusCode.NOT_FOUND, "NOT_REGISTERED") == (await status_of(agent.renew()))[:2]
            agent.incarnation = "1"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await agent.register(roles=[])
            assert grpc.StatusCode.INVALID_ARGUMENT is caught.value.code()
            await agent.renew()  # the relay's stream is the same as before
            assert 1 == relay.upstream.generation

    asyncio.run(main())


def test_plans_failures_and_refusals_pass_through(tmp_path: Path) -> None:
    """A plan in parts takes effect, a shard's failure is counted, and a wrong partial is refused above."""

    async def main() -> None:
        spec = fake_spec(shards=6)
        async with (
            served(MemoryJournal("identity"), config=QUICK) as there,
            relaying(tmp_path, there.server.address) as relay,
            by_hand(there, relay) as agent,
        ):
            job = (await there.client.submit(spec)).status.job
            assert job == (await agent.acquire()).plan.job
            answers = await agent.plan(job, reference_plan(spec), part=2)
            assert [agents_pb2.VERDICT_ACCEPTED] * 3 == [answer.verdict for answer in answers]
            given = (await agent.acquire(max_shards=2)).score
            assert given.spec_json
            assert given.manifest_json
            index = given.shards[0].index
            failure = agents_pb2.ShardFailure(
                shard=index, failure=evaluation_pb2.Failure(code="SHARD_FAILED", message="it fails")
            )
            (answer,) = await agent.report([agent.message(job, shard_failure=failure)])
            assert agents_pb2.VERDICT_ACCEPTED == answer.verdict
            assert 1 == there.runtime.scheduler.job(job).failures
            await agent.register()
            again = (await agent.acquire(max_shards=2)).score
            assert (given.spec_json, given.manifest_json) == (again.spec_json, again.manifest_json)
            wrong = agents_pb2.ScoredShard(partial=evaluation_pb2.Partial(shard=again.shards[0].index, nll=1e-3))
            (answer,) = await agent.report([agent.message(job, scored=wrong)])
            assert agents_pb2.VERDICT_ACCEPTED == answer.verdict, "the relay only keeps and passes on"
            await until(lambda: relay.delivery.delivered == 1)
            assert 2 == there.runtime.scheduler.job(job).failures, "refused above, as the agent's own"

    asyncio.run(main())


def test_a_partial_is_durable_at_the_relay_before_it_is_acknowledged(tmp_path: Path) -> None:
    """With the way up cut, what was acknowledged is in the log, and goes up from there in another life."""

    async def main() -> None:
        spec = fake_spec(shards=3)
        async with served(MemoryJournal("identity"), config=QUICK) as there:
            async with relaying(tmp_path, there.server.address) as relay, by_hand(there, relay) as agent:
                job = (await there.client.submit(spec)).status.job
                await agent.acquire()
                await agent.plan(job, reference_plan(spec))
                calls = relay.upstream.send
                silent: asyncio.Future[object] = asyncio.get_running_loop().create_future()
                relay.upstream.send = lambda call: silent  # type: ignore[method-assign]
                for partial in reference_partials(spec):
                    scored = scored_to_message(
                        ScoredShard(partial, Execution(seconds=0.1, device="cpu", dtype="float32"))
                    )
                    (answer,) = await agent.report([agent.message(job, scored=scored)])
                    assert agents_pb2.VERDICT_ACCEPTED == answer.verdict
                    (again,) = await agent.report([agent.message(job, scored=scored)])
                    assert agents_pb2.VERDICT_DUPLICATE == again.verdict
                relay.upstream.send = calls  # type: ignore[method-assign]
                assert 3 == relay.delivery.pending
            assert 0 == there.runtime.scheduler.job(job).shards_done
            async with relaying(tmp_path, there.server.address) as relay:
                assert reference_tally(spec).steps == await finished(there, job)
                await until(lambda: relay.delivery.pending == 0)

    asyncio.run(main())


def test_a_relay_killed_and_started_again_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL of the relay's process in the middle of a job: agents wait, spools and log replay, the sum is exact."""

    async def main() -> None:
        spec = fake_spec(shards=120, delay=0.02)
        listen = free_address()
        relay = ("--role", "aggregate", "--listen", listen)
        async with Cluster(tmp_path, heartbeat=0.3, lease=3.0) as cluster:
            cluster.start_agent("relay", *relay)
            upstream, cluster.address = cluster.address, listen
            for name in ("a", "b"):
                cluster.start_agent(name)
            cluster.address = upstream
            job = await cluster.submit(spec)
            await cluster.reach(job, 30)
            cluster.kill_agent("relay")
            cluster.start_agent("relay", *relay)
            report = await cluster.report(job)
            assert "SUCCEEDED" == report["state"]
            assert reference_tally(spec).steps == int(report["totals"]["loss_steps"])
            async with Client(cluster.address) as client:
                nodes = {node.node: node for node in await client.nodes()}
            assert {"relay", "a", "b"} == set(nodes)
            assert nodes["relay"].activity.startswith("relaying for ")

    asyncio.run(main())
