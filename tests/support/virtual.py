"""A cluster in virtual time: the real scheduler, and models of nodes and links around it. No process, clock or disk.

A node does what an agent does: it asks for work before it runs dry, scores one shard after the other, reports, beats.
Its speed jitters, it may join late, slow down, die, or compute wrongly. ``VirtualCluster.run`` goes from event to
event.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agent.session import HOLD_SECONDS, MAX_HELD, MIN_HELD
from coordinator.core import facts as f
from coordinator.core.calls import DEFAULT_OPTIONS, Holding, NodeInfo, PlanWork, ScoreWork, SubmitOptions
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import Role
from eval_kernel.errors import NotRegistered
from eval_kernel.partial import Execution, Partial, RowSums, ScoredShard
from eval_kernel.plan import Plan, ShardPlan
from tests.support.core_cases import make_plan

#: Grid steps of a loss sum per input token in this world: any number will do.
STEPS_PER_TOKEN = 1 << 20
POLL_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeModel:
    """How one node behaves. Times are in seconds of the simulation, speeds in input tokens a second."""

    name: str
    speed: float
    jitter: float = 0.2  # standard deviation of a shard's duration, as a share of it
    delay: float = 0.005  # of a message, one way
    joins: float = 0.0
    dies: float = math.inf  # silently, as a power cut
    slows: float = math.inf  # when its speed is divided by ``slowdown``
    slowdown: float = 1.0
    load: float = 0.0  # of a model
    bias: float = 0.0  # share by which its losses are too high
    device: str = "cpu"

    def speed_at(self, at: float) -> float:
        """Input tokens a second at a time."""
        if not self.joins <= at < self.dies:
            return 0.0
        return self.speed / self.slowdown if at >= self.slows else self.speed


def plan_of(costs: Sequence[int], label: str = "data") -> Plan:
    """Return a plan of so many shards of such costs in input tokens."""
    plan = make_plan(len(costs), label)
    shards = tuple(replace(shard, input_tokens=cost) for shard, cost in zip(plan.shards, costs, strict=True))
    return Plan(replace(plan.manifest, input_tokens=sum(costs)), shards)


def ideal_seconds(nodes: Iterable[NodeModel], tokens: float) -> float:
    """Return the time in which all nodes together could do ``tokens``: no schedule is quicker on average."""
    nodes = list(nodes)
    times = sorted({t for n in nodes for t in (n.joins, n.dies, n.slows) if math.isfinite(t)} | {0.0})
    for at, until in zip(times, [*times[1:], math.inf], strict=True):
        rate = sum(node.speed_at(at) for node in nodes)
        if rate > 0 and at + tokens / rate <= until:
            return at + tokens / rate
        tokens -= rate * (until - at)
    return math.inf


def scored(shard: ShardPlan, seconds: float, model: NodeModel) -> ScoredShard:
    """Return what a node makes of a shard: the same sums on every node, but for its bias."""
    first = shard.index * 7919 * STEPS_PER_TOKEN % (1 << 34) + (1 << 34)
    first += int(first * model.bias)
    second = (1 << 33) + int((1 << 33) * model.bias)
    rows = (
        RowSums(shard.first_document, 1, first, 6, 30, 5),
        RowSums(shard.first_document + 1, 1, second, 4, 10, 2),
    )
    return ScoredShard(
        Partial(shard.index, first + second, shard.tokens, shard.bytes, shard.words, rows),
        Execution(seconds, model.device, "float32", 1, 1 << 20, {"torch": "2"}),
    )


@dataclass(slots=True)
class _Node:
    model: NodeModel
    queue: deque[tuple[str, ShardPlan]] = field(default_factory=deque)
    running: tuple[str, ShardPlan] | None = None
    held: dict[Holding, None] = field(default_factory=dict)
    asking: bool = False
    shard_seconds: float | None = None
    loaded: str = ""
    loads: int = 0
    turn: int = 0  # grows when what runs is stopped
    busy: float = 0.0
    registered: bool = False

    @property
    def who(self) -> tuple[str, str]:
        return self.model.name, "1"


class VirtualCluster:
    """Nodes around one scheduler. Messages, and seconds of the scheduler's own work, are counted by kind."""

    def __init__(
        self,
        scheduler: Scheduler,
        models: Iterable[NodeModel],
        *,
        seed: int,
        heartbeat: float = 5.0,
        tick: float = 0.5,
        relays: int = 0,
        gather: float = 0.05,
        on_fact: Callable[[f.Fact], None] = lambda fact: None,
    ) -> None:
        """``relays``: so many of them carry all calls, each gathering them for ``gather`` seconds."""
        self.scheduler = scheduler
        self.random = random.Random(seed)
        self.now = 0.0
        self.nodes = {model.name: _Node(model) for model in models}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.core_seconds: defaultdict[str, float] = defaultdict(float)
        self.slowest_call = 0.0
        self.messages = 0  # that the coordinator gets
        self.plans: dict[str, Plan] = {}
        self.keys: dict[str, str] = {}  # job -> model
        self.seconds_by_job: defaultdict[str, float] = defaultdict(float)
        self.wasted = 0.0  # seconds of shards that did not count
        self.done_at: dict[str, float] = {}
        self._heartbeat, self._gather = heartbeat, gather
        self._on_fact = on_fact
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._waiting: dict[str, int] = {}  # node -> shards it wants
        self._offers = scheduler.offers
        self._relay: dict[str, int] = {name: i % relays for i, name in enumerate(self.nodes)} if relays else {}
        self._gathered: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        for node in self.nodes.values():
            self.at(node.model.joins, partial(self._join, node))
        self.at(tick, partial(self._tick, tick))

    # ------------------------------------------------------------ jobs

    def submit(self, job: str, plan: Plan, key: str = "m", options: SubmitOptions = DEFAULT_OPTIONS) -> None:
        """Submit and plan a job now; ``key`` names its model."""
        self.plans[job], self.keys[job] = plan, key
        spec = f'{{"model":"{key}"}}'
        made = self._core("submit", lambda: self.scheduler.submit(job, job, spec, job, self.now, options))
        self._facts(made.facts)
        planner = next(node for node in self.nodes.values() if node.registered)
        outcome = self._core("planned", lambda: self.scheduler.planned(*planner.who, job, plan, self.now))
        self._facts(outcome.facts)
        self._after()

    # ------------------------------------------------------------ time

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def run(self, until: Callable[[], bool], limit: float = 1e6) -> float:
        """Go on until a condition holds; return the time. ``AssertionError`` after ``limit`` seconds."""
        while not until():
            self.now, _, what = heapq.heappop(self._events)
            assert self.now < limit, f"not over after {self.now} s: {self.explain()}"
            what()
        return self.now

    def explain(self) -> dict[str, list[str]]:
        """Return why jobs wait."""
        return {view.job: self.scheduler.waiting(view.job, self.now) for view in self.scheduler.jobs()}

    def settled(self) -> bool:
        """Whether every job is over."""
        return len(self.done_at) == len(self.plans)

    # ------------------------------------------------------------ the wire

    def _send(self, node: _Node, call: Callable[[], None]) -> None:
        """Carry a call to the coordinator, by itself or with others by the node's relay."""
        if node.model.name not in self._relay:
            self.at(self.now + node.model.delay, partial(self._deliver, [call]))
            return
        relay = self._relay[node.model.name]
        if not self._gathered[relay]:
            self.at(self.now + self._gather, partial(self._flush, relay))
        self._gathered[relay].append(call)

    def _flush(self, relay: int) -> None:
        self.at(self.now + 0.005, partial(self._deliver, self._gathered.pop(relay)))

    def _deliver(self, calls: list[Callable[[], None]]) -> None:
        self.messages += 1
        for call in calls:
            call()

    def _core(self, kind: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            return call()
        finally:
            took = time.perf_counter() - begin
            self.core_seconds[kind] += took
            self.slowest_call = max(self.slowest_call, took)
            self.calls[kind] += 1

    def _facts(self, facts: f.Facts) -> None:
        for fact in facts:
            self._on_fact(fact)

    def _after(self) -> None:
        """After a call of the scheduler: nodes that wait for work ask again where that may help."""
        wakes = self.scheduler.wakes()
        if self.scheduler.offers != self._offers:
            self._offers = self.scheduler.offers
            wakes = set(self._waiting)
        for name in sorted(wakes & self._waiting.keys()) if len(wakes) < len(self._waiting) else list(self._waiting):
            self._try(self.nodes[name], self._waiting[name])

    def _tick(self, every: float) -> None:
        self._facts(self._core("tick", lambda: self.scheduler.tick(self.now)))
        self._after()
        self.at(self.now + every, partial(self._tick, every))

    # ------------------------------------------------------------ nodes

    def _alive(self, node: _Node) -> bool:
        return self.now < node.model.dies

    def _join(self, node: _Node) -> None:
        self._register(node)
        self.at(self.now + self.random.uniform(0, self._heartbeat), partial(self._beat, node))
        self._ask(node)

    def _register(self, node: _Node) -> None:
        info = NodeInfo(node.model.name, "1", "site", frozenset({Role.FORWARD, Role.PREPROCESS}), "1", {})
        self._facts(self._core("register", lambda: self.scheduler.register(info, self.now)))
        node.registered = True
        self._after()

    def _ask(self, node: _Node) -> None:
        """Ask for work if the queue is running dry, as agent.session does."""
        if node.asking or not self._alive(node):
            return
        waiting = len(node.queue) + (node.running is not None)
        depth = MIN_HELD
        if node.shard_seconds is not None:
            depth = min(max(MIN_HELD, 1 + math.ceil(HOLD_SECONDS / max(node.shard_seconds, 1e-6))), MAX_HELD)
        if waiting <= depth // 2:
            node.asking = True
            self._send(node, partial(self._arrived, node, depth - waiting))

    def _arrived(self, node: _Node, most: int) -> None:
        self._waiting[node.model.name] = most
        self._try(node, most)

    def _try(self, node: _Node, most: int) -> None:
        try:
            work = self._core("acquire", lambda: self.scheduler.acquire(*node.who, most, node.loaded, self.now))
        except NotRegistered:
            self._waiting.pop(node.model.name, None)
            if self._alive(node):
                self._register(node)
                node.asking = False
                self._ask(node)
            return
        if work is None:
            return
        self._waiting.pop(node.model.name, None)
        self.at(self.now + node.model.delay, partial(self._given, node, work))

    def _given(self, node: _Node, work: PlanWork | ScoreWork) -> None:
        node.asking = False
        assert isinstance(work, ScoreWork), "jobs are planned when they are submitted"
        for shard in work.shards:
            holding = Holding(work.job, shard.index)
            if holding not in node.held:
                node.held[holding] = None
                node.queue.append((work.job, shard))
        self._next(node)
        self._ask(node)

    def _next(self, node: _Node) -> None:
        if node.running is not None or not node.queue or not self._alive(node):
            return
        job, shard = node.running = node.queue.popleft()
        key = self.keys[job]
        load = 0.0
        if node.loaded == "" or self.keys[node.loaded] != key:
            load = node.model.load
            node.loads += 1
        node.loaded = job
        speed = node.model.speed_at(self.now + load)
        if speed == 0:
            return  # it dies before it begins
        seconds = shard.input_tokens / speed
        seconds *= min(max(self.random.gauss(1.0, node.model.jitter), 0.4), 1.6)
        self.at(self.now + load + seconds, partial(self._finish, node, node.turn, seconds))

    def _finish(self, node: _Node, turn: int, seconds: float) -> None:
        if node.running is None or turn != node.turn or not self._alive(node):
            return
        job, shard = node.running
        node.running = None
        node.busy += seconds
        self.seconds_by_job[job] += seconds
        node.shard_seconds = seconds if node.shard_seconds is None else (node.shard_seconds + seconds) / 2
        self._send(node, partial(self._report, node, job, scored(shard, seconds, node.model), seconds))
        self._next(node)
        self._ask(node)

    def _report(self, node: _Node, job: str, result: ScoredShard, seconds: float) -> None:
        try:
            outcome = self._core("scored", lambda: self.scheduler.scored(*node.who, job, result, self.now))
        except NotRegistered:
            self._register(node)
            outcome = self._core("scored", lambda: self.scheduler.scored(*node.who, job, result, self.now))
        node.held.pop(Holding(job, result.partial.shard), None)
        if not outcome.facts:
            self.wasted += seconds
        self._facts(outcome.facts)
        if job not in self.done_at and self.scheduler.state(job).settled:
            self.done_at[job] = self.now
        self._after()

    def _beat(self, node: _Node) -> None:
        if not self._alive(node):
            return
        running = None if node.running is None else Holding(node.running[0], node.running[1].index)
        self._send(node, partial(self._renew, node, list(node.held), running))
        self.at(self.now + self._heartbeat, partial(self._beat, node))

    def _renew(self, node: _Node, held: list[Holding], running: Holding | None) -> None:
        try:
            answer = self._core(
                "renew", lambda: self.scheduler.renew(*node.who, held, "", running, False, False, self.now)
            )
        except NotRegistered:
            self._register(node)
            return
        self._after()
        gone, settled = set(answer.lost), set(answer.settled_jobs)
        self.at(self.now + node.model.delay, partial(self._told, node, gone, settled, set(answer.done)))

    def _told(self, node: _Node, lost: set[Holding], settled: set[str], done: set[Holding]) -> None:
        """Drop what is lost and not begun; stop what is of no use."""
        for holding in [h for h in node.held if h in lost or h.job in settled]:
            del node.held[holding]
        node.queue = deque(item for item in node.queue if Holding(item[0], item[1].index) in node.held)
        if node.running is not None:
            running = Holding(node.running[0], node.running[1].index)
            if running in done or running.job in settled:
                node.running = None
                node.turn += 1
        self._next(node)
        self._ask(node)
