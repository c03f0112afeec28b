"""The demo's proof holds for a right report, and each kind of wrong one fails the line that is about it."""

from __future__ import annotations

import copy
from typing import Any

from coordinator.proof import prove
from tests.support.report_cases import k_report


def failing(change: Any) -> list[str]:
    """Return the lines that fail once ``change`` was made to a right report."""
    report, reference = k_report(), k_report()
    changed = copy.deepcopy(report)
    change(changed)
    return [line.text for line in prove(changed, reference) if not line.holds]


def at(path: str, value: Any) -> Any:
    """Return a change that sets one value of a report."""
    *way, last = path.split(".")

    def change(report: dict[str, Any]) -> None:
        for key in way:
            report = report[key]
        report[last] = value(report[last])

    return change


def test_every_line_holds_for_a_right_report() -> None:
    """Nine claims, all true, whoever worked and however long it took."""
    lines = prove(k_report(), k_report(job="reference", work=[], wall_seconds=1.0) | {"nodes": []})
    by_node = [line for line in lines if "counted twice" in line.text]

    assert 9 == len(lines)
    assert [] == [line.text for line in lines if not line.holds]
    assert ["partials counted twice 0"] == [line.text for line in by_node]


def test_a_lost_document_fails_its_line() -> None:
    """One document fewer than the manifest has."""
    assert any(
        "documents scored 4, in the manifest 5" in text for text in failing(at("totals.documents", lambda n: n - 1))
    )


def test_a_lost_token_fails_its_line() -> None:
    """One token fewer than the manifest has."""
    lines = failing(at("totals.tokens", lambda n: n - 1))

    assert any("tokens scored 15, in the manifest 16" in text for text in lines)


def test_a_lost_partial_fails_its_lines() -> None:
    """A shard that was accepted but is not in the sum."""
    assert "partials lost 1" in failing(at("totals.shards", lambda n: n - 1))


def test_a_partial_counted_twice_fails_its_line() -> None:
    """An acceptance too many."""
    assert "partials counted twice 1" in failing(at("accounting.accepted", lambda n: n + 1))


def test_one_step_of_the_grid_fails_the_comparison_and_both_sums_are_shown() -> None:
    """2^-30 nat of difference is found, and both numbers are printed with every digit."""
    reference = k_report()

    def change(report: dict[str, Any]) -> None:
        report["totals"]["loss_steps"] += 1
        report["totals"]["loss_nats_exact"] = "22.5"

    (line,) = [text for text in failing(change) if "bit-identical" in text]

    assert "22.5" in line
    assert reference["totals"]["loss_nats_exact"] in line


def test_another_manifest_or_metric_fails() -> None:
    """Another model, text or window is not the same evaluation."""
    assert any("same model" in text for text in failing(at("provenance.manifest_digest", lambda _: "sha256:other")))
    assert any("everything else" in text for text in failing(at("statistics.clusters", lambda n: n + 1)))


def test_a_report_without_its_number_fails() -> None:
    """An incomplete report proves nothing."""
    report = k_report(state="FAILED", failure=("X", "y"))

    assert "the job has its number: nothing is missing" in [
        line.text for line in prove(report, k_report()) if not line.holds
    ]
