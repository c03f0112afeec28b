"""What the scheduler shows, as messages. Reads views at one moment and keeps nothing but running estimates."""

from __future__ import annotations

import json
import time

from fedeval.v1 import agents_pb2, evaluation_pb2, jobs_pb2
from fedeval.wire.messages import manifest_to_json, shard_to_message

from coordinator.core.calls import PLANNING, Holding, PlanWork, ScoreWork, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState, NodeState
from coordinator.core.views import JobView, NodeProgress, NodeView
from eval_kernel.metrics import bits_per_byte

#: An estimate may cost at most this part of the time: with very many documents it is renewed less often.
_ESTIMATE_SHARE = 0.02


def job_state(state: JobState) -> jobs_pb2.JobState.ValueType:
    """Return the message's state."""
    return jobs_pb2.JobState.Value(f"JOB_STATE_{state.name}")


def node_state(state: NodeState | None) -> jobs_pb2.NodeState.ValueType:
    """Return the message's state; a node not seen since the start is LOST."""
    return jobs_pb2.NodeState.Value(f"NODE_STATE_{(state or NodeState.LOST).name}")


def verdict(value: Verdict) -> agents_pb2.Verdict.ValueType:
    """Return the message's verdict."""
    return agents_pb2.Verdict.Value(f"VERDICT_{value.name}")


class Estimates:
    """Running bits per byte of each job: kept until the job has changed, and longer where it is dear to compute."""

    def __init__(self) -> None:
        """Begin with none."""
        self._kept: dict[str, tuple[int, float, float | None, float | None]] = {}

    def of(self, view: JobView) -> tuple[float | None, float | None]:
        """Return the estimate and the half width of its 95 % interval; ``None`` where there is none yet."""
        done, due, value, half = self._kept.get(view.job, (-1, 0.0, None, None))
        begin = time.perf_counter()
        if done == view.shards_done or (begin < due and not view.state.settled):
            return value, half
        metric = bits_per_byte(view.tally)
        value = metric.value
        half = None if metric.low is None or metric.high is None else (metric.high - metric.low) / 2
        end = time.perf_counter()
        self._kept[view.job] = (view.shards_done, end + (end - begin) / _ESTIMATE_SHARE, value, half)
        return value, half


def job_status(
    scheduler: Scheduler, view: JobView, estimates: Estimates, now: float, *, with_spec: bool
) -> jobs_pb2.JobStatus:
    """Return the status message of a job; the specification may be as large as all the rest of many jobs together."""
    value, half = estimates.of(view)
    end = now if view.settled_at is None else view.settled_at
    left = view.input_tokens - view.input_tokens_done
    running = view.state is JobState.RUNNING and view.tokens_per_second > 0
    return jobs_pb2.JobStatus(
        job=view.job,
        name=view.name,
        state=job_state(view.state),
        shards=view.shards,
        shards_done=view.shards_done,
        shards_held=view.shards_held,
        shards_quarantined=view.shards_quarantined,
        input_tokens=view.input_tokens,
        input_tokens_done=view.input_tokens_done,
        scored_tokens_done=view.scored_tokens_done,
        waiting=scheduler.waiting(view.job, now),
        failure=_failure(view),
        bits_per_byte=value,
        bits_per_byte_half_width=half,
        nodes=[_progress(node) for node in view.nodes],
        age_seconds=max(0.0, end - view.submitted_at),
        eta_seconds=left / view.tokens_per_second if running else None,
        spec_json=view.spec_json if with_spec else "",
    )


def node(view: NodeView) -> jobs_pb2.Node:
    """Return the message of a node."""
    return jobs_pb2.Node(
        node=view.agent,
        site=view.site,
        state=node_state(view.state),
        incarnation=view.incarnation,
        silence_seconds=view.silence_seconds,
        capabilities_json=json.dumps(dict(view.capabilities), sort_keys=True),
        shards_done=view.shards_done,
        tokens_per_second=view.tokens_per_second,
        activity=view.activity,
        held=[f"{h.job}/{'plan' if h.shard == PLANNING else h.shard}" for h in view.held],
        version=view.version,
    )


def assignment(work: PlanWork | ScoreWork | None) -> agents_pb2.AcquireResponse:
    """Return the answer to an Acquire."""
    match work:
        case None:
            return agents_pb2.AcquireResponse()
        case PlanWork():
            return agents_pb2.AcquireResponse(plan=agents_pb2.PlanAssignment(job=work.job, spec_json=work.spec_json))
        case ScoreWork():
            return agents_pb2.AcquireResponse(
                score=agents_pb2.ScoreAssignment(
                    job=work.job,
                    spec_json=work.spec_json,
                    manifest_json=manifest_to_json(work.manifest),
                    shards=[shard_to_message(shard) for shard in work.shards],
                )
            )


def holding(message: agents_pb2.Holding) -> Holding:
    """Return what a message names."""
    return Holding(message.job, message.shard)


def holding_message(value: Holding) -> agents_pb2.Holding:
    """Return the message that names it."""
    return agents_pb2.Holding(job=value.job, shard=value.shard)


def _failure(view: JobView) -> evaluation_pb2.Failure | None:
    return (
        None if view.failure is None else evaluation_pb2.Failure(code=view.failure.code, message=view.failure.message)
    )


def _progress(view: NodeProgress) -> jobs_pb2.NodeProgress:
    return jobs_pb2.NodeProgress(
        node=view.agent,
        state=node_state(view.state),
        shards_done=view.shards_done,
        tokens_done=view.input_tokens_done,
        tokens_per_second=view.tokens_per_second,
        shards_held=view.shards_held,
        activity=view.activity,
        layout=view.layout,
    )
