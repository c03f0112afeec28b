"""Packs: the text of a shard apart from its corpus, made by any node, scored by any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_kernel.engine import Engine
from eval_kernel.errors import DataChanged, SpecError
from eval_kernel.evaluation import Evaluation
from eval_kernel.pack import Pack, name_of
from eval_kernel.packer import EngineConfig, Packer
from eval_kernel.plan import MAX_ROWS, Plan
from eval_kernel.spec import JobSpec
from tests.support import models
from tests.support.evaluations import Evaluator, silent

pytestmark = pytest.mark.torch

TEXTS = ["abcd" * n for n in range(1, 30)] + ["", "é€𝄞 a", "a b c"] + ["ab"] * (2 * MAX_ROWS)
WINDOWS: list[dict[str, Any]] = [
    {"policy": "rolling", "context": 16},
    {"policy": "strided", "context": 16, "stride": 4},
    {"policy": "concat", "context": 16, "join": " "},
    {"policy": "half", "context": 16},
]


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    """A node that has the text."""
    return Evaluator(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Llama over characters."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path / "model"))


def packed(evaluator: Evaluator, spec: JobSpec, plan: Plan, ahead: int = 1000) -> list[bytes]:
    """Return the packs of all shards, made from the first on by a node with a cache of its own."""
    directory = evaluator.directory / "packs"
    directory.mkdir(exist_ok=True)
    packer = Packer(EngineConfig(evaluator.directory / "another"))
    made = list(packer.pack(spec, plan.manifest, plan.shards[0], ahead, directory, silent))
    assert list(plan.shards)[: ahead + 1] == [shard for shard, _, _ in made]
    found = [(directory / name).read_bytes() for _, name, _ in made]
    assert [(name_of(data), len(data)) for data in found] == [(name, size) for _, name, size in made]
    return found


def opened(evaluator: Evaluator, spec: JobSpec, plan: Plan, *, packs: bool) -> Evaluation:
    """Open a job on the evaluator's node."""
    found = evaluator.engine.open(spec, plan.manifest, silent, packs=packs)
    assert isinstance(found, Evaluation)
    return found


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: str(window["policy"]))
def test_a_node_without_the_text_scores_packs_to_the_same_bits(
    evaluator: Evaluator, model: Path, window: dict[str, Any]
) -> None:
    """Partials of packs are those of the corpus, rows and lumps included, and both nodes' packs have equal bytes."""
    spec = evaluator.spec(model, TEXTS, window=window, shard={"tokens": 64})
    plan = evaluator.engine.plan(spec, silent)
    packs = packed(evaluator, spec, plan)
    own = opened(evaluator, spec, plan, packs=False)
    (evaluator.directory / "texts-1.jsonl").unlink()
    theirs = opened(evaluator, spec, plan, packs=True)

    assert len(plan.shards) > 3
    for shard, data in zip(plan.shards, packs, strict=True):
        assert name_of(data) == name_of(Pack.of(own._inputs.layout, shard).encode())
        expected = own.score(shard, lambda: None).partial
        assert expected == theirs.score(shard, lambda: None, Pack.decode(data, shard)).partial


def test_lumps_survive_packing(evaluator: Evaluator, model: Path) -> None:
    """A shard of very many whole documents is one row, of a pack too."""
    spec = evaluator.spec(model, TEXTS, window={"context": 16}, shard={"tokens": 4096})
    plan = evaluator.engine.plan(spec, silent)
    (data,) = packed(evaluator, spec, plan)
    shard = plan.shards[0]
    own = opened(evaluator, spec, plan, packs=False).score(shard, lambda: None)

    assert shard.lump
    theirs = opened(evaluator, spec, plan, packs=True).score(shard, lambda: None, Pack.decode(data, shard))
    assert own.partial == theirs.partial


def test_a_damaged_pack_and_the_pack_of_another_shard_are_refused(evaluator: Evaluator, model: Path) -> None:
    """What does not prove itself by the plan's digest and counts is not scored."""
    spec = evaluator.spec(model, TEXTS, window={"context": 16}, shard={"tokens": 64})
    plan = evaluator.engine.plan(spec, silent)
    first, second = packed(evaluator, spec, plan, ahead=1)
    shard = plan.shards[0]
    end = first.index(b"\n") + 1

    assert shard.windows == len(Pack.decode(first, shard).windows)
    wrong = [b"", first[:-1], first + b"\0", second, first.replace(b'"format":1', b'"format":9'), first[end:]]
    wrong += [first[:at] + bytes([first[at] ^ 1]) + first[at + 1 :] for at in (1, end, end + 24, len(first) - 1)]
    for data in wrong:
        with pytest.raises(DataChanged, match="shard 0: this is not its pack"):
            Pack.decode(data, shard)
    with pytest.raises(DataChanged, match="documents"):
        Pack.decode(first, replace(shard, end_document=shard.end_document + 1))


def test_a_packer_refuses_another_text_and_jobs_without_packs(evaluator: Evaluator, model: Path) -> None:
    """A text that is not the plan's, a shard that is not, and a job that needs the whole text are said to be so."""
    spec = evaluator.spec(model, TEXTS, window={"context": 16}, shard={"tokens": 64})
    plan = evaluator.engine.plan(spec, silent)
    other = replace(plan, manifest=replace(plan.manifest, data_digest="sha256:" + "0" * 64))
    with pytest.raises(DataChanged, match="data_digest"):
        packed(evaluator, spec, other)
    shard = replace(plan.shards[0], digest="sha256:" + "0" * 64)
    with pytest.raises(DataChanged, match="shard 0"):
        packed(evaluator, spec, replace(plan, shards=(shard, *plan.shards[1:])))
    calibrated = {"default": "int4-g64", "quantiser": "gptq", "calibration": {"source": "pydoc:topics"}}
    with pytest.raises(SpecError, match="no packs"):
        packed(evaluator, evaluator.spec(model, TEXTS, precision=calibrated), plan)


def test_a_node_with_packs_still_checks_its_model(evaluator: Evaluator, model: Path) -> None:
    """Another tokenizer or other weights than the plan's are noticed without the text."""
    spec = evaluator.spec(model, TEXTS, window={"context": 16})
    plan = evaluator.engine.plan(spec, silent)
    models.write_random_llama(model, seed=1)
    with pytest.raises(DataChanged, match="weights_digest"):
        Engine(evaluator.engine.config).open(spec, plan.manifest, silent, packs=True)
