"""Quantised weights in their one device-neutral form: values, scales, zeros, and the bytes that a digest names.

A weight is ``(value - zero) * scale``, computed in float32. How scales are chosen is ``search``'s business; with
plain rounding they are those of torchao's affine primitives, bit for bit (which the tests prove). Everything here
is elementwise, or an exact maximum, so that no thread count and no processor changes a byte.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from eval_kernel.precision.formats import FORMATS, Format, Kind

#: Largest magnitude of float8 e4m3.
FLOAT8_MAX = 448.0
#: Smallest scale: a row of zeros gets it.
EPS = torch.finfo(torch.float32).smallest_normal
SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Quantised:
    """A weight matrix of ``rows`` x ``columns``.

    ``values``: int8 [rows, columns]; float8 [rows, columns]; or, with 4 bits, uint8 [rows, columns/2], where byte j of
    a group holds column j in its low half and column j + group/2 in its high half, each unsigned (symmetric
    formats: 8 is added). ``scales``: [rows, groups]. ``zeros``: None, or uint8, two to a byte, low half first.
    """

    format: Format
    rows: int
    columns: int
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parts by the names they have in packs."""
        parts = {"values": self.values, "scales": self.scales}
        return parts if self.zeros is None else {**parts, "zeros": self.zeros}

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(t.nbytes for t in self.tensors().values())

    def digest(self) -> str:
        """``sha256:<hex>`` over format, shape and every byte."""
        hasher = hashlib.sha256(json.dumps([self.format.name, self.rows, self.columns]).encode())
        for part in self.tensors().values():
            hasher.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return "sha256:" + hasher.hexdigest()

    def to(self, device: torch.device) -> Quantised:
        """The same weight on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return Quantised(self.format, self.rows, self.columns, self.values.to(device), self.scales.to(device), zeros)

    def row_range(self, start: int, end: int) -> Quantised:
        """Rows ``start`` to ``end - 1``; where there are packed zeros, ``start`` times groups must be even."""
        zeros = self.zeros
        if zeros is not None:
            groups = self.scales.shape[1]
            zeros = zeros[start * groups // 2 : (end * groups + 1) // 2]
        return Quantised(self.format, end - start, self.columns, self.values[start:end], self.scales[start:end], zeros)


def shapes(form: Format, rows: int, columns: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each part of a weight in a format."""
    groups = columns // form.group if form.group else 1
    values: tuple[torch.dtype, tuple[int, ...]]
    if form.kind is Kind.FLOAT8:
        values = (torch.float8_e4m3fn, (rows, columns))
    elif form.bits == 4:
        values = (torch.uint8, (rows, columns // 2))
    else:
        values = (torch.int8, (rows, columns))
    parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"values": values}
    parts["scales"] = (SCALE_DTYPES[form.scale_dtype], (rows, groups))
    if not form.symmetric:
        parts["zeros"] = (torch.uint8, ((rows * groups + 1) // 2,))
    return parts


def empty(name: str, rows: int, columns: int) -> Quantised:
    """Return a weight whose parts are still to be filled."""
    form = FORMATS[name]
    parts = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in shapes(form, rows, columns).items()}
    return Quantised(form, rows, columns, **parts)


# ---------------------------------------------------------------- between floats and integers


def grouped(weight: torch.Tensor, form: Format) -> torch.Tensor:
    """View [rows, columns] as [rows, groups, group]."""
    return weight.reshape(weight.shape[0], -1, form.group or weight.shape[1])


def plain_scales(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and zeros, both float32 [rows, groups], that cover each group's range: rounding's choice."""
    groups = grouped(weight, form)
    if form.kind is Kind.FLOAT8:
        return stored(groups.abs().amax(-1) / FLOAT8_MAX, form), None
    if form.symmetric:
        return stored(groups.abs().amax(-1) / ((form.maximum - form.minimum) / 2), form), None
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    scales = stored((high - low) / (form.maximum - form.minimum), form)
    return scales, zeros_for(low, scales, form)


def stored(scales: torch.Tensor, form: Format) -> torch.Tensor:
    """Return scales as they come back from storage, in float32: values are rounded to these, not to finer ones."""
    small = scales.abs() < EPS
    return torch.where(small, EPS, scales).to(SCALE_DTYPES[form.scale_dtype]).float()


def zeros_for(low: torch.Tensor, scales: torch.Tensor, form: Format) -> torch.Tensor:
    """The integer that stands for 0 where ``low`` is to be the smallest value."""
    return (form.minimum - torch.round(low / scales)).clamp(form.minimum, form.maximum)


def to_integers(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format) -> torch.Tensor:
    """Round [rows, groups, group] to the format's values, as float32 numbers."""
    q = torch.round(groups * (1.0 / scales).unsqueeze(-1))
    if zeros is not None:
        q = q + zeros.unsqueeze(-1)
    return q.clamp(form.minimum, form.maximum)


def to_floats(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The inverse of ``to_integers``, up to rounding."""
    if zeros is not None:
        q = q - zeros.unsqueeze(-1)
    return q * scales.unsqueeze(-1)


def pack(q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, form: Format) -> dict[str, torch.Tensor]:
    """Return the parts for [rows, groups, group] values, float32 scales and zeros."""
    rows = q.shape[0]
    parts = {"scales": scales.to(SCALE_DTYPES[form.scale_dtype])}
    if form.bits == 4:
        codes = (q - form.minimum).to(torch.uint8)
        half = codes.shape[-1] // 2
        parts["values"] = (codes[..., :half] | (codes[..., half:] << 4)).reshape(rows, -1)
    else:
        parts["values"] = q.to(torch.int8).reshape(rows, -1)
    if zeros is not None:
        flat = zeros.to(torch.uint8).flatten()
        if len(flat) % 2:
            flat = torch.cat([flat, flat.new_zeros(1)])
        parts["zeros"] = flat[0::2] | (flat[1::2] << 4)
    return parts


def float8_parts(weight: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts of a float8 weight."""
    scaled = (weight * (1.0 / scales)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return {"values": scaled.to(torch.float8_e4m3fn), "scales": scales}


def unpacked(weight: Quantised) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return values [rows, groups, group] and zeros [rows, groups], or None, as small integers (values: or float8)."""
    groups, zeros = weight.scales.shape[1], _zeros(weight)
    if weight.format.bits != 4:
        return weight.values.reshape(weight.rows, groups, -1), zeros
    codes = weight.values.reshape(weight.rows, groups, -1)
    return torch.cat([codes & 15, codes >> 4], dim=-1), zeros


def _zeros(weight: Quantised) -> torch.Tensor | None:
    """The zeros [rows, groups], one to a byte; None where the format has none."""
    if weight.zeros is None:
        return None
    groups = weight.scales.shape[1]
    pairs = torch.stack([weight.zeros & 15, weight.zeros >> 4], dim=1).flatten()
    return pairs[: weight.rows * groups].reshape(weight.rows, groups)


def dequantised(
    weight: Quantised, dtype: torch.dtype = torch.float32, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weight [rows, columns]: computed in float32, then rounded once to ``dtype``.

    ``scratch``, flat and of that dtype, is used for the result if it is given.
    """
    form, groups = weight.format, weight.scales.shape[1]
    if scratch is None:
        scratch = torch.empty(weight.rows * weight.columns, dtype=dtype, device=weight.values.device)
    out = scratch[: weight.rows * weight.columns].view(weight.rows, groups, -1)
    scales = weight.scales.float().unsqueeze(-1)
    if form.bits == 4:
        zeros = _zeros(weight)
        offset = form.minimum if zeros is None else -zeros.view(torch.int8).unsqueeze(-1)
        codes = weight.values.reshape(weight.rows, groups, -1)
        half = codes.shape[-1]
        for part, q in ((slice(0, half), codes & 15), (slice(half, None), codes >> 4)):
            torch.mul(q.view(torch.int8).add_(offset), scales, out=out[..., part])
    else:
        values = weight.values.reshape(out.shape)
        torch.mul(values.float() if form.kind is Kind.FLOAT8 else values, scales, out=out)
    return out.view(weight.rows, weight.columns)
