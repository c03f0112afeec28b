"""What a job of measurements comes to: its sensitivities, put together from the tally of its cells. Pure."""

from __future__ import annotations

from typing import Any

from eval_kernel.plan import SENSITIVITY, Manifest
from eval_kernel.precision.groups import Cell, Sensitivity, cells_of, extra_names, groups_of
from eval_kernel.precision.plan import PrecisionPlan, outline_of
from eval_kernel.precision.policy import as_spec
from eval_kernel.spec import JobSpec
from eval_kernel.tally import Tally


def sensitivity_of(spec: JobSpec, manifest: Manifest, tally: Tally) -> Sensitivity:
    """Return the cells that are in the tally."""
    policy = as_spec(spec.precision)
    assert policy.measure is not None
    plan = PrecisionPlan.from_canonical(manifest.precision_plan)
    base = plan.label_format
    quantiser = "gptq" if policy.calibration is not None else policy.quantiser
    found = Sensitivity(manifest.weights_digest, manifest.data_digest, base, quantiser)
    for number, (group, name) in enumerate(cells_of(groups_of(outline_of(plan)), policy.measure.formats, base)):
        row = tally.document(number)
        if row is not None:
            nll, same = (tally.extra.get(key, 0) for key in extra_names(number))
            found = found.with_cell(group.name, name, Cell(row.tokens, row.steps, nll, same))
    return found


def section(spec: JobSpec, manifest: Manifest, tally: Tally) -> dict[str, Any] | None:
    """Return the report's ``sensitivity``, with the plan of the unchanged model; None for any other job."""
    if manifest.policy != SENSITIVITY:
        return None
    return {**sensitivity_of(spec, manifest, tally).to_json(), "plan": manifest.precision_plan}
