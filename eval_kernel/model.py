"""A model ready to score with: loaded, checked, and split into a body and a head so that full logits never exist.

What the model is comes from transformers; this file only finds the seam between hidden states and logits, and
proves on a few tokens that it found it. Scoring is ``scoring``'s business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eval_kernel import fast
from eval_kernel.checkpoint import Checkpoint
from eval_kernel.errors import ModelUnsupported, PrecisionUnsupported, reason
from eval_kernel.head import Shape
from eval_kernel.precision import loading

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Largest relative difference between the split model and the whole one on the probe tokens.
SEAM_TOLERANCE = 1e-5
#: The same, between predictions before a token that was exchanged: room for experts that are batched otherwise in bf16.
CAUSAL_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as two functions.

    ``hidden(ids)`` gives the last hidden states [rows, length, width]; ``logits(hidden)`` gives [positions, vocabulary]
    in the compute dtype. Where no seam was found, ``split`` is False and ``whole(ids, keep)`` gives the logits of the
    last ``keep`` positions [rows, keep, vocabulary]. ``rows`` is the fast way to score single rows, where there is
    one; ``kernel`` says in a word or a line how this model computes. ``alone``: rows must not be batched, because their
    bits would depend on the batch. ``scorer`` scores rows in ``scoring.score``'s
    stead, for a model whose weights are not all here (``parallel``).
    """

    device: torch.device
    dtype: torch.dtype
    vocabulary: int
    split: bool
    hidden: Callable[[torch.Tensor], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]
    whole: Callable[[torch.Tensor, int], torch.Tensor]
    rows: fast.RowPath | None = None
    kernel: str = "transformers"
    scorer: Callable[..., list[Any]] | None = None
    alone: bool = False


def choose_device(wanted: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises ``PrecisionUnsupported`` for one that is not there.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"no scoring on {device.type}")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PrecisionUnsupported(
            f"device {wanted!r} is not usable here ({reason(error)}); allowed: auto, cpu, cuda, cuda:N"
        ) from None
    return device


def check_precision(dtype: str, device: torch.device) -> None:
    """Refuse what would run wrongly or absurdly slowly. Raises ``PrecisionUnsupported``."""
    if dtype not in DTYPES:
        raise PrecisionUnsupported(
            f"the checkpoint's dtype {dtype} cannot be used as it is; write precision: fp32 or bf16"
        )
    if dtype == "float16" and device.type == "cpu":
        raise PrecisionUnsupported("fp16 on a CPU is over 200 times slower than bf16; write precision: bf16 or fp32")
    if dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise PrecisionUnsupported(
            "this GPU has no bf16 units (compute capability below 8.0); write precision: fp16 or fp32"
        )


def load(checkpoint: Checkpoint, dtype: str, device: torch.device) -> Model:
    """Load the weights in ``dtype`` on ``device``.

    Raises ``ModelCorrupt``, ``ModelNotFinite``, ``ModelUnsupported``, ``OutOfMemory`` and ``PrecisionUnsupported``.
    """
    check_precision(dtype, device)
    module = loading.load_floats(checkpoint, dtype, device)
    return prepare(module, device, DTYPES[dtype], f"model {checkpoint.directory}")


def prepare(module: Any, device: torch.device, dtype: torch.dtype, where: str) -> Model:
    """Find the seam of a loaded module and prove it on a few tokens. Raises ``ModelUnsupported``."""
    head = module.get_output_embeddings()
    body = module.base_model
    config = module.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    multiplier = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    vocabulary = int(head.out_features) if head is not None else int(config.vocab_size)

    def hidden(ids: torch.Tensor) -> torch.Tensor:
        return body(input_ids=ids, use_cache=False).last_hidden_state

    def logits(states: torch.Tensor) -> torch.Tensor:
        out = head(states)
        if multiplier != 1.0:
            out = out * multiplier
        if divisor != 1.0:
            out = out / divisor
        if softcap is not None:
            out = torch.tanh(out / softcap) * softcap
        return out

    takes_keep = "logits_to_keep" in inspect.signature(module.forward).parameters

    def whole(ids: torch.Tensor, keep: int) -> torch.Tensor:
        options = {"logits_to_keep": keep} if takes_keep else {}
        return module(input_ids=ids, use_cache=False, **options).logits[:, -keep:]

    probe = torch.arange(min(8, vocabulary), device=device).unsqueeze(0)
    other = torch.cat([probe[:, :-1], probe[:, :1]], dim=1)
    split = head is not None and body is not module
    try:
        with torch.inference_mode():
            expected = whole(probe, probe.shape[1])
            if not _alike(whole(other, probe.shape[1])[:, :-1], expected[:, :-1], CAUSAL_TOLERANCE):
                raise ModelUnsupported(
                    f"{where}: what it predicts depends on later tokens; it is no causal language model"
                )
            split = split and _alike(logits(hidden(probe)), expected, SEAM_TOLERANCE)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelUnsupported(
            f"{where}: cannot score a few tokens with it ({reason(error)}); use another model"
        ) from None
    rows, kernel = None, "transformers"
    if split:
        rows, kernel = fast.prepare(module, Shape(multiplier / divisor, softcap), whole)
    alone = device.type == "cpu"
    return Model(device, dtype, vocabulary, split, hidden, logits, whole, rows, kernel, alone=alone)


def _alike(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Whether two sets of logits agree, up to rounding; where both are infinite or NaN in the same way, they do."""
    if got.shape != expected.shape:
        return False
    got, expected = got.double(), expected.double()
    finite = torch.isfinite(expected)
    scale = expected[finite].abs().max() if bool(finite.any()) else torch.zeros(())
    return bool(torch.allclose(got, expected, rtol=0.0, atol=tolerance * float(scale), equal_nan=True))
