"""A report as plain aligned text for a terminal. Computes nothing: every figure is already in the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eval_kernel.precision import section as precision

#: Missing shards and places that are listed one by one; the JSON report has them all.
MAX_LISTED = 20


def render_text(report: dict[str, Any]) -> str:
    """Return the report as text that ends with a newline; what is missing comes first."""
    lines = [f"Job {report['job']}" + (f' "{report["name"]}"' if report["name"] else "") + f": {report['state']}"]
    lines += _missing(report)
    lines += ["", report["metric_name"], *_metrics(report)]
    lines += _section("Totals", _totals(report))
    lines += _section("Accounting", _accounting(report["accounting"]))
    lines += _nodes(report)
    lines += _calibration(report["calibration"])
    lines += _precision(report["precision"])
    numerics = report["numerics"]
    lines += _section(
        "Numerics",
        [(title, numerics[key]["text"]) for title, key in _ERRORS],
    )
    lines += _section("Provenance", _provenance(report))
    # Names come from job files and nodes: nothing in them may steer the terminal.
    return "".join("".join(c if c.isprintable() else "?" for c in line) + "\n" for line in lines)


_ERRORS = (("adding up", "aggregation"), ("kernel, dtype", "kernel"), ("quantisation", "quantisation"))


def number(value: Any, digits: int = 7) -> str:
    """Return a figure for people: ``digits`` significant digits, a dash for none, integers whole."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def interval(metric: dict[str, Any]) -> str:
    """Return a metric's 95 % interval, or a dash."""
    return "-" if metric["low"] is None else f"{number(metric['low'])} .. {number(metric['high'])}"


def all_metrics(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics, partial or not, and the one that exists for comparison with another tool."""
    metrics: list[dict[str, Any]] = report["metrics" if report["complete"] else "partial_metrics"]
    return metrics + ([report["lm_eval"]] if report["lm_eval"] else [])


def missing_lines(report: dict[str, Any]) -> list[str]:
    """Return what is missing beyond the summary: shards, then places of losses that are not finite."""
    missing = report["missing"]
    lines = []
    shards = missing["shards"]
    for s in shards[:MAX_LISTED]:
        documents = f"documents {s['first_document']} to {s['end_document'] - 1}"
        lines.append(f"shard {s['index']}: {documents}, {s['tokens']} tokens: {s['reason']}")
    if len(shards) > MAX_LISTED:
        lines.append(f"... and {len(shards) - MAX_LISTED} more shards")
    places = missing["nonfinite"]["places"]
    lines += [f"document {p['document']}, token {p['token']}: loss is {p['value']}" for p in places[:MAX_LISTED]]
    unlisted = missing["nonfinite"]["tokens"] - min(len(places), MAX_LISTED)
    if unlisted > 0:
        lines.append(f"... and {unlisted} more tokens with a loss that is not finite")
    return lines


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; those numbered in ``right`` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    pads = [str.rjust if i in set(right) else str.ljust for i in range(len(widths))]
    return ["  ".join(pad(c, w) for c, w, pad in zip(row, widths, pads, strict=True)).rstrip() for row in rows]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["", title, *("  " + line for line in table(rows))] if rows else []


def _missing(report: dict[str, Any]) -> list[str]:
    coverage = report["coverage"]
    if report["complete"]:
        return [f"Complete: {number(coverage['scored_tokens'])} tokens planned, each scored exactly once."]
    lines = ["INCOMPLETE: the numbers below are partial. What is missing:"]
    lines += [f"  - {line}" for line in report["missing"]["summary"]]
    return lines + [f"    {line}" for line in missing_lines(report)]


def _metrics(report: dict[str, Any]) -> list[str]:
    metrics = all_metrics(report)
    title = "metric" if report["complete"] else "PARTIAL metric"
    rows = [(title, "value", "SE", "95 % interval", "unit")]
    notes: dict[str, list[str]] = {}
    for m in metrics:
        rows.append((m["name"], number(m["value"]), number(m["se"], 3), interval(m), m["unit"]))
        if m["note"]:
            note = m["note"] + (f" (log10 {number(m['log10'])})" if m["value"] == "inf" else "")
            notes.setdefault(note, []).append(m["name"])
    lines = ["  " + line for line in table(rows, right=(1, 2))]
    for note, names in notes.items():
        everywhere = len(names) == len(metrics) - bool(report["lm_eval"])
        lines.append(f"  note: {note}" if everywhere else f"  {', '.join(names)}: {note}")
    return lines + [f"  note: {note}" for note in report["statistics"]["notes"]]


def _totals(report: dict[str, Any]) -> list[tuple[str, str]]:
    totals, coverage = report["totals"], report["coverage"]
    share = "" if coverage["fraction"] is None else f" ({coverage['fraction']:.2%})"
    empty = f", {coverage['empty_documents']:,} of them empty" if coverage["empty_documents"] else ""
    return [
        ("loss, exact", totals["loss_nats_exact"] + " nats"),
        ("tokens scored", f"{totals['tokens']:,} of {coverage['tokens']:,}{share}"),
        ("bytes, words", f"{totals['bytes']:,}, {totals['words']:,}"),
        ("documents", f"{totals['documents']:,} of {coverage['documents']:,}{empty}"),
        ("digest", totals["digest"]),
    ]


def _accounting(accounting: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            "partials",
            f"{accounting['accepted']} accepted, {accounting['duplicates']} duplicates counted once, "
            f"{len(accounting['divergent'])} divergent, {accounting['refused']} refused",
        ),
        ("failed tries", str(accounting["failures"])),
    ]
    if accounting.get("reused"):
        job, shards = accounting["reused"]
        rows.append(("taken over", f"{shards} shards, as accepted by the equal job {job}"))
    if accounting.get("audits"):
        rows += _audits(accounting["audits"])
    for d in accounting["divergent"][:MAX_LISTED]:
        rows.append(("divergent", ", ".join(f"{key} {number(value)}" for key, value in sorted(d.items()))))
    return rows


def _audits(audits: dict[str, Any]) -> list[tuple[str, str]]:
    """What came of second opinions, and how far devices are apart."""
    kinds = ("agreed", "outlier", "disputed", "waived", "open")
    counts = ", ".join(f"{audits[kind]} {kind}" for kind in kinds if audits[kind])
    rows = [("audits", f"{counts}; {audits['scored_anew']} shards of quarantined agents scored anew")]
    for seen in audits["spread"]:
        text = f"{seen['comparisons']} compared, at most {seen['largest_relative_difference']:.1e} apart"
        rows.append((" and ".join(seen["devices"]), text))
    return rows


def _nodes(report: dict[str, Any]) -> list[str]:
    if not report["nodes"]:
        return []
    wall = report["timing"]["wall_seconds"]
    rows = [("node", "shards", "input tokens", "tokens/s", "busy", "device", "dtype")]
    for n in report["nodes"]:
        rate = number(n["input_tokens_per_second"], 4)
        busy = f"{n['seconds'] / wall:.0%}" if wall > 0 else "-"
        rows.append((n["node"], str(n["shards"]), f"{n['input_tokens']:,}", rate, busy, n["device"], n["dtype"]))
    layouts = [f"layout on {n['node']}: {n['layout']}" for n in report["nodes"] if n["layout"]]
    lines = [*table(rows, right=(1, 2, 3, 4)), *layouts]
    return ["", f"Nodes ({wall:.1f} s in all)", *("  " + line for line in lines)]


def _calibration(part: dict[str, Any] | None) -> list[str]:
    """The temperature fit and the calibration error, beside the plain metrics."""
    if part is None:
        return []
    rows = [
        ("best temperature", f"{part['temperature']:.4f} (perplexity there {number(part['perplexity'])})"),
        ("calibration error", f"{part['ece']:.4f} (ECE, {len(part['bins'])} bins)"),
        ("top-1 accuracy", f"{part['accuracy']:.4f}"),
        ("note", part["text"]),
    ]
    return _section("Calibration", rows)


def _precision(part: dict[str, Any] | None) -> list[str]:
    """Formats and bytes by class of weights, then what else there is to say of them."""
    if part is None:
        return []
    rows = table(precision.lines(part), right=(2, 3, 4, 5))
    return ["", "Precision", *("  " + line for line in [*rows, *table(precision.facts(part))])]


def _provenance(report: dict[str, Any]) -> list[tuple[str, str]]:
    p = report["provenance"]
    rows = [
        ("model", f"{report['spec']['model']['source']} ({p['model_type']}, {p['parameters']:,} parameters)"),
        ("dataset", ", ".join(report["spec"]["dataset"]["source"])),
        ("weights", p["weights_digest"]),
        ("tokenizer", p["tokenizer_digest"]),
        ("data", p["data_digest"]),
        ("manifest", p["manifest_digest"]),
        ("plan", p["plan_digest"]),
        ("kernel", f"version {p['kernel_version']}"),
    ]
    if p["software"]:
        versions = (f"{library} {' / '.join(found)}" for library, found in p["software"].items())
        rows.append(("software", ", ".join(versions)))
    return rows
