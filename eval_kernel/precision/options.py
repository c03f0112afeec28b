"""What the planning commands are told on the command line, checked: shares, limits, formats. Pure."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from eval_kernel.errors import CallError
from eval_kernel.precision.formats import FORMATS, suggestion
from eval_kernel.precision.policy import MeasureSpec, PrecisionSpec


def limits(policy: PrecisionSpec, budget: str | None, increase: str | None) -> tuple[float | None, float | None]:
    """Return the budget and the limit on perplexity, one of them None. Raises ``CallError`` for both or neither."""
    share, limit = _share(budget, "--budget"), _share(increase, "--max-ppl-increase")
    if share is None and limit is None:
        share, limit = policy.budget, policy.max_ppl_increase
    if (share is None) == (limit is None):
        raise CallError("give one of --budget and --max-ppl-increase, or the same under precision in the job")
    return share, limit


def measure_of(formats: str | None, rows: int, context: int) -> MeasureSpec:
    """Return what to measure. Raises ``CallError``."""
    chosen: dict[str, Any] = {} if formats is None else {"formats": tuple(formats.split(","))}
    for name in chosen.get("formats", ()):
        if name not in FORMATS:
            raise CallError(f"--formats: no format {name!r}; {suggestion(name, list(FORMATS))}")
    try:
        return MeasureSpec.model_validate({**chosen, "rows": rows, "context": context})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"][:1])
        raise CallError(f"--{where}{first['msg'].removeprefix('Value error, ')}") from None


def _share(text: str | None, option: str) -> float | None:
    """``40%`` or ``0.4`` as a fraction. Raises ``CallError``."""
    if text is None:
        return None
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 10:
        raise CallError(f"{option} is {text!r}; write a share such as 40% or 0.4")
    return value
