"""Calibration of confidence: sums that add up, the best temperature, the error by bins, all checked by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.partial import Partial
from eval_kernel.precision import confidence, temperature
from eval_kernel.precision.temperature import BINS, NAMES, TEMPERATURES, bin_names, loss_name, reliability
from eval_kernel.report import render_text
from eval_kernel.tally import Tally
from tests.support.evaluations import Evaluator
from tests.support.models import ALPHABET, write_char_tokenizer, write_random_llama
from tests.support.report_cases import k_report

pytestmark = pytest.mark.torch


def drawn(count: int = 500, sharp: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and targets drawn from them at the temperature 1 / ``sharp``."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(count, 50, generator=generator) * 2
    targets = torch.multinomial(torch.softmax(logits * sharp, -1), 1, generator=generator).squeeze(1)
    return logits, targets


def test_sums_are_those_of_each_token() -> None:
    """Losses at each temperature, bins and hits, against plain float64."""
    logits, targets = drawn()
    losses, sums = confidence.sums(logits, targets)
    wide = logits.double()
    for k, t in enumerate(TEMPERATURES):
        expected = torch.nn.functional.cross_entropy(wide / t, targets, reduction="sum")
        assert abs(sums[loss_name(k)] / STEPS_PER_NAT - float(expected)) <= 1e-3
    p = torch.softmax(wide, -1)
    top, guess = p.max(-1)

    assert list(NAMES) == list(sums)
    assert 500 == sum(sums[bin_names(b)[0]] for b in range(BINS))
    assert int((guess == targets).sum()) == sum(sums[bin_names(b)[2]] for b in range(BINS))
    assert abs(sum(sums[bin_names(b)[1]] for b in range(BINS)) / STEPS_PER_NAT - float(top.sum())) <= 1e-3
    assert torch.allclose(
        losses.double(), torch.nn.functional.cross_entropy(wide, targets, reduction="none"), atol=1e-5
    )


@pytest.mark.parametrize(("sharp", "expected"), [(1.0, 1.0), (0.8, 1.25), (1.25, 0.8)])
def test_the_temperature_that_the_text_was_drawn_at_is_found(sharp: float, expected: float) -> None:
    """To one step of the grid; a model that is too sure of itself has a larger calibration error."""
    logits, targets = drawn(4000, sharp)
    found = reliability(confidence.sums(logits, targets)[1], 4000)

    assert found is not None
    assert abs(math.log2(found["temperature"] / expected)) <= 1.01 / 16
    assert (found["ece"] < 0.02) == (sharp == 1.0)


def test_the_error_by_bins_is_worked_by_hand() -> None:
    """Two bins: 3 tokens of confidence 0.5 with 1 hit, 1 token of confidence 0.9 without."""
    sums = dict.fromkeys(NAMES, 0)
    for b, (count, mass, hits) in {7: (3, 1.5, 1), 13: (1, 0.9, 0)}.items():
        for name, value in zip(bin_names(b), (count, round(mass * STEPS_PER_NAT), hits), strict=True):
            sums[name] = value
    found = reliability(sums, 4)

    assert found is not None
    assert math.isclose(0.75 * abs(0.5 - 1 / 3) + 0.25 * 0.9, found["ece"], rel_tol=1e-6)
    assert 0.25 == found["accuracy"]


def test_sums_do_not_depend_on_how_tokens_are_grouped() -> None:
    """Any split gives the same integers; losses that are not finite are in none of them."""
    logits, targets = drawn(100)
    logits[10] = math.nan
    whole = confidence.sums(logits, targets)[1]
    parts = [confidence.sums(logits[a:b], targets[a:b])[1] for a, b in ((0, 33), (33, 34), (34, 100))]

    assert whole == {name: sum(part[name] for part in parts) for name in NAMES}
    assert 99 == sum(whole[bin_names(b)[0]] for b in range(BINS))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bin_00_tokens": None}, "lack or add 'bin_00_tokens'"),
        ({"other": 1}, "lack or add 'other'"),
        ({"temperature_03": -1}, "negative"),
        ({"temperature_03": 1 << 63}, "beyond 2^63"),
        ({"bin_00_tokens": 7}, "tokens, 100 have a finite loss"),
        ({"bin_14_hits": 101}, "more hits"),
    ],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, int | None], words: str) -> None:
    """Before they are counted."""
    sums: dict[str, Any] = {**confidence.sums(*drawn(100))[1], **change}
    found = temperature.problem({k: v for k, v in sums.items() if v is not None}, 100)

    assert found is not None
    assert words in found
    assert temperature.problem(confidence.sums(*drawn(100))[1], 100) is None
    assert temperature.problem({}, 100) is None


def test_a_job_reports_calibration_beside_the_plain_perplexity(tmp_path: Path) -> None:
    """Asked for, it is in every partial and in the report; the plain sums are as without it, to float32 rounding."""
    model = write_char_tokenizer(write_random_llama(tmp_path / "m"))
    text = "".join(ALPHABET[(7 * i * i + 3 * i) % 54] for i in range(900))
    evaluator = Evaluator(tmp_path)
    job: dict[str, Any] = {"window": {"context": 64}, "shard": {"tokens": 200}}
    plain = evaluator.run(model, [text], **job)
    asked = evaluator.run(model, [text], metrics="calibration", **job)
    found = reliability(asked.tally.extra, asked.tokens)

    assert found is not None
    assert plain.tokens == asked.tokens
    assert abs(plain.nats - asked.nats) <= 1e-6 * plain.nats
    assert abs(asked.tally.extra[loss_name(8)] / STEPS_PER_NAT - asked.nats) <= 1e-9 * asked.nats
    assert found["nats_per_token"] <= asked.nats_per_token
    assert {} == plain.tally.extra
    assert all(p == Partial.from_json(p.to_json()) for p in asked.partials)


def test_reports_show_it_only_where_every_token_is_in_it() -> None:
    """One shard without the sums, and there is no figure."""
    assert k_report()["calibration"] is None
    assert "Calibration" not in render_text(k_report())
    tally = Tally()
    sums = confidence.sums(*drawn(100))[1]
    tally.extra = sums

    assert reliability(tally.extra, 100) is not None
    assert reliability(tally.extra, 101) is None
