"""What is remembered of one node: its life, its leases, its speed, what it cannot run. Soft, never journaled."""

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
        self.heard = now
        self.activity = ""
        self.running: Holding | None = None
        self.leases: dict[Holding, Lease] = {}
        self.refusals: dict[str, Refusal] = {}
        self.speeds: dict[str, Speed] = {}
        self.last_job = ""
        self.shards_done = 0

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

    def rate(self, job: str) -> float:
        """Input tokens a second on this job; 0.0 when not measured yet."""
        speed = self.speeds.get(job)
        return 0.0 if speed is None else speed.rate

    def finished(self, job: str, tokens: int, seconds: float) -> None:
        """Count a shard of ``tokens`` input tokens that was accepted from this node."""
        self.shards_done += 1
        self.last_job = job
        self.speeds.setdefault(job, Speed()).measured(tokens, seconds)

    def forget(self, job: str) -> None:
        """Drop what was remembered about a job that is settled."""
        self.refusals.pop(job, None)
        if job != self.last_job:
            self.speeds.pop(job, None)
