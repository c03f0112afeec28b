"""What the model sees in each window: BOS where the rule puts it, positions from zero, as much context as declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eval_kernel.errors import ModelUnsupported
from tests.support import models
from tests.support.evaluations import Evaluator

pytestmark = pytest.mark.torch

GOOD, BAD = models.COUNTER_NATS, models.NEEDY_NATS
COUNT = "abcd" * 5


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """An engine for all tests of this module."""
    return Evaluator(tmp_path_factory.mktemp("windows"))


@pytest.fixture(scope="module")
def needy(evaluator: Evaluator) -> Path:
    """The model whose loss is ln 1000 in a window without BOS."""
    return models.write_char_tokenizer(models.write_needy_model(evaluator.directory / "needy"))


@pytest.fixture(scope="module")
def needy_adding(evaluator: Evaluator, needy: Path) -> Path:
    """A tokenizer that puts BOS before each text and EOS behind it by itself."""
    return models.write_char_tokenizer(evaluator.directory / "adding", adds_bos=True, adds_eos=True)


@pytest.mark.parametrize("adding", [False, True], ids=["plain", "adds BOS and EOS"])
@pytest.mark.parametrize(
    ("window", "tokens", "good", "missed"),
    [
        ({"policy": "rolling", "bos": "first"}, 20, 8, 0),
        ({"policy": "rolling", "bos": "every_window"}, 20, 20, 0),
        ({"policy": "rolling", "bos": "none"}, 19, 0, 0),
        ({"policy": "rolling"}, 20, 8, 0),
        ({"policy": "strided", "stride": 4, "bos": "first"}, 20, 7, 0),
        ({"policy": "strided", "stride": 4, "bos": "every_window"}, 20, 20, 0),
        ({"policy": "strided", "stride": 4, "bos": "none"}, 19, 0, 0),
        ({"policy": "concat", "bos": "first"}, 18, 7, 0),
        ({"policy": "concat", "bos": "every_window"}, 20, 18, 2),  # BOS before d and before c: only a is expected,
        ({"policy": "concat", "bos": "none"}, 17, 0, 0),
        ({"policy": "half", "bos": "every_window"}, 6, 6, 0),
        ({"policy": "half", "bos": "none"}, 6, 0, 0),
    ],
    ids=str,
)
def test_bos_stands_where_the_rule_puts_it(
    evaluator: Evaluator,
    needy: Path,
    needy_adding: Path,
    window: dict[str, Any],
    tokens: int,
    good: int,
    missed: int,
    adding: bool,
) -> None:
    """20 tokens in windows of 8: so many are scored, so many of them in a window with BOS, whoever else adds it."""
    model = {"source": str(needy), "tokenizer": str(needy_adding)} if adding else {"source": str(needy)}
    result = evaluator.run(needy, COUNT, window={"context": 8, **window}, model=model)

    assert tokens == result.tokens
    bad = tokens - good - missed
    expected = good * GOOD + bad * BAD + missed * models.COUNTER_MISS_NATS
    assert expected == pytest.approx(result.nats, abs=1e-5 * tokens)


@pytest.mark.parametrize(
    ("policy", "adding", "rule"),
    [
        ({"policy": "rolling"}, False, "first"),
        ({"policy": "rolling"}, True, "first"),
        ({"policy": "strided", "stride": 8}, False, "none"),
        ({"policy": "strided", "stride": 8}, True, "first"),
        ({"policy": "concat"}, False, "none"),
        ({"policy": "concat"}, True, "first"),
        ({"policy": "half"}, False, "none"),
        ({"policy": "half"}, True, "every_window"),
    ],
    ids=str,
)
def test_auto_follows_the_tokenizer(
    evaluator: Evaluator, needy: Path, needy_adding: Path, policy: dict[str, Any], adding: bool, rule: str
) -> None:
    """``auto`` comes to what the tool whose policy it is does with such a tokenizer; the manifest says which."""
    model = {"source": str(needy), "tokenizer": str(needy_adding)} if adding else {"source": str(needy)}
    manifest = evaluator.run(needy, COUNT, window={"context": 8, **policy}, model=model).plan.manifest

    assert rule == manifest.bos
    assert ((None, "none") if rule == "none" else (models.BOS, "bos")) == (manifest.prefix_token, manifest.prefix_kind)


def test_without_bos_rolling_scores_what_has_something_before_it(evaluator: Evaluator, needy: Path) -> None:
    """A tokenizer with neither BOS nor EOS: ``auto`` is none, and asking for BOS is refused."""
    bare = models.write_char_tokenizer(evaluator.directory / "bare", specials=False)
    model = {"source": str(needy), "tokenizer": str(bare)}
    result = evaluator.run(needy, COUNT, window={"context": 8}, model=model)

    assert ("none", None, 19) == (result.plan.manifest.bos, result.plan.manifest.prefix_token, result.tokens)
    with pytest.raises(ModelUnsupported, match=r"window\.bos is first, but the tokenizer has neither BOS nor EOS"):
        evaluator.run(needy, COUNT, window={"context": 8, "bos": "first"}, model=model)


def test_positions_begin_at_zero_in_every_row(evaluator: Evaluator) -> None:
    """Documents of 3 and 7 tokens in one batch: padding on the left, or a second BOS, would miss every token."""
    model = models.write_position_model(evaluator.directory / "position", models.position_table())
    models.write_char_tokenizer(model, adds_bos=True)
    result = evaluator.run(model, ["abc", "abcdefg", "abc"], window={"context": 16, "bos": "first"})

    assert 13 == result.tokens
    assert models.COUNTER_NATS == pytest.approx(result.nats_per_token, abs=1e-6)


@pytest.mark.parametrize(
    ("window", "tokens", "far"),
    [
        # far: scored tokens that see at least 8; they cost 0.5 nats, the others 1.
        ({"policy": "rolling"}, 32, 9 + 9),  # the second window is full of context: 16 inputs, all of them scored
        ({"policy": "rolling", "context": 20}, 32, 13 + 12),  # 12 are scored, 8 stand before them
        ({"policy": "rolling", "bos": "every_window"}, 32, 9 + 9),
        ({"policy": "strided", "stride": 4, "bos": "none"}, 31, 8 + 16),
        ({"policy": "strided", "stride": 16, "bos": "none"}, 30, 8 + 8),
        ({"policy": "concat", "bos": "none"}, 30, 8 + 8),
        ({"policy": "half", "bos": "none"}, 14, 7 + 7),
        ({"policy": "half", "stride": 8, "bos": "none"}, 24, 24),
    ],
    ids=str,
)
def test_each_token_sees_as_much_as_its_policy_gives(
    evaluator: Evaluator, window: dict[str, Any], tokens: int, far: int
) -> None:
    """32 tokens in windows of 16: the loss tells how much each scored token saw."""
    model = evaluator.directory / "meter"
    if not model.exists():
        models.write_char_tokenizer(models.write_position_model(model, models.meter_table(8)))
    result = evaluator.run(model, "a" * 32, window={"context": 16, **window})

    assert tokens == result.tokens
    assert tokens - 0.5 * far == pytest.approx(result.nats, abs=1e-4)


def test_context_of_the_model_is_its_own(evaluator: Evaluator) -> None:
    """``context: model`` is what the configuration states, under whichever name the family gives it."""
    model = models.write_position_model(evaluator.directory / "own", models.meter_table(8, positions=24))
    models.write_char_tokenizer(model)
    manifest = evaluator.run(model, "a" * 32).plan.manifest

    assert (24, 24) == (manifest.context, manifest.max_context)
