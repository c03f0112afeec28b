"""Channels, and the settings of channels and servers, in one table: sides cannot disagree (grpc "too many pings")."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from eval_kernel.errors import Unauthenticated
from fedeval.wire.credentials import TOKEN_KEY, TOKEN_PREFIX, Credentials, Source, local_source

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
#: What calls get to end when their connection is replaced: longer than a long poll.
RETIRE_SECONDS = 45.0

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


def open_channel(address: str, source: Source | None = None, server_name: str = "") -> Channel:
    """Open a channel that shows what ``source`` says: by default, what the listener published for this user.

    ``server_name`` is what the other side's certificate must name, where that is not the host of ``address``.

    Off this machine the source must have a certificate: without one each call raises ``Unauthenticated``.
    """
    return Channel(address, source or local_source(address), server_name)


def dynamic_credentials(
    configuration: Callable[[], grpc.ServerCertificateConfiguration], *, ask: bool
) -> grpc.ServerCredentials:
    """Return a server's credentials that follow ``configuration``, called for each handshake.

    ``ask``: whether a caller must show a certificate. ``configuration`` must return the same object for as long as
    nothing has changed: grpc is then told so. To tell it of a change that is none makes it exchange what handshakes on
    other threads are using, and some of its versions do not survive that.
    """
    told = configuration()
    lock = threading.Lock()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal told
        with lock:
            now = configuration()
            if now is told:
                return None
            told = now
            return now

    # None means that nothing has changed, which the stub does not know.
    return grpc.dynamic_ssl_server_credentials(told, changed, ask)  # type: ignore[arg-type]


class _Method:
    """A method of a ``Channel``: looks up credentials before each call, and calls on the channel that fits them."""

    def __init__(self, owner: Channel, kind: str, method: str, options: dict[str, Any]) -> None:
        self._owner = owner
        self._kind = kind
        self._method = method
        self._options = options
        self._generation = 0
        self._call: Any = None

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        channel, token = self._owner.present()
        if self._generation != self._owner.generation:
            self._generation = self._owner.generation
            self._call = getattr(channel, self._kind)(self._method, **self._options)
        metadata = tuple(metadata or ())
        if token:
            metadata += ((TOKEN_KEY, TOKEN_PREFIX + token),)
        return self._call(*args, metadata=metadata, **options)


class Channel(grpc.aio.Channel):
    """A channel whose credentials may change while it is open: later calls go over a new connection then.

    ``generation`` counts the connections. Calls that are running when one is replaced have ``RETIRE_SECONDS`` to end.
    """

    def __init__(self, address: str, source: Source, server_name: str = "") -> None:
        """Nothing is connected yet."""
        self._options = client_options()
        if server_name:
            self._options.append(("grpc.ssl_target_name_override", server_name))
        self.address = address
        self.generation = 0
        self._source = source
        self._inner: grpc.aio.Channel | None = None
        self._shown: Credentials | None = None
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._changed = asyncio.Event()

    def present(self) -> tuple[grpc.aio.Channel, str]:
        """Return the connection that fits the credentials of now, and the token. Raises ``Unauthenticated``."""
        credentials = self._source()
        shown = Credentials("", credentials.ca, credentials.certificate, credentials.key)
        if self._inner is None or shown != self._shown:
            fresh = self._open(shown)
            if self._inner is not None:
                task = asyncio.get_running_loop().create_task(_retire(self._inner))
                self._retired[task] = self._inner
                task.add_done_callback(lambda done: self._retired.pop(done, None))
            self._inner, self._shown = fresh, shown
            self.generation += 1
            self._changed.set()
            self._changed = asyncio.Event()
        return self._inner, credentials.token

    def _open(self, credentials: Credentials) -> grpc.aio.Channel:
        if credentials.ca:
            tls = grpc.ssl_channel_credentials(credentials.ca, credentials.key or None, credentials.certificate or None)
            return grpc.aio.secure_channel(self.address, tls, options=self._options)
        if is_loopback(self.address):
            return grpc.aio.insecure_channel(self.address, options=self._options)
        raise Unauthenticated(
            f"{self.address} is not on this machine, and plain connections stay on this machine: "
            "join the coordinator first, with the join string that `eval-coordinator token create` prints there"
        )

    async def replaced(self, generation: int) -> None:
        """Wait until a connection is no longer the present one."""
        while self.generation == generation:
            await self._changed.wait()

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.aio.Channel``."""
        return self._callable("unary_unary", method, args, options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.aio.Channel``."""
        return self._callable("unary_stream", method, args, options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.aio.Channel``."""
        return self._callable("stream_unary", method, args, options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """See ``grpc.aio.Channel``."""
        return self._callable("stream_stream", method, args, options)

    def _callable(self, kind: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> _Method:
        names = ("request_serializer", "response_deserializer", "_registered_method")
        return _Method(self, kind, method, {**dict(zip(names, args, strict=False)), **options})

    async def close(self, grace: float | None = None) -> None:
        """Close every connection."""
        retired = dict(self._retired)
        for task in retired:
            task.cancel()
        await asyncio.gather(*retired, return_exceptions=True)
        for channel in [*retired.values(), *([] if self._inner is None else [self._inner])]:
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See ``grpc.aio.Channel``."""
        return self.present()[0].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See ``grpc.aio.Channel``."""
        await self.present()[0].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See ``grpc.aio.Channel``."""
        await self.present()[0].channel_ready()

    async def __aenter__(self) -> Channel:
        """Return the channel itself."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close it."""
        await self.close()


async def _retire(channel: grpc.aio.Channel) -> None:
    """Close a connection once its last calls had their time."""
    await asyncio.sleep(RETIRE_SECONDS)
    await channel.close(None)
