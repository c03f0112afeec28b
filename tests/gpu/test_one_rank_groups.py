"""What groups do, on one device: NCCL in a world of one, tensor parallel code, layer streaming, memory given back.

Each test runs on the CPU too, with gloo, so that what is tried on a GPU is known to be right in itself.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from eval_kernel import model, scoring
from eval_kernel.budget import Budget
from eval_kernel.engine import Engine
from eval_kernel.engine import EngineConfig as SingleConfig
from eval_kernel.parallel.group import EngineConfig, GroupEngine
from eval_kernel.parallel.opening import open_streamed
from eval_kernel.parallel.rankengine import shape_of
from eval_kernel.parallel.ranks import Ranks
from eval_kernel.parallel.tensor import TensorParallel
from eval_kernel.precision import loading
from eval_kernel.spec import JobSpec, parse_spec
from tests.support import models, ways
from tests.support.corpora import write_jsonl

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)]),
]
#: Lengths of rows, and the relative difference of their loss sum that another order of additions may make.
LENGTHS, TOLERANCE = (200, 200, 77, 41), {"fp32": 1e-5, "int8": 1e-4, "int4-g32": 1e-4}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a head of its own."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def world(device: str) -> Iterator[Ranks]:
    """A group of this process alone."""
    ranks = Ranks(0, 1, torch.device(device), 60.0)
    ranks.join()
    yield ranks
    ranks.leave()


def total(losses: list[scoring.Losses]) -> int:
    """The sum of all losses, in steps."""
    return sum(int(one.steps.sum()) for one in losses)


def resident(directory: Path, precision: str, device: torch.device, cache: Path) -> model.Model:
    """The model with all its weights on a device."""
    made, digest, found = ways.ingredients(directory, precision, cache)
    loaded = loading.load(found, digest, made.plan, device, cache, lambda _: None)
    return model.prepare(loaded.module, device, getattr(torch, made.plan.compute), "test")


def job(directory: Path, data: Path) -> JobSpec:
    """A job in float32."""
    window = {"policy": "rolling", "context": 64}
    return parse_spec(
        {"model": str(directory), "dataset": str(data), "precision": "fp32", "window": window}, where="test"
    )


def test_sums_of_a_world_of_one_are_the_numbers_themselves(world: Ranks) -> None:
    """Joining, float64 and int64 sums, and what ranks tell each other work with the device's own backend."""
    nats, flags = np.array([1.5, 2**-30, 0.0]), np.array([1, 2, 4])
    summed, counted = world.sums(nats.copy(), flags.copy())

    assert summed.tolist() == nats.tolist()
    assert counted.tolist() == flags.tolist()
    assert [3, 1] == world.largest([3, 1])
    assert [{"a": 1}] == world.every({"a": 1})


@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_tensor_parallel_model_of_one_rank_is_the_model(
    llama: Path, tmp_path: Path, world: Ranks, precision: str
) -> None:
    """Cut into one part, with its hooks and its head in parts, it comes to the whole model's losses."""
    made, _, _ = ways.ingredients(llama, precision, tmp_path)
    rows = ways.rows(LENGTHS, models.V)
    expected = scoring.score(resident(llama, precision, world.device, tmp_path), rows, Budget(4096), lambda: None)
    part = TensorParallel(made, world.device, 0, 1, None, shape_of(made.source.module))
    got = part.score(rows, Budget(4096), lambda: None, None)

    assert [len(a.steps) for a in expected] == [len(b.steps) for b in got]
    assert total(expected) == pytest.approx(total(got), rel=TOLERANCE[precision])


@pytest.mark.parametrize("precision", TOLERANCE)
def test_layers_streamed_to_the_device_give_what_resident_ones_do(
    llama: Path, tmp_path: Path, device: str, precision: str
) -> None:
    """The same losses, whatever share of the layers comes from the host's files at each visit."""
    made, _, _ = ways.ingredients(llama, precision, tmp_path)
    rows = ways.rows(LENGTHS, models.V)
    here = torch.device(device)
    expected = scoring.score(resident(llama, precision, here, tmp_path), rows, Budget(4096), lambda: None)
    streamed, _ = open_streamed(made, here, 1.0, "test")
    got = scoring.score(streamed, rows, Budget(4096), lambda: None)

    assert total(expected) == pytest.approx(total(got), rel=TOLERANCE[precision])


def test_a_group_of_one_scores_what_an_engine_does_and_gives_its_memory_back(
    llama: Path, tmp_path: Path, device: str
) -> None:
    """The same partials; after dissolving, the device holds no more than before, and a new group can form."""
    data = write_jsonl(tmp_path / "t.jsonl", [models.ALPHABET * k for k in range(1, 6)])
    spec, threads = job(llama, data), torch.get_num_threads()
    engine = Engine(SingleConfig(tmp_path / "cache", None, device, 1))
    plan = engine.plan(spec, lambda _: None)
    evaluation = engine.open(spec, plan.manifest, lambda _: None)
    expected = [evaluation.score(shard, lambda: None).partial for shard in plan.shards]
    del evaluation, engine
    group = GroupEngine(EngineConfig(tmp_path / "cache", None, device, 1, 1))
    before = allocated(device)
    try:
        for _ in range(2):
            opened = group.open(spec, plan.manifest, lambda _: None)
            assert expected == [opened.score(shard, lambda: None).partial for shard in plan.shards]
            assert device == "cpu" or allocated(device) > before
            opened.close()
            del opened
            group.close()
            assert allocated(device) <= before
    finally:
        group.close()
        torch.set_num_threads(threads)


def allocated(device: str) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, where nobody counts them."""
    gc.collect()
    return int(torch.cuda.memory_allocated(device)) if device.startswith("cuda") else 0
