"""The part of a report that says in which precision a job was computed: formats, bytes, what was skipped and why.

Pure: read from the manifest's plan and from what nodes said of themselves. Shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval_kernel.plan import Manifest
from eval_kernel.precision.formats import DTYPE_BYTES, FORMATS
from eval_kernel.precision.plan import PrecisionPlan, bytes_by_class, formats_by_class

#: Key of the digest of the quantised weights among what a node says of its precision.
DIGEST = "weights"
#: Key of the layout of a model that lies on several ranks or is streamed; the report shows it with the nodes.
LAYOUT = "layout"
#: Positions whose logits exist at one time (``scoring.CHUNK``); and positions and outputs of one tile of them, where a
#: fast path scores rows one by one (``head.BLOCK``, ``kernels.TILE``). Those modules need torch, this one must not.
CHUNK, TILE_ROWS, TILE_COLUMNS = 256, 128, 2048
#: Copies of logits in float32: themselves, and their exponentials.
LOGIT_COPIES = 2
#: What shares of bytes are shares of.
CHECKPOINT, CONVERSION = "checkpoint", "float32 conversion"
#: Copies of a token's widest layer and of its hidden state that exist at one time, roughly.
WIDE_COPIES, HIDDEN_COPIES = 3, 6


def section(
    manifest: Manifest, used: Iterable[tuple[str, Mapping[str, str]]], *, converted: bool = False
) -> dict[str, Any] | None:
    """Return the report's ``precision``, or None for a manifest without a plan. ``used``: (node, what it said).

    ``converted``: the checkpoint is not the user's own file but what a GGUF file was converted to, in float32.
    """
    if not manifest.precision_plan:
        return None
    plan = PrecisionPlan.from_canonical(manifest.precision_plan)
    classes = []
    for name, row in bytes_by_class(plan).items():
        counts = formats_by_class(plan).get(name, {})
        classes.append(
            {
                "class": name,
                "formats": ", ".join(f"{n} x {form}" for form, n in sorted(counts.items())),
                **row,
                "of_checkpoint": row["bytes"] / row["checkpoint"] if row["checkpoint"] else None,
                "of_fp32": row["bytes"] / row["fp32"] if row["fp32"] else None,
            }
        )
    said = [(node, dict(what)) for node, what in used if what]
    return {
        "label": plan.label,
        "digest": plan.digest,
        "compute": plan.compute,
        "quantiser": plan.quantiser if plan.quantised else None,
        "calibration": plan.calibration or None,
        "calibration_overlaps": plan.calibration_overlaps,
        "baseline": CONVERSION if converted else CHECKPOINT,
        "checkpoint_dtype": plan.checkpoint_dtype,
        "tied": plan.tied,
        "untied": plan.untied,
        "classes": classes,
        "working": working_bytes(manifest, plan),
        "skipped": [{"name": t.name, "format": t.format, "note": t.note} for t in plan.tensors if t.note],
        "tensors": [[t.name, t.role, t.format, t.value_bytes + t.scale_bytes, t.note] for t in plan.tensors],
        "used": {node: {k: v for k, v in what.items() if k not in (DIGEST, LAYOUT)} for node, what in said},
        "weights_digests": _digests(said),
    }


def disagreement(used: Iterable[tuple[str, Mapping[str, str]]]) -> str | None:
    """Return a line if nodes scored with different quantised weights, else None."""
    digests = _digests([(node, dict(what)) for node, what in used])
    if len(digests) < 2:
        return None
    shown = "; ".join(f"{', '.join(nodes)}: {digest[:19]}..." for digest, nodes in sorted(digests.items()))
    return f"nodes quantised the same weights to different bytes ({shown}); their losses are not of one model"


def _digests(said: list[tuple[str, dict[str, str]]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node, what in said:
        for digest in filter(None, what.get(DIGEST, "").split(" and ")):
            found.setdefault(digest, []).append(node)
    return found


def working_bytes(manifest: Manifest, plan: PrecisionPlan) -> dict[str, int]:
    """Estimate what a forward pass needs beside the weights: activations of a batch, and logits.

    Logits exist either for a chunk of positions (``logits``) or, on a fast path, in one tile per thread (``tile``).
    """
    columns = [t.columns for t in plan.tensors if t.role in ("attention", "mlp", "other") and t.kind == "matrix"]
    rows = [t.rows for t in plan.tensors if t.role in ("attention", "mlp", "other") and t.kind == "matrix"]
    hidden, wide = min(columns, default=0), max(columns + rows, default=0)
    size = DTYPE_BYTES[plan.compute]
    tokens = max(manifest.batch_tokens, manifest.context)
    # A narrower product is kept beside its copy in float32.
    logit = 4 * LOGIT_COPIES + (size if size < 4 else 0)
    return {
        "activations": tokens * size * (HIDDEN_COPIES * hidden + WIDE_COPIES * wide),
        "logits": CHUNK * manifest.vocabulary * logit,
        "tile": TILE_ROWS * min(TILE_COLUMNS, manifest.vocabulary) * logit,
    }


def rule_part(manifest: Manifest) -> str:
    """Return what a metric's name says of the precision: the dtype, or the plan's label and digest."""
    if manifest.precision_plan:
        plan = PrecisionPlan.from_canonical(manifest.precision_plan)
        if not plan.uniform:
            return f"{plan.label}/{plan.compute}#{plan.digest.removeprefix('sha256:')[:8]}"
    return manifest.dtype


def cost_text(manifest: Manifest) -> str | None:
    """Return the report's words on the cost of quantisation, or None where the job quantised nothing."""
    if not manifest.precision_plan:
        return None
    plan = PrecisionPlan.from_canonical(manifest.precision_plan)
    if not plan.quantised:
        return None
    formats = sorted({t.format for t in plan.tensors if FORMATS[t.format].quantised})
    return (
        f"weights quantised by this job ({', '.join(formats)}, {plan.quantiser}); what that costs is the paired "
        "difference to a job of the same model and data without it"
    )


def lines(part: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """Return the rows of the table of bytes, its head first; none for a report without precision."""
    if part is None:
        return []
    rows: list[tuple[str, ...]] = [("class", "format", "bytes", "scales", f"of {part['baseline']}", "of fp32")]
    for c in part["classes"]:
        share, whole = (("-" if v is None else f"{v:.1%}") for v in (c["of_checkpoint"], c["of_fp32"]))
        rows.append((c["class"], c["formats"], f"{c['bytes']:,}", f"{c['scales']:,}", share, whole))
    for name, key, how in (
        ("activations", "activations", "estimate, while running"),
        ("logits", "logits", "estimate, while running"),
        ("logits, fast path", "tile", "instead, per thread"),
    ):
        rows.append((name, how, f"{part['working'][key]:,}", "", "", ""))
    return rows


def facts(part: dict[str, Any] | None, listed: int = 20) -> list[tuple[str, str]]:
    """Return what else is worth a line: the plan, what was really used, what was skipped and why."""
    if part is None:
        return []
    rows = [("plan", f"{part['label']}, products in {part['compute']}, {part['digest']}")]
    if part["quantiser"]:
        rows.append(("quantiser", part["quantiser"] + _calibration(part)))
    for node, what in sorted(part["used"].items()):
        rows += [(f"used by {node}", f"{role}: {how}") for role, how in sorted(what.items())]
    rows += [
        ("quantised weights", f"{digest} ({', '.join(n)})") for digest, n in sorted(part["weights_digests"].items())
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for s in part["skipped"]:
        reasons.setdefault((s["format"], s["note"]), []).append(s["name"])
    for (form, note), names in list(reasons.items())[:listed]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append(("other than asked", f"{', '.join(names[:3])}{more}: {form}, {note}"))
    return rows


def _calibration(part: dict[str, Any]) -> str:
    if not part["calibration"]:
        return ""
    overlap = ", WHICH OVERLAPS WHAT IS EVALUATED" if part["calibration_overlaps"] else ""
    return f", calibrated on {part['calibration']}{overlap}"
