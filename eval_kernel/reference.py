"""A whole job in one process: same kernel, same plan, same sums, same report as a cluster, and no network.

It is what the multi-process tests compare with, and enough by itself for a person with one device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from eval_kernel.engine import Engine, Note
from eval_kernel.errors import ShardError
from eval_kernel.partial import Execution
from eval_kernel.plan import Plan, ShardPlan
from eval_kernel.report import Accounting, MissingShard, NodeWork, build_report
from eval_kernel.spec import JobSpec
from eval_kernel.tally import Tally

NODE = "reference"

Done = Callable[[Plan, ShardPlan, Tally, float], None]


def evaluate(spec: JobSpec, engine: Engine, note: Note, done: Done) -> dict[str, Any]:
    """Plan and score a job; return its report. ``done(plan, shard, tally, seconds)`` is called after each shard.

    A shard that fails is left out and named in the report, which is then incomplete. Raises the errors of the job
    and of its ingredients.
    """
    started = time.perf_counter()
    plan = engine.plan(spec, note)
    evaluation = engine.open(spec, plan.manifest, note)
    tally, missing = Tally(), list[MissingShard]()
    execution, seconds, inputs = Execution(), 0.0, 0
    note("scoring")
    for shard in plan.shards:
        try:
            scored = evaluation.score(shard, lambda: None)
        except ShardError as error:
            reason = f"{error.code}: {error}"
            missing.append(MissingShard(shard.index, shard.first_document, shard.end_document, shard.tokens, reason))
            continue
        tally.add(scored.partial)
        execution, seconds, inputs = scored.execution, seconds + scored.execution.seconds, inputs + shard.input_tokens
        done(plan, shard, tally, seconds)
    evaluation.close()
    work = NodeWork(
        NODE, tally.shards, inputs, seconds, execution.device, execution.dtype, execution.software, execution.precision
    )
    return build_report(
        job=plan.digest.removeprefix("sha256:")[:12],
        name=spec.name or "",
        state="FAILED" if missing else "SUCCEEDED",
        failure=("JOB_INCOMPLETE", missing[0].reason) if missing else None,
        spec=spec,
        manifest=plan.manifest,
        plan_digest=plan.digest,
        tally=tally,
        missing=missing,
        accounting=Accounting(accepted=tally.shards, failures=len(missing)),
        work=[work],
        wall_seconds=time.perf_counter() - started,
    )
