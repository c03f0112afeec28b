"""Values chosen with calibration data: each column's rounding error is made good by the columns not yet rounded.

GPTQ (Frantar et al., 2023, https://arxiv.org/abs/2210.17323) on the canonical form, with columns in the order of
their activations' power and scales fixed beforehand by weighted least squares. One matrix at a time; which inputs it
sees is ``calibrated``'s business.
"""

from __future__ import annotations

import torch

from eval_kernel.precision import canonical, search
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import Format

#: Share of the mean diagonal that is added to it, so that the inverse exists.
DAMPING = 0.01
#: Columns rounded before their error is spread over all later ones, and rows worked on at one time.
BLOCK, ROWS = 64, 512


def quantise(weight: torch.Tensor, moments: torch.Tensor, form: Format) -> Quantised:
    """Quantise a float32 matrix whose inputs have the second moments ``moments`` [columns, columns]."""
    rows, columns = weight.shape
    moments = moments.double()
    power = moments.diagonal().clone()
    scales, zeros = _scales(weight, form, power)
    group = form.group or columns
    # Strong inputs first: their error is made good by all the others.
    order = torch.argsort(power, descending=True, stable=True)
    upper = _factor(moments[order][:, order])
    groups = order // group
    values = torch.empty(rows, columns)
    for start in range(0, rows, ROWS):
        part = slice(start, start + ROWS)
        points = None if zeros is None else zeros[part].t()[groups]
        values[part, order] = _round(weight[part].t()[order], upper, scales[part].t()[groups], points, form).t()
    parts = canonical.pack(values.reshape(rows, -1, group), scales, zeros, form)
    return Quantised(form, rows, columns, **parts)


def _round(
    work: torch.Tensor, upper: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format
) -> torch.Tensor:
    """Return the values of a weight [columns, rows], given the factor, and scales and zeros of each column and row."""
    columns = len(work)
    chosen = torch.empty_like(work)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.empty(end - start, work.shape[1])
        for k in range(start, end):
            point = None if zeros is None else zeros[k]
            q = canonical.to_integers(work[k].unsqueeze(-1), scales[k], point, form)
            error = (work[k] - canonical.to_floats(q, scales[k], point).squeeze(-1)) / upper[k, k]
            chosen[k], errors[k - start] = q.squeeze(-1), error
            work[k:end] -= upper[k, k:end].unsqueeze(1) * error
        work[end:] -= upper[start:end, end:].t() @ errors
    return chosen


def _scales(weight: torch.Tensor, form: Format, power: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros for all rows, chosen a few rows at a time."""
    importance = (power / power.mean().clamp_min(1e-30)).float()
    found = []
    for start, end in search.row_chunks(form, *weight.shape):
        part = weight[start:end]
        found.append(canonical.plain_scales(part, form) if form.bits == 8 else search.least(part, form, importance))
    zeros = None if found[0][1] is None else torch.cat([z for _, z in found if z is not None])
    return torch.cat([s for s, _ in found]), zeros


def _factor(moments: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse, in float32. Inputs that never occur count as ones of unit power."""
    diagonal = moments.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * float(diagonal.mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    return torch.linalg.cholesky(inverse, upper=True).float()
