"""A corpus cut into windows and shards by a rule: the plan's arithmetic on real lengths. No torch, no model.

The same corpus and rule give the same windows, shards and digests wherever they are computed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eval_kernel.corpus import Corpus
from eval_kernel.gridsum import MAX_SHARD_TOKENS
from eval_kernel.plan import MAX_ROWS, ShardPlan
from eval_kernel.windows import Prefix, Window, WindowRule


@dataclass(frozen=True, slots=True)
class Placed:
    """A window in corpus coordinates: tokens ``start .. end-1``, of which ``scored .. end-1`` are scored."""

    start: int
    end: int
    scored: int
    prefix: Prefix


class Layout:
    """The windows of a corpus, numbered from 0 in the order of their text."""

    def __init__(self, corpus: Corpus, rule: WindowRule, max_windows: int | None = None) -> None:
        self.corpus, self.rule = corpus, rule
        counts: dict[int, int] = {}  # windows of a stream depend on its length alone, and lengths repeat
        firsts, total = [], 0
        for index in range(corpus.num_streams):
            start, end = corpus.stream(index)
            length = end - start
            if length not in counts:
                counts[length] = sum(1 for _ in rule.windows(length))
            firsts.append(total)
            total += counts[length]
        self._firsts = firsts
        self.num_windows = total if max_windows is None else min(total, max_windows)

    def windows(self, first: int, count: int) -> Iterator[Placed]:
        """Yield ``count`` windows from window ``first`` on."""
        index = bisect_right(self._firsts, first) - 1
        skip = first - self._firsts[index] if index >= 0 else 0
        while count > 0 and index < self.corpus.num_streams:
            base, end = self.corpus.stream(index)
            for window in self.rule.windows(end - base):
                if skip:
                    skip -= 1
                    continue
                if count == 0:
                    return
                count -= 1
                yield _place(window, base)
            index += 1

    def owner(self, token: int) -> int:
        """The document a token belongs to."""
        return int(np.searchsorted(self.corpus.offsets, token, side="right")) - 1

    def parts(self, window: Placed) -> Iterator[tuple[int, int, int]]:
        """Yield (document, start, end) for the scored tokens of a window, in order."""
        start = window.scored
        while start < window.end:
            document = self.owner(start)
            end = min(window.end, int(self.corpus.offsets[document + 1]))
            yield document, start, end
            start = end

    def shards(self, input_tokens: int) -> Iterator[ShardPlan]:
        """Yield the shards: consecutive windows, closed once ``input_tokens`` tokens of them go through the model."""
        taken: list[Placed] = []
        first = index = cost = scored = 0
        for number, window in enumerate(self.windows(0, self.num_windows)):
            extra = window.end - window.scored
            if taken and scored + extra > MAX_SHARD_TOKENS:
                yield self._shard(index, first, taken)
                taken, first, index, cost, scored = [], number, index + 1, 0, 0
            taken.append(window)
            cost += inputs_of(window)
            scored += extra
            if cost >= input_tokens:
                yield self._shard(index, first, taken)
                taken, first, index, cost, scored = [], number + 1, index + 1, 0, 0
        if taken:
            yield self._shard(index, first, taken)

    def shard_digest(self, windows: list[Placed]) -> str:
        """Digest over what the windows are: their places and their token ids."""
        hasher = hashlib.sha256()
        hasher.update(np.array([[w.start, w.end, w.scored, w.prefix.value] for w in windows], dtype="<i8").tobytes())
        for window in windows:
            hasher.update(np.ascontiguousarray(self.corpus.tokens[window.start : window.end], dtype="<i4").tobytes())
        return "sha256:" + hasher.hexdigest()

    def whole(self, shard_windows: list[Placed]) -> set[int]:
        """The documents whose every scored token lies in these windows (documents without one do not count)."""
        low, high = shard_windows[0].scored, shard_windows[-1].end
        documents = {d for w in shard_windows for d, _, _ in self.parts(w)}
        offsets = self.corpus.offsets
        # Only the first and the last can lie across the shard's ends: scored tokens ascend over windows.
        edge = {min(documents), max(documents)}
        return documents - {d for d in edge if not (self._begins(d) >= low and int(offsets[d + 1]) <= high)}

    def _begins(self, document: int) -> int:
        """Where a document's scored tokens can begin: its first token, or the second where nothing stands before it."""
        start = int(self.corpus.offsets[document])
        stream_start = 0 if self.corpus.joined else start
        return start + 1 if start == stream_start and self._first_is_context(document) else start

    def _first_is_context(self, document: int) -> bool:
        start, end = self.corpus.stream(0 if self.corpus.joined else document)
        window = next(iter(self.rule.windows(end - start)), None)
        return window is not None and window.scored > 0

    def _shard(self, index: int, first: int, windows: list[Placed]) -> ShardPlan:
        corpus = self.corpus
        scored = [slice(w.scored, w.end) for w in windows]
        return ShardPlan(
            index=index,
            first_window=first,
            windows=len(windows),
            tokens=sum(w.end - w.scored for w in windows),
            bytes=sum(int(corpus.bytes[s].sum()) for s in scored),
            words=sum(int(corpus.words[s].sum()) for s in scored),
            input_tokens=sum(inputs_of(w) for w in windows),
            first_document=self.owner(windows[0].scored),
            end_document=self.owner(windows[-1].end - 1) + 1,
            lump=len(self.whole(windows)) > MAX_ROWS,
            digest=self.shard_digest(windows),
        )


def inputs_of(window: Placed) -> int:
    """Tokens of a window that go through the model."""
    return window.end - 1 - window.start + (window.prefix is Prefix.PREPENDED)


def _place(window: Window, base: int) -> Placed:
    return Placed(window.start + base, window.end + base, window.scored + base, window.prefix)
