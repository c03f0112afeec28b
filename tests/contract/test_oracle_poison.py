"""A loss that is no number stays where it arose: it is named, left out of the sum, and spoils nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_kernel.metrics import metrics
from eval_kernel.partial import MAX_PLACES, NonFinite
from tests.support import models
from tests.support.evaluations import Evaluator

pytestmark = pytest.mark.torch

#: Finite in float32; times sqrt(V) = 8 it is not.
HUGE = 3e38
X, Y = models.ALPHABET.index("x"), models.ALPHABET.index("y")


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """An engine for all tests of this module."""
    return Evaluator(tmp_path_factory.mktemp("poison"))


@pytest.fixture(scope="module")
def poisoned(evaluator: Evaluator) -> Path:
    """After x the logit of y is infinite: y's loss is NaN, any other token's is infinite."""
    directory = evaluator.directory / "poisoned"
    models.write_table_model(directory, models.dyadic_table(), poison={(X, Y): HUGE})
    return models.write_char_tokenizer(directory)


@pytest.mark.parametrize(("text", "value"), [("abxy", "nan"), ("abxa", "inf")])
def test_the_fault_is_named_and_the_other_documents_are_exact(
    evaluator: Evaluator, poisoned: Path, text: str, value: str
) -> None:
    """Document 3 of 10 is named with token and kind; every other row is the one it has by itself."""
    clean = ["abcd", "dcba", "aaaa", "aabx", "bbbb", "abab", "cccc", "dddd", "abba", "acdc"]
    bad = [*clean[:3], text, *clean[4:]]
    expected = evaluator.run(poisoned, clean)
    result = evaluator.run(poisoned, bad)

    assert [NonFinite(3, 3, value)] == [place for p in result.partials for place in p.places]
    assert 1 == sum(p.nonfinite for p in result.partials)
    assert (40, 4) == (result.tokens, result.rows[3].tokens)
    others = [d for d in range(10) if d != 3]
    assert [expected.rows[d] for d in others] == [result.rows[d] for d in others]


def test_the_tally_is_not_complete(evaluator: Evaluator, poisoned: Path) -> None:
    """The poisoned document's cluster is left out of every metric, which rest on the sound ones."""
    result = evaluator.run(poisoned, ["aa", "xy", "dd"])
    perplexity = next(m for m in metrics(result.tally) if m.name == "perplexity")

    assert 1 == result.tally.nonfinite
    assert 2 == perplexity.clusters
    assert 4.0 == pytest.approx(perplexity.value, abs=1e-6)


def test_many_faults_are_counted_but_not_all_listed(evaluator: Evaluator, poisoned: Path) -> None:
    """40 losses are no numbers: the count says so, the first places are listed."""
    result = evaluator.run(poisoned, ["xy" * 40])

    assert 40 == result.partials[0].nonfinite
    assert tuple(NonFinite(0, 2 * k + 1, "nan") for k in range(MAX_PLACES)) == result.partials[0].places


def test_a_model_whose_first_tokens_are_poison_is_scored_all_the_same(evaluator: Evaluator) -> None:
    """Loading tries a model on the tokens 0 to 7; infinite logits there must not look like a fault of the loading."""
    directory = evaluator.directory / "early"
    models.write_table_model(directory, models.dyadic_table(), poison={(1, 2): HUGE})
    models.write_char_tokenizer(directory)
    result = evaluator.run(directory, ["abca", "adda"])

    assert (NonFinite(0, 2, "nan"),) == result.partials[0].places


def test_a_weight_of_minus_infinity_in_effect_makes_one_token_impossible(evaluator: Evaluator) -> None:
    """A logit of minus infinity costs only the token it belongs to."""
    directory = evaluator.directory / "never"
    models.write_table_model(directory, models.dyadic_table(), poison={(X, 0): -HUGE})
    models.write_char_tokenizer(directory)
    result = evaluator.run(directory, ["xa", "xb"])

    assert (NonFinite(0, 1, "inf"),) == result.partials[0].places
    assert 1 == result.partials[0].nonfinite
