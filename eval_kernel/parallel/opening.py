"""A model made ready for one of the ways to run: resident, streamed, tensor parallel, or sharded over ranks.

Which way is ``layout``'s choice; how each computes is in the modules named after them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eval_kernel import kernels, model
from eval_kernel.head import Shape
from eval_kernel.parallel.layers import Layers
from eval_kernel.parallel.streaming import Streaming
from eval_kernel.precision.loading import Ingredients


def open_streamed(
    found: Ingredients, device: torch.device, fraction: float, where: str
) -> tuple[model.Model, dict[str, str]]:
    """Make a model ready whose layers are fetched from its files, a ``fraction`` of them at each visit.

    Returns the model and what each class of weights is held and multiplied in. Raises ``LayoutUnsupported`` and
    ``ModelUnsupported``.
    """
    compute = getattr(torch, found.plan.compute)
    layers = Layers(found, device, fraction, packer(device, compute))
    ready = _streaming(layers, device, compute, where)
    away = len(layers) - len(layers.kept)
    kernel = (
        f"{ready.kernel}; {away} of {len(layers)} layers streamed, {layers.resident_bytes >> 20} MiB of weights held"
    )
    return replace(ready, kernel=kernel), layers.used()


def packer(device: torch.device, compute: torch.dtype) -> Any:
    """Return what readies a layer: linear layers in the compute dtype get this machine's packed kernels."""
    if not kernels.packs(device.type, compute):
        return lambda layer: None

    def pack(layer: Any) -> None:
        kernels.replace(layer, lambda _, linear: kernels.PackedLinear(linear.weight, linear.bias))

    return pack


def _streaming(layers: Layers, device: torch.device, compute: torch.dtype, where: str) -> model.Model:
    prepared = model.prepare(layers.module, device, compute, where)
    config = layers.module.config.get_text_config()
    multiplier, divisor = getattr(config, "logit_scale", None) or 1.0, getattr(config, "logits_scaling", None) or 1.0
    shape = Shape(multiplier / divisor, getattr(config, "final_logit_softcapping", None))
    return Streaming(layers, replace(prepared, rows=None), shape).as_model()
