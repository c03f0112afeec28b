"""What a journal is to the rest of the coordinator, and how a fact becomes a row. Where rows go is each kind's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.core.facts import KINDS, Fact, ShardCommitted
from eval_kernel.errors import JournalCorrupt, JournalNewer


class Journal(Protocol):
    """An append-only list of facts. One process has it open at a time; one thread uses it at a time."""

    @property
    def identity(self) -> str:
        """A random UUID given to this journal at birth: agents never mix two."""

    @property
    def count(self) -> int:
        """How many facts are in it."""

    def facts(self) -> Iterator[Fact]:
        """Yield every fact in order, each one verified. Raises ``JournalCorrupt``, ``JournalNewer``."""

    def append(self, facts: Sequence[Fact]) -> None:
        """Write the facts, all of them or none, and return once they are durable.

        Raises ``JournalPaused`` for want of space or of an answer: the call may be repeated with the same facts, and
        writes them once. After any other error (``DirectoryUnusable``, ``JournalCorrupt``, ``LeadershipLost``) it is
        unknown what is on the disk: the process should end, and start again by replaying.
        """

    def close(self) -> None:
        """Let go of the journal; may be repeated."""


@dataclass(frozen=True, slots=True)
class Row:
    """A fact as it is stored. ``body`` is its JSON text; ``shard`` is set for commits only, to keep them unique."""

    kind: str
    job: str
    shard: int | None
    body: str


#: A row as it is stored: its number (from 1), what it says, its checksum.
Stored = tuple[int, Row, bytes]


def encode(fact: Fact) -> Row:
    """Return the row of a fact; raises ``ValueError`` for a number that JSON does not have."""
    # ASCII only, so that any text an agent sends can be stored; floats by repr, which is exact.
    body = json.dumps(fact.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return Row(fact.kind, fact.job, fact.shard if isinstance(fact, ShardCommitted) else None, body)


def decode(row: Row, where: str) -> Fact:
    """Return the fact of a row; ``where`` begins the message of ``JournalNewer`` and ``JournalCorrupt``."""
    cls = KINDS.get(row.kind)
    if cls is None:
        raise JournalNewer(f"{where} is a {row.kind!r}, which this version does not know; install the newer one again")
    try:
        fact = cls.from_json(row.job, json.loads(row.body))
    except (KeyError, TypeError, ValueError) as error:
        raise JournalCorrupt(
            f"{where} is no {row.kind!r} ({error!r}); restore the data directory from a backup"
        ) from None
    if isinstance(fact, ShardCommitted) and fact.shard != row.shard:
        raise JournalCorrupt(
            f"{where} commits shard {fact.shard} under the number {row.shard}; restore it from a backup"
        )
    return fact


def seed_of(identity: str) -> bytes:
    """What the first row's checksum is chained to."""
    return hashlib.sha256(identity.encode()).digest()


def chained(previous: bytes, seq: int, row: Row) -> bytes:
    """Return the checksum of a row: over the one before it and all that the row says."""
    content = json.dumps([seq, row.kind, row.job, row.body], separators=(",", ":")).encode()
    return hashlib.sha256(previous + content).digest()


def verified(rows: Iterable[Stored], identity: str, journal: object, remedy: str) -> Iterator[Fact]:
    """Yield the facts of stored rows in order, each one's checksum verified.

    ``journal`` names it in the messages of ``JournalCorrupt`` and ``JournalNewer``, ``remedy`` says what to do.
    """
    expected, previous = 1, seed_of(identity)
    for seq, row, checksum in rows:
        if seq != expected:
            raise JournalCorrupt(f"{journal}: row {expected} is missing; {remedy}")
        previous = chained(previous, seq, row)
        if previous != checksum:
            raise JournalCorrupt(f"{journal}: row {seq} fails its checksum; {remedy}")
        yield decode(row, f"{journal}: row {seq}")
        expected += 1
