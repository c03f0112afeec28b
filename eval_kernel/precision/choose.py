"""From sensitivities and a limit to one format per group: allocation, candidate plans, the table of trade-offs. Pure.

Divergences serve as costs. They are never negative, so a format is given no credit for having been lucky.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval_kernel.errors import SpecError
from eval_kernel.precision.allocate import Option, Solution, solve
from eval_kernel.precision.formats import DTYPE_BYTES, FORMATS
from eval_kernel.precision.groups import Group, Sensitivity, choice_of, policy_of, predicted
from eval_kernel.precision.plan import Outline, PrecisionPlan, resolve
from eval_kernel.precision.policy import AUTO, BRIEF, PrecisionSpec, as_spec

#: Common denominator of costs: divergences per token in steps of 2^-30 nat, times this.
_SCALE = 1 << 20


@dataclass(frozen=True, slots=True)
class Chosen:
    """A format for every group, the policy that says so, and what is expected of it."""

    choice: Mapping[str, str]
    policy: PrecisionSpec
    bytes: int  # of all weights
    predicted: float  # change in nats per token
    gap: float  # how far from the best possible, relative to the bound


class Table:
    """Every group's options with their bytes and costs."""

    def __init__(self, groups: Sequence[Group], outline: Outline, sensitivity: Sensitivity) -> None:
        """Keep what was measured and what fits. Raises ``SpecError`` where a group lacks its measurements."""
        self.groups, self.outline, self.sensitivity = groups, outline, sensitivity
        self.base = sensitivity.base
        self.names: list[list[str]] = []
        self.sizes: list[list[int]] = []
        self.costs: list[list[int]] = []
        for group in groups:
            cells = sensitivity.cells.get(group.name, {})
            options = [(self.base, group.bytes_in(self.base), 0)]
            for name, cell in sorted(cells.items()):
                options.append((name, group.bytes_in(name), cell.divergence * _SCALE // cell.tokens))
            fitting = [(name, size, cost) for name, size, cost in options if size is not None]
            self.names.append([name for name, _, _ in fitting])
            self.sizes.append([size for _, size, _ in fitting])
            self.costs.append([cost for _, _, cost in fitting])
        if not any(len(names) > 1 for names in self.names):
            raise SpecError("no group has a measured format besides the base; measure again with formats that fit")
        self.fixed = fixed_bytes(groups, outline, self.base)
        self.checkpoint = checkpoint_bytes(outline)

    def within(self, budget: int) -> Chosen | None:
        """The least predicted change in at most ``budget`` bytes; None where nothing is that small."""
        starts = [s for s in (self._start(choice) for choice in baselines(self).values()) if s is not None]
        options = [[Option(*o) for o in zip(s, c, strict=True)] for s, c in zip(self.sizes, self.costs, strict=True)]
        return self._chosen(solve(options, budget - self.fixed, starts))

    def least_bytes(self, nats: float) -> Chosen | None:
        """The fewest bytes at a predicted change of at most ``nats`` per token; None for a negative limit."""
        options = [[Option(*o) for o in zip(c, s, strict=True)] for s, c in zip(self.sizes, self.costs, strict=True)]
        limit = math.floor(nats * 2**30 * _SCALE)
        starts = [s for s in (self._start(choice) for choice in baselines(self).values()) if s is not None]
        return self._chosen(solve(options, limit, starts))

    @property
    def smallest(self) -> int:
        """The fewest bytes that any choice comes to."""
        return self.fixed + sum(min(sizes) for sizes in self.sizes)

    def chosen(self, choice: Mapping[str, str], gap: float = 0.0) -> Chosen:
        """A choice with its policy, and what is expected of it."""
        policy = policy_of(self.groups, choice, self.base)
        return Chosen(choice, policy, self.bytes_of(choice), predicted(self.sensitivity, choice), gap)

    def bytes_of(self, choice: Mapping[str, str]) -> int:
        """Bytes of all weights under a choice."""
        return self.fixed + sum(group.bytes_in(choice[group.name]) or 0 for group in self.groups)

    def _start(self, choice: Mapping[str, str]) -> list[int] | None:
        picks = []
        for group, names in zip(self.groups, self.names, strict=True):
            if choice[group.name] not in names:
                return None
            picks.append(names.index(choice[group.name]))
        return picks

    def _chosen(self, found: Solution | None) -> Chosen | None:
        if found is None:
            return None
        picked = zip(self.groups, self.names, found.picks, strict=True)
        return self.chosen({group.name: names[k] for group, names, k in picked}, found.gap)


def baselines(table: Table) -> dict[str, dict[str, str]]:
    """Choices that people make by rule: uniform formats, the brief, high precision at both ends. Only measured ones."""
    measured = {name for names in table.names for name in names}
    rules: dict[str, PrecisionSpec] = {}
    for name in sorted(measured - {table.base}):
        rules[f"uniform {name}"] = PrecisionSpec(default=name)
        rules[f"uniform {name}, embedding and head too"] = PrecisionSpec(default=name, embedding=name, head=name)
        rules[f"{name}, ends high"] = _ends(table, name)
    rules[BRIEF] = as_spec(BRIEF)
    found = {}
    for label, rule in rules.items():
        try:
            plan = resolve(rule.model_copy(update={"compute": table.base}), table.outline, label)
        except SpecError:
            continue  # this rule's groups divide nothing of this model
        choice = choice_of(table.groups, _formats(plan), table.base)
        if choice is not None and all(choice[g.name] in n for g, n in zip(table.groups, table.names, strict=True)):
            found[label] = choice
    return found


def _ends(table: Table, name: str) -> PrecisionSpec:
    """The first and the last layer as they are, everything between in a format."""
    layers = sorted({g.layer for g in table.groups if g.layer is not None})
    ends = {layers[0], layers[-1]} if layers else set()
    modules = {
        w.module.replace(".", r"\."): AUTO
        for g in table.groups
        if g.layer in ends and g.layer is not None
        for w in g.weights
    }
    return PrecisionSpec(default=name, modules=modules)


def _formats(plan: PrecisionPlan) -> dict[str, str]:
    return {t.name: t.format for t in plan.tensors}


def fixed_bytes(groups: Sequence[Group], outline: Outline, base: str) -> int:
    """Bytes of what no group holds: norms, biases, and parameters that stay as they are."""
    inside = {w.name for group in groups for w in group.weights}
    return sum(w.elements for w in outline.weights if w.name not in inside) * FORMATS[base].bits // 8


def checkpoint_bytes(outline: Outline) -> int:
    """Bytes of all weights in the checkpoint's own dtype."""
    return sum(w.elements for w in outline.weights) * DTYPE_BYTES.get(outline.dtype, 4)


def smallest_bytes(groups: Sequence[Group], outline: Outline, formats: Sequence[str], base: str) -> int:
    """The fewest bytes that any choice among the formats comes to."""
    options = [[size for name in (base, *formats) if (size := g.bytes_in(name)) is not None] for g in groups]
    return fixed_bytes(groups, outline, base) + sum(min(sizes) for sizes in options)


def tradeoffs(table: Table, shares: Sequence[float]) -> list[dict[str, Any]]:
    """Rows of a table: the plans for some budgets, and the rules of thumb, each with bytes and predicted change."""
    rows = []
    for share in shares:
        found = table.within(int(table.checkpoint * share))
        if found is not None:
            rows.append(_row(f"auto, budget {share:.0%}", found.bytes, found.predicted, table, found.gap))
    for label, choice in baselines(table).items():
        rows.append(_row(label, table.bytes_of(choice), predicted(table.sensitivity, choice), table, None))
    return sorted(rows, key=lambda row: (row["bytes"], row["predicted_nats"]))


def _row(label: str, size: int, nats: float, table: Table, gap: float | None) -> dict[str, Any]:
    return {
        "plan": label,
        "bytes": size,
        "of_checkpoint": size / table.checkpoint,
        "predicted_nats": nats,
        "predicted_change": math.expm1(nats),
        "gap": gap,
    }
