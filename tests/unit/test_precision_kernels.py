"""Fast kernels for quantised weights: equal to their definition, and left out, visibly, where they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eval_kernel.kernels import Int8Linear, int8_route
from eval_kernel.precision import accelerate, search
from eval_kernel.precision.accelerate import PackedInt4Linear
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.modules import QuantisedLinear

pytestmark = pytest.mark.torch


class Two(torch.nn.Module):
    """Two quantised layers of one format."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        weights = [torch.randn(rows, 256, generator=generator) * 0.05 for rows in (128, 64)]
        made = [search.quantise(w, FORMATS[name], "mse") for w in weights]
        self.first = QuantisedLinear(made[0], torch.linspace(-1, 1, 128).to(dtype))
        self.second = QuantisedLinear(made[1], None)


def kinds(module: torch.nn.Module) -> set[type]:
    """The classes of its layers."""
    return {type(layer) for layer in module.children()}


X = torch.randn(40, 256, generator=torch.Generator().manual_seed(6))


@pytest.mark.skipif(int8_route("cpu") == "exact", reason="this CPU has neither VNNI nor AMX")
def test_int8_activations_run_on_int8_units() -> None:
    """The kernel's sums of integers are exact, so it agrees with the definition to float32 rounding."""
    plain, fast = Two("int8-dynamic"), Two("int8-dynamic")

    assert {} == accelerate.accelerate(fast, "auto", torch.float32)
    assert {Int8Linear} == kinds(fast)
    for name in ("first", "second"):
        expected, got = getattr(plain, name)(X), getattr(fast, name)(X)
        assert float((expected - got).abs().max()) <= 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64", "int4-g128", "int4-g32-asym", "int4-g64-asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_four_bit_weights_equal_their_definition(name: str, dtype: torch.dtype) -> None:
    """Torch's packed kernel passes its proof here, and then agrees within the proof's tolerance."""
    plain, fast = Two(name, dtype), Two(name, dtype)
    refused = accelerate.accelerate(fast, "packed", dtype)

    assert {} == refused
    assert {PackedInt4Linear} == kinds(fast)
    for layer in ("first", "second"):
        expected, got = getattr(plain, layer)(X.to(dtype)).float(), getattr(fast, layer)(X.to(dtype)).float()
        assert float((expected - got).abs().max()) <= 2 * accelerate.TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize(
    ("name", "wanted"), [("int8", "auto"), ("int8", "packed"), ("int4-g64", "auto"), ("int8-dynamic", "reference")]
)
def test_what_gains_nothing_stays_the_reference(name: str, wanted: str) -> None:
    """Weight-only formats buy memory, not speed, on batches of this size."""
    module = Two(name)

    assert {} == accelerate.accelerate(module, wanted, torch.float32)
    assert {QuantisedLinear} == kinds(module)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer keeps the reference, and the reason is returned."""
    original = PackedInt4Linear.forward

    def off(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) * 1.01

    monkeypatch.setattr(PackedInt4Linear, "forward", off)
    module = Two("int4-g64")
    refused = accelerate.accelerate(module, "packed", torch.float32)

    assert {QuantisedLinear} == kinds(module)
    assert "off by 1" in refused["int4-g64"]


def test_a_kernel_that_is_missing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a torch without the operator."""

    def missing(layer: Any, compute: torch.dtype) -> torch.nn.Module:
        raise AttributeError("'_OpNamespace' 'aten' object has no attribute '_convert_weight_to_int4pack_for_cpu'")

    monkeypatch.setattr(accelerate, "build", missing)
    module = Two("int4-g64")
    refused = accelerate.accelerate(module, "packed", torch.float32)

    assert {QuantisedLinear} == kinds(module)
    assert "no such kernel here" in refused["int4-g64"]
