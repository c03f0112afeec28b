"""Standing by: a coordinator that waits, on a PostgreSQL journal that another one leads, until it can take over.

Who leads is the journal's to say; what is done then is serve's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from eval_kernel.errors import FedevalError, JournalPaused, JournalRefused

if TYPE_CHECKING:
    from coordinator.journal.leadership import Election, Leader
    from coordinator.journal.postgres import PostgresJournal

#: Seconds between two attempts to lead.
POLL_SECONDS = 0.5

_log = structlog.get_logger("coordinator")


async def stand_by(url: str, stop: asyncio.Event) -> tuple[PostgresJournal | None, bool]:
    """Return the journal once this coordinator leads, and whether it had to wait; no journal when told to stop.

    Raises at once what is wrong with the first attempt (``DriverMissing``, ``ConfigError``, ``JournalUnreachable``,
    ``JournalRefused``); later only what trying again cannot mend.
    """
    # Only here: the driver is an extra.
    from coordinator.journal.database import Database
    from coordinator.journal.leadership import Election
    from coordinator.journal.postgres import lead

    database = Database(url)
    election = Election(database)
    begin = time.monotonic()
    tell = _Teller(election, str(database))
    waited = False
    try:
        while not stop.is_set():
            try:
                leadership = await asyncio.to_thread(election.attempt)
                if leadership is not None:
                    journal = await asyncio.to_thread(lead, leadership)
                    seconds = round(time.monotonic() - begin, 3)
                    _log.info("leading", journal=str(database), epoch=leadership.epoch, after_seconds=seconds)
                    return journal, waited
                tell.standing()
            except (JournalPaused, JournalRefused) as error:
                if not waited:
                    raise
                tell.trouble(error)
            waited = True
            await _wait(stop, POLL_SECONDS)
        _log.info("stopped", journal=str(database))
        return None, waited
    finally:
        election.close()


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Wait for so long, or until told to stop."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


class _Teller:
    """Logs what is new to one who stands by, and nothing twice."""

    def __init__(self, election: Election, journal: str) -> None:
        """Nothing was told yet."""
        self._election = election
        self._journal = journal
        self._told = ""
        self._ended = 0

    def standing(self) -> None:
        """Another one leads."""
        leader = self._election.leader
        if self._election.ended != self._ended:
            self._ended = self._election.ended
            _log.warning("ended the session of a leader that stood still", journal=self._journal, leader=_name(leader))
        elif self._told != _name(leader):
            self._told = _name(leader)
            _log.info("standing by", journal=self._journal, leader=_name(leader))

    def trouble(self, error: FedevalError) -> None:
        """Nothing can be known at present."""
        if self._told != error.code:
            self._told = error.code
            _log.warning("standing by: the journal does not answer", code=error.code, reason=str(error))


def _name(leader: Leader | None) -> str:
    return "unknown" if leader is None else f"{leader.holder}, epoch {leader.epoch}"
