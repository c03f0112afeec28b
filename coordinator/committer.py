"""Group commit: facts go to the journal in the order decided, many at a time; whoever waits learns when they are safe.

One thread writes, so that the event loop never waits for a disk. What facts mean, and who may be told what
once they are durable, is the runtime's affair.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from coordinator.core.facts import Fact, Facts
from eval_kernel.errors import JournalPaused, Unavailable

#: Facts written in one transaction, unless one call of the scheduler made more.
MAX_BATCH = 256
#: Facts that may wait to be written before whoever would decide more has to wait too.
MAX_PENDING = 4096


class Appendable(Protocol):
    """The part of a journal that is needed here."""

    def append(self, facts: Sequence[Fact]) -> object:
        """Write the facts, all or none, and return once they are durable."""


class Committer:
    """Writes facts behind the scheduler's back and keeps count: fact number n is durable once n facts are.

    ``on_trouble`` is called with the error when the journal cannot be written at present, and with ``None`` when it
    works again.
    """

    def __init__(
        self,
        journal: Appendable,
        *,
        retry_seconds: float,
        barrier_seconds: float,
        on_trouble: Callable[[JournalPaused | None], None] = lambda error: None,
    ) -> None:
        """Remember the journal; ``run`` must be going for anything to be written."""
        self._journal = journal
        self._retry_seconds = retry_seconds
        self._barrier_seconds = barrier_seconds
        self._on_trouble = on_trouble
        self._pending: deque[Facts] = deque()
        self._decided = 0
        self._durable = 0
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._trouble: JournalPaused | None = None
        self._fatal: Exception | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    @property
    def decided(self) -> int:
        """Number of the last fact put here."""
        return self._decided

    @property
    def durable(self) -> int:
        """Number of the last fact that is safe."""
        return self._durable

    @property
    def trouble(self) -> JournalPaused | None:
        """Why nothing is written at present, or ``None``."""
        return self._trouble

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be written that nothing more should be decided."""
        return self._decided - self._durable >= MAX_PENDING

    def put(self, facts: Facts) -> int:
        """Take facts to be written together, after all earlier ones; return the number of the last."""
        if facts:
            self._pending.append(facts)
            self._decided += len(facts)
            self._work.set()
        return self._decided

    async def room(self) -> None:
        """Wait until more may be decided. Raises ``Unavailable`` when that takes too long."""
        try:
            async with asyncio.timeout(self._barrier_seconds):
                while self.crowded:
                    self._raise_if_dead()
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            raise self._unavailable() from None

    async def barrier(self, number: int | None = None, *, patient: bool = False) -> None:
        """Wait until fact ``number`` (default: everything decided so far) is durable.

        Raises ``Unavailable`` after ``barrier_seconds`` unless ``patient``, and at once when the journal has failed.
        """
        number = self._decided if number is None else number
        if number <= self._durable:
            return
        self._raise_if_dead()
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = number
        try:
            async with asyncio.timeout(None if patient else self._barrier_seconds):
                await future
        except TimeoutError:
            raise self._unavailable() from None
        finally:
            self._waiting.pop(future, None)

    async def run(self) -> None:
        """Write until cancelled. Raises the journal's error when it is another than ``JournalPaused``."""
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                while self._pending:
                    await self._write(self._take())
        except Exception as error:  # whatever it is, nothing can be promised from here on
            self._fatal = error
            for future in self._waiting:
                if not future.done():
                    future.set_exception(self._unavailable())
            self._progress.set()
            raise

    async def close(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for what was decided; return whether all of it is durable.

        Facts left over were acknowledged to nobody.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.barrier(patient=True)
        except (TimeoutError, Unavailable):
            return False
        return True

    def shutdown(self) -> None:
        """Let the thread end its write and go; after that the journal may be closed."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> list[Fact]:
        """Return the next batch: whole decisions, about MAX_BATCH facts."""
        batch: list[Fact] = list(self._pending.popleft())
        while self._pending and len(batch) + len(self._pending[0]) <= MAX_BATCH:
            batch.extend(self._pending.popleft())
        return batch

    async def _write(self, batch: list[Fact]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._thread, self._journal.append, batch)
                break
            except JournalPaused as error:
                if self._trouble is None:
                    self._trouble = error
                    self._on_trouble(error)
                await asyncio.sleep(self._retry_seconds)
        if self._trouble is not None:
            self._trouble = None
            self._on_trouble(None)
        self._durable += len(batch)
        self._progress.set()
        for future, number in list(self._waiting.items()):
            if number <= self._durable and not future.done():
                future.set_result(None)

    def _raise_if_dead(self) -> None:
        if self._fatal is not None:
            raise self._unavailable()

    def _unavailable(self) -> Unavailable:
        if self._fatal is not None:
            return Unavailable(f"the coordinator cannot go on: {self._fatal}")
        if self._trouble is not None:
            return Unavailable(f"the coordinator cannot write its journal: {self._trouble}")
        return Unavailable(f"the coordinator's journal has not answered for {self._barrier_seconds:g} seconds")
