"""The site's log: results that the relay has taken over from its agents and the coordinator has not acknowledged yet.

Append-only segments; one flush makes many records durable. A segment goes when each of its records was acknowledged,
so what is left over after a crash is sent again, some of it twice: delivery is idempotent. Every method blocks.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_kernel.errors import DirectoryUnusable

#: A segment that has grown beyond this gets no more records.
SEGMENT_BYTES = 4 << 20
_HEADER = struct.Struct("<4sII")  # magic, length of the payload, its CRC-32
_MAGIC = b"FER1"
#: A record's payload: length of the JSON head, the head, the result's bytes.
_LENGTH = struct.Struct("<I")
_MAX_PAYLOAD = 8 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """A result on its way up. ``number`` is given by the log; ``report`` is a serialised ReportRequest."""

    number: int
    coordinator: str  # identity of the coordinator it is for
    report: bytes


@dataclass(slots=True)
class _Segment:
    path: Path
    open: set[int]  # records that are not acknowledged
    size: int


class SiteLog:
    """The log in one directory."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read what an earlier life left over. Raises ``DirectoryUnusable``."""
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []
        self._file = -1
        self._next = 0
        self.leftovers: list[Record] = []
        self.damaged: list[str] = []  # one line for each segment that was damaged within, for the log
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for path in sorted(directory.glob("*.log")):
                self._recover(path)
        except OSError as error:
            raise DirectoryUnusable(
                f"the site's log {directory} cannot be read ({error.strerror}); repair the disk or use --state"
            ) from None

    @property
    def pending(self) -> int:
        """Records that were not acknowledged."""
        return sum(len(segment.open) for segment in self._segments)

    def append(self, results: Sequence[tuple[str, bytes]]) -> list[Record]:
        """Make results durable, each for the coordinator named with it. Raises ``OSError``: then none is promised."""
        records, data = [], bytearray()
        for number, (coordinator, report) in enumerate(results, start=self._next):
            records.append(Record(number, coordinator, report))
            data += _encode(coordinator, report)
        if self._file < 0:
            self._begin_segment()
        segment = self._segments[-1]
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
        except OSError:
            # What of it is on the disk is unknown: cut it off, and never write behind a record that may be torn.
            try:
                os.ftruncate(self._file, segment.size)
            finally:
                self._end_segment()
            raise
        segment.size += len(data)
        segment.open.update(record.number for record in records)
        self._next += len(records)
        if segment.size >= self._segment_bytes:
            self._end_segment()
        return records

    def acknowledged(self, numbers: Iterable[int]) -> None:
        """Forget records; not flushed, since one that comes back is sent as a duplicate. Raises ``OSError``."""
        gone = set(numbers)
        kept = []
        for segment in self._segments:
            segment.open -= gone
            current = self._file >= 0 and segment is self._segments[-1]
            if segment.open or (current and segment.size == 0):
                kept.append(segment)
                continue
            if current:
                self._end_segment()
            segment.path.unlink(missing_ok=True)
        self._segments = kept

    def close(self) -> None:
        """Close the file; what was not acknowledged stays."""
        self._end_segment()

    # ---------------------------------------------------------------- inside

    def _recover(self, path: Path) -> None:
        data = path.read_bytes()
        segment = _Segment(path, set(), len(data))
        position = 0
        while (found := _decode(data, position)) is not None:
            coordinator, report, position = found
            self.leftovers.append(Record(self._next, coordinator, report))
            segment.open.add(self._next)
            self._next += 1
        if position < len(data) and data.find(_MAGIC, position + 1) >= 0:
            # A torn end is what a crash leaves of a write that nobody was promised; records behind it are not.
            path.with_suffix(".damaged").write_bytes(data[position:])
            self.damaged.append(f"{path} is damaged at byte {position}; the rest is kept in {path.stem}.damaged")
        if segment.open:
            self._segments.append(segment)
        else:
            path.unlink()

    def _begin_segment(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        last = max((int(path.stem) for path in self.directory.glob("*.log")), default=0)
        path = self.directory / f"{last + 1:012d}.log"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError:
            os.close(file)
            raise
        self._file = file
        self._segments.append(_Segment(path, set(), 0))

    def _end_segment(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _encode(coordinator: str, report: bytes) -> bytes:
    head = json.dumps({"coordinator": coordinator}).encode()
    payload = _LENGTH.pack(len(head)) + head + report
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _decode(data: bytes, position: int) -> tuple[str, bytes, int] | None:
    """Return coordinator, result and the next position; ``None`` where no whole record begins."""
    if position + _HEADER.size > len(data):
        return None
    magic, length, checksum = _HEADER.unpack_from(data, position)
    begin = position + _HEADER.size
    payload = data[begin : begin + length]
    if magic != _MAGIC or length > _MAX_PAYLOAD or len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    (size,) = _LENGTH.unpack_from(payload)
    head = json.loads(payload[_LENGTH.size : _LENGTH.size + size])
    return head["coordinator"], payload[_LENGTH.size + size :], begin + length
