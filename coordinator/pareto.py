"""The trade-offs of precision as one HTML file: predicted change of perplexity against bytes, and what was measured."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from eval_kernel.precision.choose import Table, tradeoffs
from eval_kernel.precision.proof import SHARES, Planned, interval
from eval_kernel.precision.proofjob import write

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 70, 40
#: Changes below this are drawn at the bottom: nobody can tell them apart.
FLOOR = 1e-6

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5c6670; --line: #dfe3e6; --accent: #1f6f8b;
  --other: #a3641f }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ea; --soft: #98a3ab; --line: #323a40; --accent: #6fbcd6;
  --other: #e0a86a } body { background: #14181b } }
body { color: var(--ink); font: 16px/1.55 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left } th { color: var(--soft); font-weight: 500 }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif } .axis { stroke: var(--line) }
.auto { fill: var(--accent); stroke: var(--accent) } .rule { fill: var(--other) } .line { fill: none }
.soft { color: var(--soft) } pre { overflow-x: auto }
"""


def write_chart(path: Path, table: Table, planned: Planned, speeds: dict[str, float], plan_text: str) -> None:
    """Write the chart. ``speeds``: tokens per second of the jobs that were run. Raises ``DirectoryUnusable``."""
    rows = tradeoffs(table, SHARES)
    chosen = {
        "plan": "this plan",
        "bytes": planned.chosen.bytes,
        "of_checkpoint": planned.chosen.bytes / table.checkpoint,
        "predicted_change": math.expm1(planned.chosen.predicted),
        "gap": planned.chosen.gap,
    }
    rows = sorted([*rows, chosen], key=lambda row: row["bytes"])
    body = "".join(_line(row) for row in rows)
    speed = ", ".join(f"{html.escape(name)} {value:,.0f} tokens/s" for name, value in speeds.items())
    text = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Precision plan</title><style>{_STYLE}</style></head><body>
<h1>Precision: bytes against perplexity</h1>
<p>The plan was measured on {planned.proof.clusters} windows kept apart: perplexity changes by
{html.escape(interval(planned.proof))}. {speed}</p>
{_svg(rows)}
<p class="soft">Line: the best choice found for each size. Other dots: rules of thumb. Changes are predicted from one
group of weights at a time; what was measured is said above.</p>
<table><tr><th>plan</th><th>bytes</th><th>of checkpoint</th><th>predicted change</th><th>gap to the bound</th></tr>
{body}</table>
<pre>{html.escape(plan_text)}</pre></body></html>
"""
    write(path, text)


def _line(row: dict[str, Any]) -> str:
    gap = "" if row["gap"] is None else f"{row['gap']:.2%}"
    cells = (
        html.escape(row["plan"]),
        f"{row['bytes']:,}",
        f"{row['of_checkpoint']:.1%}",
        f"{row['predicted_change']:+.4%}",
        gap,
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"


def _svg(rows: list[dict[str, Any]]) -> str:
    """Bytes to the right, change upwards on a logarithmic scale."""
    shares = [row["of_checkpoint"] for row in rows]
    logs = [math.log10(max(FLOOR, row["predicted_change"])) for row in rows]
    right: float = max(shares) * 1.05
    low, high = math.floor(min(logs)), math.ceil(max(logs))

    def x(share: float) -> float:
        return LEFT + share / right * (WIDTH - LEFT - 20)

    def y(log: float) -> float:
        return HEIGHT - BOTTOM - (log - low) / max(1, high - low) * (HEIGHT - BOTTOM - 20)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="Perplexity against bytes">']
    for power in range(low, high + 1):
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 20}" y1="{y(power):.1f}" y2="{y(power):.1f}"/>')
        parts.append(f'<text x="4" y="{y(power) + 4:.1f}">{10.0**power * 100:.3g} %</text>')
    for tenth in range(0, int(right * 10) + 1, 2):
        parts.append(f'<text x="{x(tenth / 10) - 12:.1f}" y="{HEIGHT - 14}">{tenth * 10} %</text>')
    parts.append(f'<text x="{WIDTH / 2 - 70:.0f}" y="{HEIGHT - 1}">bytes, of the checkpoint</text>')
    auto = [(x(s), y(log)) for row, s, log in zip(rows, shares, logs, strict=True) if row["gap"] is not None]
    parts.append('<polyline class="auto line" points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in auto) + '"/>')
    for row, share, log in zip(rows, shares, logs, strict=True):
        kind = "rule" if row["gap"] is None else "auto"
        size = 6 if row["plan"] == "this plan" else 4
        parts.append(
            f'<circle class="{kind}" cx="{x(share):.1f}" cy="{y(log):.1f}" r="{size}">'
            f"<title>{html.escape(row['plan'])}: {row['predicted_change']:+.4%}</title></circle>"
        )
    return "\n".join([*parts, "</svg>"])
