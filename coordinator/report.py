"""A job's report as files: JSON, HTML, Markdown. Computes no figure: ``eval_kernel.report`` did."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from eval_kernel.errors import DirectoryUnusable
from eval_kernel.precision import section as precision
from eval_kernel.report_text import all_metrics, interval, missing_lines, number

#: Length of the longest bar of a chart, in SVG units.
_BAR = 400.0


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where a report's three files are."""

    json: Path
    html: Path
    markdown: Path


def render_html(report: dict[str, Any]) -> str:
    """Return the report as one HTML file that needs nothing else: no script, charts as inline SVG."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coordinator", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    metrics = all_metrics(report)
    return environment.get_template("report.html.j2").render(
        r=report,
        metrics=[{**m, "interval": interval(m), "chart": _whisker(m)} for m in metrics],
        headline={m["name"]: {**m, "interval": interval(m)} for m in metrics},
        missing=missing_lines(report),
        precision=precision.lines(report["precision"]),
        precision_facts=precision.facts(report["precision"]),
        nodes=_bars(report["nodes"]),
        bar=_BAR,
        spec=json.dumps(report["spec"], indent=2, ensure_ascii=False),
    )


def render_markdown(report: dict[str, Any]) -> str:
    """Return the report's substance as Markdown, say for a pull request; what is missing comes first."""
    title = report["name"] or report["job"]
    lines = [f"# {_md(title)}: {_md(report['state'])}", ""]
    if report["complete"]:
        lines.append(f"Complete: {number(report['coverage']['scored_tokens'])} tokens, each scored exactly once.")
    else:
        lines.append("**Incomplete: the numbers below are partial.** What is missing:")
        lines += ["", *(f"- {_md(line)}" for line in report["missing"]["summary"] + missing_lines(report))]
    metrics = all_metrics(report)
    lines += ["", f"`{report['metric_name'].replace('`', '')}`", ""]
    lines += ["| metric | value | SE | 95 % interval | unit | note |", "|---|--:|--:|---|---|---|"]
    for m in metrics:
        cells = (m["name"], number(m["value"]), number(m["se"], 3), interval(m), m["unit"], m["note"])
        lines.append("| " + " | ".join(_md(cell) for cell in cells) + " |")
    lines += ["", *(f"- {_md(note)}" for note in report["statistics"]["notes"])]
    totals, provenance = report["totals"], report["provenance"]
    facts = [
        ("loss, exact", totals["loss_nats_exact"] + " nats"),
        ("tokens, bytes, words", ", ".join(number(totals[k]) for k in ("tokens", "bytes", "words"))),
        ("totals digest", totals["digest"]),
        ("weights", provenance["weights_digest"]),
        ("tokenizer", provenance["tokenizer_digest"]),
        ("data", provenance["data_digest"]),
        ("plan", provenance["plan_digest"]),
        *((f"error of {key}", entry["text"]) for key, entry in report["numerics"].items()),
    ]
    lines += ["", "| | |", "|---|---|", *(f"| {_md(name)} | {_md(value)} |" for name, value in facts)]
    if (found := report["calibration"]) is not None:
        lines += ["", f"- best temperature: {found['temperature']:.4f}, perplexity there {number(found['perplexity'])}"]
        lines += [f"- calibration error (ECE): {found['ece']:.4f}", f"- {_md(found['text'])}"]
    if table := precision.lines(report["precision"]):
        lines += ["", "| " + " | ".join(table[0]) + " |", "|---|---|--:|--:|--:|--:|"]
        lines += ["| " + " | ".join(_md(cell) for cell in row) + " |" for row in table[1:]]
        lines += ["", *(f"- {_md(name)}: {_md(value)}" for name, value in precision.facts(report["precision"]))]
    if report["nodes"]:
        lines += [
            "",
            "| node | shards | input tokens | tokens/s | device | dtype |",
            "|---|--:|--:|--:|---|---|",
        ]
        for n in report["nodes"]:
            rate = number(n["input_tokens_per_second"], 4)
            cells = (n["node"], number(n["shards"]), number(n["input_tokens"]), rate, n["device"], n["dtype"])
            lines.append("| " + " | ".join(_md(cell) for cell in cells) + " |")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def write_reports(report: dict[str, Any], directory: Path, stem: str) -> ReportPaths:
    """Write ``stem``.json, .html and .md into ``directory`` (made if need be); return the paths.

    Each file appears whole or not at all; one of that name is replaced. Characters of ``stem`` that do not
    belong in a file name become dashes. Raises ``DirectoryUnusable``.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip(".-") or "report"
    paths = ReportPaths(*(directory / f"{safe}.{suffix}" for suffix in ("json", "html", "md")))
    texts = {
        paths.json: json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        paths.html: render_html(report),
        paths.markdown: render_markdown(report),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            _replace(path, text)
    except OSError as error:
        raise DirectoryUnusable(
            f"cannot write the report to {directory} ({error.strerror}); name a directory that can be written"
        ) from None
    return paths


def _replace(path: Path, text: str) -> None:
    """Write a file under a temporary name beside it, then rename it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            # mkstemp makes files for the owner alone; a report is as public as its directory.
            part.chmod(0o644)
            file.write(text.encode("utf-8"))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _md(text: str) -> str:
    """Text that Markdown shows as it is, also inside a table."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))


def _whisker(metric: dict[str, Any]) -> dict[str, float] | None:
    """Positions of low, value and high on an axis of length 100; none where they are not finite."""
    low, value, high = metric["low"], metric["value"], metric["high"]
    if not all(isinstance(v, float) for v in (low, value, high)) or not low < high:
        return None
    margin = 6.0
    at = margin + (100.0 - 2 * margin) * (value - low) / (high - low)
    return {"low": margin, "value": round(at, 2), "high": 100.0 - margin}


def _bars(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The nodes with the length of each one's bar, in proportion to the input tokens it scored."""
    most = max((n["input_tokens"] for n in nodes), default=0)
    return [{**n, "length": round(_BAR * n["input_tokens"] / most, 1) if most else 0.0} for n in nodes]
