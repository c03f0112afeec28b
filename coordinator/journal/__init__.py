"""The record of what was decided, to be replayed after a restart. Group commit and retrying are left to the runtime."""

from coordinator.journal.base import Journal
from coordinator.journal.memory import MemoryJournal
from coordinator.journal.sqlite import SqliteJournal, open_journal

__all__ = ["Journal", "MemoryJournal", "SqliteJournal", "open_journal"]
