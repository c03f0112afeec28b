"""Channel and server settings, in one table used by both sides: they cannot disagree (grpc "too many pings")."""

from __future__ import annotations

import ipaddress
from typing import Any

import grpc.aio

#: The protocol versions this code speaks. A change that an older peer would misread raises the maximum.
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

#: Largest message either side accepts. Plans and reports are cut to fit; results are far smaller.
MAX_MESSAGE_BYTES = 4 << 20
#: Shards per PlanPart: 10,000 rows of about 130 bytes stay well below MAX_MESSAGE_BYTES.
PLAN_PART_SHARDS = 10_000
#: Results an agent may have unacknowledged at a time.
REPORT_CREDIT = 64

KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
#: Any ping, such as those that measure the line: while one is unanswered, gRPC sends no keep-alive, and its own default
#: of a minute would be what finds a dead connection out.
PING_TIMEOUT_MS = 20_000

Options = list[tuple[str, Any]]


def client_options() -> Options:
    """Options of every client channel."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),  # each channel its own connection, and so its own share of streams
        (
            "grpc.max_receive_message_length",
            MAX_MESSAGE_BYTES * 16,
        ),  # a report of many documents comes in one piece
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def server_options() -> Options:
    """Options of the coordinator's server. A pinging client at ``KEEPALIVE_MS`` is well inside what they allow."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES * 16),
        ("grpc.max_concurrent_streams", 64),
        ("grpc.so_reuseport", 0),  # two coordinators on one port would share its traffic without a word
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]


def is_loopback(address: str) -> bool:
    """Whether ``host:port`` names this machine only; a name other than localhost counts as not."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def insecure_channel(address: str) -> grpc.aio.Channel:
    """Open a plain channel; only loopback addresses are allowed. Raises ``ValueError`` for others."""
    if not is_loopback(address):
        raise ValueError(f"{address} is not a loopback address: plain connections stay on this machine")
    return grpc.aio.insecure_channel(address, options=client_options())
