"""Plans precision by measurement in one process: sensitivities, allocation, and the proof on text kept apart.

``choose`` decides, ``measure`` measures; this runs them on a job, and repeats with more bits until the proof holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval_kernel import checkpoint, tokenizer
from eval_kernel.engine import Engine
from eval_kernel.errors import DirectoryUnusable, PrecisionInfeasible, SpecError
from eval_kernel.partial import Partial
from eval_kernel.precision import calibration, loading, skeleton
from eval_kernel.precision.choose import Chosen, Table
from eval_kernel.precision.compare import Comparison, compare
from eval_kernel.precision.formats import format_of
from eval_kernel.precision.groups import Group, Sensitivity, base_of, groups_of, policy_of, read_sensitivity
from eval_kernel.precision.measure import Meter
from eval_kernel.precision.plan import Outline, as_mapping, resolve
from eval_kernel.precision.policy import CalibrationSpec, PrecisionSpec, as_spec
from eval_kernel.spec import JobSpec

Note = Callable[[str], None]

#: Formats that are tried where the user names none.
FORMATS_TRIED = ("bf16", "int8", "int4-g64")
#: Times that the limit is tightened before a plan is called infeasible.
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan: one of the two limits, the formats to choose from, and how much to measure and to prove on."""

    budget: float | None = None  # share of the checkpoint's bytes
    max_ppl_increase: float | None = None
    formats: tuple[str, ...] = FORMATS_TRIED
    rows: int = 4  # rows that sensitivities are measured on ...
    context: int = 256  # ... and their tokens
    proof_windows: int = 20  # windows of the job's data that the plan is proved on


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan that was proved, or (``proof`` None) only predicted."""

    chosen: Chosen
    proof: Comparison | None
    rounds: int
    table: Table


class Planner:
    """Plans one job's precision on one engine."""

    def __init__(self, spec: JobSpec, request: Request, engine: Engine, note: Note) -> None:
        """Find the model and the text to measure on. Raises the errors of the job's ingredients, and ``SpecError``."""
        self._spec, self._request, self._engine, self._note = spec, request, engine, note
        self._policy = as_spec(spec.precision)
        cache, roots = engine.config.cache, engine.config.roots
        self._found = checkpoint.find(spec.model, roots, cache, note)
        self._digest = checkpoint.weights_digest(self._found, cache)
        self.outline: Outline = skeleton.build(self._found, torch.float32).outline
        self.groups: list[Group] = groups_of(self.outline)
        self.base = base_of(self.outline, self._policy.compute)
        for name in request.formats:
            if format_of(name).dynamic:
                raise SpecError(
                    f"{name} rounds activations, which is not planned for; choose among weight-only formats"
                )
        self.quantiser = "gptq" if self._policy.calibration is not None else self._policy.quantiser
        tok = tokenizer.load(self._found.tokenizer)
        proof = engine.evaluated(self._job(self.base), note)
        source = self._policy.calibration or CalibrationSpec(source=spec.dataset.source, skip=0.5)
        measured = CalibrationSpec.model_validate(
            {**source.model_dump(), "windows": request.rows, "context": request.context, "skip": _later(source.skip)}
        )
        self._rows = calibration.load(measured, tok, roots, cache, note)
        calibration.check(self._rows, proof, source.allow_overlap)
        self._calibration = None
        if self._policy.calibration is not None:
            self._calibration = calibration.load(source, tok, roots, cache, note)
            calibration.check(self._calibration, proof, source.allow_overlap)

    def sensitivity(self, path: Path | None) -> Sensitivity:
        """Measure what is missing in the file (or everything), writing it after each group. Raises ``SpecError``."""
        found = Sensitivity(self._digest, self._rows.digest, self.base, self.quantiser)
        if path is not None and path.exists():
            stored = read_sensitivity(path)
            for key in ("weights_digest", "calibration", "base", "quantiser"):
                if getattr(stored, key) != getattr(found, key):
                    raise SpecError(
                        f"{path}: its {key} is {getattr(stored, key)}, this job's is {getattr(found, key)}; "
                        "name another file"
                    )
            found = stored
        todo = [(g, self._missing(found, g)) for g in self.groups]
        if any(names for _, names in todo):
            meter = self._meter()
            for number, (group, names) in enumerate(todo):
                self._note(f"measuring {group.name} ({number + 1} of {len(todo)})")
                for name in names:
                    found = found.with_cell(group.name, name, meter.measure(group, name))
                if names and path is not None:
                    write(path, json.dumps(found.to_json(), indent=0) + "\n")
        return found

    def plan(self, sensitivity: Sensitivity) -> Planned:
        """Allocate, prove, and tighten until the proof holds. Raises ``PrecisionInfeasible``."""
        table = Table(self.groups, self.outline, sensitivity)
        limit = self._request.max_ppl_increase
        if limit is None:
            share = self._request.budget
            assert share is not None
            chosen = table.within(int(table.checkpoint * share))
            if chosen is None:
                raise PrecisionInfeasible(
                    f"a budget of {share:.1%} is {int(table.checkpoint * share):,} bytes, but the smallest plan with "
                    f"{', '.join(self._request.formats)} has {table.smallest:,} "
                    f"({table.smallest / table.checkpoint:.1%}); raise the budget or allow smaller formats"
                )
            return Planned(chosen, self._prove(chosen), 1, table)
        nats = math.log1p(limit)
        for number in range(ROUNDS):
            chosen = table.least_bytes(nats)
            assert chosen is not None  # everything at the base changes nothing
            proof = self._prove(chosen)
            worst = proof.change if proof.change_high is None else proof.change_high
            self._note(
                f"round {number + 1}: {chosen.bytes / table.checkpoint:.1%} of the checkpoint, predicted "
                f"{math.expm1(chosen.predicted):+.3%}, measured {_interval(proof)}"
            )
            if worst <= limit:
                return Planned(chosen, proof, number + 1, table)
            # The share of the limit that was used up beyond it, with a little to spare, is taken off the next one.
            nats *= min(0.8, math.log1p(limit) / max(math.log1p(worst), 1e-9))
        raise PrecisionInfeasible(
            f"no plan was shown to stay within {limit:.2%}: after {ROUNDS} rounds the last measured "
            f"{_interval(proof)}; allow more, give more proof windows, or add wider formats"
        )

    def mapping(self, chosen: Chosen) -> dict[str, Any]:
        """What to write under ``precision:`` for a chosen plan."""
        return self._mapping(chosen.policy)

    def _mapping(self, policy: PrecisionSpec) -> dict[str, Any]:
        made = as_mapping(resolve(policy, self.outline))
        if "quantiser" in made:
            made["quantiser"] = self.quantiser
        if made.get("quantiser") == "gptq" and self._policy.calibration is not None:
            made["calibration"] = self._policy.calibration.model_dump(mode="json", exclude_defaults=True)
        return made

    def measured(self, choice: dict[str, str]) -> Comparison:
        """The paired change of any choice on the proof windows."""
        policy = policy_of(self.groups, choice, self.base)
        return compare(self._reference(), self._partials(self._job(self._mapping(policy))), by="shard")

    def _prove(self, chosen: Chosen) -> Comparison:
        return self.measured(dict(chosen.choice))

    _kept: list[Partial] | None = None

    def _reference(self) -> list[Partial]:
        if self._kept is None:
            self._note("scoring the proof windows with the unchanged model")
            self._kept = self._partials(self._job(self.base))
        return self._kept

    def _partials(self, spec: JobSpec) -> list[Partial]:
        plan = self._engine.plan(spec, self._note)
        evaluation = self._engine.open(spec, plan.manifest, self._note)
        found = [evaluation.score(shard, lambda: None).partial for shard in plan.shards]
        evaluation.close()
        return found

    def _job(self, precision: Any) -> JobSpec:
        """The job on its proof windows, a window to a shard, in some precision."""
        windows = self._spec.window.max_windows
        count = self._request.proof_windows if windows is None else min(windows, self._request.proof_windows)
        data = self._spec.model_dump(mode="json")
        data["window"]["max_windows"], data["shard"]["tokens"], data["precision"] = count, 1, precision
        return JobSpec.model_validate_json(json.dumps(data))

    def _missing(self, found: Sensitivity, group: Group) -> list[str]:
        have = found.cells.get(group.name, {})
        return [
            name
            for name in self._request.formats
            if name not in have and name != self.base and group.bytes_in(name) is not None
        ]

    def _meter(self) -> Meter:
        self._note("running the unchanged model on the rows to measure on")
        plain = resolve(PrecisionSpec(default=self.base), self.outline)
        loaded = loading.load(
            self._found, self._digest, plain, self._engine.device, self._engine.config.cache, self._note
        )
        ids = None if self._calibration is None else _ids(self._calibration, self._engine.device)
        return Meter(loaded.module, _ids(self._rows, self._engine.device), self.quantiser, ids)


def _later(skip: float) -> float:
    """Where the rows that are measured begin: in the part that is calibrated on, a little after its start."""
    return min(0.99, skip + (1 - skip) / 97)


def _ids(rows: calibration.Calibration, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows.ids.astype(np.int64)).to(device)


def _interval(found: Comparison) -> str:
    if found.change_low is None:
        return f"{found.change:+.3%}"
    return f"{found.change:+.3%} [{found.change_low:+.3%}, {found.change_high:+.3%}]"


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises ``DirectoryUnusable``."""
    temp = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)
    except OSError as error:
        raise DirectoryUnusable(f"{path} cannot be written ({error.strerror}); choose another place") from None
