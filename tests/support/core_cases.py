"""Plans, partials and agents for tests of the scheduler and the journal, made from a shard's number alone."""

from __future__ import annotations

from dataclasses import replace

from coordinator.core.calls import NodeInfo, SchedulerConfig
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import Role
from eval_kernel.partial import Execution, Partial, RowSums, ScoredShard
from eval_kernel.plan import Manifest, Plan, ShardPlan

CONFIG = SchedulerConfig()
BOTH = frozenset({Role.FORWARD, Role.PREPROCESS})
#: Documents, scored tokens, bytes, words and input tokens of every shard made here.
DOCUMENTS, TOKENS, BYTES, WORDS, COST = 2, 10, 40, 7, 1000


def make_plan(shards: int, label: str = "data") -> Plan:
    """A plan of so many equal shards of two whole documents each; another label is other data."""
    table = tuple(
        ShardPlan(
            index=i,
            first_window=2 * i,
            windows=2,
            tokens=TOKENS,
            bytes=BYTES,
            words=WORDS,
            input_tokens=COST,
            first_document=DOCUMENTS * i,
            end_document=DOCUMENTS * (i + 1),
            lump=False,
            digest=f"sha256:{label}{i}",
        )
        for i in range(shards)
    )
    manifest = Manifest(
        data_digest=f"sha256:{label}",
        documents=DOCUMENTS * shards,
        empty_documents=0,
        bytes=BYTES * shards,
        words=WORDS * shards,
        tokens=TOKENS * shards,
        windows=2 * shards,
        scored_tokens=TOKENS * shards,
        scored_bytes=BYTES * shards,
        scored_words=WORDS * shards,
        input_tokens=COST * shards,
        shards=shards,
        tokenizer_digest="sha256:tokenizer",
        weights_digest="sha256:weights",
        model_type="toy",
        parameters=1,
        vocabulary=4,
        max_context=None,
        dtype="float32",
        policy="rolling",
        context=8,
        stride=None,
        join=None,
        bos="none",
        prefix_token=None,
        prefix_kind="none",
        batch_tokens=64,
        kernel_version=1,
        lm_eval_words=WORDS * shards,
    )
    return Plan(manifest, table)


def make_partial(shard: int, shift: int = 0) -> Partial:
    """The partial of a shard of ``make_plan``; a shift gives one that differs and is as plausible."""
    first = (shard * 7919 + shift) * 1_000_003 % (1 << 40)
    second = (shard * 104729) * 1_000_033 % (1 << 40)
    rows = (
        RowSums(DOCUMENTS * shard, 1, first, 6, 30, 5),
        RowSums(DOCUMENTS * shard + 1, 1, second, 4, 10, 2),
    )
    return Partial(shard, first + second, TOKENS, BYTES, WORDS, rows)


def make_scored(shard: int, shift: int = 0, seconds: float = 1.0) -> ScoredShard:
    """A scored shard that took so many seconds."""
    return ScoredShard(make_partial(shard, shift), Execution(seconds, "cpu", "float32", 1, 1 << 20, {"torch": "2.9"}))


def with_partial(scored: ScoredShard, **changes: object) -> ScoredShard:
    """The same with fields of its partial changed."""
    return replace(scored, partial=replace(scored.partial, **changes))  # type: ignore[arg-type]


def info(agent: str, incarnation: str = "1", roles: frozenset[Role] = BOTH) -> NodeInfo:
    """What an agent announces."""
    return NodeInfo(agent, incarnation, "site", roles, "0.1.0", {})


def running_job(shards: int, agents: int = 1, job: str = "j1", config: SchedulerConfig = CONFIG) -> Scheduler:
    """A scheduler at time 0 with agents a1, a2, ... (incarnation 1) and one job that a1 has planned."""
    scheduler = Scheduler(config)
    for i in range(1, agents + 1):
        scheduler.register(info(f"a{i}"), 0.0)
    add_job(scheduler, shards, job)
    return scheduler


def add_job(scheduler: Scheduler, shards: int, job: str, now: float = 0.0) -> None:
    """Submit a job and have a1 plan it."""
    scheduler.submit(job, f"key-{job}", "{}", job, now)
    scheduler.planned("a1", "1", job, make_plan(shards), now)
