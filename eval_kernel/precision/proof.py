"""From measurements to a plan that was proved: allocate, prove on text kept apart, and tighten until the proof holds.

How a proof is made (in this process, or by a cluster's jobs) is the caller's. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from eval_kernel.errors import PrecisionInfeasible
from eval_kernel.precision.choose import Chosen, Table, tradeoffs
from eval_kernel.precision.compare import Comparison
from eval_kernel.precision.plan import as_mapping, resolve
from eval_kernel.precision.policy import CalibrationSpec

#: Times that the limit is tightened before a plan is called infeasible.
ROUNDS = 5
#: Budgets of the table of trade-offs, as shares of the checkpoint.
SHARES = (0.2, 0.25, 0.3, 0.4, 0.5, 0.6)

Note = Callable[[str], None]
#: Measures the paired change of a choice on the proof windows.
Prove = Callable[[Mapping[str, Any]], Comparison]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its proof, the mapping to write under ``precision:``, and how many rounds it took."""

    chosen: Chosen
    mapping: dict[str, Any]
    proof: Comparison
    rounds: int


class Settling:
    """The search for a plan as steps, so that proofs may be made asynchronously: ``next``, prove, ``take``, again."""

    def __init__(
        self, table: Table, budget: float | None, limit: float | None, calibration: CalibrationSpec | None
    ) -> None:
        """One of the two limits is given. Raises ``PrecisionInfeasible`` for a budget below the smallest plan."""
        assert (budget is None) != (limit is None)
        self._table, self._budget, self._limit, self._calibration = table, budget, limit, calibration
        self._nats = 0.0 if limit is None else math.log1p(limit)
        self._rounds = 0
        if budget is not None:
            check_budget(budget, table.smallest, table.checkpoint)

    def next(self) -> tuple[Chosen, dict[str, Any]]:
        """Return the choice to prove next, and its mapping."""
        if self._budget is not None:
            chosen = self._table.within(int(self._table.checkpoint * self._budget))
        else:
            chosen = self._table.least_bytes(self._nats)
        assert chosen is not None  # everything at the base changes nothing, and the budget was checked
        return chosen, mapping_of(self._table, chosen, self._calibration)

    def take(self, chosen: Chosen, mapping: dict[str, Any], proof: Comparison, note: Note) -> Planned | None:
        """Return the plan if the proof holds; None to try again with more bits. Raises ``PrecisionInfeasible``."""
        self._rounds += 1
        note(
            f"round {self._rounds}: {chosen.bytes / self._table.checkpoint:.1%} of the checkpoint, predicted "
            f"{math.expm1(chosen.predicted):+.3%}, measured {interval(proof)}"
        )
        if self._limit is None:
            return Planned(chosen, mapping, proof, self._rounds)
        worst = proof.change if proof.change_high is None else proof.change_high
        if worst <= self._limit:
            return Planned(chosen, mapping, proof, self._rounds)
        if self._rounds >= ROUNDS or chosen.predicted == 0.0:
            raise PrecisionInfeasible(
                f"no plan was shown to stay within {self._limit:.2%}: after {self._rounds} rounds the last measured "
                f"{interval(proof)}; allow more, give more proof windows, or add wider formats"
            )
        # By how much the limit was missed, with a little to spare, is taken off the next one.
        self._nats = min(self._nats, chosen.predicted) * min(0.8, math.log1p(self._limit) / math.log1p(worst))
        return None


def check_budget(budget: float, smallest: int, checkpoint: int) -> None:
    """Raise ``PrecisionInfeasible`` for a share of the checkpoint's bytes that is below the smallest plan."""
    if int(checkpoint * budget) < smallest:
        raise PrecisionInfeasible(
            f"a budget of {budget:.1%} is {int(checkpoint * budget):,} bytes, but the smallest plan of these formats "
            f"has {smallest:,} ({smallest / checkpoint:.1%}); raise the budget or allow smaller formats"
        )


def settle(settling: Settling, prove: Prove, note: Note) -> Planned:
    """Take steps until the proof holds. Raises ``PrecisionInfeasible``."""
    while True:
        chosen, mapping = settling.next()
        found = settling.take(chosen, mapping, prove(mapping), note)
        if found is not None:
            return found


def mapping_of(table: Table, chosen: Chosen, calibration: CalibrationSpec | None) -> dict[str, Any]:
    """What to write under ``precision:`` for a choice."""
    made = as_mapping(resolve(chosen.policy, table.outline))
    if "quantiser" in made:
        made["quantiser"] = table.sensitivity.quantiser
        if calibration is not None:
            made["calibration"] = calibration.model_dump(mode="json", exclude_defaults=True)
    return made


def interval(found: Comparison) -> str:
    """A change of perplexity with its interval, for people."""
    if found.change_low is None:
        return f"{found.change:+.3%}"
    return f"{found.change:+.3%} [{found.change_low:+.3%}, {found.change_high:+.3%}]"


def plan_text(planned: Planned, table: Table) -> str:
    """The plan as YAML that may stand under ``precision:``, with what is known of it as comments."""
    chosen, proof = planned.chosen, planned.proof
    fp32 = sum(w.elements for w in table.outline.weights) * 4
    ends = "" if proof.low is None else f" [{proof.low:+.6f}, {proof.high:+.6f}]"
    lines = [
        f"# Precision plan for the weights {table.sensitivity.weights_digest}",
        f"# {chosen.bytes:,} bytes: {chosen.bytes / table.checkpoint:.1%} of the checkpoint, "
        f"{chosen.bytes / fp32:.1%} of float32, {chosen.bytes / (fp32 / 2):.1%} of bfloat16",
        f"# predicted {chosen.predicted:+.6f} nats per token, at most {chosen.gap:.2%} from the best possible",
        f"# measured on {proof.clusters} windows kept apart: {proof.delta:+.6f}{ends} nats per token, "
        f"perplexity {proof.reference_perplexity:.4f} -> {proof.perplexity:.4f} ({proof.change:+.3%})",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(planned.mapping, sort_keys=False, width=110)


def tradeoff_text(table: Table) -> str:
    """The plans for some budgets and the rules of thumb, as an aligned table."""
    lines = [f"{'plan':44s} {'bytes':>13s} {'of checkpoint':>13s} {'predicted':>10s} {'gap':>7s}"]
    for row in tradeoffs(table, SHARES):
        gap = "" if row["gap"] is None else f"{row['gap']:.2%}"
        lines.append(
            f"{row['plan']:44s} {row['bytes']:13,} {row['of_checkpoint']:13.1%} "
            f"{row['predicted_change']:+10.3%} {gap:>7s}"
        )
    return "\n".join(lines) + "\n"
