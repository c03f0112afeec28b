"""What a relay serves to relays below it, without a network."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from typing import Any, cast

from fedeval.v1 import agents_pb2, relay_pb2

from agent.relay.service import Context, Forwarding, SiteRelayService


class Upstream:
    """Never breaks, and answers nothing."""

    coordinator, generation = "above", 1

    async def ready(self) -> None:
        """It is."""

    async def broken(self, generation: int) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()


class Endless:
    """A forwarding whose calls wait for ever."""

    def __init__(self) -> None:
        self.upstream = Upstream()
        self.begun = 0

    async def register(self, request: Any) -> None:
        """Count, and wait."""
        self.begun += 1
        await asyncio.Event().wait()

    acquire = renew = register


class Stream:
    """A context that takes what is written."""

    def set_compression(self, _: Any) -> None:
        """Nothing is compressed."""

    async def write(self, _: relay_pb2.RelayResponse) -> None:
        """Nobody reads it."""


CALLS = [
    relay_pb2.RelayCall(id=1, register=agents_pb2.RegisterRequest()),
    relay_pb2.RelayCall(id=2, acquire=agents_pb2.AcquireRequest()),
    relay_pb2.RelayCall(id=3, renew=agents_pb2.RenewRequest()),
    *(relay_pb2.RelayCall(id=10 + number, cancel=number) for number in (1, 2, 3)),
]


def test_calls_that_are_called_off_before_they_begin_leave_nothing_unawaited() -> None:
    """A message may hold calls and their ends: the calls never run, and no coroutine is left over."""
    forwarding = Endless()

    async def requests() -> AsyncIterator[relay_pb2.RelayRequest]:
        yield relay_pb2.RelayRequest(calls=CALLS)

    async def main() -> None:
        service = SiteRelayService(cast(Forwarding, forwarding))
        async with asyncio.timeout(10):
            await service.Relay(requests(), cast(Context, Stream()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()

    assert 0 == forwarding.begun
    assert [] == [str(warning.message) for warning in caught]
