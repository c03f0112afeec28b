"""A CUDA device comes to what the CPU comes to, within the rounding of its kernels, and to the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval_kernel.engine import Engine, EngineConfig
from eval_kernel.gridsum import to_nats
from eval_kernel.plan import Plan
from eval_kernel.spec import JobSpec, parse_spec
from tests.support import models
from tests.support.corpora import write_jsonl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def spec(tmp_path: Path, precision: str, batch_tokens: int) -> JobSpec:
    """A job on a random Llama: documents of 50 to 400 characters."""
    llama = tmp_path / "llama"
    if not llama.exists():
        models.write_char_tokenizer(models.write_random_llama(llama))
    texts = write_jsonl(tmp_path / "t.jsonl", [models.ALPHABET * k for k in range(1, 7)])
    job = {
        "model": str(llama),
        "dataset": str(texts),
        "precision": precision,
        "window": {"context": 128},
        "batch": {"tokens": batch_tokens},
    }
    return parse_spec(job, where="test")


def nats(engine: Engine, job: JobSpec) -> tuple[Plan, list[float], int]:
    """The plan, the loss sum of each shard, and the scored tokens."""
    plan = engine.plan(job, lambda _: None)
    evaluation = engine.open(job, plan.manifest, lambda _: None)
    partials = [evaluation.score(shard, lambda: None).partial for shard in plan.shards]
    return plan, [to_nats(p.steps) for p in partials], sum(p.tokens for p in partials)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2), ("fp16", 5e-3)])
def test_a_gpu_scores_as_a_cpu_does(tmp_path: Path, precision: str, tolerance: float) -> None:
    """Same plan for the same job; the sum is that of the CPU in float32 within the precision's rounding."""
    cpu = Engine(EngineConfig(tmp_path / "cpu", device="cpu"))
    gpu = Engine(EngineConfig(tmp_path / "gpu", device="cuda:0"))
    plan, expected, tokens = nats(cpu, spec(tmp_path, "fp32", 4096))
    gpu_plan, got, gpu_tokens = nats(gpu, spec(tmp_path, precision, 4096))

    assert plan.manifest.data_digest == gpu_plan.manifest.data_digest
    assert [s.digest for s in plan.shards] == [s.digest for s in gpu_plan.shards]
    assert tokens == gpu_tokens
    assert sum(expected) == pytest.approx(sum(got), rel=tolerance)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_repeats_itself(tmp_path: Path, precision: str) -> None:
    """Scored twice, a job comes to the same bits."""
    gpu = Engine(EngineConfig(tmp_path / "gpu", device="cuda:0"))
    job = spec(tmp_path, precision, 1000)

    assert nats(gpu, job) == nats(gpu, job)
