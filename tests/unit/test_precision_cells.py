"""Measurements as a job: one plan wherever it is made, partials that add up, the same cells as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.core.acceptance import contradiction, unusable
from eval_kernel.engine import Engine, EngineConfig
from eval_kernel.errors import DataChanged, SpecError
from eval_kernel.partial import Partial, ScoredShard
from eval_kernel.plan import SENSITIVITY, Manifest, Plan
from eval_kernel.precision.groups import Sensitivity
from eval_kernel.precision.planner import Planner, Request
from eval_kernel.precision.policy import MeasureSpec
from eval_kernel.precision.report import sensitivity_of
from eval_kernel.spec import JobSpec, load_spec, parse_spec
from eval_kernel.tally import Tally
from tests.support.models import ALPHABET
from tests.support.precision import llama, write

pytestmark = pytest.mark.torch

MEASURE = {"formats": ["bf16", "int8", "int4-g32"], "rows": 2, "context": 40}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text."""
    directory = tmp_path_factory.mktemp("cells")
    write(directory / "m", llama())
    draws = np.random.default_rng(5).integers(0, 54, 6000)
    (directory / "text.txt").write_text("".join(ALPHABET[i] for i in draws))
    return directory


def job(place: Path, **precision: Any) -> JobSpec:
    """A job of measurements."""
    return parse_spec(
        {"model": str(place / "m"), "dataset": str(place / "text.txt"), "precision": {"measure": MEASURE, **precision}},
        where="job",
    )


def engine(directory: Path) -> Engine:
    """One with a cache of its own."""
    return Engine(EngineConfig(directory / "cache", threads=1, device="cpu"))


def silent(_: str) -> None:
    """Say nothing."""


def run(spec: JobSpec, worker: Engine, order: int = 1) -> tuple[Plan, list[ScoredShard]]:
    """Plan a job and measure all its shards, forwards or backwards."""
    plan = worker.plan(spec, silent)
    opened = worker.open(spec, plan.manifest, silent)
    return plan, [opened.score(shard, lambda: None) for shard in plan.shards[::order]]


def test_cells_are_documents_and_layers_are_shards(place: Path, tmp_path: Path) -> None:
    """Nine groups in three formats; embedding and two layers make three shards; every engine plans the same."""
    plan = engine(tmp_path / "a").plan(job(place), silent)

    assert SENSITIVITY == plan.manifest.policy
    assert (27, 3) == (plan.manifest.documents, plan.manifest.shards)
    assert [(0, 3), (3, 15), (15, 27)] == [(s.first_document, s.end_document) for s in plan.shards]
    assert unusable(plan) is None
    assert plan.digest == engine(tmp_path / "b").plan(job(place), silent).digest
    assert plan.manifest == Manifest.from_json(plan.manifest.to_json())


def test_partials_are_accepted_and_add_up(place: Path, tmp_path: Path) -> None:
    """In any order, from any engine: the same partials, and the sensitivities of one process."""
    spec = job(place)
    plan, scored = run(spec, engine(tmp_path / "a"))
    _, backwards = run(spec, engine(tmp_path / "b"), -1)
    tally = Tally()
    for one in scored:
        assert contradiction(plan.shards[one.partial.shard], one) is None
        assert one.partial == Partial.from_json(one.partial.to_json())
        tally.add(one.partial)

    assert [s.partial for s in scored] == [s.partial for s in backwards[::-1]]
    found = sensitivity_of(spec, plan.manifest, tally)
    planner = Planner(
        parse_spec({**spec.model_dump(mode="json"), "precision": "auto"}, where="job"),
        Request(MeasureSpec.model_validate_json(json.dumps(MEASURE)), budget=0.5, proof_windows=1),
        engine(tmp_path / "c"),
        silent,
    )
    assert planner.sensitivity(None) == found
    assert found == Sensitivity.from_json(found.to_json())


def test_calibrated_cells_do_not_depend_on_order(place: Path, tmp_path: Path) -> None:
    """Layers that come again, or backwards, are calibrated anew."""
    calibration = {"source": str(place / "text.txt"), "windows": 4, "context": 40}
    spec = job(place, quantiser="gptq", calibration=calibration)
    _, forwards = run(spec, engine(tmp_path / "a"))
    _, backwards = run(spec, engine(tmp_path / "b"), -1)

    assert [s.partial for s in forwards] == [s.partial for s in backwards[::-1]]


def test_cells_that_lack_sums_are_refused(place: Path, tmp_path: Path) -> None:
    """Before they are counted."""
    plan, scored = run(job(place), engine(tmp_path))
    partial = scored[1].partial
    for extra in ((), partial.extra[1:], (*partial.extra, ("cell_000099_nll", 1))):
        broken = Partial(**{**{f: getattr(partial, f) for f in partial.__slots__}, "extra": extra})
        problem = contradiction(plan.shards[1], ScoredShard(broken, scored[1].execution))
        assert problem is not None
        assert "sensitivities" in problem


def test_other_text_on_a_node_is_found_out(place: Path, tmp_path: Path) -> None:
    """By the digest of the rows, before anything is measured."""
    plan = engine(tmp_path / "a").plan(job(place), silent)
    other = tmp_path / "text.txt"
    other.write_text((place / "text.txt").read_text()[::-1])
    spec = parse_spec(
        {"model": str(place / "m"), "dataset": str(other), "precision": {"measure": MEASURE}}, where="job"
    )
    with pytest.raises(DataChanged, match="data_digest"):
        engine(tmp_path / "b").open(spec, plan.manifest, silent)


def test_formats_that_fit_nothing_are_refused(place: Path, tmp_path: Path) -> None:
    """As is the format that the model has already."""
    for formats in (["fp32"], ["int4-g128"]):
        spec = parse_spec(
            {
                "model": str(place / "m"),
                "dataset": str(place / "text.txt"),
                "precision": {"measure": {**MEASURE, "formats": formats}},
            },
            where="job",
        )
        if formats == ["int4-g128"]:
            # Only what has 128 columns is left.
            assert {"layers.0.down", "layers.1.down"} == set(
                sensitivity_of(spec, *tallied(spec, engine(tmp_path))).cells
            )
            continue
        with pytest.raises(SpecError, match="fit no group"):
            engine(tmp_path).plan(spec, silent)


def tallied(spec: JobSpec, worker: Engine) -> tuple[Manifest, Tally]:
    """A job's manifest and all its partials added up."""
    plan, scored = run(spec, worker)
    tally = Tally()
    for one in scored:
        tally.add(one.partial)
    return plan.manifest, tally


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        ({"formats": []}, "formats is empty"),
        ({"formats": ["int8-dynamic"]}, "formats of weights alone"),
        ({"formats": ["int8", "int8"]}, "names one twice"),
        ({"formats": ["auto"]}, "formats of weights alone"),
        ({"rows": 0}, "rows is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_the_job(measure: dict[str, Any], words: str, tmp_path: Path) -> None:
    """One line, before anything runs."""
    file = tmp_path / "job.yaml"
    file.write_text(f"{{model: m, dataset: d, precision: {{measure: {measure}}}}}")
    with pytest.raises(SpecError) as caught:
        load_spec(file)

    assert words in str(caught.value)
