"""The report's part on precision: bytes that add up, everything that was skipped, and nodes that disagree."""

from __future__ import annotations

from typing import Any

import pytest
from fedeval.wire.messages import scored_from_message, scored_to_message

from coordinator.report import render_html, render_markdown
from eval_kernel import head, kernels, scoring
from eval_kernel.partial import Execution, ScoredShard
from eval_kernel.plan import Manifest
from eval_kernel.precision import section
from eval_kernel.precision.plan import resolve
from eval_kernel.precision.policy import as_spec, label_of
from eval_kernel.report import NodeWork, comparable, render_text
from tests.support.outlines import llama
from tests.support.report_cases import k_manifest, k_partials, k_report, k_spec

ONE, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def manifest_for(precision: Any, **outline: Any) -> Manifest:
    """A manifest whose plan is that of a precision."""
    spec = k_spec(precision=precision)
    plan = resolve(as_spec(spec.precision), llama(**outline), label_of(spec.precision))
    return k_manifest(dtype=plan.compute, precision_plan=plan.canonical())


def report_for(precision: Any, said: dict[str, dict[str, str]] | None = None, **outline: Any) -> dict[str, Any]:
    """A complete run's report whose nodes said something of their precision."""
    work = [NodeWork(node, 1, 10, 1.0, "cpu", "float32", {}, what) for node, what in (said or {}).items()]
    return k_report(manifest=manifest_for(precision, **outline), spec=k_spec(precision=precision), work=work)


def test_a_manifest_without_a_plan_has_no_section() -> None:
    """Nothing is invented."""
    report = k_report()

    assert report["precision"] is None
    assert "\nPrecision\n" not in render_text(report)
    assert "<h2>Precision</h2>" not in render_html(report)


def test_bytes_stand_beside_the_checkpoints_and_float32s() -> None:
    """Each class with its formats, scales and shares; the total is the sum."""
    part = report_for("int8", dtype="bfloat16")["precision"]
    rows = {c["class"]: c for c in part["classes"]}

    assert ["attention", "mlp", "embedding", "vectors", "total"] == list(rows)
    assert "8 x int8" == rows["attention"]["formats"]
    assert (64 * 64 + 64 * 4) / (64 * 64 * 2) == rows["attention"]["of_checkpoint"]
    assert (64 * 64 + 64 * 4) / (64 * 64 * 4) == rows["attention"]["of_fp32"]
    assert rows["total"]["bytes"] == sum(c["bytes"] for c in part["classes"][:-1])
    assert 256 * 64 * (4 * 2 + 2) == part["working"]["logits"]
    assert 128 * 64 * (4 * 2 + 2) == part["working"]["tile"]
    assert 0 < part["working"]["activations"]


def test_estimates_of_logits_are_those_of_the_code_that_holds_them() -> None:
    """The sizes of chunks and tiles are repeated in the report's part, which must not need torch."""
    assert (scoring.CHUNK, head.BLOCK, kernels.TILE) == (section.CHUNK, section.TILE_ROWS, section.TILE_COLUMNS)


def test_shares_of_a_gguf_file_are_called_those_of_its_conversion() -> None:
    """Float32 weights are 100% of what the file was converted to, not of the file."""
    spec = k_spec(precision="fp32", model="m.gguf")
    gguf = k_report(manifest=manifest_for("fp32"), spec=spec)
    other = report_for("fp32")

    assert ("float32 conversion", "checkpoint") == (gguf["precision"]["baseline"], other["precision"]["baseline"])
    for render in (render_text, render_html, render_markdown):
        assert "of float32 conversion" in render(gguf)
        assert "of checkpoint" not in render(gguf)
        assert "of checkpoint" in render(other)


def test_every_tensor_is_listed_and_every_skip_has_a_reason() -> None:
    """A group that divides some rows only is never silent."""
    report = report_for("int4-g128", wide=256)
    part = report["precision"]

    assert 19 - 1 == len(part["tensors"])
    assert 12 == len(part["skipped"])
    assert {"64 columns are no multiple of 128"} == {s["note"] for s in part["skipped"]}
    for text in (render_text(report), render_html(report), render_markdown(report)):
        assert "64 columns are no multiple of 128" in text
        assert "and 9 more" in text


@pytest.mark.parametrize(
    ("precision", "name"),
    [("fp32", "precision=float32]"), ("bf16", "precision=bfloat16]"), ("int8", "precision=int8/float32#")],
)
def test_a_metrics_name_says_the_precision(precision: str, name: str) -> None:
    """Uniform floats by their dtype, anything else by label, compute dtype and the plan's digest."""
    assert name in report_for(precision)["metric_name"]


def test_the_cost_of_quantisation_is_never_claimed() -> None:
    """It is the difference to another job."""
    assert "int8, mse" in report_for("int8")["numerics"]["quantisation"]["text"]
    assert "paired difference" in report_for("int8")["numerics"]["quantisation"]["text"]


def test_what_nodes_used_is_shown_by_node() -> None:
    """Kernels differ between devices; the report says so, and is comparable without."""
    said = {"a": {"mlp": "6 x int8 weights (x)", "weights": ONE}, "b": {"mlp": "6 x int8 weights (y)", "weights": ONE}}
    report = report_for("int8", said)
    text = render_text(report)

    assert report["complete"]
    assert {ONE: ["a", "b"]} == report["precision"]["weights_digests"]
    assert "used by a" in text
    assert "6 x int8 weights (y)" in text
    assert comparable(report) == comparable(report_for("int8", {"c": {"mlp": "z", "weights": ONE}}))


def test_nodes_with_different_weights_give_no_headline() -> None:
    """The same plan on the same checkpoint must give the same bytes."""
    report = report_for("int8", {"a": {"weights": ONE}, "b": {"weights": OTHER}})

    assert not report["complete"]
    assert ["nodes quantised the same weights to different bytes"] == [
        line.partition(" (")[0] for line in report["missing"]["summary"]
    ]
    assert not report_for("int8", {"a": {"weights": f"{ONE} and {OTHER}"}})["complete"]


def test_what_a_node_says_survives_the_wire() -> None:
    """As part of how a partial was computed."""
    scored = ScoredShard(k_partials()[0], Execution(1.0, "cpu", "float32", 2, 3, {"torch": "2"}, {"mlp": "int8"}))

    assert scored == scored_from_message(scored_to_message(scored))


def test_overlapping_calibration_is_shouted() -> None:
    """Numbers that were calibrated on what they evaluate are marked as such."""
    part = report_for("int8")["precision"]
    rows = section.facts({**part, "calibration": "sha256:ca", "calibration_overlaps": True})

    assert "OVERLAPS" in dict(rows)["quantiser"]
