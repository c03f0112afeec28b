"""Quantised models on a GPU: the same weights as on a CPU, by digest, and losses within the kernels' tolerance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eval_kernel import checkpoint
from eval_kernel.precision import loading, skeleton
from eval_kernel.precision.plan import resolve
from eval_kernel.precision.policy import as_spec, label_of
from eval_kernel.spec import ModelSpec, parse_spec
from tests.support.precision import IDS, llama, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def loaded(directory: Path, precision: Any, cache: Path, device: str) -> loading.Loaded:
    """A model in a precision on a device."""
    found = checkpoint.find(ModelSpec(source=str(directory)), None, cache, lambda text: None)
    spec = parse_spec({"model": "m", "dataset": "d", "precision": precision}, where="job")
    plan = resolve(as_spec(spec.precision), skeleton.build(found, torch.float32).outline, label_of(spec.precision))
    digest = checkpoint.weights_digest(found, cache)
    return loading.load(found, digest, plan, torch.device(device), cache / device, lambda text: None)


def losses(module: Any, device: str) -> torch.Tensor:
    """Next-token losses of a few fixed tokens."""
    ids = IDS.to(device)
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=False).logits.float()
    flat = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.double().cpu()


@pytest.mark.parametrize("kernels", ["auto", "packed"])
@pytest.mark.parametrize(
    "precision",
    ["int8", "int8-g64", "int4-g32", "int4-g64-asym", "8da4w", "int8-dynamic", "fp8", "brief"],
)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_gpu_holds_the_same_weights_and_comes_to_the_same_losses(
    precision: str, compute: str, kernels: str, tmp_path: Path
) -> None:
    """Each device makes its own pack: the digests agree; losses differ by what the dtype's products allow."""
    directory = write(tmp_path / "m", llama())
    mapping: Any = {"compute": compute, "kernels": kernels}
    mapping |= {"mlp": "int8", "embedding": "int4-g64"} if precision == "brief" else {"default": precision}
    made = {device: loaded(directory, mapping, tmp_path, device) for device in ("cpu", "cuda")}
    cpu, cuda = (losses(found.module, device) for device, found in made.items())

    assert made["cpu"].digest == made["cuda"].digest
    tolerance = 1e-3 if compute == "fp32" else 5e-2
    assert float((cpu - cuda).abs().max()) <= tolerance * float(cpu.abs().max())
