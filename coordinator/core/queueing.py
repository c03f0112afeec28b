"""Whose job a node is offered first: priorities with ageing, fair shares between submitters, loaded models, limits.

1. Jobs of the highest *level* go first. A job's level is its priority, and one more for every ``ageing_seconds`` since
   it was submitted, up to the highest priority there is: so no job waits for ever, however many urgent ones arrive.
2. A node stays with the model it has loaded, whoever's job that is, until its submitter is ahead by more than the
   ``switch_seconds`` and a multiple of what loading takes, for every node there is.
3. Else the submitter who has used least goes first. Seconds of nodes are counted, those of work under lease included,
   and what the nodes at each one's models are about to add. A submitter who was away does not save up: they come back
   at the level of the poorest present.
4. Of one submitter's jobs the oldest goes first. Joining others at a model costs a load that need not be, so it
   comes after all models on which nobody works, unless their submitters are ahead by what loading costs the fleet; and
   only where it is worth it (affinity).

Decides on orders only; how much of a job is given is leasing's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from coordinator.core.affinity import Models
from coordinator.core.calls import PLANNING, SchedulerConfig
from coordinator.core.jobs import Job
from coordinator.core.nodes import Node
from coordinator.core.states import ShardState
from coordinator.core.throughput import may_score

#: A node leaves a loaded model for fairness' sake when each node has so many loads' time to make good.
LOADS_BEFORE_SWITCH = 10.0
#: It joins others at the poorest submitter's model before it begins a fresh one of a submitter who has used so much
#: more: so many loads' time of all nodes.
LOADS_BEFORE_JOINING = 1.0
#: What loading takes before it was measured.
GUESSED_LOAD_SECONDS = 10.0
#: Why a node is given a job when there is no choice.
ONLY = "it is the only job with work for it"


@dataclass(slots=True)
class Share:
    """What one submitter has used, and holds: seconds of nodes."""

    used: float = 0.0
    held: float = 0.0
    open_jobs: int = 0

    @property
    def total(self) -> float:
        """What counts when shares are compared."""
        return self.used + self.held


class Shares:
    """The submitters' shares, and who works with which model. Soft: a restart begins anew."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self.of: defaultdict[str, Share] = defaultdict(Share)
        self.working: defaultdict[str, set[str]] = defaultdict(set)  # key -> agents last given a shard of it
        self._loads: dict[str, float] = {}  # key -> seconds of the last load

    def enter(self, job: Job) -> None:
        """A job was submitted."""
        share = self.of[job.submitter]
        if not share.open_jobs:
            present = [other.total for other in self.of.values() if other.open_jobs]
            share.used = max(share.used, min(present, default=0.0) - share.held)
        share.open_jobs += 1

    def leave(self, job: Job) -> None:
        """A job was settled."""
        self.of[job.submitter].open_jobs -= 1

    def hold(self, job: Job, seconds: float) -> None:
        """Work was given out that will take so long."""
        self.of[job.submitter].held += seconds

    def release(self, job: Job, seconds: float) -> None:
        """That work is over, one way or another."""
        self.of[job.submitter].held -= seconds

    def use(self, job: Job, seconds: float) -> None:
        """A node has worked so long for the job."""
        self.of[job.submitter].used += seconds

    def place(self, node: Node, key: str) -> None:
        """A node was given a shard of this model; an empty key: it works no more."""
        if node.working != key:
            self.working[node.working].discard(node.agent)
            node.working = key
            self.working[key].add(node.agent)

    def loaded(self, key: str, seconds: float) -> None:
        """A node has loaded a model within so many seconds."""
        self._loads[key] = seconds

    def load_seconds(self, key: str) -> float:
        """Return what loading a model takes: as measured last, else the mean of other models, else a guess."""
        if key in self._loads:
            return self._loads[key]
        return sum(self._loads.values()) / len(self._loads) if self._loads else GUESSED_LOAD_SECONDS


@dataclass(frozen=True, slots=True)
class Offer:
    """A job that a node may be given shards of, and why."""

    job: Job
    why: str


def within_limits(node: Node, job: Job, config: SchedulerConfig) -> bool:
    """Whether a job's limit of nodes and the node's limit of jobs let the node take more of it."""
    if node.agent in job.holders:
        return True
    if job.max_nodes and len(job.holders) >= job.max_nodes:
        return False
    jobs = {holding.job for holding in node.leases if holding.shard != PLANNING}
    return len(jobs) < config.max_jobs_per_node


def level(job: Job, highest: int, config: SchedulerConfig, now: float) -> int:
    """Return the priority that a job has by now: its age raises it, up to the ``highest`` that any was given."""
    return min(highest, job.priority + int((now - job.submitted.at) / config.ageing_seconds))


def offers(
    node: Node,
    jobs: Collection[Job],
    nodes: Mapping[str, Node],
    shares: Shares,
    config: SchedulerConfig,
    loaded_job: str,
    now: float,
) -> Iterator[Offer]:
    """Yield the jobs with waiting shards that the node may be given, best first."""
    able = [job for job in jobs if job.counts[ShardState.WAITING] and _may(node, job, config, now)]
    by_level: defaultdict[int, list[Job]] = defaultdict(list)
    highest = max((job.priority for job in able), default=0)
    for job in able:
        by_level[level(job, highest, config, now)].append(job)
    for rank in sorted(by_level, reverse=True):
        yield from _of_level(node, by_level[rank], nodes, shares, config, loaded_job, now)


def _may(node: Node, job: Job, config: SchedulerConfig, now: float) -> bool:
    return may_score(node, job.id, now) and within_limits(node, job, config)


def _of_level(
    node: Node,
    jobs: Collection[Job],
    nodes: Mapping[str, Node],
    shares: Shares,
    config: SchedulerConfig,
    loaded_job: str,
    now: float,
) -> Iterator[Offer]:
    """One level's jobs, by what their submitters have used and what loading their models costs."""
    total = {job.submitter: shares.of[job.submitter].total for job in jobs}
    # What all nodes do while one is away loading counts too: hence by the number of nodes.
    slack = (config.switch_seconds + LOADS_BEFORE_SWITCH * shares.load_seconds(node.loaded)) * max(1, len(nodes))
    most = min(total.values()) + slack
    stay = [job for job in jobs if job.key == node.loaded and total[job.submitter] <= most]
    for job in sorted(stay, key=lambda job: (job.id != loaded_job, job.number)):
        yield Offer(job, "its model is loaded there" if len(jobs) > 1 else ONLY)
    others = [job for job in jobs if job.key != node.loaded or total[job.submitter] > most]
    if not others:
        return
    models = Models(node, jobs, nodes, shares.working, now)
    used = {name: seconds + models.used_soon(name) for name, seconds in total.items()}
    turn = ONLY if len(jobs) == 1 else "its submitter has used least" if len(total) > 1 else "it is the oldest"
    ranked: list[tuple[float, float, int, Offer]] = []
    for job in others:
        load, left = shares.load_seconds(job.key), models.left(job.key)
        if job.key == node.loaded or load <= 0 or models.own_turn(job.key, load):
            more = "" if left is None or load <= 0 else ", and enough of it is left to load it"
            ranked.append((used[job.submitter], 0.0, job.number, Offer(job, turn + more)))
        elif models.worth_loading(job, load):
            late = LOADS_BEFORE_JOINING * load * max(1, len(nodes))
            why = ONLY if len(jobs) == 1 else "loading it is quicker than leaving all of it to others"
            ranked.append((used[job.submitter] + late, -(left or math.inf), job.number, Offer(job, why)))
    for *_, offer in sorted(ranked, key=lambda item: item[:3]):
        yield offer
