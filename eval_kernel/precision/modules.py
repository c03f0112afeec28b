"""Layers that hold quantised weights, and compute with them as defined: dequantised piece by piece, then multiplied.

This is the reference on every device. Faster ways to the same numbers are ``kernels``' to put in its place.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from eval_kernel import kernels
from eval_kernel.kernels import quantise
from eval_kernel.precision import canonical
from eval_kernel.precision.canonical import Quantised

#: Elements of a weight that exist as floats at one time.
PIECE_ELEMENTS = 1 << 18


class QuantisedLinear(torch.nn.Module):
    """A linear layer over a quantised weight; with a dynamic format, over inputs rounded to int8, a scale per token."""

    def __init__(self, weight: Quantised, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.quantised = weight
        self.in_features, self.out_features = weight.columns, weight.rows
        self.bias = bias

    @property
    def dynamic(self) -> bool:
        """Whether inputs are rounded to int8."""
        return self.quantised.format.dynamic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply. The result has the dtype of ``x``."""
        if self.dynamic:
            x = rounded_activations(x)
        out = torch.empty(*x.shape[:-1], self.out_features, dtype=x.dtype, device=x.device)
        scratch = None
        for start, end in pieces(self.quantised):
            if scratch is None:
                scratch = torch.empty((end - start) * self.in_features, dtype=x.dtype, device=x.device)
            part = canonical.dequantised(self.quantised.row_range(start, end), x.dtype, scratch)
            bias = None if self.bias is None else self.bias[start:end]
            out[..., start:end] = functional.linear(x, part, bias)
        return out

    def dense(self, dtype: torch.dtype) -> torch.nn.Module:
        """Return a kernel over the dequantised weight in ``dtype``, for as long as one has many rows to multiply."""
        kernel = kernels.linear(canonical.dequantised(self.quantised, dtype), self.bias)
        return RoundedInputs(kernel) if self.dynamic else kernel

    def tiles(self, outputs: int) -> list[QuantisedLinear]:
        """Cut into layers of ``outputs`` outputs each, an even number, and a rest."""
        found = []
        for start in range(0, self.out_features, outputs):
            end = min(start + outputs, self.out_features)
            bias = None if self.bias is None else self.bias[start:end]
            found.append(QuantisedLinear(self.quantised.row_range(start, end), bias))
        return found

    def extra_repr(self) -> str:
        """What torch prints of it."""
        return f"{self.in_features}, {self.out_features}, {self.quantised.format.name}"


class RoundedInputs(torch.nn.Module):
    """A kernel whose inputs are rounded to int8 first, a scale per token, as dynamic formats mean it."""

    def __init__(self, kernel: torch.nn.Module) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Round and multiply."""
        out: torch.Tensor = self.kernel(rounded_activations(x))
        return out


class QuantisedEmbedding(torch.nn.Module):
    """An embedding over a quantised table: the rows looked up are dequantised, and multiplied by ``scale`` if given."""

    def __init__(self, weight: Quantised, dtype: torch.dtype, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.quantised, self.dtype = weight, dtype
        self.register_buffer("scale", scale, persistent=False)
        self.num_embeddings, self.embedding_dim = weight.rows, weight.columns

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up."""
        rows = _rows(self.quantised, ids.flatten())
        found = canonical.dequantised(rows, self.dtype).reshape(*ids.shape, -1)
        return found if self.scale is None else found * self.scale.to(self.dtype)

    def extra_repr(self) -> str:
        """What torch prints of it."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.quantised.format.name}"


class CastLinear(torch.nn.Module):
    """A linear layer whose weight is a float of another width than the activations: the wider of the two computes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = bias
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply. The result has the dtype of ``x``."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(wide)
        return functional.linear(x.to(wide), self.weight.to(wide), bias).to(x.dtype)


class CastEmbedding(torch.nn.Module):
    """An embedding whose table is a float of another width than the activations."""

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.dtype = dtype
        self.register_buffer("scale", scale, persistent=False)
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up."""
        found = functional.embedding(ids, self.weight).to(self.dtype)
        return found if self.scale is None else found * self.scale.to(self.dtype)


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """Round each token's activations to int8, as ``kernels.quantise`` does, and return them as floats again."""
    values, scales = quantise(x.reshape(-1, x.shape[-1]))
    return (values.float() * scales).reshape(x.shape).to(x.dtype)


def pieces(weight: Quantised) -> list[tuple[int, int]]:
    """Ranges of rows that are dequantised together; they begin at even rows."""
    step = max(2, PIECE_ELEMENTS // weight.columns // 2 * 2)
    return [(start, min(start + step, weight.rows)) for start in range(0, weight.rows, step)]


def _rows(weight: Quantised, ids: torch.Tensor) -> Quantised:
    """The rows looked up, as a weight of their own."""
    zeros = None
    if weight.zeros is not None:
        zeros = _zero_rows(weight, ids)
    return Quantised(weight.format, len(ids), weight.columns, weight.values[ids], weight.scales[ids], zeros)


def _zero_rows(weight: Quantised, ids: torch.Tensor) -> torch.Tensor:
    assert weight.zeros is not None
    groups = weight.scales.shape[1]
    places = (ids.unsqueeze(1) * groups + torch.arange(groups, device=ids.device)).flatten()
    packed = weight.zeros[places // 2]
    zeros = torch.where(places % 2 == 1, packed >> 4, packed & 15)
    if len(zeros) % 2:
        zeros = torch.cat([zeros, zeros.new_zeros(1)])
    return zeros[0::2] | (zeros[1::2] << 4)
