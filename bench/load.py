"""A coordinator under load: 1,000 agents over real gRPC on loopback, heartbeats every 10 s, 300 partials/s durable.

One process plays the agents (real session and client, partials of the fake engine); the coordinator is a process of its
own with its journal on the disk. Prints its share of one core, its memory and the slope of it, and how long partials
wait for their acknowledgement; then it is killed under the load and started again, and in the end the total has to be
the reference's to the last bit.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common

from coordinator.client import Client
from coordinator.fleet import Fleet, Process
from coordinator.status import NodeState
from eval_kernel.spec import JobSpec
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.light_agents import LightAgent, partials_of
from tests.support.processes import until

AGENTS, RATE = 1000, 300.0
HEARTBEAT_SECONDS, LEASE_SECONDS = 10.0, 30.0
TOKENS = 16
TICK_SECONDS = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Watched:
    """What a process uses, second by second."""

    pid: int
    moments: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds so far
    rss: list[float] = field(default_factory=list)  # MiB

    def look(self) -> None:
        """Take a sample."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        self.moments.append(time.monotonic())
        self.cpu.append((int(stat[11]) + int(stat[12])) / _TICKS)
        self.rss.append(int(stat[21]) * _PAGE / (1 << 20))

    @property
    def share(self) -> float:
        """Of one core, between the first and the last sample."""
        return (self.cpu[-1] - self.cpu[0]) / (self.moments[-1] - self.moments[0])

    @property
    def slope(self) -> float:
        """MiB an hour, by least squares."""
        return statistics.linear_regression(self.moments, self.rss).slope * 3600


async def start(fleet: Fleet, listen: str) -> tuple[Process, str]:
    """Start the coordinator and return it with its address."""
    data = fleet.directory / "data"
    file = data / "address"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "coordinator", "serve", "--listen", listen, "--data-dir", str(data)]
    command += ["--heartbeat", str(HEARTBEAT_SECONDS), "--lease", str(LEASE_SECONDS)]
    process = fleet.start("coordinator", command)
    while not file.exists():
        if process.code is not None:
            sys.exit(f"bench: the coordinator ended: {process.last_line()}")
        await asyncio.sleep(0.02)
    return process, file.read_text(encoding="utf-8").strip()


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of all lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def acknowledged(agents: list[LightAgent]) -> int:
    """Partials acknowledged so far."""
    return sum(len(agent.acknowledgement_seconds) for agent in agents)


async def hold(
    fleet: Fleet, agents: list[LightAgent], spec: JobSpec, address: str, coordinator: Process, seconds: float
) -> dict[str, Any]:
    """Ramp up, measure for ``seconds``, kill and restart the coordinator, and finish the job."""
    begun = time.monotonic()
    async with Client(address) as client:
        job = (await client.submit(spec)).status.job
    for agent in agents:
        agent.start()
        await asyncio.sleep(AGENTS / 250 / len(agents))
    await until(lambda: acknowledged(agents) >= len(agents), 120)
    print(f"{len(agents)} agents are at work after {time.monotonic() - begun:.1f} s; measuring for {seconds:.0f} s")
    for agent in agents:
        agent.acknowledgement_seconds.clear()
    watched, mine = Watched(coordinator.pid), Watched(os.getpid())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watched.look()
        mine.look()
        await asyncio.sleep(TICK_SECONDS)
    watched.look()
    mine.look()
    waits = [wait for agent in agents for wait in agent.acknowledgement_seconds]
    figures: dict[str, Any] = {
        "partials_per_second": round(len(waits) / seconds, 1),
        "coordinator_core_share": round(watched.share, 3),
        "load_core_share": round(mine.share, 3),
        "rss_mib": round(max(watched.rss), 1),
        "rss_mib_per_hour": round(watched.slope, 1),
        "ack_p50_ms": round(1000 * percentile(waits, 0.50), 1),
        "ack_p99_ms": round(1000 * percentile(waits, 0.99), 1),
        "registered_again": sum(agent.registrations - 1 for agent in agents),
    }
    async with Client(address) as client:
        report = await client.report(job)
        nodes = await client.nodes()
    log = coordinator.log.read_text(encoding="utf-8")
    figures["false_expiries"] = log.count("shard expired") + report["accounting"]["duplicates"]
    figures["nodes_not_active"] = sum(node.state is not NodeState.ACTIVE for node in nodes)
    print(
        f"coordinator: {figures['partials_per_second']} partials/s, "
        f"{100 * watched.share:.0f} % of a core (target < 60), "
        f"{figures['rss_mib']} MiB (target < 400), {figures['rss_mib_per_hour']:+.0f} MiB/h while the job grows; "
        f"the load's own share {100 * mine.share:.0f} %"
    )
    print(
        f"acknowledgement: p50 {figures['ack_p50_ms']} ms, p99 {figures['ack_p99_ms']} ms (target < 250); "
        f"expiries {figures['false_expiries']}, registered again {figures['registered_again']}, "
        f"nodes not ACTIVE {figures['nodes_not_active']}"
    )
    before = [agent.registrations for agent in agents]
    coordinator.kill()
    killed = time.monotonic()
    await start(fleet, address)
    listening = time.monotonic()
    await until(lambda: all(a.registrations > old for a, old in zip(agents, before, strict=True)), 120)
    figures["restart_listening_seconds"] = round(listening - killed, 2)
    figures["restart_all_back_seconds"] = round(time.monotonic() - killed, 2)
    print(
        f"killed and started under the load: it listens after {figures['restart_listening_seconds']} s, "
        f"all agents are back after {figures['restart_all_back_seconds']} s (target < 15)"
    )
    for agent in agents:
        agent.seconds = 0.2  # the rest need not take long
    async with Client(address) as client:
        status = await client.settled(job)
        report = await client.report(job)
    await until(lambda: not any(agent.disk for agent in agents), 30)
    for agent in agents:
        agent.check()
    expected = reference_tally(spec)
    figures["bit_identical"] = int(report["totals"]["loss_steps"]) == expected.steps
    figures["unacknowledged"] = sum(len(agent.disk) for agent in agents)
    print(
        f"the job is {status.state.value}; total bit-identical: {figures['bit_identical']}; "
        f"left in spools: {figures['unacknowledged']}"
    )
    return figures


async def measure(agents: int, rate: float, seconds: float) -> None:
    """Run the load."""
    shards = int(rate * (seconds + 30)) + 3 * agents
    spec = fake_spec("load", shards=shards, tokens=TOKENS, documents=1)
    partials_of(spec.canonical())  # made before the load begins, since it takes long
    with tempfile.TemporaryDirectory() as temp, Fleet(Path(temp) / "fleet") as fleet:
        coordinator, address = await start(fleet, "127.0.0.1:0")
        crew = [LightAgent(address, f"load-{i}", seconds=agents / rate) for i in range(agents)]
        try:
            figures = await hold(fleet, crew, spec, address, coordinator, seconds)
        finally:
            await asyncio.gather(*(agent.close() for agent in crew))
    common.finish({"bench": "load", "agents": agents, "seconds": seconds, "shards": shards, **figures})


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten seconds instead of five minutes")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long to measure")
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--rate", type=float, default=RATE, help="partials a second, of all agents together")
    options = parser.parse_args()
    asyncio.run(measure(options.agents, options.rate, 10.0 if options.quick else options.seconds))


if __name__ == "__main__":
    main()
