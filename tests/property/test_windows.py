"""Laws of every window policy, and two policies against small implementations of the recipes they follow."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.windows import Bos, Policy, Prefix, WindowRule

BOS = -1  # stands for the prefix token in what the model sees

#: What the model sees, and the tokens it is asked for after each of the last of them.
Scoring = tuple[list[int], list[int]]


@st.composite
def rules(draw: st.DrawFn) -> WindowRule:
    """Any rule that is accepted at birth."""
    policy = draw(st.sampled_from(Policy))
    context = draw(st.integers(3, 40))
    bos = draw(st.sampled_from([Bos.EVERY_WINDOW, Bos.NONE] if policy is Policy.HALF else list(Bos)))
    stride = None
    if policy is Policy.STRIDED or (policy is Policy.HALF and draw(st.booleans())):
        stride = draw(st.integers(1, context - (bos is Bos.EVERY_WINDOW)))
    return WindowRule(policy, context, bos, stride, policy is Policy.CONCAT and draw(st.booleans()))


def seen_and_scored(rule: WindowRule, length: int) -> list[Scoring]:
    """Per window, the tokens that the model sees and those that are scored."""
    result = []
    for w in rule.windows(length):
        inputs = list(range(w.start, w.end - 1))
        if w.prefix is Prefix.PREPENDED:
            inputs = [BOS, *inputs]
        elif w.prefix is Prefix.OVERWRITES:
            inputs = [BOS, *inputs[1:]]
        result.append((inputs, list(range(w.scored, w.end))))
    return result


@given(rules(), st.integers(0, 200))
def test_every_window_is_well_formed(rule: WindowRule, length: int) -> None:
    """It lies in the stream, scores something, sees something before it, and never more than the context."""
    for w in rule.windows(length):
        assert 0 <= w.start <= w.scored < w.end <= length
        assert w.scored > w.start or w.prefix is Prefix.PREPENDED
        assert 1 <= w.num_inputs <= rule.context


@given(rules(), st.integers(0, 200))
def test_inputs_are_counted_as_they_are_seen(rule: WindowRule, length: int) -> None:
    """``num_inputs`` and ``num_scored`` are what the window really holds."""
    counted = [(w.num_inputs, w.num_scored) for w in rule.windows(length)]

    assert [(len(inputs), len(targets)) for inputs, targets in seen_and_scored(rule, length)] == counted


@given(rules(), st.integers(0, 200))
def test_no_token_is_scored_twice_and_tokens_are_scored_in_order(rule: WindowRule, length: int) -> None:
    """Over all windows the scored tokens ascend."""
    tokens = [t for _, targets in seen_and_scored(rule, length) for t in targets]

    assert sorted(set(tokens)) == tokens


@given(st.integers(2, 40), st.sampled_from([Bos.FIRST, Bos.EVERY_WINDOW]), st.integers(0, 200))
def test_rolling_with_bos_scores_every_token_exactly_once(context: int, bos: Bos, length: int) -> None:
    """Nothing is left out, at any length."""
    windows = seen_and_scored(WindowRule(Policy.ROLLING, context, bos), length)

    assert Counter(range(length)) == Counter(t for _, targets in windows for t in targets)


@given(st.integers(2, 40), st.sampled_from(Bos), st.integers(0, 200))
def test_the_last_rolling_window_has_full_context(context: int, bos: Bos, length: int) -> None:
    """However few tokens the last window scores, it sees as much as any other once the stream is long enough."""
    windows = list(WindowRule(Policy.ROLLING, context, bos).windows(length))

    if length > context:
        assert {context} == {w.num_inputs for w in windows}


@given(st.data(), st.integers(2, 40), st.integers(0, 200))
def test_strided_leaves_out_only_what_nothing_precedes(data: st.DataObject, context: int, length: int) -> None:
    """A token is unscored exactly when it opens a window without BOS and no earlier window held it."""
    bos = data.draw(st.sampled_from(Bos))
    stride = data.draw(st.integers(1, context - (bos is Bos.EVERY_WINDOW)))
    windows = seen_and_scored(WindowRule(Policy.STRIDED, context, bos, stride), length)
    missing = set(range(length)) - {t for _, targets in windows for t in targets}

    if bos is Bos.EVERY_WINDOW or (bos is Bos.FIRST and stride < context):
        assert set() == missing
    elif stride < context:
        assert ({0} if length else set()) == missing
    else:
        # Disjoint windows of the stream with BOS as its token 0, where there is one.
        shift = int(bos is Bos.FIRST)
        openings = {k - shift for k in range(0, length + shift, context)} - {-1}
        assert openings == missing


def harness_rolling(length: int, n: int) -> list[Scoring]:
    """lm-evaluation-harness, as described: the first request predicts up to n tokens after the prefix token.

    Each later one predicts the next n tokens (or what is left) from an input of exactly n tokens.
    """
    stream = [BOS, *range(length)]  # stream[i + 1] is token i
    requests, done = [], 0
    while done < length:
        now = min(n, length - done)
        last = done + now  # tokens done .. last-1 are predicted; the input ends one before the last of them
        inputs = stream[max(0, last - n) : last]
        requests.append((inputs, list(range(done, last))))
        done = last
    return requests


@given(st.integers(2, 40), st.integers(0, 200))
def test_rolling_is_the_harness_rule(context: int, length: int) -> None:
    """Same inputs, same targets, window by window."""
    rule = WindowRule(Policy.ROLLING, context, Bos.FIRST)

    assert harness_rolling(length, context) == seen_and_scored(rule, length)


def labels_recipe(stream: list[int], n: int, stride: int) -> list[Scoring]:
    """The fixed-length guide: mask labels that an earlier window held, score each remaining one but the first."""
    result, held = [], 0
    for begin in range(0, len(stream), stride):
        end = min(begin + n, len(stream))
        ids = stream[begin:end]
        labels: list[int | None] = [None] * len(ids)
        fresh = end - held
        if fresh > 0:
            labels[-fresh:] = ids[-fresh:]
        # A causal model predicts label i from the ids before it, so label 0 counts for nothing.
        targets = [label for label in labels[1:] if label is not None]
        if targets:
            result.append((ids[:-1], targets))
        held = end
        if end == len(stream):
            break
    return result


@given(st.data(), st.integers(2, 40), st.sampled_from([Bos.NONE, Bos.FIRST]), st.integers(0, 200))
def test_strided_is_the_fixed_length_recipe(data: st.DataObject, context: int, bos: Bos, length: int) -> None:
    """Same inputs, same targets; with BOS first, the stream the recipe cuts begins with BOS."""
    stride = data.draw(st.integers(1, context))
    stream = [BOS, *range(length)] if bos is Bos.FIRST else list(range(length))

    expected = labels_recipe(stream, context, stride)

    assert expected == seen_and_scored(WindowRule(Policy.STRIDED, context, bos, stride), length)


@given(st.integers(2, 40), st.integers(0, 200))
def test_concat_without_remainder_is_the_disjoint_recipe(context: int, length: int) -> None:
    """length // n windows of n tokens, each scoring all but its first."""
    rule = WindowRule(Policy.CONCAT, context, Bos.NONE, drop_remainder=True)
    expected = [
        (list(range(k * context, (k + 1) * context - 1)), list(range(k * context + 1, (k + 1) * context)))
        for k in range(length // context)
    ]

    assert expected == seen_and_scored(rule, length)


@given(st.integers(3, 40), st.integers(0, 300))
def test_half_scores_the_same_places_of_every_full_window(context: int, length: int) -> None:
    """Tokens n/2 + 1 to n - 1 of each disjoint window; nothing for less than two windows of text."""
    tokens = [t for _, targets in seen_and_scored(WindowRule(Policy.HALF, context, Bos.NONE), length) for t in targets]
    full = length // context if length >= 2 * context else 0
    expected = [k * context + i for k in range(full) for i in range(context // 2 + 1, context)]

    assert expected == tokens
