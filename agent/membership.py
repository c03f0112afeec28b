"""What an agent got by joining: a file in its state directory, and the task that keeps its certificate young."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedeval.wire import credentials
from fedeval.wire.channel import Channel
from fedeval.wire.invitation import Invitation
from fedeval.wire.joining import Membership, join, renew
from fedeval.wire.pki import date

from agent.logs import Logger
from eval_kernel.errors import AccessError, ConfigError, DirectoryUnusable, FedevalError, Unauthenticated

FILE = "membership.json"
#: The part of its life after which a certificate is renewed, and by how much that differs from node to node.
RENEW_AFTER, JITTER = 2 / 3, 0.05
#: After news of other roots nodes renew within so many seconds, not all at once; and the pause after a failure at most.
SPREAD_SECONDS, RETRY_SECONDS = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A membership and when it was received (seconds since the epoch), by which its age is measured."""

    membership: Membership
    received: float

    @property
    def life(self) -> float:
        """How long the certificate is good from its receipt on, in seconds."""
        return max(self.membership.certificate.expires - self.received, 0.0)


def path_in(state: Path) -> Path:
    """Return where a state directory keeps its membership."""
    return state / FILE


def load(path: Path) -> Joined | None:
    """Read a membership; ``None`` where this node has not joined. Raises ``ConfigError``."""
    try:
        changed = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); name another directory with --state") from None
    value = credentials.read(path)
    return Joined(Membership.from_json(value), float(value.get("received", changed)))


def store(path: Path, membership: Membership) -> None:
    """Write a membership for this user's eyes only. Raises ``DirectoryUnusable``."""
    try:
        credentials.write(path, {**membership.to_json(), "received": time.time()})
    except OSError as error:
        raise DirectoryUnusable(
            f"cannot write {path} ({error.strerror}), where this node's certificate is kept; name another directory "
            "with --state"
        ) from None


def join_once(text: str, path: Path, name: str) -> Membership:
    """Join with a join string and keep what that gives. Raises ``ConfigError`` where this node has joined already.

    Raises ``Unreachable``, ``CaMismatch``, ``PlainText``, ``JoinRefused`` and ``DirectoryUnusable`` too.
    """
    invitation = Invitation.parse(text)
    if invitation.client:
        raise ConfigError("this join string is for a person: use it with `eval-coordinator join`")
    earlier = load(path)
    if earlier is not None and earlier.membership.certificate.expires > time.time():
        known = earlier.membership
        raise ConfigError(
            f"this node has joined {known.address} as {known.owner} already; to join anew remove {path}, or give the "
            "agent another --name or --state"
        )
    membership = asyncio.run(join(invitation, name))
    store(path, membership)
    return membership


class Keeper:
    """Renews the certificate at two thirds of its life, or when the coordinator trusts other roots than this node."""

    def __init__(self, path: Path, channel: Channel, log: Logger) -> None:
        """``channel`` reaches the coordinator, or a relay of the site. Raises ``ConfigError``."""
        joined = load(path)
        if joined is None:
            raise ConfigError(f"{path} is missing: this node has not joined a coordinator")
        self._path = path
        self._joined = joined
        self._channel = channel
        self._log = log
        self._trust = joined.membership.trust
        self._news = asyncio.Event()

    def heard(self, trust: str) -> None:
        """Take note of the roots that the coordinator trusts; ``trust`` is "" where it says nothing of them."""
        if trust and trust != self._trust:
            self._news.set()

    async def run(self) -> None:
        """Renew whenever it is time, until cancelled. Raises the ``AccessError`` that no other try would change."""
        while True:
            await self._due()
            await self._until_renewed()

    async def _due(self) -> None:
        life = self._joined.life
        due = self._joined.received + life * (RENEW_AFTER + random.uniform(-JITTER, JITTER))
        try:
            async with asyncio.timeout(max(due - time.time(), 0.0)):
                await self._news.wait()
        except TimeoutError:
            return
        self._log.info("the coordinator's CA changes: the certificate is renewed")
        await asyncio.sleep(random.uniform(0, min(SPREAD_SECONDS, life / 50)))

    async def _until_renewed(self) -> None:
        pause = 0.2
        refused = False
        while True:
            try:
                membership = await renew(self._channel, self._joined.membership)
                break
            except AccessError as error:
                if refused or not isinstance(error, Unauthenticated):
                    raise
                refused = True
            except FedevalError as error:
                self._log.warning("the certificate could not be renewed yet", reason=str(error))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, RETRY_SECONDS, max(self._joined.life / 20, 0.2))
        await asyncio.to_thread(store, self._path, membership)
        self._joined = Joined(membership, time.time())
        self._trust = membership.trust
        self._news.clear()
        self._channel.present()  # the new connection begins now
        self._log.info("the certificate was renewed", good_until=date(membership.certificate.expires))


def source(address: str, path: Path | None) -> Callable[[], credentials.Credentials]:
    """Return the source of what an agent shows: its membership, or what the listener published for its user."""
    return credentials.local_source(address) if path is None else credentials.FileSource(path)
