"""Causal attention over one row, a block of queries at a time against the keys up to it: the masked rest is left out.

Scores exist for one block only, so they stay in the cache. Heads that share keys are multiplied together.
"""

from __future__ import annotations

from functools import cache

import torch

#: Queries that are multiplied together: their scores against a thousand keys stay in the second-level cache.
BLOCK = 128


class Attention:
    """Keys and values of one layer for one row, filled from the left, and what it takes to attend to them.

    One object serves all layers of a row in turn: what is beyond the last position put in is never read.
    """

    def __init__(self, heads: int, shared: int, length: int, width: int, dtype: torch.dtype) -> None:
        self.heads, self.shared, self.width = heads, shared, width
        self._keys = torch.empty(shared, length, width, dtype=dtype)
        self._values = torch.empty(shared, length, width, dtype=dtype)
        # Fresh memory costs more than the products that are written into it: it has to be mapped and zeroed.
        size = heads * min(BLOCK, length) * length
        self._scores, self._weights = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)

    def put(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys [shared heads, positions, width] and values [positions, shared heads, width] from ``start`` on."""
        end = start + keys.shape[1]
        self._keys[:, start:end].copy_(keys)
        self._values[:, start:end].copy_(values.transpose(0, 1))

    def attend(self, start: int, queries: torch.Tensor) -> torch.Tensor:
        """Return [positions, heads * width] for scaled queries [heads, positions, width] from ``start`` on.

        Keys and values up to the last of them must be there.
        """
        count = queries.shape[1]
        out = torch.empty(count, self.heads * self.width, dtype=self._keys.dtype)
        for first in range(0, count, BLOCK):
            part = slice(first, min(count, first + BLOCK))
            self._block(start + first, queries[:, part], out[part])
        return out

    def _block(self, start: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        positions, group = queries.shape[1], self.heads // self.shared
        end = start + positions
        ours = torch.empty(self.shared, group * positions, self.width, dtype=self._keys.dtype)
        ours.view(queries.shape).copy_(queries)
        shape = (self.shared, group * positions, end)
        scores, weights = (x[: self.heads * positions * end].view(shape) for x in (self._scores, self._weights))
        torch.bmm(ours, self._keys[:, :end].transpose(1, 2), out=scores)
        scores.view(self.shared, group, positions, end)[..., start:].add_(_later(positions, scores.dtype))
        torch.softmax(scores, -1, out=weights)
        torch.bmm(weights, self._values[:, :end], out=ours)
        out.view(positions, self.heads, self.width).copy_(ours.view(self.heads, positions, self.width).transpose(0, 1))


@cache
def _later(positions: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a block against itself: minus infinity above the diagonal."""
    return torch.full((positions, positions), float("-inf"), dtype=dtype).triu(1)
