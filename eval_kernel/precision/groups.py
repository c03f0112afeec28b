"""Weights that get one format together, and what a measurement of their sensitivity holds. Pure.

Groups are, per decoder layer, {q, k, v}, {o}, {gate, up} and {down}, or what stands in their place; the embedding; the
head; and per module whatever else multiplies. Sensitivity is the Kullback-Leibler divergence of the next-token
distribution to the unchanged model's, summed over the tokens, when one group alone is in another format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_kernel.errors import SpecError
from eval_kernel.precision.formats import FORMATS, SHORT_NAMES
from eval_kernel.precision.plan import Outline, Weight, patterns
from eval_kernel.precision.policy import PrecisionSpec

SCHEMA = "fedeval.sensitivity/1"
#: Begins the digest of a shard whose documents are cells.
CELLS = "cells:"
#: Last words of modules that carry a block's result back to the stream.
_OUT = {"o_proj", "out_proj", "dense", "c_proj", "wo", "o"}
_DOWN = {"down_proj", "c_proj", "fc2", "w2", "dense_4h_to_h", "fc_out", "proj_down", "wo"}


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that change together. ``layer`` is None outside the decoder's layers."""

    name: str
    layer: int | None
    weights: tuple[Weight, ...]

    def bytes_in(self, name: str) -> int | None:
        """Bytes of the group in a format, scales included; None where a row is no whole number of its groups."""
        form = FORMATS[name]
        if not all(form.divides(w.columns) for w in self.weights):
            return None
        return sum(form.value_bytes(w.rows, w.columns) + form.scale_bytes(w.rows, w.columns) for w in self.weights)


def groups_of(outline: Outline) -> list[Group]:
    """Return the groups of a model, in order of their first weight."""
    members: dict[tuple[str, int | None], list[Weight]] = {}
    for w in outline.weights:
        if w.kind in ("matrix", "table"):
            members.setdefault(_key(w), []).append(w)
    return [Group(name, layer, tuple(weights)) for (name, layer), weights in members.items()]


def _key(w: Weight) -> tuple[str, int | None]:
    if w.role in ("embedding", "head"):
        return w.role, None
    found = re.match(r"(?:.*\.)?(\d+)\.", w.module)
    last = w.module.rpartition(".")[2]
    if found is None or w.role not in ("attention", "mlp"):
        return w.module, None if found is None else int(found[1])
    if w.role == "attention":
        part = "o" if last in _OUT else "qkv"
    else:
        part = "down" if last in _DOWN else "gate_up"
    return f"layers.{found[1]}.{part}", int(found[1])


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: what changes when one group is in one format. Sums over ``tokens``, in grid steps of 2^-30."""

    tokens: int
    divergence: int  # never negative
    nll_change: int
    agreements: int  # tokens whose most likely successor stayed the same


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """All cells of a model, by group and format, and what they were measured on. Reusable for any budget."""

    weights_digest: str
    calibration: str  # digest of the rows
    base: str  # format of everything that is not changed
    quantiser: str
    cells: Mapping[str, Mapping[str, Cell]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        cells = {
            group: {name: [c.tokens, c.divergence, c.nll_change, c.agreements] for name, c in sorted(found.items())}
            for group, found in sorted(self.cells.items())
        }
        head = {k: getattr(self, k) for k in ("weights_digest", "calibration", "base", "quantiser")}
        return {"schema": SCHEMA, **head, "cells": cells}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sensitivity:
        """Build from ``to_json``'s dict; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, not {SCHEMA!r}")
        cells = {group: {name: Cell(*row) for name, row in found.items()} for group, found in data["cells"].items()}
        return cls(data["weights_digest"], data["calibration"], data["base"], data["quantiser"], cells)

    def with_cell(self, group: str, name: str, cell: Cell) -> Sensitivity:
        """Return this with one more cell."""
        cells = {**self.cells, group: {**self.cells.get(group, {}), name: cell}}
        return Sensitivity(self.weights_digest, self.calibration, self.base, self.quantiser, cells)


def cells_of(groups: Sequence[Group], formats: Sequence[str], base: str) -> list[tuple[Group, str]]:
    """Return what is measured, in order: every group with every format that fits it, the base left out."""
    return [(g, name) for g in groups for name in formats if name != base and g.bytes_in(name) is not None]


def extra_names(cell: int) -> tuple[str, str]:
    """Names under which a partial has a cell's change of loss (signed, in grid steps) and its agreements."""
    return f"cell_{cell:06d}_nll", f"cell_{cell:06d}_same"


def extra_problem(sums: Mapping[str, int], first: int, end: int) -> str | None:
    """Return what is wrong with the further sums of cells ``first`` to ``end - 1``; None where nothing is."""
    expected = {name for cell in range(first, end) for name in extra_names(cell)}
    if set(sums) != expected:
        odd = sorted(set(sums) ^ expected)[0]
        return f"its sums for sensitivities lack or add {odd!r}"
    if any(abs(value) >= 1 << 63 for value in sums.values()):
        return "a sum for sensitivities is beyond 2^63"
    return None


def read_sensitivity(path: Path) -> Sensitivity:
    """Read ``sensitivity.json``. Raises ``SpecError``."""
    try:
        return Sensitivity.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise SpecError(f"{path}: cannot read the sensitivities ({error.strerror}); measure them first") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{path}: no file of sensitivities ({error}); measure them again") from None


def predicted(sensitivity: Sensitivity, choice: Mapping[str, str]) -> float:
    """Return the predicted change in nats per token: the divergences of the chosen cells, added up."""
    total = 0.0
    for group, name in choice.items():
        if name != sensitivity.base:
            cell = sensitivity.cells[group][name]
            total += cell.divergence / cell.tokens
    return total / 2**30


def policy_of(groups: Sequence[Group], choice: Mapping[str, str], base: str) -> PrecisionSpec:
    """Return the policy that gives each group its chosen format. How integers are chosen is left to the caller."""
    by_format: dict[str, list[str]] = {}
    for group in groups:
        if group.name not in ("embedding", "head") and choice[group.name] != base:
            by_format.setdefault(choice[group.name], []).extend(w.module for w in group.weights)
    return PrecisionSpec(
        default=base,
        compute=base,  # type: ignore[arg-type]
        embedding=choice.get("embedding"),
        head=choice.get("head"),
        modules={p: name for name, members in by_format.items() for p in patterns(members)},
    )


def choice_of(groups: Iterable[Group], formats: Mapping[str, str], base: str) -> dict[str, str] | None:
    """Return the choice that a plan (parameter -> format) stands for; None where a group's weights differ."""
    choice: dict[str, str] = {}
    for group in groups:
        found = {formats.get(w.name, base) for w in group.weights}
        if len(found) != 1:
            return None
        choice[group.name] = found.pop()
    return choice


def base_of(outline: Outline, compute: str) -> str:
    """The format that sensitivities are measured against: the compute dtype asked for, or the checkpoint's."""
    return compute if compute != "auto" else SHORT_NAMES.get(outline.dtype, "fp32")
