"""Distributions of two precisions compared token by token: worked by hand, and on a real small model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.precision import distance
from eval_kernel.precision.__main__ import main
from eval_kernel.precision.distance import Sums
from tests.support.models import ALPHABET
from tests.support.precision import llama, write

pytestmark = pytest.mark.torch


def test_two_tokens_are_worked_by_hand() -> None:
    """A fair coin against one of three to one: ln 2, the two losses, one agreement of two."""
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    q = torch.tensor([[0.75, 0.25], [0.2, 0.8]]).log()
    found = distance.of_logits(p + 3.0, q - 1.0, torch.tensor([1, 0]))
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    expected += 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)

    assert (2, 1) == (found.tokens, found.agreements)  # the coin's first of two equals counts
    assert math.isclose(expected, found.divergence / STEPS_PER_NAT, rel_tol=1e-5)
    assert math.isclose(-math.log(0.5 * 0.9), found.reference / STEPS_PER_NAT, rel_tol=1e-5)
    assert math.isclose(-math.log(0.25 * 0.2), found.other / STEPS_PER_NAT, rel_tol=1e-5)


def test_sums_do_not_depend_on_the_pieces() -> None:
    """Values are rounded token by token."""
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(60, 11, generator=generator) for _ in range(2))
    targets = torch.randint(0, 11, (60,), generator=generator)
    pieces = [slice(0, 7), slice(7, 50), slice(50, 60)]

    assert distance.of_logits(p, q, targets) == distance.of_pieces(
        [(p[s], targets[s]) for s in pieces], [(q[s], targets[s]) for s in pieces]
    )


def test_intervals_are_over_shards() -> None:
    """Two shards of ten tokens: means, and an error from their spread."""
    grid = STEPS_PER_NAT
    found = distance.distance([Sums(10, 20 * grid, 21 * grid, grid, 9), Sums(10, 20 * grid, 23 * grid, 3 * grid, 7)])

    assert (2, 20) == (found.change.clusters, found.change.tokens)
    assert math.isclose(0.2, found.change.delta)
    assert math.isclose(0.2, found.divergence.value or 0)
    assert math.isclose(0.8, found.agreement.value or 0)
    assert math.isclose(0.1, found.divergence.se or 0)
    assert any("ratio 1.221403" in line for line in distance.lines(found))


def run(directory: Path, capsys: pytest.CaptureFixture[str], *sides: str) -> tuple[int, Any]:
    """Compare two precisions of a small model; return the exit code and what was printed."""
    draws = np.random.default_rng(5).integers(0, 54, 500)
    (directory / "text.txt").write_text("".join(ALPHABET[i] for i in draws))
    model = directory / "m"
    if not model.exists():
        write(model, llama())
    window = {"policy": "concat", "context": 50}
    job = {"model": str(model), "dataset": "text.txt", "window": window, "shard": {"tokens": 100}}
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    options = ["--cache", str(directory / "cache"), "--device", "cpu", "--json", "--quiet"]
    code = main(["compare", str(directory / "job.yaml"), *sides, *options])
    shown = capsys.readouterr()
    return code, json.loads(shown.out) if code == 0 else shown.err


def test_the_command_compares_names_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same on both sides is no distance; fewer bits are farther; the loss is that of each alone."""
    (tmp_path / "plan.yaml").write_text("default: int4-g32\n")
    same = run(tmp_path, capsys, "fp32", "fp32")[1]
    eight = run(tmp_path, capsys, "fp32", "int8")[1]
    four = run(tmp_path, capsys, "fp32", str(tmp_path / "plan.yaml"))[1]
    other = run(tmp_path, capsys, "int8", str(tmp_path / "plan.yaml"))[1]

    assert (0.0, 0.0, 1.0) == (same["delta"], same["divergence"]["value"], same["agreement"]["value"])
    assert 0 < eight["divergence"]["value"] < four["divergence"]["value"]
    assert four["agreement"]["value"] < 1
    assert eight["perplexity"] == other["reference_perplexity"]
    assert four["perplexity"] == other["perplexity"]
    assert 4 == four["clusters"]  # two windows of 50 make 98 inputs, a third closes the shard of 100


@pytest.mark.parametrize(
    ("text", "words"),
    [("default: [", "no plan of a precision"), ("measure: {rows: 1}", "not measure"), ("default: int9", "int9")],
)
def test_what_is_no_precision_is_refused(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that says why."""
    (tmp_path / "plan.yaml").write_text(text)
    code, shown = run(tmp_path, capsys, "fp32", str(tmp_path / "plan.yaml"))

    assert code == 11
    assert words in shown
    assert 1 == shown.count("\n")
