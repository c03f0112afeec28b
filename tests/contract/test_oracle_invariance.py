"""Threads, batches and order change no bit of a partial; the losses are those of a float64 log-softmax."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from eval_kernel import checkpoint, model, scoring
from eval_kernel.decoder import Strip
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.spec import ModelSpec
from tests.support import models
from tests.support.evaluations import Evaluator, silent

pytestmark = pytest.mark.torch

VOCABULARY = 512


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    """An engine for all tests of this module."""
    return Evaluator(tmp_path_factory.mktemp("invariance"))


@pytest.fixture(scope="module")
def llama(evaluator: Evaluator) -> Path:
    """A random Llama that reads characters."""
    return models.write_char_tokenizer(models.write_random_llama(evaluator.directory / "llama"))


@pytest.fixture(scope="module")
def wide(evaluator: Evaluator) -> Path:
    """A random Llama with 512 tokens, to be fed with ids."""
    return models.write_random_llama(evaluator.directory / "wide", vocabulary=VOCABULARY)


@pytest.fixture
def threads() -> Iterator[None]:
    """Put torch's number of threads back afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def texts(seed: int) -> list[str]:
    """Documents of 41 to 700 letters."""
    draw = random.Random(seed)
    return ["".join(draw.choices(models.ALPHABET, k=draw.randint(41, 700))) for _ in range(8)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("context", [64, 300])
def test_threads_and_batches_change_no_bit(
    evaluator: Evaluator, llama: Path, threads: None, precision: str, context: int
) -> None:
    """One thread and two, budgets from one row to everything: equal partials, in fp32 and in bf16."""
    documents = texts(1)
    runs = []
    for count, budget in [(1, 4096), (2, 4096), (1, 1), (2, 131), (1, 1000)]:
        torch.set_num_threads(count)
        result = evaluator.run(
            llama, documents, precision=precision, window={"context": context}, batch={"tokens": budget}
        )
        runs.append(result.partials)

    assert [runs[0]] * 4 == runs[1:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_order_of_rows_changes_no_bit(wide: Path, tmp_path: Path, dtype: str) -> None:
    """Rows come back with the same losses wherever they stand, those of fewer than 40 tokens too."""
    loaded = load(wide, tmp_path, dtype)
    rows = random_rows(2, [(64, 64), (64, 20), (300, 299), (7, 7), (41, 3), (130, 128)] * 3)
    order = random.Random(3).sample(range(len(rows)), len(rows))
    straight = scoring.score(loaded, rows, 512, lambda: None)
    shuffled = scoring.score(loaded, [rows[i] for i in order], 512, lambda: None)

    assert [straight[i].steps.tolist() for i in order] == [loss.steps.tolist() for loss in shuffled]


def test_a_beat_follows_every_batch(wide: Path, tmp_path: Path) -> None:
    """A worker that scores shows it is alive at least once per batch, or per block of short rows."""
    loaded, beats = load(wide, tmp_path, "float32"), []
    rows = random_rows(4, [(50, 50)] * 6)
    scoring.score(loaded, rows, 100, lambda: beats.append(1))
    at_once = len(beats)
    scoring.score(dataclasses.replace(loaded, rows=None, alone=False), rows, 100, lambda: beats.append(1))

    assert (2, 3) == (at_once, len(beats) - at_once)


def own_logits(loaded: model.Model, ids: torch.Tensor, scored: int) -> torch.Tensor:
    """The logits of the path that scores this row: the fast one's own, where it takes that."""
    if loaded.rows is None:
        return loaded.logits(loaded.hidden(ids)[0, -scored:])
    return loaded.rows.head.logits(loaded.rows.body.states(Strip.of([ids[0]]), [scored]))


@pytest.mark.parametrize("scored", [300, 100, 40, 7])
def test_losses_are_those_of_a_float64_log_softmax(wide: Path, tmp_path: Path, scored: int) -> None:
    """Chunked float32 losses add up to the float64 sum over the same logits within 1e-8 of it."""
    loaded = load(wide, tmp_path, "float32")
    rows = random_rows(5, [(300, scored)] * 24)
    losses = scoring.score(loaded, rows, 1024, lambda: None)
    got = sum(int(loss.steps.sum()) for loss in losses) / STEPS_PER_NAT
    expected = 0.0
    for row in rows:
        with torch.inference_mode():
            logits = own_logits(loaded, as_batch(row), scored)
        expected += float(-torch.log_softmax(logits.double(), -1)[range(scored), row.targets.tolist()].sum())

    # A float32 loss of 6 nats is off by 2e-7 at most, and either way: sums of thousands are far closer.
    assert expected == pytest.approx(got, rel=1e-8 if scored >= 100 else 5e-8)


def test_losses_are_those_of_the_whole_model(wide: Path, tmp_path: Path) -> None:
    """Body and head apart give what the model gives in one piece; so does the way for models without such a seam."""
    loaded = load(wide, tmp_path, "float32")
    rows = random_rows(6, [(200, 200), (200, 200), (45, 12)] * 4)
    total = sum(int(x.steps.sum()) for x in scoring.score(loaded, rows, 512, lambda: None)) / STEPS_PER_NAT
    unsplit = dataclasses.replace(loaded, split=False)
    whole = sum(int(x.steps.sum()) for x in scoring.score(unsplit, rows, 512, lambda: None)) / STEPS_PER_NAT
    loop = 0.0
    for row in rows:
        with torch.inference_mode():
            logits = loaded.whole(as_batch(row), len(row.targets))[0].double()
        loop += float(-torch.log_softmax(logits, -1)[range(len(row.targets)), row.targets.tolist()].sum())

    assert loaded.split
    assert loop == pytest.approx(total, rel=1e-6)
    assert loop == pytest.approx(whole, rel=1e-6)


def load(directory: Path, cache: Path, dtype: str) -> model.Model:
    """Load a model on the CPU."""
    found = checkpoint.find(ModelSpec(source=str(directory)), None, cache, silent)
    return model.load(found, dtype, torch.device("cpu"))


def random_rows(seed: int, shapes: list[tuple[int, int]]) -> list[scoring.Row]:
    """Rows of (inputs, targets) random tokens."""
    draw = np.random.default_rng(seed)
    return [
        scoring.Row(
            draw.integers(0, VOCABULARY, length).astype(np.int32), draw.integers(0, VOCABULARY, scored).astype(np.int32)
        )
        for length, scored in shapes
    ]


def as_batch(row: scoring.Row) -> torch.Tensor:
    """A row's inputs as a batch of one."""
    return torch.from_numpy(row.inputs.astype(np.int64)).unsqueeze(0)
