"""The command that plans a job's precision by measurement on the cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator import precision
from coordinator.client import Client, call
from coordinator.commands.common import ADDRESS, Address, JobFile, say
from coordinator.pareto import write_chart
from eval_kernel.errors import RequestInvalid, SpecError
from eval_kernel.precision.choose import Table
from eval_kernel.precision.options import limits, measure_of
from eval_kernel.precision.policy import as_spec
from eval_kernel.precision.proof import Planned, plan_text, tradeoff_text
from eval_kernel.precision.proofjob import write
from eval_kernel.spec import load_spec


def plan(
    job_file: JobFile,
    budget: Annotated[str | None, typer.Option(help="Share of the checkpoint's bytes, such as 40%.")] = None,
    max_ppl_increase: Annotated[
        str | None, typer.Option(help="Share by which perplexity may rise, such as 0.5%.")
    ] = None,
    formats: Annotated[str | None, typer.Option(help="Formats to choose from, with commas between.")] = None,
    rows: Annotated[int, typer.Option(help="Rows that sensitivities are measured on.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens of such a row.")] = 256,
    proof: Annotated[int, typer.Option(min=2, help="Windows that the plan is proved on.")] = 20,
    sensitivity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measurements: used if the file is there, else written.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan there (YAML).")] = None,
    chart: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the trade-offs there (HTML).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    address: Address = ADDRESS,
) -> None:
    """Choose each layer's format by measurement, within a budget or a limit on perplexity, and prove it.

    Measurements and proofs are jobs that run on the cluster's agents. The plan goes under `precision:` of later jobs.
    """
    spec = load_spec(job_file)
    share, limit = limits(as_spec(spec.precision), budget, max_ppl_increase)
    wanted = precision.Wanted(measure_of(formats, rows, context), share, limit, proof)
    started = time.monotonic()

    def note(text: str) -> None:
        if not quiet:
            typer.echo(f"[{time.monotonic() - started:6.1f} s] {text}", err=True)

    async def action(client: Client) -> tuple[Table, Planned, dict[str, float]]:
        found = _read(sensitivity)
        if found is None:
            found = await precision.sensitivities(client, spec, wanted, note)
            if sensitivity is not None:
                write(sensitivity, json.dumps(found, indent=0) + "\n")
        table = precision.table_of(found)
        return table, *await precision.settle(client, spec, wanted, table, note)

    table, planned, speeds = call(address, action)
    text = plan_text(planned, table)
    say(tradeoff_text(table) + "\n" + text.rstrip("\n"))
    if out is not None:
        write(out, text)
    if chart is not None:
        write_chart(chart, table, planned, speeds, text)


def _read(path: Path | None) -> dict[str, Any] | None:
    """The measurements in a file; None where there is none yet."""
    if path is None or not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestInvalid(f"{path}: cannot read the sensitivities ({error.strerror})") from None
    except ValueError:
        raise SpecError(f"{path}: no file of sensitivities (not JSON); measure them again") from None
    if not isinstance(found, dict):
        raise SpecError(f"{path}: no file of sensitivities; measure them again")
    return found
