"""A corpus cut into windows and shards by a rule: the plan's arithmetic on real lengths. No torch, no model.

The same corpus and rule give the same windows, shards and digests wherever they are computed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eval_kernel.corpus import Corpus
from eval_kernel.gridsum import MAX_SHARD_TOKENS
from eval_kernel.plan import MAX_ROWS, ShardPlan
from eval_kernel.windows import Prefix, WindowRule

Cut = npt.NDArray[np.int64]


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
        self._cuts: dict[int, Cut] = {}  # windows of a stream depend on its length alone, and lengths repeat
        firsts, total = [], 0
        for index in range(corpus.num_streams):
            start, end = corpus.stream(index)
            firsts.append(total)
            total += len(self._cut(end - start))
        self._firsts = firsts
        self.num_windows = total if max_windows is None else min(total, max_windows)

    def _cut(self, length: int) -> Cut:
        """The windows of a stream: one row each of start, end, scored, prefix."""
        if length not in self._cuts:
            rows = [(w.start, w.end, w.scored, w.prefix.value) for w in self.rule.windows(length)]
            self._cuts[length] = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return self._cuts[length]

    def windows(self, first: int, count: int) -> Iterator[Placed]:
        """Yield ``count`` windows from window ``first`` on, fewer where there are no more."""
        index = bisect_right(self._firsts, first) - 1
        count = min(count, self.num_windows - first)
        while count > 0:
            base, end = self.corpus.stream(index)
            begin = first - self._firsts[index]
            for a, b, scored, prefix in self._cut(end - base)[begin : begin + count].tolist():
                yield Placed(a + base, b + base, scored + base, Prefix(prefix))
                first, count = first + 1, count - 1
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

    def shards(self, input_tokens: int, index: int = 0, first: int = 0) -> Iterator[ShardPlan]:
        """Yield the shards: consecutive windows, closed once ``input_tokens`` tokens of them go through the model.

        ``index``, ``first``: the shard to begin with, and its first window.
        """
        taken: list[Placed] = []
        cost = scored = 0
        for number, window in enumerate(self.windows(first, self.num_windows), first):
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
        return windows_digest(windows, self.corpus.tokens)

    def whole(self, first: int, windows: list[Placed]) -> set[int]:
        """The documents whose every scored token lies in these windows, of which ``first`` is the first one's number.

        Documents without a scored token do not count.
        """
        documents = {d for w in windows for d, _, _ in self.parts(w)}
        # Scored tokens ascend over windows and every window has one: only the neighbours can share a document.
        if first > 0:
            before = next(self.windows(first - 1, 1))
            documents.discard(self.owner(before.end - 1))
        if (last := first + len(windows)) < self.num_windows:
            after = next(self.windows(last, 1))
            documents.discard(self.owner(after.scored))
        return documents

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
            lump=len(self.whole(first, windows)) > MAX_ROWS,
            digest=self.shard_digest(windows),
        )


def windows_digest(windows: Sequence[Placed], tokens: npt.NDArray[np.int32], base: int = 0) -> str:
    """Digest over the places of windows and their token ids; ``tokens`` are those of the corpus from ``base`` on."""
    hasher = hashlib.sha256()
    hasher.update(np.array([[w.start, w.end, w.scored, w.prefix.value] for w in windows], dtype="<i8").tobytes())
    for window in windows:
        hasher.update(np.ascontiguousarray(tokens[window.start - base : window.end - base], dtype="<i4").tobytes())
    return "sha256:" + hasher.hexdigest()


def inputs_of(window: Placed) -> int:
    """Tokens of a window that go through the model."""
    return window.end - 1 - window.start + (window.prefix is Prefix.PREPENDED)
