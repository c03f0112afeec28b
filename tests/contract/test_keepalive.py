"""Client and server settings agree about pings; a table whose option names grpc ignores would not show it otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc.aio
import pytest
from fedeval.wire.channel import KEEPALIVE_MS, client_options, server_options
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

#: Both tables' intervals divided by this: what takes a minute in the field takes three seconds here.
SPEED = 20


def faster(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the options with every interval of keep-alive divided by ``SPEED``."""
    return [
        (name, value // SPEED if name.endswith(("_time_ms", "_timeout_ms", "_without_data_ms")) else value)
        for name, value in options
    ]


async def drops_of_an_idle_channel(server: list[tuple[str, Any]], client: list[tuple[str, Any]]) -> int:
    """Return how often an idle channel was cut during six ping intervals."""
    service = grpc.aio.server(options=server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), service)
    port = service.add_insecure_port("127.0.0.1:0")
    await service.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client)
    try:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        state = channel.get_state()
        try:
            await asyncio.wait_for(channel.wait_for_state_change(state), 6 * KEEPALIVE_MS / SPEED / 1000)
        except TimeoutError:
            return 0
        return 1
    finally:
        await channel.close()
        await service.stop(0)


def test_an_idle_agent_that_pings_as_it_should_is_not_cut_off() -> None:
    """The server allows the pings that the shared table makes clients send."""
    drops = asyncio.run(drops_of_an_idle_channel(faster(server_options()), faster(client_options())))

    assert 0 == drops


def test_a_server_without_the_table_cuts_such_an_agent_off() -> None:
    """grpc's own defaults refuse these pings, so the test above can fail."""
    drops = asyncio.run(drops_of_an_idle_channel([], faster(client_options())))

    assert 1 == drops


@pytest.mark.parametrize("side", [client_options, server_options])
def test_option_names_are_not_given_twice(side: Any) -> None:
    """Each option stands once in its table."""
    names = [name for name, _ in side()]

    assert sorted(set(names)) == sorted(names)
