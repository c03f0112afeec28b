"""What the demo proves: a distributed run lost nothing, counted nothing twice, and has the reference's bits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval_kernel.report import comparable


@dataclass(frozen=True, slots=True)
class Line:
    """One claim with its figures, and whether it holds."""

    holds: bool
    text: str


def prove(report: dict[str, Any], reference: dict[str, Any]) -> list[Line]:
    """Return the claims about a run's report, against its own manifest and the reference evaluator's report."""
    manifest, totals, accounting = report["provenance"], report["totals"], report["accounting"]
    documents = manifest["documents"] - manifest["empty_documents"]
    shards, accepted, counted = manifest["shards"], accounting["accepted"], totals["shards"]
    by_node = sum(node["shards"] for node in report["nodes"])
    mine, other = totals["loss_nats_exact"], reference["totals"]["loss_nats_exact"]
    width = max(len(mine), len(other))
    return [
        Line(report["complete"], "the job has its number: nothing is missing"),
        Line(
            totals["documents"] == documents,
            f"documents scored {totals['documents']:,}, in the manifest {documents:,}",
        ),
        Line(
            totals["tokens"] == manifest["scored_tokens"] == manifest["tokens"],
            f"tokens scored {totals['tokens']:,}, in the manifest {manifest['tokens']:,}",
        ),
        Line(accepted == shards, f"partials accepted {accepted}, shards {shards}"),
        Line(counted == shards, f"partials lost {shards - counted}"),
        Line(accepted == counted == by_node, f"partials counted twice {max(accepted, by_node) - counted}"),
        Line(
            manifest["manifest_digest"] == reference["provenance"]["manifest_digest"],
            f"same model, text and windows as the reference: {manifest['manifest_digest']}",
        ),
        Line(
            totals["loss_steps"] == reference["totals"]["loss_steps"],
            f"loss sums bit-identical, in nats, to the last digit:\n"
            f"         coordinator {mine:>{width}}\n"
            f"         reference   {other:>{width}}",
        ),
        Line(
            comparable(report) == comparable(reference),
            "everything else in the report that could be equal is: metrics, intervals, digests, coverage",
        ),
    ]
