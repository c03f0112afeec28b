"""What crosses a site's border: bytes and messages of 20 agents through a relay and without one, to the same total.

A tap at the border counts TCP payload in both directions and gRPC messages; everything is counted, registration and
plan included. Heartbeats are kept apart: in the measured jobs none is due, and they have a measurement of their own.
Agents are light (real session, real client, partials of the fake engine); coordinator, relay and wire are real.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import common
from wire_tap import Tap

from agent.logs import make_logger
from agent.relay.relay import Relay
from agent.relay.sitelog import SiteLog
from coordinator.core.calls import SchedulerConfig
from coordinator.journal import MemoryJournal
from eval_kernel.spec import JobSpec
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.light_agents import light_agents
from tests.support.processes import until
from tests.support.served import served

AGENTS = 20
SHARD_TOKENS = 16_384  # what a job has unless it says otherwise
TARGETS = {"lumps": 64, "rows": 256}  # KiB per million scored tokens
Figures = dict[str, float]


async def border(spec: JobSpec | None, through_relay: bool, heartbeat: float, idle: float = 0.0) -> Figures:
    """Run a job (or, without one, nothing for ``idle`` seconds) and return what crossed the border."""
    config = SchedulerConfig(
        heartbeat_seconds=heartbeat,
        suspect_after_seconds=3 * heartbeat,
        lease_seconds=3 * heartbeat,
        target_seconds=2.0,
    )
    async with AsyncExitStack() as stack:
        there = await stack.enter_async_context(served(MemoryJournal("bench"), config=config))
        tap = await stack.enter_async_context(Tap(there.server.address))
        address = tap.address
        relay = None
        if through_relay:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            relay = Relay("127.0.0.1:0", address, "relay", SiteLog(folder), make_logger(as_json=False))
            running = asyncio.create_task(relay.run())
            stack.push_async_callback(_end, running)
            await until(lambda: relay is not None and relay.upstream.generation > 0)
            address = relay.address
        agents = await stack.enter_async_context(light_agents([address], AGENTS, seconds=0.15))
        await until(lambda: all(agent.registrations for agent in agents))
        scheduler = there.runtime.scheduler
        if spec is None:
            tap.reset()
            await asyncio.sleep(idle)
            return {"bytes": tap.bytes, "messages": tap.messages, "beats": AGENTS * idle / heartbeat}
        job = (await there.client.submit(spec)).status.job
        await until(lambda: scheduler.state(job).settled, 120)
        await until(lambda: not any(agent.disk for agent in agents) and (relay is None or relay.delivery.pending == 0))
        expected = reference_tally(spec)
        if scheduler.job(job).tally.steps != expected.steps:
            sys.exit(f"bench: the sum is {scheduler.job(job).tally.steps} steps, the reference's {expected.steps}")
        return {
            "bytes": tap.bytes,
            "messages": tap.messages,
            "connections": tap.connections,
            "tokens": expected.tokens,
            "kib_per_million": tap.bytes / 1024 / (expected.tokens / 1e6),
        }


async def _end(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def measure(shards: int) -> None:
    """Print both ways side by side."""
    jobs = {
        "lumps": fake_spec("whole documents in lumps", shards=shards, tokens=SHARD_TOKENS, documents=256),
        "rows": fake_spec("64 document rows a shard", shards=shards, tokens=SHARD_TOKENS, documents=64),
    }
    figures: dict[str, object] = {"bench": "border", "agents": AGENTS, "shards": shards}
    print(f"{AGENTS} agents, {shards} shards of {SHARD_TOKENS:,} tokens; the sums are bit-identical to the reference's")
    for name, spec in jobs.items():
        direct, relayed = await border(spec, False, 600.0), await border(spec, True, 600.0)
        for how, got in (("direct", direct), ("relay", relayed)):
            print(
                f"{spec.name:<26} {how:<7} {got['bytes'] / 1024:8.1f} KiB  {got['messages']:6.0f} messages  "
                f"{got['connections']:3.0f} connections  {got['kib_per_million']:7.1f} KiB per million scored tokens"
            )
            figures[f"{name}_{how}_kib_per_million"] = round(got["kib_per_million"], 1)
            figures[f"{name}_{how}_messages"] = int(got["messages"])
        print(
            f"{'':<26} relay / direct: bytes {relayed['bytes'] / direct['bytes']:.2f}, messages "
            f"{relayed['messages'] / direct['messages']:.2f}; target <= {TARGETS[name]} KiB per million"
        )
        figures[f"{name}_bytes_ratio"] = round(relayed["bytes"] / direct["bytes"], 3)
        figures[f"{name}_messages_ratio"] = round(relayed["messages"] / direct["messages"], 3)
    for how in ("direct", "relay"):
        beat = await border(None, how == "relay", 1.0, idle=4.0)
        each = beat["bytes"] / beat["beats"]
        print(f"heartbeats, idle           {how:<7} {each:8.0f} bytes a heartbeat, {beat['messages']:.0f} messages")
        figures[f"heartbeat_bytes_{how}"] = round(each)
    common.finish(figures)


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one million tokens")
    options = parser.parse_args()
    asyncio.run(measure(64 if options.quick else 256))


if __name__ == "__main__":
    main()
