"""The words between the agent's parts: work to do, its results, what is said of them. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from eval_kernel.errors import FedevalError
from eval_kernel.partial import ScoredShard
from eval_kernel.plan import ShardPlan

#: The shard number that stands for the planning of a job.
PLANNING = -1
Held = tuple[str, int]
#: How to get what agents need beyond the coordinator.
INSTALL = "pip install 'fedeval[agent]' (in a checkout: pip install '.[agent]')"


class Verdict(Enum):
    """The coordinator's answers to a result. All of them mean: forget it."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    DIVERGENT = "divergent"
    UNWANTED = "unwanted"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Work:
    """One thing to do: score ``shard`` of a job, or plan the job (``shard`` is ``None``)."""

    job: str
    spec_json: str
    manifest_json: str = ""
    shard: ShardPlan | None = None

    @property
    def held(self) -> Held:
        """How the heartbeat names it."""
        return self.job, PLANNING if self.shard is None else self.shard.index


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What planning a job came to."""

    manifest_json: str
    shards: tuple[ShardPlan, ...]


@dataclass(frozen=True, slots=True)
class PlanPart:
    """A plan's piece, small enough for one message."""

    manifest_json: str
    shards: tuple[ShardPlan, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a shard, or the planning of a job (``shard`` is ``PLANNING``), failed."""

    shard: int
    error: FedevalError


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message of the report stream."""

    sequence: int
    job: str
    body: ScoredShard | Failed | PlanPart


@dataclass(frozen=True, slots=True)
class Settled:
    """What an acknowledgement settled, for the log."""

    job: str
    shard: int
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What to renew. ``mark`` tells the answer which grants it cannot have known of."""

    holdings: tuple[Held, ...]
    running: Held | None
    draining: bool
    mark: int
