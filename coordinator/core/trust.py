"""Second opinions on shards: which are wanted, which arrived, and what they say together. Who gives them is audit's.

A shard under audit is scored again by an agent that does not know it is an audit. Equal within the tolerance of its
precision class: agreed. If not, a third agent is asked, and so on, until a majority agrees: who stands apart is an
outlier. Where nobody is left to ask, the audit is waived (one opinion) or disputed (two that differ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from coordinator.core.nodes import Lease
from eval_kernel.partial import Execution, Partial
from eval_kernel.precision.section import DIGEST, LAYOUT

#: Relative difference of a shard's loss sum that may come from another device, kernel or library, by class.
TOLERANCES: Mapping[str, float] = {"full": 2e-5, "half": 2e-3, "quantised": 4e-3}
#: Opinions after which a shard on which no two agree is left disputed.
MAX_OPINIONS = 5


class AuditOutcome(Enum):
    """What came of an audit."""

    AGREED = "AGREED"
    OUTLIER = "OUTLIER"  #: a majority agrees, someone stands apart
    DISPUTED = "DISPUTED"  #: nobody else is there to say who is right
    WAIVED = "WAIVED"  #: there is no second agent


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one agent makes of a shard."""

    steps: int
    nonfinite: int
    device: str
    dtype: str
    precision_class: str  # a key of TOLERANCES

    @classmethod
    def of(cls, partial: Partial, execution: Execution) -> Opinion:
        """Return the opinion that a result is."""
        return cls(partial.steps, partial.nonfinite, execution.device, execution.dtype, precision_class(execution))

    def to_json(self) -> list[Any]:
        """Return the fields in order."""
        return [self.steps, self.nonfinite, self.device, self.dtype, self.precision_class]


def precision_class(execution: Execution) -> str:
    """Return how exactly results of equal shards can be expected to agree: ``full``, ``half`` or ``quantised``."""
    formats = [value for key, value in execution.precision.items() if key not in (DIGEST, LAYOUT)]
    if any("int" in value or "fp8" in value for value in formats):
        return "quantised"
    return "full" if execution.dtype == "float32" else "half"


def difference(one: Opinion, other: Opinion) -> float:
    """Return the relative difference of two loss sums; infinite where the counts of non-finite losses differ."""
    if one.nonfinite != other.nonfinite:
        return float("inf")
    largest = max(abs(one.steps), abs(other.steps))
    return abs(one.steps - other.steps) / largest if largest else 0.0


def agree(one: Opinion, other: Opinion) -> bool:
    """Whether two opinions may both be right: within the wider tolerance of the two classes."""
    return difference(one, other) <= max(TOLERANCES[one.precision_class], TOLERANCES[other.precision_class])


@dataclass(frozen=True, slots=True)
class Decision:
    """What opinions say together; ``outcome`` is ``None`` while another one is needed."""

    outcome: AuditOutcome | None
    outliers: tuple[str, ...] = ()


def decide(opinions: Mapping[str, Opinion]) -> Decision:
    """Judge the opinions on one shard, by agent."""
    if len(opinions) < 2:
        return Decision(None)
    friends = {
        agent: [other for other, theirs in opinions.items() if agree(mine, theirs)] for agent, mine in opinions.items()
    }
    majority = max(friends.values(), key=len)
    if len(majority) == len(opinions):
        return Decision(AuditOutcome.AGREED)
    if 2 * len(majority) > len(opinions):
        return Decision(AuditOutcome.OUTLIER, tuple(sorted(agent for agent in opinions if agent not in majority)))
    return Decision(AuditOutcome.DISPUTED if len(opinions) >= MAX_OPINIONS else None)


@dataclass(slots=True)
class Audit:
    """One shard's second opinions. The committed one is kept with the commit, until the audit is closed."""

    shard: int
    opinions: dict[str, Opinion] = field(default_factory=dict)
    outcome: AuditOutcome | None = None
    # Soft: who is asked now, and who was asked in vain.
    lease: Lease | None = None
    declined: set[str] = field(default_factory=set)


class Audits:
    """The audits of one job."""

    def __init__(self) -> None:
        """Begin with none."""
        self.of: dict[int, Audit] = {}  # every shard that has, or wants, another opinion than the committed one
        self.open: dict[int, Audit] = {}  # the job is not complete before these are closed
        self.spread: dict[tuple[str, str], list[float]] = {}  # pair of device classes -> comparisons, largest
        self.all_done_at: float | None = None  # soft: since when nothing but audits is outstanding

    def want(self, shard: int) -> None:
        """A shard needs another opinion before the job is complete."""
        audit = self.of.setdefault(shard, Audit(shard))
        audit.outcome = None
        self.open[shard] = audit

    def hear(self, shard: int, agent: str, opinion: Opinion, committed: Opinion | None) -> None:
        """An opinion arrived."""
        self.of.setdefault(shard, Audit(shard)).opinions[agent] = opinion
        if committed is not None:
            first, second = sorted((_class(committed), _class(opinion)))
            seen = self.spread.setdefault((first, second), [0, 0.0])
            seen[0] += 1
            seen[1] = max(seen[1], difference(committed, opinion))

    def close(self, shard: int, outcome: AuditOutcome) -> None:
        """An audit is over; raises ``KeyError`` where it is not open."""
        self.open.pop(shard).outcome = outcome

    def withdraw(self, agent: str) -> None:
        """Forget what an agent said."""
        for audit in self.of.values():
            audit.opinions.pop(agent, None)

    def count(self, outcome: AuditOutcome) -> int:
        """Return how many audits ended so."""
        return sum(audit.outcome is outcome for audit in self.of.values())

    def durable(self) -> list[Any]:
        """Return what facts came to, in canonical form."""
        return [
            [
                shard,
                sorted((agent, opinion.to_json()) for agent, opinion in audit.opinions.items()),
                None if audit.outcome is None else audit.outcome.name,
                shard in self.open,
            ]
            for shard, audit in sorted(self.of.items())
            if audit.opinions or audit.outcome or shard in self.open
        ]


def _class(opinion: Opinion) -> str:
    kind, _, model = opinion.device.partition(" ")
    return f"{kind.partition(':')[0]} {model} {opinion.dtype}".replace("  ", " ")
