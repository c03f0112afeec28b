"""How near the scheduler comes to the ideal: the real core in virtual time, beside an equal split and one-at-a-time.

    python bench/scheduling.py [--quick] [--seed N]

The ideal bound is the time in which all nodes together, as fast as each is at each moment, could do the work. An equal
static split gives every node the same number of shards; one-at-a-time is a work queue without look-ahead, in which a
node asks for its next shard when it has reported the last. Core time is that of this machine.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import finish
from coordinator.core.calls import SchedulerConfig, SubmitOptions
from coordinator.core.scheduler import Scheduler
from tests.support.virtual import NodeModel, VirtualCluster, ideal_seconds, plan_of

COST = 1000  # input tokens of a shard


def mixed(load: float = 0.0) -> list[NodeModel]:
    """8 fast nodes (10x), 8 medium (3x), 16 slow (1x): a slow one takes a second for a shard."""
    kinds = (("fast", 8, 10), ("medium", 8, 3), ("slow", 16, 1))
    return [NodeModel(name=f"{kind}{i}", speed=x * COST, load=load) for kind, n, x in kinds for i in range(n)]


def troubled(seed: int) -> list[NodeModel]:
    """The same; one fast node slows down 50 times in mid-job, and one node in ten dies."""
    chance = random.Random(seed)
    nodes = mixed()
    nodes[0] = replace(nodes[0], slows=60.0, slowdown=50.0)
    for i in chance.sample(range(1, len(nodes)), len(nodes) // 10):
        nodes[i] = replace(nodes[i], dies=chance.uniform(20, 130))
    return nodes


def equal_split(nodes: Sequence[NodeModel], shards: int, seed: int) -> float:
    """Makespan of giving every node the same number of shards; infinite if one of them dies."""
    chance = random.Random(seed)
    ends = []
    for i, node in enumerate(nodes):
        now = 0.0
        for _ in range(len(range(i, shards, len(nodes)))):
            speed = node.speed_at(now)
            if speed == 0:
                return float("inf")
            now += COST / speed * min(max(chance.gauss(1.0, node.jitter), 0.4), 1.6)
        ends.append(now)
    return max(ends)


def one_at_a_time(nodes: Sequence[NodeModel], shards: int, seed: int, lease: float = 30.0) -> float:
    """Makespan of a queue from which a node takes one shard after the other; a lost shard returns after ``lease``."""
    chance = random.Random(seed)
    ready = [(0.0, i) for i in range(len(nodes))]
    heapq.heapify(ready)
    returned: list[float] = []
    waiting, last = shards, 0.0
    while waiting or returned:
        now, i = heapq.heappop(ready)
        node = nodes[i]
        if not waiting and returned:
            now = max(now, heapq.heappop(returned))
            waiting += 1
        speed = node.speed_at(now)
        if speed == 0:
            continue
        waiting -= 1
        end = now + 2 * node.delay + COST / speed * min(max(chance.gauss(1.0, node.jitter), 0.4), 1.6)
        if end >= node.dies:
            heapq.heappush(returned, now + lease)
            continue
        last = max(last, end)
        heapq.heappush(ready, (end, i))
    return last


def run(
    name: str, nodes: Sequence[NodeModel], shards: int, seed: int, *, baselines: bool = True, **more: Any
) -> dict[str, Any]:
    """One job of equal shards on these nodes; print and return its figures."""
    scheduler = Scheduler(SchedulerConfig(heartbeat_seconds=more.get("heartbeat", 5.0)))
    cluster = VirtualCluster(scheduler, nodes, seed=seed, **more)
    cluster.run(lambda: all(node.registered for node in cluster.nodes.values() if node.model.joins == 0))
    begin = time.perf_counter()
    cluster.submit("job", plan_of([COST] * shards))
    makespan = cluster.run(cluster.settled)
    ideal = ideal_seconds(nodes, COST * shards)
    alive = sum(min(makespan, node.dies) - node.joins for node in nodes)
    decisions = {kind: round(1e6 * s / cluster.calls[kind], 1) for kind, s in cluster.core_seconds.items()}
    figures: dict[str, Any] = {
        "nodes": len(nodes),
        "shards": shards,
        "makespan_s": round(makespan, 2),
        "ratio_to_ideal": round(makespan / ideal, 4),
        "utilisation": round(sum(node.busy for node in cluster.nodes.values()) / alive, 4),
        "wasted_share": round(cluster.wasted / max(1e-9, sum(node.busy for node in cluster.nodes.values())), 4),
        "messages_per_shard": round(cluster.messages / shards, 3),
        "messages_per_s": round(cluster.messages / makespan, 1),
        "calls_per_s": round(sum(cluster.calls[k] for k in ("acquire", "renew", "scored")) / makespan, 1),
        "core_us_per_call": {kind: decisions[kind] for kind in ("acquire", "renew", "scored", "tick")},
        "core_busy_share": round(sum(cluster.core_seconds.values()) / makespan, 4),
        "wall_s": round(time.perf_counter() - begin, 1),
    }
    if baselines:
        ratio = equal_split(nodes, shards, seed) / ideal
        figures["equal_split_ratio"] = round(ratio, 3) if math.isfinite(ratio) else None  # one that dies: never
        figures["one_at_a_time_ratio"] = round(one_at_a_time(nodes, shards, seed) / ideal, 3)
    print(
        f"{name}: {len(nodes)} nodes, {shards} shards: {makespan:.1f} s, {figures['ratio_to_ideal']:.4f} x the ideal",
        end="",
    )
    if baselines:
        split, single = figures["equal_split_ratio"] or "never ends", figures["one_at_a_time_ratio"]
        print(f" (equal split {split}, one at a time {single})", end="")
    print(
        f"; busy {figures['utilisation']:.1%}, wasted {figures['wasted_share']:.2%}; the coordinator gets "
        f"{figures['messages_per_s']:.0f} messages/s with {figures['calls_per_s']:.0f} calls/s; core time in us "
        f"{figures['core_us_per_call']}, {figures['core_busy_share']:.1%} of a core"
    )
    return figures


def queue(seed: int, jobs_of_a_model: int) -> dict[str, Any]:
    """200 queued jobs of three submitters whose jobs differ in size; a model takes 20 s to load."""
    chance = random.Random(seed)
    nodes = [
        NodeModel(name=f"n{i}", speed=(10, 10, 3, 3, 1, 1, 1, 1)[i] * COST, load=20.0, joins=1.0) for i in range(8)
    ]
    planner = NodeModel(name="planner", speed=1.0, dies=0.5)
    cluster = VirtualCluster(Scheduler(SchedulerConfig()), [planner, *nodes], seed=seed)
    cluster.run(lambda: cluster.nodes["planner"].registered)
    models = set()
    for who, count, shards in (("ann", 60, 200), ("bob", 100, 120), ("eve", 40, 300)):
        for i in range(count):
            model = f"{who}{i // jobs_of_a_model}"
            models.add(model)
            plan = plan_of([COST] * round(shards * chance.uniform(0.7, 1.3)))
            cluster.submit(f"{who}-{i}", plan, model, SubmitOptions(submitter=who))
    shares: list[Counter[str]] = []

    def snapshot() -> None:
        """Note what each has used, while all three wait for more."""
        if len({job.split("-")[0] for job in cluster.plans if job not in cluster.done_at}) == 3:
            used: Counter[str] = Counter()
            for job, seconds in cluster.seconds_by_job.items():
                used[job.split("-")[0]] += seconds
            shares.append(used)
            cluster.at(cluster.now + 10.0, snapshot)

    cluster.at(10.0, snapshot)
    makespan = cluster.run(cluster.settled)
    loads = sum(node.loads for node in cluster.nodes.values())
    mean = sum(shares[-1].values()) / 3
    unfair = max(abs(used / mean - 1) for used in shares[-1].values())
    longest = max(later - at for at, later in itertools.pairwise(sorted(cluster.done_at.values())))
    figures = {
        "jobs": len(cluster.plans),
        "models": len(models),
        "loads": loads,
        "loads_to_minimum": round(loads / len(models), 3),
        "furthest_from_fair_share": round(unfair, 4),
        "makespan_s": round(makespan, 1),
        "longest_without_a_finished_job_s": round(longest, 1),
        "unfinished": len(cluster.plans) - len(cluster.done_at),
    }
    print(
        f"queue: {figures['jobs']} jobs of 3 submitters, {len(models)} models: all done after {makespan:.0f} s; "
        f"{loads} loads ({figures['loads_to_minimum']:.2f} x the minimum); while all three wait, nobody is more than "
        f"{unfair:.1%} from the fair share"
    )
    return figures


def main() -> None:
    """Run the scenarios and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    seed = given.seed
    chance = random.Random(seed)
    some = [NodeModel(name=f"n{i}", speed=chance.choice((10, 3, 3, 1, 1)) * COST) for i in range(1000)]
    many = [NodeModel(name=f"n{i}", speed=chance.choice((10, 3, 3, 1, 1)) * COST / 10) for i in range(10_000)]
    figures: dict[str, Any] = {
        "mixed": run("mixed", mixed(), 12_000, seed),
        "coarse": run("mixed, few shards", mixed(), 2_400, seed),
        "troubled": run("one slows 50x, one in ten dies", troubled(seed), 18_000, seed),
        "queue": queue(seed, 1),
        "queue_shared_models": queue(seed, 4),
        "thousand": run("thousand", some, 100_000 if given.quick else 200_000, seed, baselines=False, heartbeat=10.0),
    }
    if not given.quick:
        figures["ten_thousand_by_relays"] = run(
            "ten thousand by 40 relays", many, 200_000, seed, baselines=False, heartbeat=10.0, relays=40
        )
    finish({"benchmark": "scheduling", "seed": seed, **figures})


if __name__ == "__main__":
    main()
