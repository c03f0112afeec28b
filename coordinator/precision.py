"""Plans a job's precision on the cluster: measurements and proofs are jobs like any other. Decides nothing itself.

What to choose is ``eval_kernel.precision.proof``'s to say; this submits jobs, waits, and hands their reports over.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.client import Client
from coordinator.status import JobState
from eval_kernel.errors import JobIncomplete, SpecError
from eval_kernel.plan import digest_json
from eval_kernel.precision.choose import Table
from eval_kernel.precision.compare import compare_reports
from eval_kernel.precision.groups import Sensitivity, groups_of
from eval_kernel.precision.plan import PrecisionPlan, outline_of
from eval_kernel.precision.policy import MeasureSpec, PrecisionSpec, as_spec
from eval_kernel.precision.proof import Planned, Settling
from eval_kernel.precision.proofjob import proof_job
from eval_kernel.spec import JobSpec

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to plan: one of the two limits, what to measure, and how many of the job's windows to prove the plan on."""

    measure: MeasureSpec
    budget: float | None
    max_ppl_increase: float | None
    proof_windows: int


async def sensitivities(client: Client, spec: JobSpec, wanted: Wanted, note: Note) -> dict[str, Any]:
    """Measure on the cluster; return the report's ``sensitivity``. Raises ``JobIncomplete`` and the client's errors."""
    policy = as_spec(spec.precision)
    kept = {"compute": policy.compute, "quantiser": policy.quantiser, "calibration": policy.calibration}
    measuring = PrecisionSpec(measure=wanted.measure, **kept)  # type: ignore[arg-type]
    report = await _run(client, _with_precision(spec, measuring.model_dump(mode="json")), "sensitivities", note)
    found: dict[str, Any] = report["sensitivity"]
    return found


def table_of(found: dict[str, Any]) -> Table:
    """Return what there is to choose from. Raises ``SpecError`` for a dict that holds no sensitivities."""
    try:
        outline = outline_of(PrecisionPlan.from_canonical(found["plan"]))
        sensitivity = Sensitivity.from_json(found)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"these are no sensitivities of a cluster's job ({error}); measure them again") from None
    return Table(groups_of(outline), outline, sensitivity)


async def settle(
    client: Client, spec: JobSpec, wanted: Wanted, table: Table, note: Note
) -> tuple[Planned, dict[str, float]]:
    """Choose, prove on the cluster, and tighten until the proof holds. Raises ``PrecisionInfeasible``.

    Beside the plan stand the tokens per second of a node that scored the unchanged model, and the plan.
    """
    settling = Settling(table, wanted.budget, wanted.max_ppl_increase, as_spec(spec.precision).calibration)
    base = proof_job(spec, table.base, wanted.proof_windows)
    reference = await _run(client, base, "the proof's reference", note)
    while True:
        chosen, mapping = settling.next()
        report = await _run(client, proof_job(spec, mapping, wanted.proof_windows), "the proof", note)
        planned = settling.take(chosen, mapping, compare_reports(reference, report), note)
        if planned is not None:
            return planned, {"unchanged": _speed(reference), "this plan": _speed(report)}


def _speed(report: dict[str, Any]) -> float:
    """Tokens per second of scoring, by one node on average."""
    tokens = sum(node["input_tokens"] for node in report["nodes"])
    seconds = sum(node["seconds"] for node in report["nodes"])
    return tokens / seconds if seconds > 0 else 0.0


def _with_precision(spec: JobSpec, precision: Any) -> JobSpec:
    data = spec.model_dump(mode="json")
    data["precision"], data["metrics"] = precision, []
    return JobSpec.model_validate_json(json.dumps(data))


async def _run(client: Client, spec: JobSpec, what: str, note: Note) -> dict[str, Any]:
    """Submit a job, or find it again if it was submitted before; wait for it and return its report."""
    key = "plan-" + digest_json(json.loads(spec.canonical())).removeprefix("sha256:")[:40]
    made = await client.submit(spec, key)
    note(f"{what}: job {made.status.job}" + (" (was there already)" if made.existed else ""))
    status = await client.settled(made.status.job)
    if status.state is not JobState.SUCCEEDED:
        why = status.failure.text if status.failure else status.state.value
        raise JobIncomplete(f"{what} (job {status.job}) came to nothing: {why}")
    report = await client.report(status.job)
    if not report["complete"]:
        raise JobIncomplete(f"{what} (job {status.job}) is incomplete: {'; '.join(report['missing']['summary'])}")
    return report
