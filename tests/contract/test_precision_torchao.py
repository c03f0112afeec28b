"""Our canonical weights and torchao's affine primitives: plain rounding is theirs, bit for bit."""

from __future__ import annotations

import pytest
import torch

from eval_kernel.precision import canonical, search
from eval_kernel.precision.formats import FORMATS

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    "name", ["int8", "int8-g32", "int8-g64", "int8-g128", "int4-g32", "int4-g64", "int4-g128", "8da4w"]
)
def test_symmetric_integers_are_torchaos(name: str) -> None:
    """Same scales and values as ``choose_qparams_affine`` and ``quantize_affine``."""
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    form = FORMATS[name]
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(64, 256, generator=generator) * torch.logspace(-3, 1, 64).unsqueeze(1)
    block = (1, form.group or 256)
    scales, zeros = choose_qparams_affine(
        w,
        MappingType.SYMMETRIC,
        block,
        torch.int8,
        form.minimum,
        form.maximum,
        canonical.EPS,
        canonical.SCALE_DTYPES[form.scale_dtype],
        torch.int32,
    )
    values = quantize_affine(w, block, scales.float(), zeros, torch.int8, form.minimum, form.maximum)
    made = search.quantise(w, form, "rtn")
    own, _ = canonical.unpacked(made)

    assert torch.equal(scales.reshape(64, -1), made.scales)
    assert torch.equal(values, (own.to(torch.int8) + (form.minimum if form.bits == 4 else 0)).reshape(64, 256))


@pytest.mark.parametrize("name", ["int4-g32-asym", "int4-g64-asym", "int4-g128-asym"])
def test_asymmetric_integers_are_torchaos(name: str) -> None:
    """Same scales, zeros and values in the integer zero-point domain."""
    from torchao.quantization.quant_primitives import MappingType, choose_qparams_affine, quantize_affine

    form = FORMATS[name]
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)) + 0.3
    block = (1, form.group or 256)
    # torchao rounds its zeros against the unrounded scale; ours belong to the scale that is stored.
    scales, zeros = choose_qparams_affine(
        w, MappingType.ASYMMETRIC, block, torch.uint8, 0, 15, canonical.EPS, torch.float32, torch.int32
    )
    stored = scales.to(torch.bfloat16)
    made = search.quantise(w, form, "rtn")
    own, points = canonical.unpacked(made)
    assert points is not None

    assert torch.equal(stored.reshape(64, -1), made.scales)
    assert int((zeros.reshape(64, -1) - points.int()).abs().max()) <= 1
    values = quantize_affine(w, block, stored.float(), points.int().reshape(zeros.shape), torch.uint8, 0, 15)
    assert torch.equal(values, own.reshape(64, 256))
