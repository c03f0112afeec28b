"""What it costs that a node changes its model, and what it brings: loading, joining others, coming too late.

Each model must be loaded once. Every further load is time in which a node scores nothing, so a node joins others at a
model, or begins one that it cannot end in time, only where what it would do there is worth some loads. Measured in
seconds of a mean node, so that the fast ones do it and the slow ones keep away from the end. Decides on one node at one
moment; the order of jobs is queueing's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping

from coordinator.core.jobs import Job
from coordinator.core.nodes import Node
from coordinator.core.states import NodeState, ShardState
from coordinator.core.throughput import may_score

#: To join others must be worth so many loads, and is as good as any job's turn where so many are left to do.
JOIN_GAIN, WORTH_JOINING = 2.0, 60.0
#: A node leaves a model to others that are so many times as fast and will be free.
FASTER = 1.5
#: For so many seconds ahead the nodes at a submitter's models count as used by that submitter.
LOOK_AHEAD_SECONDS = 120.0


class Models:
    """Who works with which of the models that have something waiting, while one node chooses. Keys name models."""

    def __init__(
        self,
        node: Node,
        jobs: Collection[Job],
        nodes: Mapping[str, Node],
        working: Mapping[str, Collection[str]],
        now: float,
    ) -> None:
        """Look at the jobs of one level; ``working`` names the agents last given shards of a model."""
        self._node, self._jobs, self._nodes, self._working, self._now = node, jobs, nodes, working, now
        self._waiting: defaultdict[str, int] = defaultdict(int)
        for job in jobs:
            self._waiting[job.key] += job.cost[ShardState.WAITING]
        self._known: dict[str, tuple[int, float]] = {}
        active = [other for other in nodes.values() if other.state is NodeState.ACTIVE]
        rates = [rate for rate in map(typical, active) if rate > 0]
        self._mean = sum(rates) / len(rates) if rates else 0.0
        fleet = self._mean * len(active)
        #: Seconds in which all nodes together would do all that waits.
        self.all_left = sum(self._waiting.values()) / fleet if fleet > 0 else math.inf

    def used_soon(self, submitter: str) -> float:
        """Return the seconds of nodes that those who work with a submitter's models will add to its share soon."""
        seconds = 0.0
        for job in self._jobs:
            left = self.left(job.key) if job.submitter == submitter and self._waiting[job.key] else None
            if left is not None:
                part = job.cost[ShardState.WAITING] / self._waiting[job.key]
                seconds += self._others(job.key)[0] * part * min(left, LOOK_AHEAD_SECONDS)
        return seconds

    def left(self, key: str) -> float | None:
        """Return how long those who work with a model take for all that waits for it; None: nobody does."""
        others, rate = self._others(key)
        if not others:
            return None
        return self._waiting[key] / rate if rate > 0 else math.inf

    def own_turn(self, key: str, load: float) -> bool:
        """Whether loading the model, which takes ``load`` seconds, needs no further reason.

        Either nobody works with it, and the node would end it before all else is done; or so much is left that it
        makes no difference.
        """
        left = self.left(key)
        if left is None:
            own = self._rate(key)
            return own <= 0 or self._waiting[key] / own + load <= self.all_left
        return WORTH_JOINING * load <= min(left, self.all_left) < math.inf

    def worth_loading(self, job: Job, load: float) -> bool:
        """Whether the node should load the job's model though others work with it, or will before it is done."""
        own, left = self._rate(job.key), self.left(job.key)
        if left is not None and left <= load:
            return False
        if own <= 0 or self._mean <= 0:
            return True  # nothing is known of the node yet
        faster = self._faster_will_be_free(job, own)
        if left is None and not faster:
            return True  # it must be done by someone
        # It would be done after so long with the node's help; where faster ones come too, with all else at the latest.
        _, rate = self._others(job.key)
        until = (self._waiting[job.key] + own * load) / (rate + own)
        if faster:
            until = min(until, self.all_left)
        return (until - load) * own / self._mean >= JOIN_GAIN * load

    def _faster_will_be_free(self, job: Job, own: float) -> bool:
        """Whether a much faster node is at work elsewhere, and may take the job when it is done there."""
        return any(
            other.leases
            and other.working != job.key
            and other is not self._node
            and typical(other) > FASTER * own
            and may_score(other, job.id, self._now)
            for other in self._nodes.values()
        )

    def _rate(self, key: str) -> float:
        return self._node.rate(key) or typical(self._node)

    def _others(self, key: str) -> tuple[int, float]:
        """How many others work with a model, and how fast together; 0.0 when nothing was measured.

        Who holds nothing is not at work: what waits may be just what failed on it, and must not be left to it for
        ever.
        """
        if key not in self._known:
            at = [self._nodes[agent] for agent in self._working.get(key, ()) if agent != self._node.agent]
            rates = [other.rate(key) or typical(other) for other in at if other.leases]
            rate = sum(rates) if all(rates) else len(rates) * typical(self._node)
            self._known[key] = len(rates), rate
        return self._known[key]


def typical(node: Node) -> float:
    """Return a node's mean speed on whatever it has done, for want of a better guess; 0.0 if it has done nothing."""
    rates = [speed.rate for speed in node.speeds.values() if speed.rate > 0]
    return sum(rates) / len(rates) if rates else 0.0
