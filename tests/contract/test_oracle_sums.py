"""Models with known probabilities come to the numbers that arithmetic gives; naive averages would not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval_kernel.errors import DatasetEmpty
from eval_kernel.metrics import metrics
from tests.support import models
from tests.support.corpora import write_k_corpus
from tests.support.evaluations import Evaluator

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """An engine for all tests of this module."""
    return Evaluator(tmp_path_factory.mktemp("sums"))


def table_model(evaluator: Evaluator, name: str, table: models.Table) -> Path:
    """Write a table model with the character tokenizer, once."""
    directory = evaluator.directory / name
    if not directory.exists():
        models.write_char_tokenizer(models.write_table_model(directory, table))
    return directory


@pytest.fixture(scope="module")
def dyadic(evaluator: Evaluator) -> Path:
    """The dyadic unigram model."""
    return table_model(evaluator, "dyadic", models.dyadic_table())


@pytest.mark.parametrize("shard_tokens", [1, 3, 5, 1000])
@pytest.mark.parametrize("batch_tokens", [1, 5, 4096])
def test_the_k_corpus_has_perplexity_four(
    evaluator: Evaluator, dyadic: Path, shard_tokens: int, batch_tokens: int
) -> None:
    """32 bits on 16 tokens of one byte, however the documents are spread over shards and batches."""
    result = evaluator.run(
        dyadic,
        write_k_corpus(evaluator.directory),
        shard={"tokens": shard_tokens},
        batch={"tokens": batch_tokens},
        window={"context": 16},
    )

    assert 16 == result.tokens
    assert 4.0 == pytest.approx(math.exp(result.nats / 16), abs=1e-6)
    assert 2.0 == pytest.approx(result.nats / math.log(2) / result.plan.manifest.scored_bytes, abs=1e-6)
    assert [8, 2, 2, 2, 2] == [result.rows[d].tokens for d in range(5)]
    assert [8, 6, 6, 6, 6] == [pytest.approx(result.rows[d].steps / 2**30 / math.log(2), abs=1e-5) for d in range(5)]


def test_the_metrics_of_the_k_corpus_are_exact(evaluator: Evaluator, dyadic: Path) -> None:
    """Perplexity 4, 2 bits per byte, and the standard error by documents is 0.625 bits."""
    result = evaluator.run(dyadic, write_k_corpus(evaluator.directory), window={"context": 16})
    found = {m.name: m for m in metrics(result.tally)}

    assert 4.0 == pytest.approx(found["perplexity"].value, abs=1e-6)
    assert 2.0 == pytest.approx(found["bits_per_byte"].value, abs=1e-6)
    assert 0.625 == pytest.approx(found["bits_per_byte"].se, abs=1e-6)
    assert 5 == found["bits_per_byte"].clusters


def test_batches_change_no_bit(evaluator: Evaluator, dyadic: Path) -> None:
    """Budgets of one token, of odd numbers and of everything give equal partials of the K corpus."""
    corpus = write_k_corpus(evaluator.directory)
    results = [
        evaluator.run(dyadic, corpus, window={"context": 3}, batch={"tokens": budget}) for budget in (1, 3, 7, 4096)
    ]

    assert [results[0].partials] * 3 == [r.partials for r in results[1:]]


@pytest.mark.parametrize(
    ("window", "scored"),
    [
        ({"policy": "rolling"}, (10, 12, 13, 4, 3)),
        ({"policy": "strided", "stride": 4}, (7, 9, 9, 3, 2)),
        ({"policy": "strided", "stride": 2}, (9, 11, 12, 3, 2)),
        ({"policy": "concat", "drop_remainder": True}, (6, 9, 9, 3, 0)),
        ({"policy": "concat"}, (7, 9, 9, 3, 2)),
        ({"policy": "half"}, (2, 3, 3, 0, 0)),
    ],
    ids=str,
)
def test_each_policy_scores_its_own_number_of_tokens(
    evaluator: Evaluator, window: dict[str, Any], scored: tuple[int, ...]
) -> None:
    """Texts of 10, 12, 13, 4 and 3 tokens in windows of 4, no BOS but for rolling; every scored token counts on."""
    counter = table_model(evaluator, "counter", models.counter_table())
    for length, expected in zip((10, 12, 13, 4, 3), scored, strict=True):
        text = ("abcd" * 4)[:length]
        if expected == 0:
            with pytest.raises(DatasetEmpty, match="scores none"):
                evaluator.run(counter, text, window={"context": 4, **window})
            continue
        result = evaluator.run(counter, text, window={"context": 4, **window})

        assert expected == result.tokens, f"{length} tokens"
        # BOS counts as d: after it comes a. One token off anywhere would cost 7.65 nats.
        assert models.COUNTER_NATS == pytest.approx(result.nats_per_token, abs=1e-6)


def test_a_text_that_is_one_off_costs_what_a_miss_costs(evaluator: Evaluator) -> None:
    """Where every token is the wrong one for the counter, every loss is that of a miss."""
    counter = table_model(evaluator, "counter", models.counter_table())
    result = evaluator.run(counter, "bdbd" * 5, window={"context": 7})

    assert models.COUNTER_MISS_NATS == pytest.approx(result.nats_per_token, abs=1e-6)


def test_a_uniform_model_costs_ln_v_per_token(evaluator: Evaluator) -> None:
    """Whatever the text, its perplexity is the size of the vocabulary."""
    uniform = table_model(evaluator, "uniform", models.uniform_table())
    result = evaluator.run(uniform, ["hello world", "", "naïve ☃ text\n"], window={"context": 5})

    assert 11 + 13 == result.tokens
    assert math.log(models.V) == pytest.approx(result.nats_per_token, rel=1e-7)


def test_equal_documents_count_as_often_as_they_occur(evaluator: Evaluator, dyadic: Path) -> None:
    """Identity of a document is its place, not its text."""
    once = evaluator.run(dyadic, ["abcd"])
    often = evaluator.run(dyadic, ["abcd"] * 4)

    assert 4 * once.nats == often.nats
    assert 4 * once.tokens == often.tokens
    assert [0, 1, 2, 3] == sorted(often.rows)


def test_many_documents_of_a_shard_become_one_lump(evaluator: Evaluator, dyadic: Path) -> None:
    """Beyond 64 whole documents per shard their rows are added up, and stand for that many documents."""
    result = evaluator.run(dyadic, ["ab"] * 130, shard={"tokens": 2 * 65})

    assert [65, 65] == [row.documents for p in result.partials for row in p.rows]
    assert [None, None] == [row.document for p in result.partials for row in p.rows]
    assert 130 * 3 == pytest.approx(result.nats / math.log(2), abs=1e-4)


def test_limit_takes_the_first_documents_only(evaluator: Evaluator, dyadic: Path) -> None:
    """What comes after the limit is neither scored nor counted."""
    result = evaluator.run(dyadic, ["aa", "dd", "bb"], data={"limit": 2})

    assert (2, 4, 4) == (result.plan.manifest.documents, result.plan.manifest.bytes, result.tokens)
    assert 8.0 == pytest.approx(result.nats / math.log(2), abs=1e-5)


def test_max_windows_takes_the_first_windows_only(evaluator: Evaluator, dyadic: Path) -> None:
    """Three windows of four tokens out of five; the manifest still tells of the whole text."""
    result = evaluator.run(dyadic, "a" * 20, window={"policy": "rolling", "context": 4, "max_windows": 3})

    assert (3, 12, 20) == (result.plan.manifest.windows, result.tokens, result.plan.manifest.tokens)
    assert 12 == result.plan.manifest.scored_bytes


def test_documents_without_tokens_count_but_are_not_scored(evaluator: Evaluator, dyadic: Path) -> None:
    """Empty documents between others keep their numbers; blanks and single tokens are scored as any text."""
    result = evaluator.run(dyadic, ["", "a", "", " ", "aa", ""], window={"context": 4})

    assert (6, 3) == (result.plan.manifest.documents, result.plan.manifest.empty_documents)
    assert {1: 1, 3: 1, 4: 2} == {d: row.tokens for d, row in result.rows.items()}
    assert {1: 1, 3: 0, 4: 1} == {d: row.words for d, row in result.rows.items()}
    assert 1.0 == pytest.approx(result.rows[1].steps / 2**30 / math.log(2), abs=1e-6)


def test_a_document_of_one_token_needs_something_before_it(evaluator: Evaluator, dyadic: Path) -> None:
    """Without BOS there is nothing to predict a lone token from: it is left out, and the counts say so."""
    result = evaluator.run(dyadic, ["a", "aa"], window={"context": 4, "bos": "none"})

    assert (3, 1) == (result.plan.manifest.tokens, result.tokens)
    assert [1] == list(result.rows)


@pytest.mark.parametrize("size", [15, 4096])
def test_carriage_returns_are_bytes_of_the_text(evaluator: Evaluator, dyadic: Path, size: int) -> None:
    """A file with CRLF line ends is read byte for byte."""
    path = evaluator.directory / "crlf.txt"
    path.write_bytes(b"a\r\nb\r\n")
    result = evaluator.run(dyadic, path, shard={"tokens": size})

    assert (6, 6, 2) == (result.plan.manifest.bytes, result.plan.manifest.scored_bytes, result.plan.manifest.words)


JOINED: list[dict[str, Any]] = [
    {"policy": "strided", "context": 8, "stride": 3, "join": "\n\n", "bos": "first"},
    {"policy": "strided", "context": 8, "stride": 7, "join": "", "bos": "every_window"},
    {"policy": "concat", "context": 8, "join": "\n", "bos": "every_window"},
]


@pytest.fixture(scope="module")
def multibyte(evaluator: Evaluator) -> Path:
    """A random model whose tokenizer splits characters beyond ASCII into bytes."""
    directory = models.write_random_llama(evaluator.directory / "multibyte", vocabulary=384)
    return models.write_bpe_tokenizer(directory, ["the cat sat on the mat", "a dog ate the cat's hat"])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from("the cat é€𝄞\u00a0\u2028\n\r"), max_size=12), min_size=1, max_size=6),
    window=st.sampled_from([{"policy": "rolling", "context": 5}, *JOINED]),
    shard=st.integers(1, 40),
)
def test_rows_add_up_to_the_text(
    evaluator: Evaluator, multibyte: Path, texts: list[str], window: dict[str, Any], shard: int
) -> None:
    """Where every token is scored, the documents' bytes and words are the text's, joins included, to the last one."""
    join = window.get("join")
    whole = texts if join is None else [join.join(texts)]
    size = sum(len(text.encode()) for text in whole)
    if size == 0:
        with pytest.raises(DatasetEmpty):
            evaluator.run(multibyte, texts, window=window)
        return
    result = evaluator.run(multibyte, texts, window=window, shard={"tokens": shard})
    rows = result.rows.values()

    assert size == sum(row.bytes for row in rows) == result.plan.manifest.scored_bytes
    assert sum(len(text.split()) for text in whole) == sum(row.words for row in rows)
    assert result.plan.manifest.tokens == sum(row.tokens for row in rows)
    if join is None:
        assert {d: len(text.encode()) for d, text in enumerate(texts) if text} == {r.document: r.bytes for r in rows}
