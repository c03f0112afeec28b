"""Hidden states to losses: the head in tiles of the vocabulary, so that logits never leave the processor's cache.

Per tile the logits' maximum and the sum of their exponentials are kept, and the target's logit where the tile has it;
tiles are put together in float64. Positions are cut into blocks from the row's first scored one, so a position's loss
does not depend on other rows; those of short rows fill whole blocks together, for the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eval_kernel import kernels

#: Positions of one block.
BLOCK = 128
#: log2(e) as the sum of two float32: one alone is off by 1.3e-8, which shifts every loss the same way.
LOG2E = (1.4426950216293335, 1.9259629911e-08)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the model does to logits after the product: times ``factor``, then capped smoothly at +-``cap``."""

    factor: float = 1.0
    cap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits as the model means them."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


#: By tile and position: the largest logit, and the sum of exponentials below it; by position: the target's logit, or
#: NaN where no tile has it.
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Head:
    """The output layer of a model, in tiles."""

    def __init__(self, layer: torch.nn.Module, shape: Shape, first: int = 0) -> None:
        """``first``: the token that the layer's first output stands for, where it has only a part of the vocabulary."""
        self._tiles = kernels.tiles_of(layer)
        self._shape = shape
        self._first = first

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return all logits [positions, vocabulary] in the compute dtype."""
        return self._shape.apply(torch.cat([tile(states) for tile in self._tiles], dim=-1))

    def losses(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of each position in nats, float64: logsumexp over float32 logits minus the target's logit.

        No loss is below zero; where the difference rounds to less, it is zero. NaN stays NaN.
        """
        return combined(self.parts(states, targets))

    def losses_by_row(self, states: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As ``losses``, for the targets of several rows; ``states`` may go on behind them."""
        return by_row(combined(self.parts(states, laid_out(states, targets))), targets)

    def parts(self, states: torch.Tensor, targets: torch.Tensor) -> Parts:
        """Return what each position's loss is made of, tile by tile."""
        count, device = len(targets), states.device
        tops = torch.empty(len(self._tiles), count, device=device)
        sums = torch.empty(len(self._tiles), count, device=device)
        picked = torch.full((count,), float("nan"), device=device)
        first = self._first
        for index, cut in enumerate(self._tiles):
            tile = kernels.opened(cut, states.dtype)
            for start in range(0, count, BLOCK):
                part = slice(start, start + BLOCK)
                logits = self._shape.apply(tile(states[part])).float()
                here = targets[part] - first
                rows = ((here >= 0) & (here < logits.shape[1])).nonzero().squeeze(1)
                picked[start + rows] = logits[rows, here[rows]]
                top = logits.amax(-1, keepdim=True)
                tops[index, part] = top.squeeze(1)
                sums[index, part] = _sum_of_exponentials(logits, top)
            first += logits.shape[1]
        return tops, sums, picked


def laid_out(states: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """The targets of several rows, one after the other, and token 0 for each state behind them."""
    every = torch.zeros(len(states), dtype=torch.int64)
    joined = torch.cat(list(targets))
    every[: len(joined)] = joined
    return every


def by_row(losses: torch.Tensor, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Cut losses into those of each row; what is behind them goes."""
    sizes = [len(wanted) for wanted in targets]
    return list(losses[: sum(sizes)].split(sizes))


def combined(parts: Parts) -> torch.Tensor:
    """Return the losses, float64, from the parts of all tiles of the vocabulary."""
    tops, sums, picked = parts
    total = torch.logsumexp(tops.double() + sums.double().log(), 0)
    return (total - picked.double()).clamp_min_(0.0)


def _sum_of_exponentials(logits: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """``exp(logits - top).sum(-1)`` by powers of two: torch's ``exp`` is three to five times slower than ``exp2``."""
    below = logits.sub_(top)
    powers = (below * LOG2E[0]).add_(below, alpha=LOG2E[1]).exp2_()
    return powers.sum(-1)
