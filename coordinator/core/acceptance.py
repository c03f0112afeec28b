"""Whether a result fits what was planned: pure checks that return the first contradiction as one line of text.

What is wrong in itself (not on the grid, not finite) the wire refuses before it is a partial at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from eval_kernel.gridsum import GRID_BITS, MAX_SHARD_TOKENS
from eval_kernel.partial import MAX_PLACES, Execution, Partial, RowSums, ScoredShard
from eval_kernel.plan import MAX_COUNT, Manifest, Plan, ShardPlan
from eval_kernel.precision import temperature
from eval_kernel.precision.groups import CELLS, extra_problem

#: Sums below this many steps are exact in float64, in any order (2^23 nats).
MAX_STEPS = 1 << 53
#: Bounds of what an agent tells of how it computed: seconds (30 years), entries of a table, characters of a text.
MAX_SECONDS = 1e9
MAX_ENTRIES = 64
MAX_TEXT = 500
_SUMS = ("steps", "tokens", "bytes", "words")


def contradiction(plan: ShardPlan, scored: ScoredShard) -> str | None:
    """Return what keeps a scored shard from being the result of ``plan``; ``None`` where nothing does."""
    partial = scored.partial
    for name in ("tokens", "bytes", "words"):
        got, planned = getattr(partial, name), getattr(plan, name)
        if got != planned:
            return f"shard {plan.index}: {name} is {got}, its plan says {planned}"
    for name in _SUMS:
        total, added = getattr(partial, name), sum(getattr(row, name) for row in partial.rows)
        if total != added:
            return f"shard {plan.index}: {name} is {total}, its rows add up to {added}"
    problem = _steps(partial) or _rows(plan, partial.rows) or _nonfinite(plan, partial)
    problem = problem or _extra(plan, partial)
    problem = problem or _execution(scored.execution)
    return None if problem is None else f"shard {plan.index}: {problem}"


def _steps(partial: Partial) -> str | None:
    if not 0 <= partial.steps < MAX_STEPS:
        return f"its loss sum of {partial.steps} steps is outside [0, 2^53)"
    for row in partial.rows:
        if min(row.steps, row.tokens, row.bytes, row.words) < 0:
            return f"a row has a negative sum: {row}"
    return None


def _rows(plan: ShardPlan, rows: Sequence[RowSums]) -> str | None:
    """Documents ascending, unique and in range; at most one lump, and only where the plan has one."""
    previous = plan.first_document - 1
    lumps = [row for row in rows if row.document is None]
    if lumps and not plan.lump:
        return "it lumps documents together, its plan reports each by itself"
    if len(lumps) > 1:
        return f"it has {len(lumps)} lumps; one is allowed"
    for row in rows:
        if row.document is None:
            if row.documents < 1:
                return f"its lump stands for {row.documents} documents"
            continue
        if not plan.first_document <= row.document < plan.end_document:
            return f"document {row.document} is outside [{plan.first_document}, {plan.end_document})"
        if row.document <= previous:
            return f"document {row.document} follows document {previous}; they must ascend"
        if row.documents != 1:
            return f"the row of document {row.document} stands for {row.documents} documents"
        previous = row.document
    room = plan.end_document - plan.first_document
    documents = sum(row.documents for row in rows)
    return f"its rows stand for {documents} documents, its plan has {room}" if documents > room else None


def _nonfinite(plan: ShardPlan, partial: Partial) -> str | None:
    if not 0 <= partial.nonfinite <= partial.tokens:
        return f"{partial.nonfinite} of {partial.tokens} tokens cannot be non-finite"
    if partial.nonfinite and partial.nonfinite == partial.tokens and partial.steps:
        return f"no token has a finite loss, yet their sum is {partial.steps} steps"
    if len(partial.places) > min(partial.nonfinite, MAX_PLACES):
        return f"it names {len(partial.places)} places of {partial.nonfinite} non-finite losses"
    for place in partial.places:
        if place.value not in ("nan", "inf") or place.token < 0:
            return f"{place} is no place of a non-finite loss"
        if not plan.first_document <= place.document < plan.end_document:
            return f"a non-finite loss in document {place.document} is outside the shard"
    return None


def _extra(plan: ShardPlan, partial: Partial) -> str | None:
    """Further sums, by what they are for; a job that asked for none has none."""
    sums = dict(partial.extra)
    if plan.digest.startswith(CELLS):
        return extra_problem(sums, plan.first_document, plan.end_document)
    return temperature.problem(sums, partial.tokens - partial.nonfinite)


def _execution(execution: Execution) -> str | None:
    """How it was computed goes into the journal and the report as it is: finite, and of bounded length."""
    if not 0 <= execution.seconds <= MAX_SECONDS:  # NaN is neither
        return f"it took {execution.seconds} seconds, which no clock measures"
    if execution.threads < 0 or not 0 <= execution.peak_bytes <= MAX_COUNT:
        return f"it says {execution.threads} threads and {execution.peak_bytes} bytes at its peak"
    texts = [execution.device, execution.dtype]
    for name, table in (("software", execution.software), ("precision", execution.precision)):
        if len(table) > MAX_ENTRIES:
            return f"its {name} has {len(table)} entries; at most {MAX_ENTRIES} are kept"
        texts += [*table.keys(), *table.values()]
    longest = max(map(len, texts))
    return (
        f"a text of {longest} characters tells how it was computed; at most {MAX_TEXT} are kept"
        if (longest > MAX_TEXT)
        else None
    )


def unusable(plan: Plan) -> str | None:
    """Return what keeps a plan from being run; ``None`` where nothing does. That it adds up, ``Plan`` itself checks."""
    if not plan.shards:
        return "the plan has no shard"
    for s in plan.shards:
        if not 0 < s.tokens <= MAX_SHARD_TOKENS:
            return (
                f"shard {s.index} scores {s.tokens} tokens; between 1 and {MAX_SHARD_TOKENS} keep its sum exact "
                f"on a grid of 2^-{GRID_BITS} nat"
            )
        if not 0 <= s.first_document < s.end_document <= plan.manifest.documents:
            return f"shard {s.index} has documents [{s.first_document}, {s.end_document}) of {plan.manifest.documents}"
    return None


def difference(ours: Manifest, theirs: Manifest) -> str:
    """Name the fields in which two manifests differ, with the first one's values."""
    mine, other = ours.to_json(), theirs.to_json()
    names = [name for name in mine if mine[name] != other[name]]
    if not names:
        return "the same manifest, but other shards"
    first = names[0]
    return f"{', '.join(names)} differ ({first}: {mine[first]} planned, {other[first]} here)"
