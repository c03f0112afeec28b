"""A job's report as JSON-ready data: the number, or what it lacks, and how it came about. Shows nothing.

``eval_kernel.report_text`` shows it on a terminal, the coordinator as HTML and Markdown. What depends on the
clock or on who worked is kept apart, so that two runs of a job can be compared bit by bit (``comparable``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eval_kernel.gridsum import GRID_BITS, exact_decimal, to_nats
from eval_kernel.intervals import CONFIDENCE
from eval_kernel.metrics import divergence, lm_eval_word_perplexity, metrics
from eval_kernel.plan import Manifest
from eval_kernel.precision import report as sensitivities
from eval_kernel.precision import section as precision
from eval_kernel.precision.policy import PrecisionSpec
from eval_kernel.precision.temperature import reliability
from eval_kernel.report_text import render_text
from eval_kernel.spec import JobSpec
from eval_kernel.tally import Tally

__all__ = ["Accounting", "MissingShard", "NodeWork", "build_report", "comparable", "render_text", "rule_name"]

SCHEMA = "fedeval.report/1"
#: Shards whose sums a report lists, so that two reports can be compared shard by shard.
MAX_SHARDS_LISTED = 4096


@dataclass(frozen=True, slots=True)
class MissingShard:
    """A shard without an accepted partial, the documents it has tokens of, and why it is missing."""

    index: int
    first_document: int
    end_document: int  # one past the last
    tokens: int  # scored tokens that are missing
    reason: str


@dataclass(frozen=True, slots=True)
class Accounting:
    """What became of the results that arrived: numbers of partials, and of failed tries."""

    accepted: int = 0
    duplicates: int = 0  # equal to the accepted one, counted once
    divergent: tuple[dict[str, Any], ...] = ()  # unequal to the accepted one: who, which shard, by how much
    refused: int = 0
    failures: int = 0  # tries at a shard that failed
    audits: Mapping[str, Any] | None = None  # second opinions: how many ended how, and the spread by device class
    reused: tuple[str, int] | None = None  # an equal job, and how many of its accepted shards were taken over


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What one node contributed, with the device, dtype and libraries it used."""

    node: str
    shards: int
    input_tokens: int
    seconds: float  # scoring time, model loading excluded
    device: str
    dtype: str
    software: dict[str, str]
    precision: dict[str, str] = field(default_factory=dict)


def build_report(
    *,
    job: str,
    name: str,
    state: str,
    failure: tuple[str, str] | None,
    spec: JobSpec,
    manifest: Manifest,
    plan_digest: str,
    tally: Tally,
    missing: Sequence[MissingShard],
    accounting: Accounting,
    work: Sequence[NodeWork],
    wall_seconds: float,
) -> dict[str, Any]:
    """Return the report of a job that has a manifest, in any state. All values are JSON's own types.

    The metrics stand under ``metrics`` only when every token that the manifest plans was scored exactly once,
    with a finite loss; else they stand under ``partial_metrics``, and ``missing.summary`` says what lacks.
    """
    lacking = _lacking(state, failure, spec, manifest, tally, missing)
    used = [(w.node, w.precision) for w in work]
    if (differ := precision.disagreement(used)) is not None:
        lacking.append(differ)
    complete = not lacking
    rule = rule_name(spec, manifest)
    work = sorted(work, key=lambda w: w.node)
    sensitivity = sensitivities.section(spec, manifest, tally)
    found = metrics(tally) if sensitivity is None else (divergence(tally),)
    computed = [{**m.to_json(), "full_name": f"{m.name}[{rule}]"} for m in found]
    return {
        "schema": SCHEMA,
        "job": job,
        "name": name,
        "state": state,
        "complete": complete,
        "failure": None if failure is None else {"code": failure[0], "message": failure[1]},
        "metric_name": f"{'perplexity' if sensitivity is None else found[0].name}[{rule}]",
        "metrics" if complete else "partial_metrics": computed,
        "missing": {
            "summary": lacking,
            "tokens": manifest.scored_tokens - tally.tokens,
            "shards": [asdict(m) for m in sorted(missing, key=lambda m: m.index)],
            "nonfinite": {
                "tokens": tally.nonfinite,
                "places": [asdict(p) for p in tally.places],
                "documents_left_out": sum(c.documents for c in tally.spoiled),
                "tokens_left_out": sum(c.tokens for c in tally.spoiled),
            },
        },
        "lm_eval": _lm_eval(manifest, tally) if complete else None,
        "totals": {
            "loss_nats_exact": exact_decimal(tally.steps),
            "loss_steps": tally.steps,
            "loss_nats": to_nats(tally.steps),
            "tokens": tally.tokens,
            "bytes": tally.bytes,
            "words": tally.words,
            "documents": tally.documents,
            "shards": tally.shards,
            "digest": tally.digest(),
        },
        "coverage": _coverage(manifest, tally),
        "statistics": _statistics(manifest, tally),
        "precision": precision.section(manifest, used, converted=_is_gguf(spec)),
        "sensitivity": sensitivity,
        "shards": _shards(tally),
        "calibration": reliability(tally.extra, tally.tokens - tally.nonfinite),
        "numerics": _numerics(spec, manifest, tally, accounting, work),
        "accounting": {**asdict(accounting), "divergent": [dict(d) for d in accounting.divergent]},
        "nodes": [_node(w) for w in work],
        "provenance": {
            **{key: value for key, value in manifest.to_json().items() if key != "precision_plan"},
            "manifest_digest": manifest.digest,
            "plan_digest": plan_digest,
            "software": _software(work),
        },
        "spec": spec.model_dump(mode="json"),
        "timing": {
            "wall_seconds": wall_seconds,
            "scoring_seconds": sum(w.seconds for w in work),
            "input_tokens_per_second": sum(w.input_tokens for w in work) / wall_seconds if wall_seconds > 0 else None,
        },
    }


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """Return what is bit-identical in two runs of one job: all but its id, who worked, and how long."""
    run = ("job", "name", "timing", "nodes", "accounting", "numerics")
    kept = {key: value for key, value in report.items() if key not in run}
    if kept["precision"] is not None:
        kept["precision"] = {k: v for k, v in kept["precision"].items() if k not in ("used", "weights_digests")}
    kept["provenance"] = {k: v for k, v in report["provenance"].items() if k != "software"}
    return kept


def rule_name(spec: JobSpec, manifest: Manifest) -> str:
    """Return what stands in brackets after a metric's name: numbers compare only where this is equal."""
    m = manifest
    parts = [m.policy, f"context={m.context}"]
    if m.stride is not None:
        parts.append(f"stride={m.stride}")
    if m.join is not None:
        parts.append(f"join={json.dumps(m.join, ensure_ascii=False)}")
    if spec.window.drop_remainder:
        parts.append("drop_remainder")
    if spec.window.max_windows is not None:
        parts.append(f"max_windows={spec.window.max_windows}")
    parts += [
        f"bos={m.bos}" if m.bos == "none" else f"bos={m.bos}({m.prefix_kind})",
        f"precision={precision.rule_part(m)}",
    ]
    return ",".join(parts)


def _lacking(
    state: str,
    failure: tuple[str, str] | None,
    spec: JobSpec,
    m: Manifest,
    tally: Tally,
    missing: Sequence[MissingShard],
) -> list[str]:
    """Why there is no headline number, a line each; empty when there is one."""
    lines = []
    if failure is not None:
        lines.append(f"the job ended with {failure[0]}: {failure[1]}")
    elif state != "SUCCEEDED":
        lines.append(f"the job is {state}: this is what has been scored so far")
    if missing:
        tokens = sum(s.tokens for s in missing)
        lines.append(f"{len(missing)} of {m.shards} shards are missing, with {tokens} of {m.scored_tokens} tokens")
    elif tally.shards != m.shards:
        lines.append(f"{tally.shards} of {m.shards} shards are in the tally")
    lines += _miscounts(spec, m, tally, missing)
    if tally.nonfinite:
        lines.append(f"tokens without a finite loss: {tally.nonfinite}; their documents are left out")
    return lines


def _miscounts(spec: JobSpec, m: Manifest, tally: Tally, missing: Sequence[MissingShard]) -> list[str]:
    """Counts that contradict the manifest, unless the missing shards account for them."""
    gap = m.scored_tokens - tally.tokens
    if missing and sum(s.tokens for s in missing) == gap and len(missing) + tally.shards == m.shards:
        return []
    lines = []
    counts = (("tokens", m.scored_tokens), ("bytes", m.scored_bytes), ("words", m.scored_words))
    for what, planned in counts:
        scored = getattr(tally, what)
        if scored != planned:
            lines.append(f"{scored} {what} were scored, the manifest says {planned}")
    with_tokens = m.documents - m.empty_documents
    # Only here is every document that has a token sure to have one that is scored.
    whole = m.policy == "rolling" and m.bos != "none" and spec.window.max_windows is None
    if tally.documents > with_tokens or (whole and tally.documents != with_tokens):
        lines.append(f"{tally.documents} documents were scored, the manifest has {with_tokens} with a token")
    return lines


def _lm_eval(m: Manifest, tally: Tally) -> dict[str, Any] | None:
    """The harness' own word perplexity; none where not every token of every document is scored, as it does."""
    if m.policy != "rolling" or m.scored_tokens != m.tokens:
        return None
    return {**lm_eval_word_perplexity(tally.steps, m.lm_eval_words).to_json(), "words": m.lm_eval_words}


def _coverage(m: Manifest, tally: Tally) -> dict[str, Any]:
    """How much of the text the metric is about."""
    return {
        "scored_tokens": tally.tokens,
        "tokens": m.tokens,
        "fraction": tally.tokens / m.tokens if m.tokens else None,
        "scored_documents": tally.documents,
        "documents": m.documents,
        "empty_documents": m.empty_documents,
    }


def _statistics(m: Manifest, tally: Tally) -> dict[str, Any]:
    """What the intervals rest on, and what they do not account for."""
    clusters = tally.sound
    lumps = sum(c.documents > 1 for c in clusters)
    notes = []
    if lumps:
        notes.append(f"{lumps} of {len(clusters)} clusters are shards of whole documents, each one sum")
    if m.join is not None:
        notes.append(
            "documents are joined and windows cross their borders: a document's loss depends on its "
            "neighbours, so the clusters are not quite independent"
        )
    if m.scored_tokens < m.tokens:
        notes.append("not every token is scored under this rule; bytes and words are those of the scored ones")
    return {
        "unit": "document",
        "clusters": len(clusters),
        "confidence": CONFIDENCE,
        "method": "cluster-robust standard error of a ratio; Student's t, clusters - 1 degrees of freedom",
        "notes": notes,
    }


def _numerics(
    spec: JobSpec, m: Manifest, tally: Tally, accounting: Accounting, work: Sequence[NodeWork]
) -> dict[str, Any]:
    """The three errors, kept apart: of adding up, of kernels and dtype, of quantisation."""
    classes = sorted({f"{device_class(w.device)} {w.dtype}".strip() for w in work})
    computed = f"computed on {', '.join(classes)}" if classes else "nothing was computed"
    if accounting.divergent:
        kernel = f"observed: partials that differ from the accepted ones: {len(accounting.divergent)}; {computed}"
    else:
        kernel = f"not measured: no unequal partial of a shard was seen; {computed}"
    if (cost := precision.cost_text(m)) is not None:
        quantisation = cost
    elif _is_gguf(spec):
        quantisation = f"weights of a GGUF file, computed in {m.dtype}; the cost of its quantisation is not known"
    elif spec.precision in ("auto", PrecisionSpec()):
        quantisation = f"none by this job: {m.dtype} is the checkpoint's own"
    else:
        quantisation = f"weights taken to {m.dtype} as asked; not compared with the checkpoint's own dtype"
    bound = tally.tokens / 2 ** (GRID_BITS + 1)
    return {
        "aggregation": {
            "error_nats": 0,
            "rounding_bound_nats": bound,
            "text": f"exact; losses are rounded once, to 2^-{GRID_BITS} nat: at most {bound:.2g} nats in all",
        },
        "kernel": {"device_classes": classes, "divergent": len(accounting.divergent), "text": kernel},
        "quantisation": {"dtype": m.dtype, "text": quantisation},
    }


def _is_gguf(spec: JobSpec) -> bool:
    """Whether the model is a GGUF file, whose weights are converted to float32 before anything else."""
    return spec.model.source.lower().endswith(".gguf")


def device_class(device: str) -> str:
    """Return a device's kind without its number: ``cuda:1 NVIDIA H100`` is ``cuda NVIDIA H100``."""
    kind, _, model = device.partition(" ")
    return f"{kind.partition(':')[0]} {model}".strip()


def _shards(tally: Tally) -> list[list[int]] | None:
    """Loss in grid steps, scored tokens and those without a finite loss, by shard; None for a job of very many."""
    if tally.shards > MAX_SHARDS_LISTED:
        return None
    return [[index, *sums] for index, sums in sorted(tally.by_shard.items())]


def _node(w: NodeWork) -> dict[str, Any]:
    rate = w.input_tokens / w.seconds if w.seconds > 0 else None
    return {**asdict(w), "layout": w.precision.get(precision.LAYOUT), "input_tokens_per_second": rate}


def _software(work: Iterable[NodeWork]) -> dict[str, list[str]]:
    """Every version of every library that took part: more than one is worth seeing."""
    versions: dict[str, set[str]] = {}
    for w in work:
        for library, version in w.software.items():
            versions.setdefault(library, set()).add(version)
    return {library: sorted(versions[library]) for library in sorted(versions)}
