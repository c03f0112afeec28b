"""The command that compares two precisions of one model, token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.client import call
from coordinator.commands.common import ADDRESS, Address, AsJson, print_json, say
from eval_kernel.errors import RequestInvalid
from eval_kernel.precision.compare import compare_reports

_Side = Annotated[str, typer.Argument(metavar="JOB|REPORT.json", help="A job's id, or the JSON file of a report.")]


def compare(reference: _Side, other: _Side, as_json: AsJson = False, address: Address = ADDRESS) -> None:
    """Compare two jobs that differ in precision only: the paired difference of their losses, with its interval."""
    found = compare_reports(_report(reference, address), _report(other, address))
    if as_json:
        print_json(found.to_json())
        return
    ends = "" if found.low is None else f", 95 %: {found.low:+.6f} .. {found.high:+.6f}"
    change = "" if found.change_low is None else f", 95 %: {found.change_low:+.3%} .. {found.change_high:+.3%}"
    say(f"perplexity   {found.reference_perplexity:.6f} -> {found.perplexity:.6f} ({found.change:+.3%}{change})")
    say(f"difference   {found.delta:+.6f} nats per token{ends}")
    say(f"paired over  {found.clusters:,} shards, {found.tokens:,} tokens")


def _report(side: str, address: str) -> dict[str, Any]:
    """Read a report from its file, or fetch it. Raises ``RequestInvalid`` for a file that is none."""
    path = Path(side)
    if path.suffix != ".json":
        return call(address, lambda client: client.report(side))
    try:
        report = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestInvalid(
            f"{path}: cannot read the report ({error.strerror}); give a job's id or a report's JSON"
        ) from None
    except ValueError:
        raise RequestInvalid(f"{path}: not JSON; give the JSON file that `report --out` writes") from None
    if not isinstance(report, dict) or "provenance" not in report:
        raise RequestInvalid(f"{path}: no report of a job; give the JSON file that `report --out` writes")
    return dict(report)
