"""Which format each weight of a model gets, and the bytes that come of it: a policy applied to names and shapes.

No weights are read. The same policy and the same names and shapes give the same plan, wherever it is made. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from eval_kernel.errors import PrecisionUnsupported, SpecError
from eval_kernel.plan import digest_json
from eval_kernel.precision.formats import DTYPE_BYTES, DTYPE_NAMES, FORMATS, SHORT_NAMES, Format, suggestion
from eval_kernel.precision.policy import AUTO, ROLES, PrecisionSpec, is_float

#: Modules that a message names one by one.
MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of the model, as its outline says: no values.

    ``kind``: ``matrix`` (a linear layer), ``table`` (an embedding), ``vector`` (norms, biases: anything that no
    matrix product uses as a matrix) or ``block`` (used in a way its module alone knows, such as fused experts).
    ``transposed``: the checkpoint has it as inputs x outputs. Rows are outputs or table entries.
    """

    name: str  # of the parameter, e.g. "model.layers.0.mlp.up_proj.weight"
    module: str  # e.g. "model.layers.0.mlp.up_proj"
    role: str  # one of policy.ROLES, or "vector"
    kind: str
    rows: int
    columns: int
    transposed: bool = False

    @property
    def elements(self) -> int:
        """Number of values."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Outline:
    """What a plan needs to know of a model. ``tied``: the head is the embedding's table (and not among ``weights``)."""

    weights: tuple[Weight, ...]
    dtype: str  # torch's name of the dtype most of the checkpoint is stored in
    embedding: str  # module of the input embedding
    head: str  # module of the output layer, "" where there is none
    tied: bool


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One weight's format. ``note`` says why it is not what was asked for, or is empty."""

    name: str
    module: str
    role: str
    kind: str
    format: str
    rows: int
    columns: int
    note: str = ""

    @property
    def quantised(self) -> bool:
        """Whether the weight has scales."""
        return FORMATS[self.format].quantised

    @property
    def value_bytes(self) -> int:
        """Bytes of the values."""
        return FORMATS[self.format].value_bytes(self.rows, self.columns)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and zeros."""
        return FORMATS[self.format].scale_bytes(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Every weight's format; the dtype of activations and products; how integers are chosen, and by what multiplied.

    ``calibration`` is the digest of the calibration rows, or empty. ``untied``: the head was the embedding's table in
    the checkpoint and has become a tensor of its own.
    """

    label: str
    compute: str  # torch's name
    quantiser: str
    tensors: tuple[TensorPlan, ...]
    checkpoint_dtype: str
    tied: bool
    untied: bool = False
    calibration: str = ""
    calibration_overlaps: bool = False
    kernels: str = "auto"
    head: str = ""  # module of the output layer, whose weights may be the embedding's

    @property
    def digest(self) -> str:
        """Digest over what decides the quantised values: formats, quantiser, calibration; not label or kernels."""
        quantised = any(t.quantised for t in self.tensors)
        return digest_json(
            [
                [[t.name, t.format] for t in self.tensors],
                self.compute,
                self.quantiser if quantised else "",
                self.calibration,
                self.untied,
            ]
        )

    @property
    def quantised(self) -> bool:
        """Whether any weight has scales."""
        return any(t.quantised for t in self.tensors)

    @property
    def label_format(self) -> str:
        """The format of the compute dtype."""
        return SHORT_NAMES[self.compute]

    @property
    def uniform(self) -> bool:
        """Whether every weight is in the compute dtype: torch's own loading and layers do."""
        return not self.untied and all(t.format == SHORT_NAMES[self.compute] for t in self.tensors)

    def named(self) -> dict[str, TensorPlan]:
        """The tensors by parameter name."""
        return {t.name: t for t in self.tensors}

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**asdict(self), "tensors": [list(asdict(t).values()) for t in self.tensors]}

    def canonical(self) -> str:
        """The one JSON text of this plan, as manifests carry it."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> PrecisionPlan:
        """Build from ``to_json``'s dict."""
        return cls(**{**data, "tensors": tuple(TensorPlan(*row) for row in data["tensors"])})

    @classmethod
    def from_canonical(cls, text: str) -> PrecisionPlan:
        """Build from ``canonical``'s text."""
        return cls.from_json(json.loads(text))


def resolve(spec: PrecisionSpec, outline: Outline, label: str = "") -> PrecisionPlan:
    """Apply a policy to a model.

    Raises ``SpecError`` for a pattern that matches nothing, two patterns that disagree over a module, and a group size
    that divides no row it was given for; ``PrecisionUnsupported`` for a checkpoint's dtype that has no format here.
    """
    own = _short(outline.dtype)
    base = own if spec.default == AUTO else spec.default
    compute = spec.compute if spec.compute != AUTO else base if is_float(base) else own
    by_module = _matched(spec.modules, outline)
    wanted: dict[str, tuple[str, str]] = {}  # parameter -> format, and the key that asked for it
    for weight in outline.weights:
        wanted[weight.name] = _wanted(weight, spec, by_module, own, compute)
    tensors, untied = [], False
    for weight in outline.weights:
        tensors.append(_place(weight, wanted[weight.name][0], compute))
        if weight.module == outline.embedding and outline.tied and outline.head:
            asked = by_module.get(outline.head, spec.head)
            head = own if asked == AUTO else asked
            copy = Weight(f"{outline.head}.weight", outline.head, "head", "matrix", weight.rows, weight.columns)
            if head is not None and (placed := _place(copy, head, compute)).format != tensors[-1].format:
                untied = True
                note = "; ".join(p for p in (placed.note, "untied: the embedding is in another format") if p)
                tensors.append(TensorPlan(**{**asdict(placed), "note": note}))
                wanted[copy.name] = (head, "head" if outline.head not in by_module else "modules")
    _refuse_idle_groups(tensors, wanted)
    return PrecisionPlan(
        label=label or spec.default,
        compute=DTYPE_NAMES[compute],
        quantiser=spec.quantiser,
        tensors=tuple(tensors),
        checkpoint_dtype=outline.dtype,
        tied=outline.tied and not untied,
        untied=untied,
        kernels=spec.kernels,
        head=outline.head,
    )


def _short(dtype: str) -> str:
    """The format of a checkpoint's dtype; float64 is narrowed, as torch's loading does."""
    if dtype == "float64":
        return "fp32"
    if dtype not in SHORT_NAMES:
        raise PrecisionUnsupported(
            f"the checkpoint's dtype {dtype} cannot be used as it is; write precision: fp32 or bf16"
        )
    return SHORT_NAMES[dtype]


def _matched(patterns: dict[str, str], outline: Outline) -> dict[str, str]:
    """The format of each module that a pattern names."""
    modules = list(dict.fromkeys(w.module for w in outline.weights if w.kind != "vector"))
    if outline.head and outline.head not in modules:
        modules.append(outline.head)
    chosen: dict[str, tuple[str, str]] = {}
    for pattern, name in sorted(patterns.items()):
        found = [m for m in modules if re.fullmatch(pattern, m)]
        if not found:
            near = suggestion(pattern.replace("\\", ""), modules)
            hint = near if near.startswith("did") else f"they are named like {_some(modules)}"
            raise SpecError(f"precision.modules: {pattern!r} matches no module of this model; {hint}")
        for module in found:
            before = chosen.setdefault(module, (name, pattern))
            if before[0] != name:
                raise SpecError(
                    f"precision.modules: {before[1]!r} says {before[0]} and {pattern!r} says {name} for {module}; "
                    "let only one of them match it"
                )
    return {module: name for module, (name, _) in chosen.items()}


def _wanted(weight: Weight, spec: PrecisionSpec, by_module: dict[str, str], own: str, compute: str) -> tuple[str, str]:
    """The format asked for one weight, and the key that did."""
    if weight.module in by_module and weight.kind != "vector":
        name, key = by_module[weight.module], "modules"
    elif weight.role in ROLES and (given := getattr(spec, weight.role)) is not None:
        name, key = given, weight.role
    elif (weight.role in ("embedding", "head", "vector") or weight.kind == "table") and not is_float(spec.default):
        # Integers are for the layers; what is looked up or comes last changes only when it is named.
        name, key = compute, ""
    else:
        name, key = spec.default, "default"
    return (own if name == AUTO else name), key


def _place(weight: Weight, name: str, compute: str) -> TensorPlan:
    """Give one weight the format, or the nearest that it can bear, and say why."""
    form, note = FORMATS[name], ""
    if weight.kind == "vector":
        form = FORMATS[compute]  # a few thousand numbers: norms and biases stay in the compute dtype
    elif weight.kind == "block" and form.quantised:
        form, note = FORMATS[compute], "its module uses it in a way of its own: kept as it is"
    elif not form.divides(weight.columns):
        note = f"{weight.columns} columns are no multiple of {form.group or 2}"
        form = FORMATS[compute]
    elif weight.kind == "table" and form.dynamic:
        form, note = _static(form), "a table is looked up, not multiplied: no activations to round"
    return TensorPlan(
        weight.name, weight.module, weight.role, weight.kind, form.name, weight.rows, weight.columns, note
    )


def _static(form: Format) -> Format:
    return FORMATS["int8" if form.bits == 8 else f"int4-g{form.group}"]


def _refuse_idle_groups(tensors: list[TensorPlan], wanted: dict[str, tuple[str, str]]) -> None:
    """Refuse a key whose format none of its weights can bear: the result would bear its name without having it."""
    asked: dict[tuple[str, str], list[TensorPlan]] = {}
    for t in tensors:
        name, key = wanted[t.name]
        if t.kind in ("matrix", "table") and key and FORMATS[name].quantised:
            asked.setdefault((key, name), []).append(t)
    for (key, name), members in asked.items():
        if all(not t.quantised for t in members):
            columns = sorted({t.columns for t in members})
            raise SpecError(
                f"precision.{key}: {name} fits none of {_some([t.module for t in members])}: their rows have "
                f"{' or '.join(str(c) for c in columns)} columns, no multiple of {FORMATS[name].group or 2}; "
                "use a smaller group, or int8"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def outline_of(plan: PrecisionPlan) -> Outline:
    """Return the outline that a plan was made of, as far as names, roles and shapes go."""
    tensors = [t for t in plan.tensors if not (plan.untied and t.role == "head")]
    weights = tuple(Weight(t.name, t.module, t.role, t.kind, t.rows, t.columns) for t in tensors)
    named = {t.role: t.module for t in plan.tensors if t.role in ("embedding", "head")}
    tied = plan.tied or plan.untied
    return Outline(weights, plan.checkpoint_dtype, named.get("embedding", ""), plan.head or named.get("head", ""), tied)


# ---------------------------------------------------------------- bytes


def bytes_by_class(plan: PrecisionPlan) -> dict[str, dict[str, int]]:
    """Bytes of the plan by class of weights, beside what the same weights take in the checkpoint's dtype and in fp32.

    Classes: ``attention``, ``mlp``, ``other`` (linear layers), ``embedding``, ``head``, ``vectors``, ``total``.
    ``scales`` are part of a class's ``bytes``. A head that was untied takes nothing in the checkpoint.
    """
    own = DTYPE_BYTES[plan.checkpoint_dtype]
    table: dict[str, dict[str, int]] = {}
    for t in plan.tensors:
        stored = 0 if plan.untied and t.role == "head" else t.rows * t.columns
        row = {
            "bytes": t.value_bytes + t.scale_bytes,
            "scales": t.scale_bytes,
            "checkpoint": stored * own,
            "fp32": stored * 4,
        }
        for key in ("vectors" if t.role == "vector" else t.role, "total"):
            sums = table.setdefault(key, dict.fromkeys(row, 0))
            for column, value in row.items():
                sums[column] += value
    order = ("attention", "mlp", "other", "embedding", "head", "vectors", "total")
    return {key: table[key] for key in order if key in table}


def formats_by_class(plan: PrecisionPlan) -> dict[str, dict[str, int]]:
    """How many tensors of each class are in each format."""
    table: dict[str, dict[str, int]] = {}
    for t in plan.tensors:
        counts = table.setdefault("vectors" if t.role == "vector" else t.role, {})
        counts[t.format] = counts.get(t.format, 0) + 1
    return table


# ---------------------------------------------------------------- a plan as a job's mapping


def as_mapping(plan: PrecisionPlan) -> dict[str, Any]:
    """Return the mapping for ``precision:`` that gives this plan again on the same model, calibration text aside."""
    compute = SHORT_NAMES[plan.compute]
    mapping: dict[str, Any] = {"default": compute, "compute": compute}
    for role in ("embedding", "head"):
        named = {t.format for t in plan.tensors if t.role == role}
        if len(named) == 1 and (name := named.pop()) != compute:
            mapping[role] = name
    if plan.quantised:
        mapping["quantiser"] = plan.quantiser
    by_format: dict[str, list[str]] = {}
    for t in plan.tensors:
        if t.kind in ("matrix", "table") and t.role not in ("embedding", "head") and t.format != compute:
            by_format.setdefault(t.format, []).append(t.module)
    modules = {p: name for name, members in sorted(by_format.items()) for p in patterns(members)}
    return {**mapping, **({"modules": modules} if modules else {})}


def patterns(modules: Iterable[str]) -> list[str]:
    """Return regular expressions that match exactly these names among those that differ in numbers: few and short."""
    layers: dict[tuple[str, str], list[str]] = {}
    for module in modules:
        before, number, after = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", module, re.DOTALL).groups()  # type: ignore[union-attr]
        layers.setdefault((before, after or ""), []).append(number or "")
    return [
        re.escape(before) + (("(" + "|".join(numbers) + ")") if numbers != [""] else "") + re.escape(after)
        for (before, after), numbers in layers.items()
    ]
