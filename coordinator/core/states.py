"""The states of jobs, shards and nodes, and every transition between them: one table a machine, nothing else.

The diagrams in DESIGN.md are drawn from these tables (``make diagrams``). Who causes an event, and what else
happens then, is the scheduler's affair. States that end in -ED are settled: nothing leads out of them.

PACKING and READY are not listed among the shard's states: no pack is made apart from scoring yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from eval_kernel.errors import IllegalTransition


class Role(Enum):
    """What an agent may do; one agent may hold several roles."""

    FORWARD = "FORWARD"
    PREPROCESS = "PREPROCESS"
    AGGREGATE = "AGGREGATE"


class JobState(Enum):
    """Where a job stands."""

    PLANNING = "PLANNING"  #: its data is not indexed yet
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"  #: every shard is committed
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen to the job."""
        return not JOB_TABLE[self]


class JobEvent(Enum):
    """What moves a job on."""

    PLAN = "a plan is accepted"
    COMPLETE = "the last shard is committed"
    FAIL = "it cannot give a number"
    CANCEL = "someone cancels it"


class ShardState(Enum):
    """Where a shard of a running job stands."""

    WAITING = "WAITING"  #: nobody holds it
    SCORING = "SCORING"  #: an agent holds a lease on it; at the end of a job two may
    COMMITTED = "COMMITTED"  #: a partial of it was accepted
    QUARANTINED = "QUARANTINED"  #: tried too often; not given out any more


class ShardEvent(Enum):
    """What moves a shard on."""

    LEASE = "an agent is given it"
    SHARE = "an idle agent is given it too"
    UNSHARE = "one of two leases ends"
    RETURN = "the last lease ends without a result"
    COMMIT = "a partial is accepted"
    GIVE_UP = "it was tried too often"
    WITHDRAW = "its agent is quarantined"


class NodeState(Enum):
    """What is known of a node's life."""

    ACTIVE = "ACTIVE"
    SUSPECT = "SUSPECT"  #: a heartbeat is overdue
    LOST = "LOST"  #: silent for longer than a lease; its leases have run out
    DRAINING = "DRAINING"  #: finishes what it holds and takes nothing new
    LEFT = "LEFT"  #: said good-bye


class NodeEvent(Enum):
    """What changes a node's state."""

    REGISTER = "it registers"
    HEAR = "it calls"
    OVERDUE = "a heartbeat is overdue"
    SILENT = "silent for longer than a lease"
    DRAIN = "it says it drains"
    RESUME = "it drains no more"
    LEAVE = "it says good-bye"


JOB_TABLE: Mapping[JobState, Mapping[JobEvent, JobState]] = {
    JobState.PLANNING: {
        JobEvent.PLAN: JobState.RUNNING,
        JobEvent.FAIL: JobState.FAILED,
        JobEvent.CANCEL: JobState.CANCELLED,
    },
    JobState.RUNNING: {
        JobEvent.COMPLETE: JobState.SUCCEEDED,
        JobEvent.FAIL: JobState.FAILED,
        JobEvent.CANCEL: JobState.CANCELLED,
    },
    JobState.SUCCEEDED: {},
    JobState.FAILED: {},
    JobState.CANCELLED: {},
}

# A partial is accepted in every state but COMMITTED: what is right is right, whoever was meant to compute it.
SHARD_TABLE: Mapping[ShardState, Mapping[ShardEvent, ShardState]] = {
    ShardState.WAITING: {
        ShardEvent.LEASE: ShardState.SCORING,
        ShardEvent.COMMIT: ShardState.COMMITTED,
        ShardEvent.GIVE_UP: ShardState.QUARANTINED,
    },
    ShardState.SCORING: {
        ShardEvent.SHARE: ShardState.SCORING,
        ShardEvent.UNSHARE: ShardState.SCORING,
        ShardEvent.RETURN: ShardState.WAITING,
        ShardEvent.COMMIT: ShardState.COMMITTED,
        ShardEvent.GIVE_UP: ShardState.QUARANTINED,
    },
    ShardState.QUARANTINED: {ShardEvent.COMMIT: ShardState.COMMITTED},
    ShardState.COMMITTED: {ShardEvent.WITHDRAW: ShardState.WAITING},
}

# A node begins ACTIVE, by registering. LOST and LEFT are left by registering again, and by nothing else.
NODE_TABLE: Mapping[NodeState, Mapping[NodeEvent, NodeState]] = {
    NodeState.ACTIVE: {
        NodeEvent.REGISTER: NodeState.ACTIVE,
        NodeEvent.OVERDUE: NodeState.SUSPECT,
        NodeEvent.SILENT: NodeState.LOST,
        NodeEvent.DRAIN: NodeState.DRAINING,
        NodeEvent.LEAVE: NodeState.LEFT,
    },
    NodeState.SUSPECT: {
        NodeEvent.REGISTER: NodeState.ACTIVE,
        NodeEvent.HEAR: NodeState.ACTIVE,
        NodeEvent.SILENT: NodeState.LOST,
    },
    NodeState.DRAINING: {
        NodeEvent.REGISTER: NodeState.ACTIVE,
        NodeEvent.RESUME: NodeState.ACTIVE,
        NodeEvent.SILENT: NodeState.LOST,
        NodeEvent.LEAVE: NodeState.LEFT,
    },
    NodeState.LOST: {NodeEvent.REGISTER: NodeState.ACTIVE},
    NodeState.LEFT: {NodeEvent.REGISTER: NodeState.ACTIVE},
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def advance(table: Mapping[S, Mapping[E, S]], state: S, event: E) -> S:
    """Return the state that ``event`` leads to; ``IllegalTransition`` where the table has no such step."""
    try:
        return table[state][event]
    except KeyError:
        raise IllegalTransition(
            f"{type(state).__name__} {state.name} has no transition for {type(event).__name__}.{event.name}; "
            "this is a fault of the program: please report it"
        ) from None
