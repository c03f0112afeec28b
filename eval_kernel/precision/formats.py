"""The number formats that weights can be stored in, and the bytes they take. Pure: no torch, no weights.

One definition for every device: an integer weight is ``(value - zero) * scale``, each factor in float32, with one
scale (and, where asymmetric, one zero) per row or per group of a row; ``canonical`` computes them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum

#: Torch's names of the float formats, and the bytes of one element.
DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT_NAMES = {name: short for short, name in DTYPE_NAMES.items()}


class Kind(Enum):
    """What one stored value is."""

    FLOAT = "float"  #: an IEEE or brain float that torch multiplies by itself
    FLOAT8 = "float8"  #: e4m3 with a scale
    INTEGER = "integer"  #: a signed (symmetric) or unsigned (asymmetric) integer with a scale


@dataclass(frozen=True, slots=True)
class Format:
    """How a weight matrix of ``rows`` outputs and ``columns`` inputs is stored."""

    name: str
    kind: Kind
    bits: int
    group: int | None = None  # columns that share a scale; None: the whole row does
    symmetric: bool = True  # False: an unsigned 4-bit zero per scale, packed two to a byte
    dynamic: bool = False  # activations are rounded to int8, a scale per token, before they are multiplied

    @property
    def quantised(self) -> bool:
        """Whether there are scales, so that the weights are not torch's own numbers."""
        return self.kind is not Kind.FLOAT

    @property
    def scale_dtype(self) -> str:
        """``float32`` for a scale per row, ``bfloat16`` for one per group (values are rounded to that very scale)."""
        return "float32" if self.group is None else "bfloat16"

    @property
    def minimum(self) -> int:
        """Smallest integer value: 8 bits use -127 to 127, so that a row's largest weight, of either sign, is exact."""
        if not self.symmetric:
            return 0
        return -127 if self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def maximum(self) -> int:
        """Largest integer value."""
        return (1 << (self.bits - 1)) - 1 if self.symmetric else (1 << self.bits) - 1

    def divides(self, columns: int) -> bool:
        """Whether a row of ``columns`` is a whole number of groups (and of bytes)."""
        return columns % (self.group or 1) == 0 and (columns * self.bits) % 8 == 0

    def value_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the values alone."""
        return rows * columns * self.bits // 8

    def scale_bytes(self, rows: int, columns: int) -> int:
        """Bytes of scales and zeros."""
        if not self.quantised:
            return 0
        scales = rows * (columns // self.group if self.group else 1)
        return scales * DTYPE_BYTES[self.scale_dtype] + (0 if self.symmetric else (scales + 1) // 2)

    @property
    def text(self) -> str:
        """One phrase for people."""
        if self.kind is Kind.FLOAT:
            return DTYPE_NAMES[self.name]
        what = f"{self.bits}-bit float (e4m3)" if self.kind is Kind.FLOAT8 else f"{self.bits}-bit integers"
        scale = "a scale per row" if self.group is None else f"a scale per {self.group} columns"
        sign = "" if self.kind is Kind.FLOAT8 else ", symmetric" if self.symmetric else ", with a zero"
        return f"{what}, {scale}{sign}" + (", activations int8 per token" if self.dynamic else "")


def _formats() -> dict[str, Format]:
    listed = [
        Format("fp32", Kind.FLOAT, 32),
        Format("bf16", Kind.FLOAT, 16),
        Format("fp16", Kind.FLOAT, 16),
        Format("fp8", Kind.FLOAT8, 8),
        Format("int8", Kind.INTEGER, 8),
        Format("int8-dynamic", Kind.INTEGER, 8, dynamic=True),
        Format("8da4w", Kind.INTEGER, 4, group=32, dynamic=True),
    ]
    listed += [Format(f"int8-g{g}", Kind.INTEGER, 8, group=g) for g in (32, 64, 128)]
    listed += [Format(f"int4-g{g}", Kind.INTEGER, 4, group=g) for g in (32, 64, 128)]
    listed += [Format(f"int4-g{g}-asym", Kind.INTEGER, 4, group=g, symmetric=False) for g in (32, 64, 128)]
    return {f.name: f for f in listed}


FORMATS = _formats()


def format_of(name: str) -> Format:
    """Return the format of that name; raises ``ValueError`` with the nearest one that exists."""
    if name in FORMATS:
        return FORMATS[name]
    raise ValueError(f"no format {name!r}; {suggestion(name, list(FORMATS))}")


def suggestion(name: str, known: list[str]) -> str:
    """Return ``did you mean 'x'?``, or all that is allowed where nothing is near."""
    longer = [k for k in known if name and k.startswith(name)][:3]
    near = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"allowed: {', '.join(known)}"
