"""Two ways to wait that the agent's loops share: for a condition that others change, for the first of some tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Pulse:
    """Wakes whoever waits. Check the condition, then wait, without an ``await`` in between: nothing is missed."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next ``fire``."""
        await self._event.wait()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for a condition; return whether it came within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self.wait()
        except TimeoutError:
            return condition()
        return True


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    """Run all until the first ends or fails; end the others, and raise its error if there is one."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
