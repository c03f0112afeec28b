"""What the engine makes of a device that fails, of losses beyond all bounds, and of the machine it runs on."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from eval_kernel import errors
from eval_kernel.engine import Engine, EngineConfig
from tests.support import models
from tests.support.evaluations import Evaluator, silent

pytestmark = pytest.mark.torch


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    """A fresh engine with a fresh cache."""
    return Evaluator(tmp_path)


@pytest.fixture
def dyadic(tmp_path: Path) -> Path:
    """The dyadic unigram model."""
    return models.write_char_tokenizer(models.write_table_model(tmp_path / "dyadic", models.dyadic_table()))


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9"),
            errors.OutOfMemory,
            "window.context",
        ),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to"), errors.OutOfMemory, r"window\.context \(now 512\)"),
        (MemoryError(), errors.OutOfMemory, r"lower window\.context"),
        (
            RuntimeError("CUDA error: an illegal\naddress"),
            errors.ShardError,
            r"scoring failed on cpu \(RuntimeError: CUDA",
        ),
    ],
)
def test_a_device_that_fails_costs_the_shard(
    evaluator: Evaluator, dyadic: Path, fault: BaseException, kind: type[errors.FedevalError], match: str
) -> None:
    """One line that names the shard, blamed on the shard; the next try of the same evaluation may succeed."""
    spec = evaluator.spec(dyadic, "abcd", batch={"tokens": 77})
    plan = evaluator.engine.plan(spec, silent)
    evaluation = evaluator.engine.open(spec, plan.manifest, silent)
    sound = evaluation._model

    def fail(ids: torch.Tensor) -> torch.Tensor:
        raise fault

    evaluation._model = dataclasses.replace(sound, hidden=fail, rows=None)
    with pytest.raises(kind, match=match) as caught:
        evaluation.score(plan.shards[0], lambda: None)
    evaluation._model = sound

    assert kind is type(caught.value)
    assert errors.Blame.SHARD is caught.value.blame
    assert str(caught.value).startswith("shard 0: ")
    assert "\n" not in str(caught.value)
    assert 4 == evaluation.score(plan.shards[0], lambda: None).partial.tokens


def test_a_sum_beyond_what_stays_exact_is_refused(evaluator: Evaluator, tmp_path: Path) -> None:
    """500 tokens of 20,000 nats each are more than 2^23: the document and the remedy are named."""
    table = models.dyadic_table()
    table[:, 4:] = -20_000.0
    model = models.write_char_tokenizer(models.write_table_model(tmp_path / "steep", table))
    spec = evaluator.spec(model, ["a", "e" * 500])
    plan = evaluator.engine.plan(spec, silent)
    evaluation = evaluator.engine.open(spec, plan.manifest, silent)
    with pytest.raises(errors.LossOutOfBounds, match=r"document 1 add up to 1e\+07 nats.*lower shard\.tokens"):
        evaluation.score(plan.shards[0], lambda: None)

    assert 400 == evaluator.run(model, ["e" * 400]).tokens
    assert 400 * 20_000 == pytest.approx(evaluator.run(model, ["e" * 400]).nats, rel=1e-6)


def test_a_partial_tells_how_it_was_computed(evaluator: Evaluator, dyadic: Path) -> None:
    """Device, dtype really used, threads, memory and versions; none of it is part of the partial."""
    spec = evaluator.spec(dyadic, "abcd", precision="bf16")
    plan = evaluator.engine.plan(spec, silent)
    beats: list[int] = []
    scored = evaluator.engine.open(spec, plan.manifest, silent).score(plan.shards[0], lambda: beats.append(1))
    execution = scored.execution

    assert ("cpu", "bfloat16", 1) == (execution.device, execution.dtype, execution.threads)
    assert 0.0 < execution.seconds
    assert 1 << 20 < execution.peak_bytes
    assert {"torch", "transformers", "tokenizers", "fedeval"} <= set(execution.software)
    assert [1] == beats


def test_the_probe_says_what_works_here(tmp_path: Path) -> None:
    """On a CPU float32 and bfloat16 multiply; float16, far too slow, is not offered."""
    probe = Engine(EngineConfig(tmp_path, device="cpu")).probe()

    assert {"float32", "bfloat16"} == set(probe["dtypes"])
    assert "cpu" == probe["device"]
    assert 1 <= probe["threads"]


def test_the_plan_is_the_same_whoever_makes_it(evaluator: Evaluator, dyadic: Path, tmp_path: Path) -> None:
    """Another engine with another cache, and the same engine again, give an equal plan."""
    other = Evaluator(tmp_path / "other")
    other.directory.mkdir()
    spec = evaluator.spec(dyadic, ["abcd" * 30, "", "dd"], shard={"tokens": 40})
    plan = evaluator.engine.plan(spec, silent)

    assert plan == evaluator.engine.plan(spec, silent)
    assert plan == other.engine.plan(spec, silent)
    assert plan.digest == other.engine.plan(spec, silent).digest
    assert 1 < len(plan.shards)


def test_the_checkpoints_own_dtype_is_the_default(evaluator: Evaluator, dyadic: Path) -> None:
    """``precision: auto`` is what the weights are stored in."""
    assert "float32" == evaluator.run(dyadic, "abcd", precision="auto").plan.manifest.dtype
    result = evaluator.run(dyadic, "abcd", precision="bf16")

    assert "bfloat16" == result.plan.manifest.dtype
    assert 9 / 4 * math.log(2) == pytest.approx(result.nats_per_token, rel=1e-2)
