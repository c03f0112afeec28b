"""Text that the quantiser may look at: cut into rows of tokens, named by digest, and kept apart from what is evaluated.

A row counts as evaluated when most of its runs of ``RUN`` tokens occur in the evaluated windows, wherever they begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eval_kernel import corpus, documents
from eval_kernel.errors import DatasetEmpty, SpecError
from eval_kernel.precision.policy import CalibrationSpec
from eval_kernel.roots import Roots
from eval_kernel.spec import calibration_data
from eval_kernel.tokenizer import Tokenizer

#: Tokens in a row that count as the same text wherever they occur twice.
RUN = 16
#: Share of a row's runs that makes it evaluated text.
SAME = 0.5
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rows of token ids [rows, context], and the digest over them."""

    ids: Rows
    digest: str


def load(
    spec: CalibrationSpec, tokenizer: Tokenizer, roots: Roots, cache: Path, note: Callable[[str], None]
) -> Calibration:
    """Read calibration text and cut rows out of it evenly. Raises the errors of ``documents``, and ``DatasetEmpty``."""
    found = corpus.load(
        documents.find(calibration_data(spec), roots), tokenizer.backend, tokenizer.digest, "\n\n", cache, note
    )
    tokens = found.tokens[int(len(found.tokens) * spec.skip) :]
    rows = min(spec.windows, len(tokens) // spec.context)
    if rows == 0:
        raise DatasetEmpty(
            f"precision.calibration: {', '.join(spec.source)} has {len(tokens)} tokens to calibrate on, "
            f"less than one window of {spec.context}; give more text or lower context"
        )
    starts = np.linspace(0, len(tokens) - spec.context, rows).astype(np.int64)
    ids = np.stack([np.array(tokens[start : start + spec.context], dtype=np.int32) for start in starts])
    digest = hashlib.sha256(np.array(ids.shape, dtype="<i8").tobytes() + ids.astype("<i4").tobytes()).hexdigest()
    return Calibration(ids, "sha256:" + digest)


def overlap(calibration: Calibration, evaluated: Iterable[npt.NDArray[np.int32]]) -> int:
    """Return how many calibration rows are (mostly) text that is evaluated; ``evaluated``: runs of token ids."""
    known = [runs(part) for part in evaluated if len(part) >= RUN]
    if not known:
        return 0
    pool = np.unique(np.concatenate(known))
    return sum(int(np.isin(runs(row), pool).mean() > SAME) for row in calibration.ids)


def check(calibration: Calibration, evaluated: Iterable[npt.NDArray[np.int32]], allowed: bool) -> bool:
    """Return whether calibration and evaluation overlap. Raises ``SpecError`` unless that is allowed."""
    rows = overlap(calibration, evaluated)
    if rows and not allowed:
        raise SpecError(
            f"precision.calibration: {rows} of {len(calibration.ids)} rows are text that this job evaluates, which "
            "makes its numbers too good; use other text (or skip), or write allow_overlap: true to have it recorded"
        )
    return rows > 0


def runs(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each run of ``RUN`` tokens."""
    if len(tokens) < RUN:
        return np.zeros(0, dtype=np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    out = np.zeros(len(tokens) - RUN + 1, dtype=np.uint64)
    for k in range(RUN):
        out = out * np.uint64(31) + mixed[k : k + len(out)]
    return out
