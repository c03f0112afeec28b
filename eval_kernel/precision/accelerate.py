"""Fast kernels in the place of reference layers: packed from the canonical weights, each proved on the layer's own.

Integers with rounded activations run on int8 units where there are any. Formats that only store weights small are
dequantised piece by piece and multiplied: on batches of evaluation's size no packed kernel beats that here, so those
are used only when a job asks for them. A kernel that is missing, or fails its proof, leaves the reference in place.
"""

from __future__ import annotations

from typing import Any

import torch

from eval_kernel.kernels import Int8Linear, int8_route
from eval_kernel.precision import canonical
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import FORMATS, Format
from eval_kernel.precision.modules import QuantisedLinear, rounded_activations

#: Largest error of a kernel against the float64 product of its dequantised weights, relative to the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
#: Tokens of the proof.
PROBE_ROWS = 32
#: Inner tiles of CUDA's 4-bit layout.
INNER_TILES = 8


class PackedInt4Linear(torch.nn.Module):
    """Int4 weights in torch's own packed layout (``aten::_weight_int4pack_mm``), on CPUs and on GPUs from Ampere on."""

    kernel = "torch int4 packed"

    def __init__(self, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.columns, weight.rows
        self.format, self.bias, self._group = weight.format, bias, weight.format.group
        device = weight.values.device
        self._cpu = device.type == "cpu"
        values, zeros = canonical.unpacked(weight)
        codes = values.reshape(weight.rows, weight.columns)
        scales = weight.scales.float()
        # The kernel computes (code - 8) * scale + offset.
        offset = torch.zeros_like(scales) if zeros is None else (8.0 - zeros.float()) * scales
        self._scales = torch.stack([scales, offset], dim=-1).transpose(0, 1).contiguous().to(dtype)
        if self._cpu:
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), INNER_TILES)
        else:
            pairs = (codes[:, ::2] << 4) | codes[:, 1::2]
            self._packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), INNER_TILES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply. The result has the dtype of ``x``."""
        rows = x.reshape(-1, self.in_features)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu if self._cpu else torch.ops.aten._weight_int4pack_mm
        out: torch.Tensor = product(rows, self._packed, self._group, self._scales)
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features)


def accelerate(module: Any, wanted: str, compute: torch.dtype) -> dict[str, str]:
    """Replace reference layers by kernels that pass their proof; return why the others stay, by format.

    ``wanted``: ``reference`` replaces nothing, ``auto`` what gains speed, ``packed`` whatever has a kernel.
    """
    refused: dict[str, str] = {}
    if wanted == "reference":
        return refused
    proved: dict[tuple[str, int], str] = {}  # (format, columns) -> why not, empty if it passed
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, QuantisedLinear)]
    for name, layer in layers:
        form = layer.quantised.format
        if not has_kernel(form, wanted):
            continue
        key = (form.name, layer.in_features)
        if key not in proved:
            proved[key] = prove(layer, compute)
        if proved[key]:
            refused[form.name] = proved[key]
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, build(layer, compute))
    return refused


def has_kernel(form: Format, wanted: str) -> bool:
    """Whether there is a kernel that would be used for a format."""
    if form == FORMATS["int8-dynamic"]:
        return True
    return wanted == "packed" and form.bits == 4 and not form.dynamic


def build(layer: QuantisedLinear, compute: torch.dtype) -> torch.nn.Module:
    """Make the kernel of a layer. Raises ``RuntimeError`` or ``AttributeError`` where torch lacks it."""
    if layer.quantised.format.dynamic:
        weight = layer.quantised
        return Int8Linear.from_integers(weight.values, weight.scales[:, 0].contiguous(), layer.bias)
    return PackedInt4Linear(layer.quantised, layer.bias, compute)


def prove(layer: QuantisedLinear, compute: torch.dtype) -> str:
    """Compare a kernel with the float64 product of the dequantised weights; return what is wrong, or nothing."""
    device = layer.quantised.values.device
    if layer.quantised.format.dynamic and int8_route(device.type) == "exact":
        return f"{device.type} has no int8 products that pass their self-test"
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(PROBE_ROWS, layer.in_features, generator=generator).to(device=device, dtype=compute)
    try:
        with torch.inference_mode():
            got = build(layer, compute)(x).double()
            seen = rounded_activations(x) if layer.quantised.format.dynamic else x
            weight = canonical.dequantised(layer.quantised).double()
            expected = seen.double() @ weight.t()
            if layer.bias is not None:
                expected += layer.bias.double()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"no such kernel here ({' '.join(str(error).split())[:120]})"
    off = float((got - expected).abs().max() / expected.abs().max())
    return "" if off <= TOLERANCE[compute] else f"its products are off by {off:.1e} of the largest"
