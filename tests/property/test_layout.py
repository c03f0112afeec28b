"""Shards tile the windows, whatever documents and policy; which documents are whole is what brute force finds."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.layout import Layout, Placed, inputs_of
from eval_kernel.windows import Bos, Policy, WindowRule
from tests.support.corpora import corpus_of


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any rule on any documents, joined or not."""
    policy = draw(st.sampled_from(Policy))
    context = draw(st.integers(3, 12))
    bos = draw(st.sampled_from([Bos.EVERY_WINDOW, Bos.NONE] if policy is Policy.HALF else list(Bos)))
    stride = None
    if policy is Policy.STRIDED or (policy is Policy.HALF and draw(st.booleans())):
        stride = draw(st.integers(1, context - (bos is Bos.EVERY_WINDOW)))
    rule = WindowRule(policy, context, bos, stride, policy is Policy.CONCAT and draw(st.booleans()))
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    return Layout(corpus_of(lengths, joined=draw(st.booleans())), rule, draw(st.none() | st.integers(1, 20)))


def scored(layout: Layout, windows: list[Placed]) -> Counter[int]:
    """Scored tokens per document, token by token."""
    offsets = layout.corpus.offsets.tolist()
    return Counter(
        next(d for d in range(len(offsets) - 1) if offsets[d] <= token < offsets[d + 1])
        for w in windows
        for token in range(w.scored, w.end)
    )


@given(layouts(), st.integers(1, 60))
def test_shards_tile_the_windows(layout: Layout, size: int) -> None:
    """Every window is in one shard, in order, and the shards' counts add up to the windows'."""
    windows = list(layout.windows(0, layout.num_windows))
    shards = list(layout.shards(size))
    parts = [list(layout.windows(s.first_window, s.windows)) for s in shards]

    assert windows == [w for part in parts for w in part]
    assert list(range(len(shards))) == [s.index for s in shards]
    for shard, part in zip(shards, parts, strict=True):
        documents = scored(layout, part)
        assert sum(documents.values()) == shard.tokens == shard.bytes
        assert sum(inputs_of(w) for w in part) == shard.input_tokens
        assert (min(documents), max(documents) + 1) == (shard.first_document, shard.end_document)
        assert layout.shard_digest(part) == shard.digest


@given(layouts(), st.integers(1, 60))
def test_whole_documents_are_those_of_one_shard(layout: Layout, size: int) -> None:
    """A document is whole in a shard exactly when no other shard scores a token of it."""
    total = scored(layout, list(layout.windows(0, layout.num_windows)))
    for shard in layout.shards(size):
        part = list(layout.windows(shard.first_window, shard.windows))
        here = scored(layout, part)
        expected = {d for d, count in here.items() if count == total[d]}

        assert expected == layout.whole(shard.first_window, part)


@given(layouts())
def test_parts_are_the_scored_tokens_document_by_document(layout: Layout) -> None:
    """No token is left out, none is in two parts, each is its owner's."""
    for window in layout.windows(0, layout.num_windows):
        parts = list(layout.parts(window))
        counted = Counter({d: end - start for d, start, end in parts})

        assert [*range(window.scored, window.end)] == [t for _, start, end in parts for t in range(start, end)]
        assert scored(layout, [window]) == counted


@given(layouts(), st.integers(0, 30), st.integers(0, 30))
def test_any_range_of_windows_is_a_slice_of_all(layout: Layout, first: int, count: int) -> None:
    """A worker that scores shard 7 need not go through the first six."""
    windows = list(layout.windows(0, layout.num_windows))

    assert windows[first : first + count] == list(layout.windows(first, count))
