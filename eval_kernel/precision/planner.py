"""Plans precision by measurement in one process. What is measured is ``cells``'s to say; ``proof`` settles the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_kernel.engine import Engine
from eval_kernel.errors import SpecError
from eval_kernel.partial import Partial
from eval_kernel.precision import calibration, cells
from eval_kernel.precision.choose import Table, checkpoint_bytes, smallest_bytes
from eval_kernel.precision.compare import Comparison, compare
from eval_kernel.precision.groups import Sensitivity, cells_of, read_sensitivity
from eval_kernel.precision.policy import MeasureSpec, as_spec
from eval_kernel.precision.proof import Planned, Settling, check_budget, settle
from eval_kernel.precision.proofjob import proof_job, write
from eval_kernel.spec import JobSpec

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan: one of the two limits, what to measure, and how many of the job's windows to prove the plan on."""

    measure: MeasureSpec
    budget: float | None = None  # share of the checkpoint's bytes
    max_ppl_increase: float | None = None
    proof_windows: int = 20


class Planner:
    """Plans one job's precision on one engine."""

    def __init__(self, spec: JobSpec, request: Request, engine: Engine, note: Note) -> None:
        """Find the model and the text to measure on. Raises the errors of the job's ingredients, and ``SpecError``."""
        self._spec, self._request, self._engine, self._note = spec, request, engine, note
        self._prepared = cells.prepare(spec, request.measure, engine.config.roots, engine.config.cache, note)
        p = self._prepared
        if request.budget is not None:
            # Before anything is measured for nothing.
            smallest = smallest_bytes(p.groups, p.outline, request.measure.formats, p.base)
            check_budget(request.budget, smallest, checkpoint_bytes(p.outline))
        self._source = as_spec(spec.precision).calibration
        allowed = self._source is not None and self._source.allow_overlap
        proof = engine.evaluated(proof_job(spec, self._prepared.base, request.proof_windows), note)
        for text in filter(None, (self._prepared.rows, self._prepared.calibration)):
            calibration.check(text, proof, allowed)
        self._kept: list[Partial] | None = None

    def sensitivity(self, path: Path | None) -> Sensitivity:
        """Measure what is missing in the file (or everything), writing it after each group. Raises ``SpecError``."""
        p = self._prepared
        found = Sensitivity(p.weights_digest, p.text_digest, p.base, p.quantiser)
        if path is not None and path.exists():
            found = agreeing(read_sensitivity(path), found, path)
        todo = [
            (group, name)
            for group, name in cells_of(p.groups, self._request.measure.formats, p.base)
            if name not in found.cells.get(group.name, {})
        ]
        if not todo:
            return found
        meter = cells.meter(p, self._engine.device, self._engine.config.cache, self._note)
        for number, (group, name) in enumerate(todo):
            self._note(f"measuring {group.name} in {name} ({number + 1} of {len(todo)})")
            found = found.with_cell(group.name, name, meter.measure(group, name))
            if path is not None and (number + 1 == len(todo) or todo[number + 1][0] is not group):
                write(path, json.dumps(found.to_json(), indent=0) + "\n")
        return found

    def table(self, sensitivity: Sensitivity) -> Table:
        """Return what there is to choose from. Raises ``SpecError``."""
        return Table(self._prepared.groups, self._prepared.outline, sensitivity)

    def plan(self, table: Table) -> Planned:
        """Allocate, prove, and tighten until the proof holds. Raises ``PrecisionInfeasible``."""
        settling = Settling(table, self._request.budget, self._request.max_ppl_increase, self._source)
        return settle(settling, self.measured, self._note)

    def measured(self, mapping: Mapping[str, Any]) -> Comparison:
        """The paired change of a precision on the proof windows."""
        if self._kept is None:
            self._note("scoring the proof windows with the unchanged model")
            self._kept = self._partials(self._prepared.base)
        self._note("scoring the proof windows with the plan")
        return compare(self._kept, self._partials(mapping), by="shard")

    def _partials(self, precision: Any) -> list[Partial]:
        spec = proof_job(self._spec, precision, self._request.proof_windows)
        plan = self._engine.plan(spec, self._note)
        evaluation = self._engine.open(spec, plan.manifest, self._note)
        found = [evaluation.score(shard, lambda: None).partial for shard in plan.shards]
        evaluation.close()
        return found


def agreeing(stored: Sensitivity, wanted: Sensitivity, path: Path) -> Sensitivity:
    """Return stored sensitivities if they are of what is wanted. Raises ``SpecError`` naming what differs."""
    for key in ("weights_digest", "calibration", "base", "quantiser"):
        if getattr(stored, key) != getattr(wanted, key):
            raise SpecError(
                f"{path}: its {key} is {getattr(stored, key)}, this job's is {getattr(wanted, key)}; name another file"
            )
    return stored
