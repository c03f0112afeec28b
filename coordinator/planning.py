"""Puts a job's plan together from the parts an agent streams. Judges its shape; accepting it is the scheduler's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedeval.wire.messages import manifest_from_json

from eval_kernel.errors import PlanRefused, reason
from eval_kernel.plan import Manifest, Plan, ShardPlan
from eval_kernel.precision import section

#: Shards a job may have: what the coordinator can hold in memory with room to spare (about 1 KiB each).
MAX_SHARDS = 2_000_000
#: Plans one agent may be streaming at a time.
MAX_OPEN = 4


@dataclass(slots=True)
class _Open:
    manifest_json: str
    manifest: Manifest
    shards: list[ShardPlan] = field(default_factory=list)


class PlanAssembly:
    """The unfinished plans of one report stream; a broken stream takes them along, and the agent begins anew."""

    def __init__(self) -> None:
        """Begin with none."""
        self._open: dict[str, _Open] = {}

    def add(self, job: str, manifest_json: str, shards: Iterable[ShardPlan], *, last: bool) -> Plan | None:
        """Take a part; return the plan with the last one, ``None`` before.

        ``shards`` may raise ``ValueError`` when it is read, for one that is none. Raises ``PlanRefused`` for parts that
        make no plan, and forgets what there was of it.
        """
        try:
            return self._add(job, manifest_json, shards, last=last)
        except ValueError as error:
            self._open.pop(job, None)
            raise PlanRefused(f"job {job}: the plan contradicts itself: {error}") from None
        except PlanRefused:
            self._open.pop(job, None)
            raise

    def drop(self, job: str) -> None:
        """Forget what there is of a job's plan."""
        self._open.pop(job, None)

    def _add(self, job: str, manifest_json: str, shards: Iterable[ShardPlan], *, last: bool) -> Plan | None:
        plan = self._open.get(job)
        if plan is None:
            if len(self._open) >= MAX_OPEN:
                raise PlanRefused(f"job {job}: {MAX_OPEN} plans are being sent already; send one after the other")
            manifest = manifest_from_json(manifest_json)
            if manifest.shards > MAX_SHARDS:
                raise PlanRefused(
                    f"job {job} would have {manifest.shards} shards; at most {MAX_SHARDS} are possible: "
                    f"raise shard.tokens"
                )
            _check_readable(manifest)
            plan = self._open[job] = _Open(manifest_json, manifest)
        elif manifest_json != plan.manifest_json:
            raise PlanRefused(f"job {job}: the manifest differs between the parts of the plan")
        plan.shards.extend(shards)
        if len(plan.shards) > plan.manifest.shards:
            raise ValueError(f"the manifest says {plan.manifest.shards} shards, {len(plan.shards)} came")
        if not last:
            return None
        del self._open[job]
        return Plan(plan.manifest, tuple(plan.shards))


def _check_readable(manifest: Manifest) -> None:
    """Read the precision plan as every report of the job will; raises ``ValueError`` where that fails."""
    try:
        section.rule_part(manifest)
        section.cost_text(manifest)
        json.dumps(section.section(manifest, []), ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"precision_plan is no plan of a precision ({reason(error)})") from None
