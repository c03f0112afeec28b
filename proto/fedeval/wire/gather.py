"""Gathers what goes out in one direction of a relay's stream, so that many small things travel in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

#: How long the first item waits for company, and how much may travel in one message (but a single item may be larger).
GATHER_SECONDS = 0.05
GATHER_ITEMS, GATHER_BYTES = 512, 512 << 10


class Sized(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:
        """Return the size on the wire."""


_T = TypeVar("_T", bound=Sized)


class Gatherer(Generic[_T]):
    """A queue whose consumer takes many items at a time."""

    def __init__(self, seconds: float = GATHER_SECONDS) -> None:
        """Begin empty."""
        self._seconds = seconds
        self._items: list[_T] = []
        self._some = asyncio.Event()

    def put(self, item: _T) -> None:
        """Add an item, after those before it."""
        self._items.append(item)
        self._some.set()

    async def run(self, write: Callable[[Sequence[_T]], Awaitable[None]]) -> None:
        """Hand batches to ``write``, in order, until cancelled or ``write`` raises."""
        while True:
            await self._some.wait()
            if len(self._items) < GATHER_ITEMS:
                await asyncio.sleep(self._seconds)
            items, self._items = self._items, []
            self._some.clear()
            batch: list[_T] = []
            size = 0
            for item in items:
                weight = item.ByteSize()
                if batch and (len(batch) >= GATHER_ITEMS or size + weight > GATHER_BYTES):
                    await write(batch)
                    batch, size = [], 0
                batch.append(item)
                size += weight
            await write(batch)
