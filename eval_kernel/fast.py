"""The fast way to score rows on a CPU, proved against transformers on a few tokens before it is used.

``prepare`` packs a model's weights and puts ``decoder`` and ``head`` together. Which rows come this way is
``scoring``'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval_kernel import decoder, heap, kernels
from eval_kernel.head import Head, Shape

#: Tokens of the self-test: more than one block, and a rest.
PROBE = decoder.BLOCK + 50
#: Largest relative difference of the probe's loss sum from transformers'.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-3}
#: The same where inputs are rounded to int8: what bf16 rounds otherwise may be rounded to another step of int8.
INT8_TOLERANCE = 1e-2

#: Logits [rows, keep, vocabulary] of the last ``keep`` positions of token ids [rows, length].
Whole = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowPath:
    """A model whose rows are scored for themselves. ``longest`` is the longest row it is right for, None means any."""

    body: decoder.Decoder
    head: Head

    @property
    def longest(self) -> int | None:
        """Rows with more tokens than this must go through transformers."""
        return self.body.longest

    def losses(self, rows: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return float64 losses of each row's targets, which follow the last of its token ids.

        The rows are such as ``decoder.gathered`` puts together.
        """
        with torch.inference_mode():
            states = self.body.states(decoder.Strip.of(rows), [len(wanted) for wanted in targets])
            return self.head.losses_by_row(states, targets)


def prepare(module: Any, shape: Shape, whole: Whole) -> tuple[RowPath | None, str]:
    """Pack the module's weights for this machine; return its fast path, or None, and a line: which, or why none.

    ``shape`` is what the model does to logits, ``whole(ids, keep)`` are transformers' logits. The module computes as
    before, with other kernels.
    """
    body = module.base_model
    config = module.config.get_text_config()
    device, dtype = module.device, module.dtype
    if device.type != "cpu" or dtype not in TOLERANCE:
        return None, "transformers"
    known = decoder.build(body, config)
    if known is None:
        return None, "transformers (no fast path for layers of this kind)"
    vocabulary, length = int(config.vocab_size), min(PROBE, known.longest or PROBE)
    del known  # it holds the very layers whose weights are to go one by one
    ids = (torch.arange(length) * 7919 + 13) % vocabulary
    targets = (torch.arange(length) * 104729 + 7) % vocabulary
    with torch.inference_mode():
        expected = _total(whole(ids.unsqueeze(0), length)[0], targets)
        packed = kernels.packs("cpu", dtype)
        if packed:
            kernels.replace(body, lambda name, layer: kernels.PackedLinear(layer.weight, layer.bias))
            heap.trim()
        built = decoder.build(body, config)
        assert built is not None
        path = RowPath(built, Head(module.get_output_embeddings(), shape))
        got = path.losses([ids], [targets])[0].sum()
    difference = abs(float(got - expected)) / abs(float(expected))
    if not difference <= tolerance(module, dtype):
        return None, f"transformers (the fast path's self-test was off by {difference:.1e} of the loss)"
    return path, f"rows/{decoder.BLOCK}, {'onednn' if packed else 'plain'} products"


def tolerance(module: torch.nn.Module, dtype: torch.dtype) -> float:
    """Return the largest relative difference of loss sums that two ways through a module's layers may have."""
    return INT8_TOLERANCE if any(kernels.rounds_inputs(layer) for layer in module.modules()) else TOLERANCE[dtype]


def _total(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss sum in float64; few positions at a time, so that loading does not peak here."""
    total = torch.zeros((), dtype=torch.float64)
    for some, wanted in zip(logits.split(16), targets.split(16), strict=True):
        wide = some.double()
        total += (torch.logsumexp(wide, -1) - wide.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)).sum()
    return total
