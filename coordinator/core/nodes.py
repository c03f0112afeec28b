"""What is remembered of one node: its life, its leases, its speeds, what it cannot run. Soft, never journaled."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.core.calls import Holding, NodeInfo
from coordinator.core.states import NODE_TABLE, NodeEvent, NodeState, Role, advance

#: Weight of what was known before in a node's speed: about the last three shards count.
SPEED_MEMORY = 0.7


@dataclass(slots=True)
class Lease:
    """Permission to work on something until ``expires``, unless renewed."""

    agent: str
    holding: Holding
    expires: float
    cost: int = 0  # input tokens
    charge: float = 0.0  # seconds that the job's submitter is charged with while it lasts
    audit: bool = False  # a second opinion on a shard that is committed


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node is not given a job, until when."""

    until: float
    code: str
    message: str


@dataclass(slots=True)
class Speed:
    """Input tokens a second, as a ratio of decayed sums: long shards weigh as much as they are long."""

    tokens: float = 0.0
    seconds: float = 0.0

    def measured(self, tokens: int, seconds: float) -> None:
        """Take one more shard into account."""
        self.tokens = SPEED_MEMORY * self.tokens + tokens
        self.seconds = SPEED_MEMORY * self.seconds + seconds

    @property
    def rate(self) -> float:
        """Input tokens a second; 0.0 before the first measurement."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Node:
    """One agent in one life. Its state moves by ``NODE_TABLE`` only."""

    def __init__(self, info: NodeInfo, now: float) -> None:
        """Begin as ACTIVE, just heard."""
        self.info = info
        self.state = NodeState.ACTIVE
        self.since = now
        self.heard = now
        self.activity = ""
        self.running: Holding | None = None
        self.leases: dict[Holding, Lease] = {}  # in order of granting, which is the order of working
        self.refusals: dict[str, Refusal] = {}
        self.speeds: dict[str, Speed] = {}  # by model and precision (throughput.work_key)
        self.loading: dict[str, float] = {}  # seconds that loading took, likewise
        self.loaded = ""  # what it has loaded, likewise
        self.working = ""  # what it was given shards of last, likewise
        self.proven: set[str] = set()  # what it has computed as others do, likewise
        self.last_key = ""
        self.shards_done = 0
        self.busy_seconds = 0.0  # scoring, as its results say
        self.busy_since = now  # when it began what it is doing now, as far as is known
        self.held_back = False  # it asked and was given nothing
        self.placed: dict[str, str] = {}  # job -> why it was given shards of it last
        self.quiet_until = now  # no lease runs out before

    @property
    def agent(self) -> str:
        """The agent's name."""
        return self.info.agent

    @property
    def connected(self) -> bool:
        """Whether the node is believed to be there."""
        return self.state not in (NodeState.LOST, NodeState.LEFT)

    def advance(self, event: NodeEvent) -> None:
        """Move to the state that ``event`` leads to; raises ``IllegalTransition``."""
        self.state = advance(NODE_TABLE, self.state, event)

    def has(self, role: Role) -> bool:
        """Whether the node announced this role."""
        return role in self.info.roles

    def refuses(self, job: str, now: float) -> Refusal | None:
        """Why the node is not given this job now; ``None`` if it may be."""
        refusal = self.refusals.get(job)
        return refusal if refusal is not None and now < refusal.until else None

    def rate(self, key: str) -> float:
        """Input tokens a second with this model and precision; 0.0 when not measured yet."""
        speed = self.speeds.get(key)
        return 0.0 if speed is None else speed.rate

    def measured(self, key: str, tokens: int, seconds: float, now: float) -> None:
        """Take a result into account, whatever becomes of it: so many input tokens took so many seconds."""
        if key != self.last_key:
            # What the time since it began does not explain went into loading the model.
            self.loading[key] = max(0.0, now - self.busy_since - seconds)
        self.loaded = self.last_key = key
        self.busy_since = now
        self.busy_seconds += seconds
        self.speeds.setdefault(key, Speed()).measured(tokens, seconds)

    def held_cost(self) -> int:
        """Input tokens of the shards that it holds."""
        return sum(lease.cost for lease in self.leases.values())
