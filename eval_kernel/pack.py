"""One shard's text, ready to score: its windows, tokens, bytes, words and documents, apart from the corpus.

``Pack.of`` cuts it out of a corpus, ``encode`` and ``decode`` carry it from node to node: the same shard has the same
bytes, whoever made them, so that a pack is named by its digest. Scoring is ``evaluation``'s, making them ahead of time
``packer``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eval_kernel.corpus import Int32, Int64
from eval_kernel.errors import DataChanged
from eval_kernel.layout import Layout, Placed, windows_digest
from eval_kernel.plan import ShardPlan
from eval_kernel.windows import Prefix

#: Raised when the bytes change. A node refuses a pack of another format, and makes its own.
FORMAT = 1
_HEADER_BYTES = 1024
_PREFIXES = frozenset(prefix.value for prefix in Prefix)


@dataclass(frozen=True, slots=True)
class Pack:
    """Places are those of the corpus. Per token from ``base`` on: ``tokens`` its id, ``sizes`` its bytes, ``words``.

    ``offsets`` [documents + 1]: where the documents from ``first_document`` on begin. ``whole``: the documents whose
    every scored token is here.
    """

    windows: tuple[Placed, ...]
    base: int
    tokens: Int32
    sizes: Int32
    words: Int32
    first_document: int
    offsets: Int64
    whole: frozenset[int]

    @classmethod
    def of(cls, layout: Layout, shard: ShardPlan) -> Pack:
        """Cut a shard's text out of its corpus; where that is not the plan's, so is ``digest``."""
        windows = tuple(layout.windows(shard.first_window, shard.windows))
        corpus = layout.corpus
        base = min((w.start for w in windows), default=0)
        end = max((w.end for w in windows), default=0)
        documents = [layout.owner(w.scored) for w in windows[:1]] + [layout.owner(w.end - 1) for w in windows[-1:]]
        first, last = (documents[0], documents[-1] + 1) if documents else (0, 0)
        return cls(
            windows=windows,
            base=base,
            tokens=np.array(corpus.tokens[base:end]),
            sizes=np.array(corpus.bytes[base:end]),
            words=np.array(corpus.words[base:end]),
            first_document=first,
            offsets=np.array(corpus.offsets[first : last + 1]),
            whole=frozenset(layout.whole(shard.first_window, list(windows))) if windows and shard.lump else frozenset(),
        )

    @property
    def digest(self) -> str:
        """Digest over the windows and their tokens: that of the shard's plan, if this is its text."""
        return windows_digest(self.windows, self.tokens, self.base)

    def run(self, start: int, end: int) -> slice:
        """Where the tokens ``start .. end-1`` of the corpus lie in the arrays."""
        return slice(start - self.base, end - self.base)

    def parts(self, window: Placed) -> Iterator[tuple[int, int, int]]:
        """Yield (document, start, end) for the scored tokens of a window, in order."""
        start = window.scored
        while start < window.end:
            k = int(np.searchsorted(self.offsets, start, side="right")) - 1
            end = min(window.end, int(self.offsets[k + 1]))
            yield self.first_document + k, start, end
            start = end

    def within(self, document: int, token: int) -> int:
        """The number of a token within its document."""
        return token - int(self.offsets[document - self.first_document])

    def encode(self) -> bytes:
        """Return the bytes that stand for it."""
        header = {
            "format": FORMAT,
            "base": self.base,
            "first_document": self.first_document,
            "windows": len(self.windows),
            "tokens": len(self.tokens),
            "offsets": len(self.offsets),
            "whole": len(self.whole),
        }
        places = np.array([[w.start, w.end, w.scored, w.prefix.value] for w in self.windows], dtype="<i8")
        arrays = [
            *(places.reshape(-1, 4), self.offsets.astype("<i8"), np.array(sorted(self.whole), dtype="<i8")),
            *(array.astype("<i4") for array in (self.tokens, self.sizes, self.words)),
        ]
        line = json.dumps(header, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        return line + b"".join(array.tobytes() for array in arrays)

    @classmethod
    def decode(cls, data: bytes, shard: ShardPlan) -> Pack:
        """Build from ``encode``'s bytes. Raises ``DataChanged`` for what is no pack of this shard."""
        try:
            found = cls._decode(data)
            found._check(shard)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            raise DataChanged(f"shard {shard.index}: this is not its pack ({error}); make it anew") from None
        return found

    @classmethod
    def _decode(cls, data: bytes) -> Pack:
        line, _, _ = data[:_HEADER_BYTES].partition(b"\n")
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}, not {FORMAT}")
        sizes = [header[name] for name in ("windows", "offsets", "whole", "tokens")]
        if not all(type(value) is int and 0 <= value <= len(data) for value in sizes):
            raise ValueError("a count is wrong")
        windows, offsets, whole, tokens = sizes
        counts = [(windows * 4, "<i8"), (offsets, "<i8"), (whole, "<i8"), *[(tokens, "<i4")] * 3]
        at = len(line) + 1
        if len(data) != at + sum(count * int(kind[-1]) for count, kind in counts):
            raise ValueError("its length is wrong")
        arrays = []
        for count, kind in counts:
            arrays.append(np.frombuffer(data, dtype=kind, count=count, offset=at))
            at += count * int(kind[-1])
        places = arrays[0].reshape(-1, 4).tolist()
        if not all(row[3] in _PREFIXES for row in places):
            raise ValueError("a window has no such prefix")
        return cls(
            windows=tuple(Placed(a, b, c, Prefix(prefix)) for a, b, c, prefix in places),
            base=int(header["base"]),
            tokens=arrays[3].astype(np.int32),
            sizes=arrays[4].astype(np.int32),
            words=arrays[5].astype(np.int32),
            first_document=int(header["first_document"]),
            offsets=arrays[1].astype(np.int64),
            whole=frozenset(arrays[2].tolist()),
        )

    def _check(self, shard: ShardPlan) -> None:
        """Raise ``ValueError`` where it is not consistent, or not this shard's."""
        end = self.base + len(self.tokens)
        if not all(self.base <= w.start <= w.scored < w.end <= end for w in self.windows):
            raise ValueError("a window lies outside")
        if self.digest != shard.digest or len(self.windows) != shard.windows:
            raise ValueError("its tokens are not the plan's")
        last = self.first_document + len(self.offsets) - 1
        if (self.first_document, last) != (shard.first_document, shard.end_document):
            raise ValueError("its documents are not the plan's")
        if np.any(np.diff(self.offsets) < 0) or not (
            self.offsets[0] <= self.windows[0].scored and self.windows[-1].end <= self.offsets[-1]
        ):
            raise ValueError("its documents do not cover its tokens")
        scored = [self.run(w.scored, w.end) for w in self.windows]
        counts = tuple(sum(int(array[part].sum()) for part in scored) for array in (self.sizes, self.words))
        if counts != (shard.bytes, shard.words):
            raise ValueError("its bytes and words are not the plan's")
        if not self.whole <= frozenset(range(self.first_document, last)):
            raise ValueError("a document lies outside")


def name_of(data: bytes) -> str:
    """Return the name of a pack's bytes."""
    return hashlib.sha256(data).hexdigest()
