"""A journal in memory that can be made to block, to be full, or to fail: the runtime's promises are tested with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from coordinator.core.facts import Fact


class FaultyJournal:
    """Keeps facts in a list. ``gate`` closed makes writes block; ``errors`` are raised one per write, first to last."""

    def __init__(self) -> None:
        self.batches: list[tuple[Fact, ...]] = []
        self.attempts: list[tuple[Fact, ...]] = []
        self.errors: list[Exception] = []
        self.always: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)  # released once per attempt, before the gate

    @property
    def identity(self) -> str:
        return "a faulty journal"

    @property
    def count(self) -> int:
        return len(self.written)

    def facts(self) -> Iterator[Fact]:
        return iter(self.written)

    @property
    def written(self) -> list[Fact]:
        return [fact for batch in self.batches for fact in batch]

    def append(self, facts: Sequence[Fact]) -> None:
        self.attempts.append(tuple(facts))
        self.entered.release()
        assert self.gate.wait(30), "the test never opened the gate"
        if self.errors:
            raise self.errors.pop(0)
        if self.always is not None:
            raise self.always
        self.batches.append(tuple(facts))
