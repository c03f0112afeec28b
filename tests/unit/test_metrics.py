"""Metrics of corpora whose figures are known, and the identities between them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.metrics import Metric, bits_per_byte, lm_eval_word_perplexity, metrics
from eval_kernel.partial import NonFinite
from eval_kernel.tally import Tally
from tests.support.report_cases import k_partials, partial, row, tally_of


def by_name(tally: Tally) -> dict[str, Metric]:
    """The metrics under their names."""
    return {m.name: m for m in metrics(tally)}


def test_the_k_corpus_gives_its_known_figures() -> None:
    """Perplexity 4, 2 bits per byte, a standard error of 0.625 bits; every naive average gives something else."""
    m = by_name(tally_of(*k_partials()))

    assert m["perplexity"].value == pytest.approx(4.0, abs=1e-8)
    assert m["bits_per_byte"].value == pytest.approx(2.0, abs=1e-8)
    assert m["bits_per_byte"].se == pytest.approx(0.625, abs=1e-8)
    assert m["nats_per_token"].se == pytest.approx(0.625 * math.log(2.0), abs=1e-8)
    assert m["perplexity"].se == pytest.approx(1.7328679514, abs=1e-8)
    assert m["word_perplexity"].value == pytest.approx(2.0 ** (32 / 5), rel=1e-8)
    assert {5} == {metric.clusters for metric in m.values()}


def test_the_interval_of_a_perplexity_is_the_exponential_of_that_of_its_nats() -> None:
    """Asymmetric, and never below one."""
    m = by_name(tally_of(*k_partials()))
    nats, ppl = m["nats_per_token"], m["perplexity"]

    assert nats.low is not None
    assert nats.high is not None
    assert (math.exp(nats.low), math.exp(nats.high)) == (ppl.low, ppl.high)


def test_bits_and_perplexities_are_one_quantity() -> None:
    """2^bpb is the byte perplexity, and word perplexity is byte perplexity to the power bytes per word."""
    m = by_name(tally_of(partial(0, row(0, 12345678901, 8)), partial(1, row(1, 4567890123, 3, words=2))))
    bpb, byte, word = (m[name].value for name in ("bits_per_byte", "byte_perplexity", "word_perplexity"))

    assert bpb is not None
    assert byte is not None
    assert byte == pytest.approx(2.0**bpb, rel=1e-14)
    assert word == pytest.approx(byte ** (11 / 3), rel=1e-13)


def test_the_running_estimate_is_the_metric() -> None:
    """One metric alone equals the one among all."""
    tally = tally_of(*k_partials()[:2])

    assert by_name(tally)["bits_per_byte"] == bits_per_byte(tally)


def test_an_overflowing_perplexity_is_infinite_beside_finite_nats() -> None:
    """710 nats per token are beyond float64: the nats and the log10 stay, and JSON stays valid."""
    m = by_name(tally_of(partial(0, row(0, 710 * STEPS_PER_NAT, 1)), partial(1, row(1, 2 * 711 * STEPS_PER_NAT, 2))))
    ppl = m["perplexity"]

    assert ppl.value == math.inf
    assert ppl.se is None
    assert ppl.log10 == pytest.approx((710 + 2 * 711) / 3 / math.log(10.0), rel=1e-14)
    assert m["nats_per_token"].value == pytest.approx(710.6666666666666, rel=1e-14)
    assert "beyond float64" in ppl.note
    assert "inf" == json.loads(json.dumps(ppl.to_json(), allow_nan=False))["value"]


def test_one_document_has_no_error_and_says_why() -> None:
    """The value stands without an interval."""
    m = by_name(tally_of(partial(0, row(0, STEPS_PER_NAT, 1))))

    assert (math.e, None, None, None) == (
        m["perplexity"].value,
        m["perplexity"].se,
        m["perplexity"].low,
        m["perplexity"].high,
    )
    assert "at least two documents" in m["perplexity"].note


def test_nothing_scored_is_no_value_and_no_crash() -> None:
    """An empty tally has five metrics without a value, each with the reason."""
    found = metrics(Tally())

    assert [None] * 5 == [m.value for m in found]
    assert ["tokens", "tokens", "bytes", "bytes", "words"] == [m.note.split()[3] for m in found]


def test_no_words_leaves_the_other_metrics() -> None:
    """Text without a word has bits per byte but no word perplexity."""
    m = by_name(tally_of(partial(0, row(0, 50, 2, words=0)), partial(1, row(1, 40, 2, words=0))))

    assert m["word_perplexity"].value is None
    assert "no value: no words scored" == m["word_perplexity"].note
    assert m["bits_per_byte"].value is not None


def test_documents_without_a_finite_loss_are_left_out_whole() -> None:
    """D4 is poisoned: the rest gives what a corpus without D4 gives, not a sum that is too small."""
    poisoned = replace(k_partials()[2], nonfinite=1, places=(NonFinite(4, 0, "nan"),))
    without = partial(2, k_partials()[2].rows[0])

    assert metrics(tally_of(*k_partials()[:2], without)) == metrics(tally_of(*k_partials()[:2], poisoned))


def test_few_documents_are_pointed_out() -> None:
    """Below thirty clusters a note says what the interval rests on; with thirty it is silent."""
    few, many = (tally_of(*(partial(i, row(i, 100 + i, 2)) for i in range(n))) for n in (29, 30))

    assert "29 clusters only (t, 28 degrees of freedom)" in bits_per_byte(few).note
    assert "" == bits_per_byte(many).note


def test_another_tools_words_give_another_word_perplexity() -> None:
    """lm-evaluation-harness counts empty pieces as words; the value says so and has no interval."""
    metric = lm_eval_word_perplexity(3 * STEPS_PER_NAT, 2)

    assert metric.value == pytest.approx(math.exp(1.5), rel=1e-15)
    assert metric.low is None
    assert "lm-evaluation-harness" in metric.note
