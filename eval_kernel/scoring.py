"""Windows to losses: rows of equal length through the body, the head by chunks of positions, one loss per scored token.

Nothing is padded and nothing is masked by token id. On a CPU each row is scored for itself, on one thread, as many
rows at a time as there are threads: the bits of matrix products may depend on the batch and on the threads, and those
of a row must not. Where the model has a fast path for single rows, rows take it. On other devices rows of one shape go
together, and no product has fewer than ``MIN_ROWS`` rows: a batch too small for that holds its rows more than once.
What the losses are summed into is the caller's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eval_kernel import lanes
from eval_kernel.budget import Budget
from eval_kernel.decoder import gathered
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.model import Model
from eval_kernel.precision import confidence

#: Positions whose logits exist at one time: 256 x 49,152 float32 are 50 MB.
CHUNK = 256
#: Products of fewer rows use other kernels (GEMV), whose last bits differ.
MIN_ROWS = 40


@dataclass(frozen=True, slots=True)
class Row:
    """One window's tokens: the model sees ``inputs``, and the last ``len(targets)`` positions predict ``targets``."""

    inputs: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Losses:
    """Per scored token: the loss in grid steps, and whether it was finite (steps are 0 where it was not)."""

    steps: npt.NDArray[np.int64]
    finite: npt.NDArray[np.bool_]
    nan: npt.NDArray[np.bool_]


class Extra(dict[str, int]):
    """Further sums over all scored tokens, for metrics that need more than losses."""

    def take(self, sums: dict[str, int]) -> None:
        """Add what some tokens yield."""
        for name, value in sums.items():
            self[name] = self.get(name, 0) + value


def by_shape(rows: list[Row]) -> list[list[int]]:
    """The rows' indices, grouped by input and target lengths. Long rows first: what needs most memory fails first."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault((len(row.inputs), len(row.targets)), []).append(index)
    return [members for _, members in sorted(groups.items(), reverse=True)]


def score(
    model: Model, rows: list[Row], budget: Budget | int, beat: Callable[[], None], extra: Extra | None = None
) -> list[Losses]:
    """Return the losses of each row's targets, in nats on the grid. ``beat`` is called after each batch.

    ``extra`` takes the sums for calibration, if it is given; all rows then go through whole logits. Where a batch does
    not fit into memory, half of it is tried, and so on; raises what torch raises when a single row does not fit.
    loss = logsumexp(logits) - logits[target] over float32 logits, then float64 and one rounding to 2^-30 nat.
    """
    budget = Budget(budget) if isinstance(budget, int) else budget
    if model.scorer is not None:
        return model.scorer(rows, budget, beat, extra)
    results: list[Losses | None] = [None] * len(rows)
    single = [i for i, row in enumerate(rows) if extra is None and _takes_fast_path(model, row)]
    strips = [[single[k] for k in strip] for strip in gathered([len(rows[i].inputs) for i in single])]
    found = lanes.each(lambda strip: _strip(model, [rows[i] for i in strip]), strips, beat)
    for strip, several in zip(strips, found, strict=True):
        for index, losses in zip(strip, several, strict=True):
            results[index] = losses
    others = [i for i, known in enumerate(results) if known is None]
    for group in by_shape([rows[i] for i in others]):
        members = [others[k] for k in group]
        way = _one_by_one if model.alone else _by_batches
        for index, losses in zip(members, way(model, [rows[i] for i in members], budget, beat, extra), strict=True):
            results[index] = losses
    return [r for r in results if r is not None]


def _one_by_one(
    model: Model, rows: list[Row], _: Budget, beat: Callable[[], None], extra: Extra | None
) -> list[Losses]:
    """Score rows of one shape each for itself, on as many lanes as there are threads."""

    def work(row: Row) -> tuple[list[Losses], Extra | None]:
        sums = None if extra is None else Extra()
        return _batch(model, [row], sums), sums

    results = []
    for losses, sums in lanes.each(work, rows, beat):
        results += losses
        if extra is not None and sums is not None:
            extra.take(sums)
    return results


def _by_batches(
    model: Model, rows: list[Row], budget: Budget, beat: Callable[[], None], extra: Extra | None
) -> list[Losses]:
    """Score rows of one shape together, as many as the budget allows; a batch that does not fit is halved."""
    results: list[Losses] = []
    while len(results) < len(rows):
        first, length = len(results), len(rows[0].inputs)
        members = rows[first : first + budget.rows(length)]
        tokens = len(members) * length
        sums = None if extra is None else Extra()
        started = time.perf_counter()
        try:
            found = _batch(model, members, sums)
        except (RuntimeError, MemoryError) as error:
            if not lanes.is_memory(error) or len(members) == 1:
                raise
            budget.failed(tokens)
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        budget.took(tokens, time.perf_counter() - started)
        if extra is not None and sums is not None:
            extra.take(sums)
        results += found
        beat()
    return results


def _batch(model: Model, rows: list[Row], extra: Extra | None) -> list[Losses]:
    """Score rows of one shape together."""
    ids, targets = tensors(model, rows)
    with torch.inference_mode():
        steps, finite, nan = on_grid(losses_of(model, ids, targets, extra))
    return [Losses(steps[k], finite[k], nan[k]) for k in range(len(rows))]


def tensors(model: Model, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, repeated where there are few, and targets of rows of one shape, on the model's device."""
    inputs = np.stack([row.inputs for row in rows])
    ids = torch.from_numpy(_repeated(inputs, MIN_ROWS // inputs.shape[1] + 1).astype(np.int64))
    targets = torch.from_numpy(np.stack([row.targets for row in rows]).astype(np.int64))
    return ids.to(model.device), targets.to(model.device)


def _takes_fast_path(model: Model, row: Row) -> bool:
    """Whether a row takes the model's fast path. The row alone decides: its losses depend on nothing else."""
    return model.rows is not None and (model.rows.longest is None or len(row.inputs) <= model.rows.longest)


def _strip(model: Model, rows: list[Row]) -> list[Losses]:
    assert model.rows is not None
    ids = [torch.from_numpy(row.inputs.astype(np.int64)) for row in rows]
    targets = [torch.from_numpy(row.targets.astype(np.int64)) for row in rows]
    return [Losses(*on_grid(losses)) for losses in model.rows.losses(ids, targets)]


def on_grid(losses: torch.Tensor) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Losses in grid steps, which of them are finite, and which are NaN."""
    nan, finite = torch.isnan(losses), torch.isfinite(losses)
    steps = torch.where(finite, torch.round(losses.double() * STEPS_PER_NAT), 0.0).to(torch.int64)
    return steps.cpu().numpy(), finite.cpu().numpy(), nan.cpu().numpy()


def _repeated(inputs: npt.NDArray[np.int32], least: int) -> npt.NDArray[np.int32]:
    """The rows of a batch, over and over until there are ``least`` of them."""
    return inputs if len(inputs) >= least else np.resize(inputs, (least, inputs.shape[1]))


def losses_of(model: Model, ids: torch.Tensor, targets: torch.Tensor, extra: Extra | None) -> torch.Tensor:
    """Losses [rows, scored] in float32; ``ids`` may have more rows than ``targets``."""
    rows, scored = targets.shape
    if not model.split:
        found = [_loss(model.whole(ids[r : r + 1], scored)[0], targets[r], extra) for r in range(rows)]
        return torch.stack(found)
    states = model.hidden(ids)[:rows, -scored:].flatten(0, 1)
    # Even chunks of positions: none is small unless all are few.
    positions = rows * scored
    count = -(-positions // CHUNK)
    losses = []
    for c in range(count):
        chunk = slice(positions * c // count, positions * (c + 1) // count)
        part, wanted = states[chunk], targets.flatten()[chunk]
        few = -(-MIN_ROWS // len(part))
        losses.append(_loss(model.logits(part.repeat(few, 1))[: len(part)], wanted, extra))
    return torch.cat(losses).reshape(rows, scored)


def _loss(logits: torch.Tensor, targets: torch.Tensor, extra: Extra | None) -> torch.Tensor:
    """``logsumexp - gather`` in float32: within 2e-9 of float64; ``F.cross_entropy`` is 3e-6 low on large vocabularies.

    No loss is below zero; where the difference rounds to less, it is zero. NaN stays NaN.
    """
    if extra is not None:
        losses, sums = confidence.sums(logits, targets)
        extra.take(sums)
        return losses
    logits = logits.float()
    return (torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).clamp_min(0.0)
