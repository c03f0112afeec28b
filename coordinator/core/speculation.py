"""The end of a job: what nodes without work may take over from those that will not be done in time.

When nothing waits any more, a node that is free may be given what another holds, if it would be done sooner:

- a shard that the other has *not begun* changes hands (stealing): the other learns it from its next heartbeat, and if
  it has begun meanwhile there are two at it;
- a shard that it *has begun* is given to both (speculation). The first partial counts; the other agent is told to stop.

Correctness does not depend on any of this: a shard is committed once, whoever sends it. Each job's holdings are looked
through at most every ``KEEP_SECONDS``, and the ones that will be done last are offered first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coordinator.core.jobs import Job, Shard
from coordinator.core.leasing import front_seconds
from coordinator.core.nodes import Lease, Node
from coordinator.core.states import ShardState
from coordinator.core.throughput import Fleet

#: How long the list of a job's holdings is used, in seconds; an empty one is looked through again sooner.
KEEP_SECONDS, KEEP_EMPTY_SECONDS = 0.25, 0.05
#: A shard changes hands, or is doubled, if the node would be done within such a part of the time the other needs.
STEAL_GAIN, DOUBLE_GAIN = 0.9, 0.75
#: Entries that are looked at for one node, the last to be done first.
LOOK_AT = 8
#: Of the time that it gains, a node may fill so much with further shards.
FILL = 0.5


@dataclass(frozen=True, slots=True)
class Late:
    """A shard that one agent holds, and when it will be done."""

    done_at: float
    shard: int
    lease: Lease
    begun: bool


@dataclass(slots=True)
class Tail:
    """One job's holdings, those that are done last at the end of the list."""

    until: float = 0.0
    items: list[Late] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Takeover:
    """A shard for a node that is free; ``steal``: the holder loses it."""

    shard: Shard
    holder: str
    steal: bool


class Tails:
    """The holdings of the jobs that have nothing waiting."""

    def __init__(self) -> None:
        """Begin with none."""
        self._of: dict[str, Tail] = {}

    def forget(self, job: str) -> None:
        """Drop what was kept for a job that is settled, or has shards waiting again."""
        self._of.pop(job, None)

    def takeovers(
        self, node: Node, job: Job, nodes: Mapping[str, Node], fleet: Fleet, load: float, most: int, now: float
    ) -> list[Takeover]:
        """Return what the node should take over from others, at most ``most``; none if it would not be done sooner.

        ``load``: the seconds that loading the job's model takes.
        """
        rate = node.rate(job.key) or fleet.mean
        if rate <= 0:
            return []
        tail = self._of.setdefault(job.id, Tail())
        if now >= tail.until:
            tail.items = sorted(holdings(job, nodes, fleet, load, now), key=lambda late: (late.done_at, late.shard))
            tail.until = now + (KEEP_SECONDS if tail.items else KEEP_EMPTY_SECONDS)
        taken: list[Takeover] = []
        ready = now + (0.0 if node.loaded == job.key else load)
        begin = ready
        first_gain = 0.0
        skipped: list[Late] = []
        while tail.items and len(taken) < most and len(skipped) < LOOK_AT:
            late = tail.items.pop()
            shard = job.shards[late.shard]
            if shard.leases != (late.lease,):
                continue  # committed, returned, or doubled meanwhile
            done = ready + shard.plan.input_tokens / rate
            gain = DOUBLE_GAIN if late.begun else STEAL_GAIN
            own = late.lease.agent == node.agent or node.agent in shard.failed_on
            if own or done - now > gain * (late.done_at - now):
                skipped.append(late)
                continue
            if taken and done - begin > FILL * first_gain:
                skipped.append(late)
                break
            first_gain = first_gain or late.done_at - now
            taken.append(Takeover(shard, late.lease.agent, steal=not late.begun))
            ready = done
        tail.items += reversed(skipped)
        return taken


def holdings(job: Job, nodes: Mapping[str, Node], fleet: Fleet, load: float, now: float) -> Iterable[Late]:
    """Yield the shards of a job that exactly one agent holds, with the time at which each is likely to be done."""
    for agent in job.holders:
        node = nodes[agent]
        at = now
        for place, lease in enumerate(node.leases.values()):
            rate = (node.rate(job.key) if lease.holding.job == job.id else 0.0) or node.rate(node.last_key)
            rate = rate or fleet.mean
            cost = max(lease.cost, 1)
            if place == 0:
                fresh = load if node.loaded != job.key else 0.0
                at += front_seconds(node, cost, rate, fresh, now) if rate > 0 else 0.0
            else:
                at += cost / rate if rate > 0 else 0.0
            if lease.holding.job != job.id or lease.audit or lease.holding.shard < 0:
                continue
            shard = job.shards[lease.holding.shard]
            if shard.state is ShardState.SCORING and len(shard.leases) == 1:
                yield Late(at, lease.holding.shard, lease, place == 0 or lease.holding == node.running)
