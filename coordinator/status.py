"""What a coordinator tells its clients, as frozen data classes with a JSON form. Knows messages, opens no channel."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, TypeVar

from fedeval.v1 import evaluation_pb2, jobs_pb2

_E = TypeVar("_E", bound=Enum)


class JobState(Enum):
    """States of a job, as clients see them."""

    UNSPECIFIED = "unspecified"  #: a state this version does not know
    PLANNING = "planning"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def settled(self) -> bool:
        """Whether nothing will change any more."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class NodeState(Enum):
    """States of a node, as clients see them."""

    UNSPECIFIED = "unspecified"  #: a state this version does not know
    ACTIVE = "active"
    SUSPECT = "suspect"
    LOST = "lost"
    DRAINING = "draining"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed: a stable code and one line for people."""

    code: str
    message: str

    @property
    def text(self) -> str:
        """Code and message; of a cancelled job the message alone, since its state says the rest."""
        return self.message if self.code == "CANCELLED" else f"{self.code}: {self.message}"


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """One node's progress on one job; tokens are input tokens."""

    node: str
    state: NodeState
    shards_done: int
    tokens_done: int
    tokens_per_second: float
    shards_held: int
    activity: str
    layout: str = ""  #: how its model lies on several ranks, or is streamed, and why


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job at one moment. ``waiting`` says, one line each, why not everything is being worked on."""

    job: str
    name: str
    state: JobState
    shards: int
    shards_done: int
    shards_held: int
    shards_quarantined: int
    input_tokens: int
    input_tokens_done: int
    scored_tokens_done: int
    waiting: tuple[str, ...]
    failure: Failure | None
    bits_per_byte: float | None
    bits_per_byte_half_width: float | None
    nodes: tuple[NodeProgress, ...]
    age_seconds: float
    eta_seconds: float | None
    spec_json: str

    @property
    def label(self) -> str:
        """The job's name, or its id where it has none."""
        return self.name or self.job

    @classmethod
    def from_message(cls, m: jobs_pb2.JobStatus) -> JobStatus:
        """Build from a message."""
        return cls(
            job=m.job,
            name=m.name,
            state=_job_state(m.state),
            shards=m.shards,
            shards_done=m.shards_done,
            shards_held=m.shards_held,
            shards_quarantined=m.shards_quarantined,
            input_tokens=m.input_tokens,
            input_tokens_done=m.input_tokens_done,
            scored_tokens_done=m.scored_tokens_done,
            waiting=tuple(m.waiting),
            failure=_failure(m.failure) if m.HasField("failure") else None,
            bits_per_byte=m.bits_per_byte if m.HasField("bits_per_byte") else None,
            bits_per_byte_half_width=m.bits_per_byte_half_width if m.HasField("bits_per_byte_half_width") else None,
            nodes=tuple(
                NodeProgress(
                    n.node,
                    _node_state(n.state),
                    n.shards_done,
                    n.tokens_done,
                    n.tokens_per_second,
                    n.shards_held,
                    n.activity,
                    n.layout,
                )
                for n in m.nodes
            ),
            age_seconds=m.age_seconds,
            eta_seconds=m.eta_seconds if m.HasField("eta_seconds") else None,
            spec_json=m.spec_json,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return _json(self)


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node at one moment. ``held`` lists its work as ``job/shard``."""

    node: str
    site: str
    state: NodeState
    incarnation: str
    silence_seconds: float
    capabilities_json: str
    shards_done: int
    tokens_per_second: float
    activity: str
    held: tuple[str, ...]
    version: str

    @property
    def degraded(self) -> tuple[str, ...]:
        """What does not work on the node as it should, one line each: its devices' driver, say."""
        # Agents of any version may have written it.
        found = json.loads(self.capabilities_json or "{}").get("degraded", ())
        return tuple(str(line) for line in found) if isinstance(found, list) else ()

    @classmethod
    def from_message(cls, m: jobs_pb2.Node) -> NodeStatus:
        """Build from a message."""
        return cls(
            node=m.node,
            site=m.site,
            state=_node_state(m.state),
            incarnation=m.incarnation,
            silence_seconds=m.silence_seconds,
            capabilities_json=m.capabilities_json,
            shards_done=m.shards_done,
            tokens_per_second=m.tokens_per_second,
            activity=m.activity,
            held=tuple(m.held),
            version=m.version,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**_json(self), "degraded": list(self.degraded)}


@dataclass(frozen=True, slots=True)
class CoordinatorInfo:
    """Who answers at an address. ``coordinator`` is the identity of its journal."""

    address: str
    coordinator: str
    version: str
    protocol_min: int
    protocol_max: int
    uptime_seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return _json(self)


@dataclass(frozen=True, slots=True)
class Submitted:
    """Answer to a submission: the job, and whether an earlier submission with the same key had made it."""

    status: JobStatus
    existed: bool


def _json(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(asdict(value))
    return plain


def _failure(m: evaluation_pb2.Failure) -> Failure:
    return Failure(m.code, m.message)


def _job_state(value: jobs_pb2.JobState.ValueType) -> JobState:
    return _state(JobState, jobs_pb2.JobState.DESCRIPTOR, value, "JOB_STATE_")


def _node_state(value: jobs_pb2.NodeState.ValueType) -> NodeState:
    return _state(NodeState, jobs_pb2.NodeState.DESCRIPTOR, value, "NODE_STATE_")


def _state(kind: type[_E], descriptor: Any, value: int, prefix: str) -> _E:
    known = descriptor.values_by_number.get(value)
    name = known.name.removeprefix(prefix) if known else "UNSPECIFIED"
    return kind[name] if name in kind.__members__ else kind["UNSPECIFIED"]


def _plain(value: Any) -> Any:
    """Enums become their values, tuples lists: what ``json.dumps`` takes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
