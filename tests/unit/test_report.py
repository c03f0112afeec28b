"""The report's data and its text: complete or precisely what is missing, and comparable between runs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from eval_kernel.partial import NonFinite
from eval_kernel.report import Accounting, MissingShard, NodeWork, comparable, device_class, render_text
from eval_kernel.tally import Tally
from tests.support.report_cases import (
    k_manifest,
    k_partials,
    k_report,
    k_spec,
    k_work,
    partial,
    row,
    tally_of,
)


def value(report: dict[str, Any], name: str) -> Any:
    """The value of one of a complete report's metrics."""
    return next(m["value"] for m in report["metrics"] if m["name"] == name)


def missing_one() -> dict[str, Any]:
    """A failed job of which shard 1 was never scored."""
    return k_report(
        state="FAILED",
        failure=("SHARD_FAILED", "shard 1 failed 3 times"),
        tally=tally_of(k_partials()[0], k_partials()[2]),
        missing=[MissingShard(1, 0, 3, 7, "quarantined after 3 tries: out of memory")],
    )


def test_a_complete_job_has_metrics() -> None:
    """Perplexity 4 under ``metrics``, and nothing under ``missing``."""
    report = k_report()

    assert report["complete"] is True
    assert value(report, "perplexity") == pytest.approx(4.0, abs=1e-8)
    assert "partial_metrics" not in report
    assert [] == report["missing"]["summary"]
    assert 0 == report["missing"]["tokens"]


def test_a_report_is_json_without_extensions() -> None:
    """It survives JSON text that allows neither NaN nor infinity."""
    for report in (k_report(), missing_one(), k_report(tally=Tally(), work=[], wall_seconds=0.0)):
        assert report == json.loads(json.dumps(report, allow_nan=False))


def test_a_missing_shard_leaves_no_metrics_and_is_named() -> None:
    """The number stands under ``partial_metrics``; shard, documents, tokens and reason are listed."""
    report = missing_one()

    assert report["complete"] is False
    assert "metrics" not in report
    assert [
        "the job ended with SHARD_FAILED: shard 1 failed 3 times",
        "1 of 3 shards are missing, with 7 of 16 tokens",
    ] == report["missing"]["summary"]
    assert [
        {
            "index": 1,
            "first_document": 0,
            "end_document": 3,
            "tokens": 7,
            "reason": "quarantined after 3 tries: out of memory",
        }
    ] == report["missing"]["shards"]
    assert 7 == report["missing"]["tokens"]


@pytest.mark.parametrize("state", ["PLANNING", "RUNNING", "CANCELLED", "FAILED"])
def test_a_job_that_has_not_succeeded_is_incomplete(state: str) -> None:
    """Even with every token scored: the state is part of the claim."""
    report = k_report(state=state)

    assert report["complete"] is False
    assert [f"the job is {state}: this is what has been scored so far"] == report["missing"]["summary"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"scored_tokens": 17}, "16 tokens were scored, the manifest says 17"),
        ({"scored_bytes": 15}, "16 bytes were scored, the manifest says 15"),
        ({"scored_words": 6}, "5 words were scored, the manifest says 6"),
        ({"documents": 7}, "5 documents were scored, the manifest has 6 with a token"),
        ({"empty_documents": 2}, "5 documents were scored, the manifest has 4 with a token"),
        ({"shards": 4}, "3 of 4 shards are in the tally"),
    ],
)
def test_counts_that_contradict_the_manifest_are_incomplete(change: dict[str, int], line: str) -> None:
    """A job that calls itself succeeded is checked against what its data is."""
    report = k_report(manifest=k_manifest(**change))

    assert report["complete"] is False
    assert [line] == report["missing"]["summary"]


def test_documents_that_cannot_be_scored_do_not_make_a_job_incomplete() -> None:
    """Without BOS a document of one token has none that can be scored."""
    assert k_report(manifest=k_manifest(documents=7, bos="none", prefix_kind="none"))["complete"] is True
    assert k_report(manifest=k_manifest(documents=7), spec=k_spec(window={"max_windows": 6}))["complete"] is True


def test_a_loss_that_is_not_finite_is_named_and_leaves_no_headline() -> None:
    """Document 4 is left out of the partial metrics, and its place is in the report."""
    poisoned = replace(k_partials()[2], nonfinite=1, places=(NonFinite(4, 1, "nan"),))
    report = k_report(tally=tally_of(*k_partials()[:2], poisoned))

    assert ["tokens without a finite loss: 1; their documents are left out"] == report["missing"]["summary"]
    assert {
        "tokens": 1,
        "places": [{"document": 4, "token": 1, "value": "nan"}],
        "documents_left_out": 1,
        "tokens_left_out": 2,
    } == report["missing"]["nonfinite"]
    assert 4 == report["partial_metrics"][0]["clusters"]


def test_totals_hold_the_exact_sum() -> None:
    """The decimal string has every digit of the integer sum."""
    tally = tally_of(*k_partials())
    totals = k_report()["totals"]

    assert (tally.steps, 16, 16, 5, 5, 3) == tuple(
        totals[k] for k in ("loss_steps", "tokens", "bytes", "words", "documents", "shards")
    )
    assert "22.180709779262542724609375" == totals["loss_nats_exact"]
    assert tally.digest() == totals["digest"]


@pytest.mark.parametrize(
    ("manifest", "window", "name"),
    [
        ({}, {}, "perplexity[rolling,context=1024,bos=first(bos),precision=float32]"),
        (
            {"policy": "strided", "stride": 256, "context": 512, "bos": "none", "dtype": "bfloat16"},
            {"policy": "strided", "stride": 256},
            "perplexity[strided,context=512,stride=256,bos=none,precision=bfloat16]",
        ),
        (
            {"policy": "concat", "join": "\n\n", "bos": "every_window", "prefix_kind": "eos"},
            {"policy": "concat", "drop_remainder": True, "max_windows": 9},
            r'perplexity[concat,context=1024,join="\n\n",drop_remainder,max_windows=9,bos=every_window(eos),precision=float32]',
        ),
    ],
)
def test_the_rule_is_part_of_the_metrics_name(manifest: dict[str, Any], window: dict[str, Any], name: str) -> None:
    """Two numbers compare only where their names are equal."""
    report = k_report(manifest=k_manifest(**manifest), spec=k_spec(window=window))

    assert name == report["metric_name"]


def test_coverage_is_the_share_of_tokens_that_are_scored() -> None:
    """A policy that scores half of the text says so, and is complete all the same."""
    report = k_report(manifest=k_manifest(tokens=32, documents=20, policy="half", join="\n\n", bos="none"))

    assert report["complete"] is True
    assert 0.5 == report["coverage"]["fraction"]
    assert report["lm_eval"] is None
    notes = " ".join(report["statistics"]["notes"])
    assert "not every token is scored" in notes
    assert "windows cross their borders" in notes


def test_lumps_are_pointed_out() -> None:
    """Where a shard is the cluster, the statistics say so."""
    tally = tally_of(partial(0, row(None, 10, 3, documents=70)), partial(1, row(9, 5, 2)))

    assert ["1 of 2 clusters are shards of whole documents, each one sum"] == k_report(tally=tally)["statistics"][
        "notes"
    ]


def test_the_harness_word_count_stands_beside_ours() -> None:
    """Where every token is scored, the word perplexity that lm-evaluation-harness would print is given too."""
    assert k_report()["lm_eval"]["value"] == pytest.approx(2.0 ** (32 / 8), rel=1e-8)


def test_two_runs_compare_equal_whoever_did_the_work() -> None:
    """Nodes, retries, job id and time differ; all that is compared is equal."""
    one = k_report()
    other = k_report(
        job="job-2",
        tally=tally_of(*reversed(k_partials())),
        accounting=Accounting(accepted=3, duplicates=7, failures=2),
        work=[NodeWork("gamma", 3, 16, 1.0, "cpu", "float32", {"torch": "2.12.0"})],
        wall_seconds=99.0,
    )

    assert one != other
    assert comparable(one) == comparable(other)


def test_one_step_more_makes_two_runs_differ() -> None:
    """A difference of 2^-30 nat in one document is a difference."""
    first = k_partials()[0]
    moved = partial(0, replace(first.rows[0], steps=first.rows[0].steps + 1))

    assert comparable(k_report()) != comparable(k_report(tally=tally_of(moved, *k_partials()[1:])))


def test_the_three_errors_are_kept_apart() -> None:
    """Adding up is exact with a stated rounding bound; kernels are compared only where partials differ."""
    numerics = k_report()["numerics"]

    assert 0 == numerics["aggregation"]["error_nats"]
    assert 16 * 2.0**-31 == numerics["aggregation"]["rounding_bound_nats"]
    assert ["cpu float32", "cuda NVIDIA H100 float32"] == numerics["kernel"]["device_classes"]
    assert numerics["kernel"]["text"].startswith("not measured")
    assert "float32 is the checkpoint's own" in numerics["quantisation"]["text"]


def test_divergent_partials_are_an_observation() -> None:
    """They are counted and listed with their difference."""
    divergent = {"shard": 1, "node": "beta", "difference_nats": 2.5e-6}
    report = k_report(accounting=Accounting(accepted=3, divergent=(divergent,)))

    assert report["numerics"]["kernel"]["text"].startswith("observed")
    assert [divergent] == report["accounting"]["divergent"]
    assert "difference_nats 2.5e-06" in render_text(report)


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"model": "/m/x.GGUF"}, "weights of a GGUF file"),
        ({"precision": "bf16"}, "as asked; not compared"),
    ],
)
def test_what_is_known_of_quantisation_is_said(spec: dict[str, Any], part: str) -> None:
    """No claim is made about what was not measured."""
    assert part in k_report(spec=k_spec(**spec))["numerics"]["quantisation"]["text"]


def test_provenance_names_every_digest_and_version() -> None:
    """Data, tokenizer, weights, manifest, plan, kernel, and all versions of each library."""
    work = [*k_work(), replace(k_work()[0], node="gamma", software={"torch": "2.12.0"})]
    provenance = k_report(work=work)["provenance"]
    digests = [provenance[f"{name}_digest"] for name in ("data", "tokenizer", "weights", "manifest", "plan")]

    assert ["sha256:da", "sha256:70", "sha256:3e", k_manifest().digest, "sha256:91"] == digests
    assert {"torch": ["2.12.0", "2.13.0"], "transformers": ["5.24.0"]} == provenance["software"]


def test_timing_is_apart_and_survives_no_time_at_all() -> None:
    """Rates are numbers where time passed, and absent where none did."""
    report = k_report(wall_seconds=0.0, work=[replace(k_work()[0], seconds=0.0)])

    assert report["timing"]["input_tokens_per_second"] is None
    assert report["nodes"][0]["input_tokens_per_second"] is None
    assert 2.0 == k_report()["timing"]["input_tokens_per_second"]


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "cpu"), ("cuda:1 NVIDIA H100", "cuda NVIDIA H100"), ("cuda:0", "cuda"), ("", "")]
)
def test_a_device_class_has_no_number(device: str, expected: str) -> None:
    """Two devices of one kind are one class."""
    assert expected == device_class(device)


def test_the_text_shows_the_number_and_how_it_was_obtained() -> None:
    """Name, value, interval, exact sum, nodes and digests, none wider than its column."""
    text = render_text(k_report())

    assert 'Job job-1 "K": SUCCEEDED\nComplete: 16 tokens planned, each scored exactly once.\n' in text
    for part in ("perplexity                      4", "22.180709779262542724609375 nats", "alpha", "sha256:91"):
        assert part in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_how_a_model_lay_on_a_nodes_ranks_stands_with_the_node() -> None:
    """Of a node with one rank nothing is said."""
    layout = "sharded over 2 ranks: 538 MB of weights do not fit into 300 MB, 1/2 of the layers does"
    first, second = k_work()
    report = k_report(work=[replace(first, precision={"mlp": "fp32", "layout": layout}), second])

    assert [None, layout] == [node["layout"] for node in report["nodes"]]
    assert f"  layout on beta: {layout}\n" in render_text(report)
    assert 1 == render_text(report).count("layout on")


def test_the_text_of_an_incomplete_job_begins_with_what_is_missing() -> None:
    """The reader meets the gap before any number, and each number is called partial."""
    lines = render_text(missing_one()).splitlines()

    assert lines[1].startswith("INCOMPLETE")
    assert "    shard 1: documents 0 to 2, 7 tokens: quarantined after 3 tries: out of memory" in lines
    assert any(line.startswith("  PARTIAL metric") for line in lines)


def test_long_lists_are_cut_and_counted() -> None:
    """Of 500 missing shards twenty are listed; the JSON has them all."""
    missing = [MissingShard(i, i, i + 1, 1, "not scored") for i in range(500)]
    report = k_report(state="CANCELLED", tally=Tally(), missing=missing, manifest=k_manifest(shards=500))
    text = render_text(report)

    assert 500 == len(report["missing"]["shards"])
    assert 20 == text.count(": not scored")
    assert "... and 480 more shards" in text


def test_names_cannot_steer_the_terminal() -> None:
    """Escape sequences in a node's name are shown as question marks."""
    text = render_text(k_report(work=[replace(k_work()[0], node="\x1b[2Jevil\u202e\n")]))

    assert "?[2Jevil??" in text
    assert text.replace("\n", "").isprintable()


def test_an_empty_tally_gives_a_report() -> None:
    """Before the first partial: no value, no crash, and everything is missing."""
    report = k_report(state="RUNNING", tally=Tally(), work=[])

    assert [None] * 5 == [m["value"] for m in report["partial_metrics"]]
    assert 16 == report["missing"]["tokens"]
    assert "no value: no tokens scored" in render_text(report)
