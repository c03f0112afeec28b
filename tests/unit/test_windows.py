"""Window policies against the token counts that other tools' loops give, and against recorded reference runs."""

from __future__ import annotations

from typing import Any

import pytest

from eval_kernel.windows import Bos, Policy, Prefix, Window, WindowRule


def scored(rule: WindowRule, length: int) -> int:
    """How many tokens the rule scores in a stream of this length."""
    return sum(w.num_scored for w in rule.windows(length))


#: Stream length -> tokens scored with a context of 4: rolling, HF stride 4, HF stride 2, GPTQ, llama-perplexity.
COUNTS = {10: (10, 7, 9, 6, 2), 12: (12, 9, 11, 9, 3), 13: (13, 9, 12, 9, 3), 4: (4, 3, 3, 3, 0), 3: (3, 2, 2, 0, 0)}
RULES = (
    WindowRule(Policy.ROLLING, 4, Bos.FIRST),
    WindowRule(Policy.STRIDED, 4, Bos.NONE, stride=4),
    WindowRule(Policy.STRIDED, 4, Bos.NONE, stride=2),
    WindowRule(Policy.CONCAT, 4, Bos.NONE, drop_remainder=True),
    WindowRule(Policy.HALF, 4, Bos.NONE),
)


@pytest.mark.parametrize("length", COUNTS)
def test_each_policy_scores_as_many_tokens_as_the_tool_it_follows(length: int) -> None:
    """The table of token counts per policy, computed from the other tools' own loops."""
    assert COUNTS[length] == tuple(scored(rule, length) for rule in RULES)


@pytest.mark.parametrize(
    ("rule", "windows", "tokens"),
    [
        (WindowRule(Policy.HALF, 512, Bos.NONE), 5, 1275),
        (WindowRule(Policy.HALF, 256, Bos.NONE), 11, 1397),
        (WindowRule(Policy.HALF, 256, Bos.NONE, stride=128), 22, 2816),
        (WindowRule(Policy.STRIDED, 512, Bos.NONE, stride=256), 11, 3038),
        (WindowRule(Policy.STRIDED, 512, Bos.NONE, stride=512), 6, 3033),
        (WindowRule(Policy.ROLLING, 512, Bos.FIRST), 6, 3039),
    ],
)
def test_windows_and_tokens_equal_those_of_recorded_runs(rule: WindowRule, windows: int, tokens: int) -> None:
    """On 3039 tokens each rule gives the counts that the reference tools printed."""
    assert (windows, tokens) == (len(list(rule.windows(3039))), scored(rule, 3039))


def test_half_scores_the_positions_that_llama_cpp_scores() -> None:
    """With a context of 512, tokens 257 to 511 of each window."""
    second = list(WindowRule(Policy.HALF, 512, Bos.NONE).windows(3039))[1]

    assert Window(512, 1024, 512 + 257, Prefix.ABSENT) == second


def test_half_overwrites_the_first_token_of_every_window_with_bos() -> None:
    """llama.cpp replaces a token rather than moving the text."""
    windows = list(WindowRule(Policy.HALF, 4, Bos.EVERY_WINDOW).windows(9))

    assert [Window(0, 4, 3, Prefix.OVERWRITES), Window(4, 8, 7, Prefix.OVERWRITES)] == windows
    assert [3, 3] == [w.num_inputs for w in windows]


def test_rolling_fills_the_last_window_with_earlier_tokens() -> None:
    """Ten tokens, context 4: the last two are predicted from the four before each."""
    windows = list(WindowRule(Policy.ROLLING, 4, Bos.FIRST).windows(10))

    assert [
        Window(0, 4, 0, Prefix.PREPENDED),
        Window(3, 8, 4, Prefix.ABSENT),
        Window(5, 10, 8, Prefix.ABSENT),
    ] == windows


def test_rolling_with_bos_in_every_window_leaves_it_room() -> None:
    """BOS takes one place of the context, and every token is still scored."""
    windows = list(WindowRule(Policy.ROLLING, 4, Bos.EVERY_WINDOW).windows(9))

    assert [(0, 4, 0), (4, 8, 4), (5, 9, 8)] == [(w.start, w.end, w.scored) for w in windows]
    assert [4, 4, 4] == [w.num_inputs for w in windows]


def test_without_bos_a_lone_token_is_not_scored() -> None:
    """Nothing stands before the only token, so nothing predicts it."""
    for rule in (WindowRule(Policy.ROLLING, 4, Bos.NONE), WindowRule(Policy.STRIDED, 4, Bos.NONE, stride=2)):
        assert [] == list(rule.windows(1))


@pytest.mark.parametrize("bos", [Bos.FIRST, Bos.EVERY_WINDOW])
def test_with_bos_a_lone_token_is_scored(bos: Bos) -> None:
    """BOS predicts the only token."""
    for rule in (WindowRule(Policy.ROLLING, 4, bos), WindowRule(Policy.STRIDED, 4, bos, stride=2)):
        assert [Window(0, 1, 0, Prefix.PREPENDED)] == list(rule.windows(1))


def test_an_empty_stream_has_no_window() -> None:
    """Zero tokens, zero windows, whatever the rule."""
    for rule in (*RULES, WindowRule(Policy.ROLLING, 4, Bos.EVERY_WINDOW), WindowRule(Policy.CONCAT, 4, Bos.FIRST)):
        assert [] == list(rule.windows(0))


def test_concat_scores_the_remainder_unless_told_to_drop_it() -> None:
    """Ten tokens, context 4: the remainder of two yields one more scored token."""
    kept, dropped = (WindowRule(Policy.CONCAT, 4, Bos.NONE, drop_remainder=drop) for drop in (False, True))

    assert 7 == scored(kept, 10)
    assert 6 == scored(dropped, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": Policy.ROLLING, "context": 1, "bos": Bos.FIRST}, "context is 1"),
        ({"policy": Policy.ROLLING, "context": 8, "bos": Bos.FIRST, "stride": 4}, "stride has no meaning"),
        ({"policy": Policy.STRIDED, "context": 8, "bos": Bos.NONE}, "stride is missing"),
        ({"policy": Policy.STRIDED, "context": 8, "bos": Bos.NONE, "stride": 9}, "stride is 9"),
        ({"policy": Policy.STRIDED, "context": 8, "bos": Bos.NONE, "stride": 0}, "stride is 0"),
        ({"policy": Policy.STRIDED, "context": 8, "bos": Bos.EVERY_WINDOW, "stride": 8}, "use at most 7"),
        ({"policy": Policy.HALF, "context": 8, "bos": Bos.FIRST}, "bos is first"),
        ({"policy": Policy.HALF, "context": 2, "bos": Bos.NONE}, "scores nothing below 3"),
        ({"policy": Policy.HALF, "context": 8, "bos": Bos.NONE, "drop_remainder": True}, "drop_remainder has no"),
    ],
)
def test_parameters_without_meaning_are_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the parameter and its value."""
    with pytest.raises(ValueError, match=message):
        WindowRule(**arguments)
