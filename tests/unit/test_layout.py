"""Windows of a corpus get their numbers, shards their windows and counts, documents their shards."""

from __future__ import annotations

import numpy as np
import pytest

from eval_kernel.corpus import Corpus
from eval_kernel.gridsum import MAX_SHARD_TOKENS
from eval_kernel.layout import Layout, Placed, inputs_of
from eval_kernel.windows import Bos, Policy, Prefix, WindowRule
from tests.support.corpora import corpus_of

ROLLING = WindowRule(Policy.ROLLING, 4, Bos.FIRST)


def test_windows_are_numbered_through_the_documents() -> None:
    """Documents without a window take no number; any range can be had."""
    layout = Layout(corpus_of([0, 5, 0, 3, 0]), ROLLING)
    placed = list(layout.windows(0, 99))

    assert 3 == layout.num_windows == len(placed)
    assert [(0, 4, 0), (0, 5, 4), (5, 8, 5)] == [(w.start, w.end, w.scored) for w in placed]
    assert placed[1:3] == list(layout.windows(1, 2))
    assert [] == list(layout.windows(3, 1))


def test_max_windows_cuts_the_numbering_off() -> None:
    """What lies beyond is not to be had."""
    layout = Layout(corpus_of([5, 3]), ROLLING, max_windows=2)

    assert (2, 2) == (layout.num_windows, len(list(layout.windows(0, 99))))
    assert 3 == Layout(corpus_of([5, 3]), ROLLING, max_windows=99).num_windows


def test_a_token_belongs_to_one_document() -> None:
    """Empty documents own nothing."""
    layout = Layout(corpus_of([0, 2, 0, 1]), ROLLING)

    assert [1, 1, 3] == [layout.owner(token) for token in range(3)]


def test_a_window_over_a_border_has_parts() -> None:
    """In a joined text the scored tokens of one window may be several documents'."""
    layout = Layout(corpus_of([3, 0, 2, 4], joined=True), WindowRule(Policy.CONCAT, 8, Bos.NONE))

    assert [(0, 1, 3), (2, 3, 5), (3, 5, 8)] == list(layout.parts(next(layout.windows(0, 1))))


def test_shards_close_when_they_have_enough_input() -> None:
    """The window that fills a shard is its last one; the rest is a shard of its own."""
    layout = Layout(corpus_of([4] * 5), ROLLING)

    assert [2, 2, 1] == [s.windows for s in layout.shards(5)]
    assert [1] * 5 == [s.windows for s in layout.shards(4)]
    assert [5] == [s.windows for s in layout.shards(1000)]


def test_a_shard_says_what_scoring_it_must_yield() -> None:
    """Tokens, bytes, words, inputs and documents; the second one's context was scored by the first."""
    first, second, third = Layout(corpus_of([6, 2]), ROLLING).shards(4)

    assert (0, 1, 4, 4, 4) == (first.first_window, first.windows, first.tokens, first.bytes, first.input_tokens)
    assert (1, 1, 2, 4) == (second.first_window, second.windows, second.tokens, second.input_tokens)
    assert (2, 1, 2, 2) == (third.first_window, third.windows, third.tokens, third.input_tokens)
    assert [(0, 1), (0, 1), (1, 2)] == [(s.first_document, s.end_document) for s in (first, second, third)]
    assert [2, 0, 1] == [s.words for s in (first, second, third)]


def test_no_shard_scores_more_than_stays_exact() -> None:
    """However little input a window is, a shard's scored tokens are bounded."""
    corpus = corpus_of([MAX_SHARD_TOKENS + 5000])
    shards = list(Layout(corpus, WindowRule(Policy.ROLLING, 1000, Bos.FIRST)).shards(10**9))

    assert 2 == len(shards)
    assert all(s.tokens <= MAX_SHARD_TOKENS for s in shards)
    assert MAX_SHARD_TOKENS + 5000 == sum(s.tokens for s in shards)


@pytest.mark.parametrize(("documents", "lump"), [(64, False), (65, True)])
def test_many_whole_documents_are_a_lump(documents: int, lump: bool) -> None:
    """Beyond 64, and only whole ones count."""
    (shard,) = Layout(corpus_of([2] * documents), ROLLING).shards(10**6)
    split = list(Layout(corpus_of([2] * 64 + [9]), ROLLING).shards(2 * 64 + 4))

    assert lump == shard.lump
    assert [65, False] == [split[0].end_document, split[0].lump]


def test_the_digest_follows_tokens_and_places() -> None:
    """Another token, another place or another prefix is another shard."""
    corpus = corpus_of([6])
    layout = Layout(corpus, ROLLING)
    window = Placed(0, 4, 0, Prefix.PREPENDED)
    digests = {
        layout.shard_digest([window]),
        layout.shard_digest([Placed(0, 4, 1, Prefix.PREPENDED)]),
        layout.shard_digest([Placed(0, 4, 0, Prefix.ABSENT)]),
        layout.shard_digest([window, window]),
        Layout(with_token(corpus, 3), ROLLING).shard_digest([window]),
    }

    assert 5 == len(digests)
    assert layout.shard_digest([window]) == Layout(with_token(corpus, 5), ROLLING).shard_digest([window])


def with_token(corpus: Corpus, place: int) -> Corpus:
    """The same corpus with one token exchanged."""
    tokens = np.array(corpus.tokens)
    tokens[place] += 1
    return Corpus(
        tokens,
        corpus.bytes,
        corpus.words,
        corpus.offsets,
        corpus.joined,
        corpus.data_digest,
        corpus.source_bytes,
        corpus.source_words,
        corpus.lm_eval_words,
    )


def test_the_cost_of_a_window_is_what_the_model_sees() -> None:
    """The last token is a target only; a prefix that stands before it is seen."""
    assert (3, 4, 3) == tuple(inputs_of(Placed(0, 4, 1, prefix)) for prefix in Prefix)
