"""Causal attention over one row, a block of queries at a time against the keys up to it: the masked rest is left out.

Scores exist for one block only, so they stay in the cache. Heads that share keys are multiplied together.
"""

from __future__ import annotations

from functools import cache

import torch


class Keys:
    """Keys and values of one layer for one row, [key heads, length, width]: filled from the left, block by block."""

    def __init__(self, heads: int, length: int, width: int, dtype: torch.dtype) -> None:
        self.keys = torch.empty(heads, length, width, dtype=dtype)
        self.values = torch.empty(heads, length, width, dtype=dtype)

    def put(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store [positions, heads, width] from position ``start`` on, rounded to the store's dtype."""
        end = start + keys.shape[0]
        self.keys[:, start:end].copy_(keys.transpose(0, 1))
        self.values[:, start:end].copy_(values.transpose(0, 1))

    def attend(self, start: int, queries: torch.Tensor) -> torch.Tensor:
        """Return [positions, query heads * width] for queries [positions, query heads, width] from ``start`` on.

        The queries are scaled already; keys up to the last of them must be there.
        """
        positions, heads, width = queries.shape
        shared = self.keys.shape[0]
        group = heads // shared
        end = start + positions
        dtype = self.keys.dtype
        ours = torch.empty(shared, group, positions, width, dtype=dtype)
        ours.copy_(queries.view(positions, shared, group, width).permute(1, 2, 0, 3))
        scores = torch.bmm(ours.view(shared, group * positions, width), self.keys[:, :end].transpose(1, 2))
        scores.view(shared, group, positions, end)[..., start:].add_(_later(positions, dtype))
        mixed = torch.bmm(torch.softmax(scores, -1), self.values[:, :end])
        return mixed.view(shared, group, positions, width).permute(2, 0, 1, 3).reshape(positions, heads * width)


@cache
def _later(positions: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask of a block against itself: minus infinity above the diagonal."""
    return torch.full((positions, positions), float("-inf"), dtype=dtype).triu(1)
