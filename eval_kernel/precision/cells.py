"""Sensitivities as a job like any other: cells instead of documents, a layer's cells to a shard, exact sums.

A cell is one group of weights in one format. Its row in a partial holds the divergence where a loss would be; the
change of loss and the agreements are further sums. So measurements are leased, repeated and counted like scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eval_kernel import KERNEL_VERSION, checkpoint, tokenizer
from eval_kernel.errors import OutOfMemory, SpecError, reason
from eval_kernel.execution import execution
from eval_kernel.partial import Partial, RowSums, ScoredShard
from eval_kernel.plan import SENSITIVITY, Manifest, Plan, ShardPlan, digest_json
from eval_kernel.precision import calibration, loading, skeleton
from eval_kernel.precision.groups import CELLS, Cell, Group, base_of, cells_of, extra_names, groups_of
from eval_kernel.precision.measure import Meter
from eval_kernel.precision.plan import Outline, PrecisionPlan, resolve
from eval_kernel.precision.policy import CalibrationSpec, MeasureSpec, PrecisionSpec, as_spec
from eval_kernel.roots import Roots
from eval_kernel.spec import JobSpec

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model, its groups, and the text to measure and to calibrate on; no weights."""

    found: checkpoint.Checkpoint
    tokenizer: tokenizer.Tokenizer
    weights_digest: str
    outline: Outline
    groups: list[Group]
    base: str
    quantiser: str
    rows: calibration.Calibration
    calibration: calibration.Calibration | None

    @property
    def plain(self) -> PrecisionPlan:
        """The plan of the unchanged model."""
        return resolve(PrecisionSpec(default=self.base), self.outline, "sensitivity")

    @property
    def text_digest(self) -> str:
        """Digest over the rows that are measured and, where there are any, those that are calibrated on."""
        return digest_json([self.rows.digest, self.calibration.digest if self.calibration else None])


def prepare(spec: JobSpec, measure: MeasureSpec, roots: Roots, cache: Path, note: Note) -> Prepared:
    """Find what a job's sensitivities are measured on. Raises the errors of the job's ingredients, and ``SpecError``.

    Without calibration text of its own, a job is measured on the second half of its dataset.
    """
    policy = as_spec(spec.precision)
    found = checkpoint.find(spec.model, roots, cache, note)
    tok = tokenizer.load(found.tokenizer)
    outline = skeleton.build(found, torch.float32).outline
    source = policy.calibration or CalibrationSpec(
        source=spec.dataset.source,
        format=spec.dataset.format,
        field=spec.dataset.field,
        split=spec.dataset.split,
        documents=spec.dataset.documents,
        skip=0.5,
    )
    # Other rows than those that are calibrated on, from the same text.
    here = {
        "windows": measure.rows,
        "context": measure.context,
        "skip": min(0.99, source.skip + (1 - source.skip) / 97),
    }
    rows = calibration.load(source.model_copy(update=here), tok, roots, cache, note)
    given = None if policy.calibration is None else calibration.load(policy.calibration, tok, roots, cache, note)
    if outline.dtype == "float64":
        raise SpecError("a checkpoint in float64 is not planned for; store it in float32")
    return Prepared(
        found=found,
        tokenizer=tok,
        weights_digest=checkpoint.weights_digest(found, cache),
        outline=outline,
        groups=groups_of(outline),
        base=base_of(outline, policy.compute),
        quantiser="gptq" if given is not None else policy.quantiser,
        rows=rows,
        calibration=given,
    )


def meter(prepared: Prepared, device: torch.device, cache: Path, note: Note) -> Meter:
    """Load the unchanged model and run it on the rows."""
    note("running the unchanged model on the rows to measure on")
    loaded = loading.load(prepared.found, prepared.weights_digest, prepared.plain, device, cache, note)
    ids = None if prepared.calibration is None else _ids(prepared.calibration, device)
    return Meter(loaded.module, _ids(prepared.rows, device), prepared.quantiser, ids)


def _ids(rows: calibration.Calibration, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(rows.ids.astype(np.int64)).to(device)


# ---------------------------------------------------------------- as a job


def plan(prepared: Prepared, measure: MeasureSpec, batch_tokens: int) -> Plan:
    """Return the plan of a job of measurements."""
    cells = cells_of(prepared.groups, measure.formats, prepared.base)
    if not cells:
        raise SpecError(
            f"precision.measure: {', '.join(measure.formats)} fit no group of this model, or are what it has already"
        )
    rows, length = prepared.rows.ids.shape
    tokens, inputs = rows * (length - 1), rows * length
    shards = []
    for index, (first, end) in enumerate(_ranges(cells)):
        names = [[group.name, name] for group, name in cells[first:end]]
        digest = CELLS + digest_json([prepared.text_digest, prepared.weights_digest, prepared.quantiser, names])
        size = end - first
        shards.append(
            ShardPlan(index, first, size, tokens * size, 0, 0, inputs * size, first, end, lump=False, digest=digest)
        )
    config = prepared.found.config
    manifest = Manifest(
        data_digest=prepared.text_digest,
        documents=len(cells),
        empty_documents=0,
        bytes=0,
        words=0,
        lm_eval_words=0,
        tokens=tokens * len(cells),
        windows=len(cells),
        scored_tokens=tokens * len(cells),
        scored_bytes=0,
        scored_words=0,
        input_tokens=inputs * len(cells),
        shards=len(shards),
        tokenizer_digest=prepared.tokenizer.digest,
        weights_digest=prepared.weights_digest,
        model_type=str(config["model_type"]),
        parameters=prepared.found.num_parameters,
        vocabulary=prepared.found.vocabulary,
        max_context=prepared.found.max_context,
        dtype=prepared.plain.compute,
        policy=SENSITIVITY,
        context=length,
        stride=None,
        join=None,
        bos="none",
        prefix_token=None,
        prefix_kind="none",
        batch_tokens=batch_tokens,
        kernel_version=KERNEL_VERSION,
        precision_plan=prepared.plain.canonical(),
    )
    return Plan(manifest, tuple(shards))


def _ranges(cells: list[tuple[Group, str]]) -> Iterator[tuple[int, int]]:
    """Consecutive cells of one layer; what is outside the layers goes by groups."""
    start = 0
    for k in range(1, len(cells) + 1):
        if k == len(cells) or _place(cells[k][0]) != _place(cells[start][0]):
            yield start, k
            start = k


def _place(group: Group) -> Any:
    return group.name if group.layer is None else group.layer


def partial(shard: ShardPlan, measured: list[Cell]) -> Partial:
    """Return the partial of a shard's cells."""
    rows = tuple(
        RowSums(shard.first_document + k, 1, cell.divergence, cell.tokens, 0, 0) for k, cell in enumerate(measured)
    )
    extra: dict[str, int] = {}
    for k, cell in enumerate(measured):
        nll, same = extra_names(shard.first_document + k)
        extra[nll], extra[same] = cell.nll_change, cell.agreements
    steps, tokens = sum(r.steps for r in rows), sum(r.tokens for r in rows)
    return Partial(shard.index, steps, tokens, 0, 0, rows, extra=tuple(sorted(extra.items())))


class Measuring:
    """A job of measurements that is open on this node: measures its shards one at a time, as ``Evaluation`` scores."""

    def __init__(self, prepared: Prepared, measure: MeasureSpec, ready: Meter, device: torch.device) -> None:
        self._cells = cells_of(prepared.groups, measure.formats, prepared.base)
        self._meter, self._device = ready, device
        self._dtype: torch.dtype = getattr(torch, prepared.plain.compute)

    def score(self, shard: ShardPlan, beat: Callable[[], None]) -> ScoredShard:
        """Measure one shard's cells. ``beat`` is called after each. Raises ``ShardError``s."""
        started = time.perf_counter()
        measured = []
        try:
            for group, name in self._cells[shard.first_document : shard.end_document]:
                measured.append(self._meter.measure(group, name))
                beat()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise OutOfMemory(
                f"shard {shard.index}: {reason(error)}; lower precision.measure.rows or context"
            ) from None
        seconds = time.perf_counter() - started
        how = execution(self._device, self._dtype, seconds, "transformers", {})
        return ScoredShard(partial(shard, measured), how)

    def close(self) -> None:
        """Nothing is held beyond the object itself."""
