"""An engine without torch: losses are hashes, faults and delays are asked for in the dataset's source.

`fake_spec(shards=200, delay=0.01, crash="3")` makes the job; `reference_partials` and `reference_tally` say what it
must come to. Any node that runs this engine gives the same plan and the same partials.

Faults name shards: "3" or "3,5"; "3x2" means only the first two times on one cache directory.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from eval_kernel.errors import DataChanged, DatasetNotFound, PathRefused, PrecisionUnsupported, ShardError, by_code
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.partial import MAX_PLACES, Execution, NonFinite, Partial, RowSums, ScoredShard
from eval_kernel.plan import MAX_ROWS, Manifest, Plan, ShardPlan, digest_json
from eval_kernel.spec import JobSpec, parse_spec
from eval_kernel.tally import Tally

SOURCE = "hub:fake?"
#: Seconds between two beats of a delayed shard.
BEAT = 0.05
#: Environment variable of a process that multiplies its losses with this.
FACTOR = "FEDEVAL_TEST_FACTOR"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeJob:
    """What a fake job does; every field can be given in the source. Times are in seconds."""

    shards: int = 8
    tokens: int = 32  # per shard; at least as many as documents
    documents: int = 2  # whole documents per shard (more than 64: one lump); ignored with `span`
    span: int = 1  # above 1: one document goes through so many shards
    seed: int = 0
    delay: float = 0.0  # of every shard
    load_delay: float = 0.0  # of opening the job
    plan_delay: float = 0.0
    slow: str = ""  # shards that take 20 times `delay`
    crash: str = ""  # os._exit(11)
    kill: str = ""  # SIGKILL, as from the out-of-memory killer
    hang: str = ""  # no beat, for ever
    bug: str = ""  # an exception that is none of ours
    error: str = ""  # ShardError
    oom: str = ""  # MemoryError
    noise: str = ""  # prints to the standard output, and goes on
    nan: str = ""  # the first token's loss is NaN
    plan_fails: str = ""  # an error code
    open_fails: str = ""  # an error code
    plan_crashes: str = ""  # "0": planning ends the process; "0x1": the first time only
    path: str = ""  # a file that must be readable on this node
    tell: str = ""  # a file that gets a line for each shard that is scored to its end

    @classmethod
    def of(cls, spec: JobSpec) -> FakeJob:
        """Read the job from a specification's source."""
        query = spec.dataset.source[0].removeprefix(SOURCE)
        given = dict(urllib.parse.parse_qsl(query, strict_parsing=bool(query)))
        kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(cls)}
        return cls(**{name: kinds[name](value) for name, value in given.items()})


def fake_spec(name: str | None = None, **options: Any) -> JobSpec:
    """Return a job for this engine; ``options`` are fields of ``FakeJob``."""
    FakeJob(**options)
    source = SOURCE + urllib.parse.urlencode({key: str(value) for key, value in options.items()})
    return parse_spec({"name": name, "model": "hub:fake/model", "dataset": source}, where="fake")


def reference_plan(spec: JobSpec) -> Plan:
    """Return the plan every node makes of a job."""
    return _plan(_values(FakeJob.of(spec)))


def reference_partials(spec: JobSpec) -> list[Partial]:
    """Return what each shard must yield."""
    job = FakeJob.of(spec)
    plan = reference_plan(spec)
    return [_partial(job, shard) for shard in plan.shards]


def reference_tally(spec: JobSpec) -> Tally:
    """Return the sums the job must come to."""
    tally = Tally()
    for partial in reference_partials(spec):
        tally.add(partial)
    return tally


# ---------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a node lends to its engine."""

    cache: Path
    roots: tuple[Path, ...] | None
    device: str = "auto"
    threads: int | None = None


class FakeEngine:
    """Plans and opens fake jobs."""

    def __init__(self, config: EngineConfig) -> None:
        if config.device not in ("auto", "cpu"):
            raise PrecisionUnsupported(f"device {config.device!r} is not usable here; allowed: auto, cpu")
        self.config = config

    def probe(self) -> dict[str, Any]:
        return {"engine": "fake", "device": "cpu", "dtypes": ["float32"], "threads": self.config.threads}

    def plan(self, spec: JobSpec, progress: Callable[[str], None]) -> Plan:
        job = FakeJob.of(spec)
        progress("indexing the documents")
        _wait(job.plan_delay, lambda: progress("indexing the documents"))
        self._check_access(job)
        if job.plan_fails:
            raise by_code(job.plan_fails)(f"planning fails with {job.plan_fails}, as asked for")
        if _strikes(self.config.cache, spec, "plan_crashes", job.plan_crashes, 0):
            os._exit(11)
        return _plan(_values(job))

    def open(self, spec: JobSpec, manifest: Manifest, progress: Callable[[str], None]) -> FakeEvaluation:
        job = FakeJob.of(spec)
        progress("loading the model")
        _wait(job.load_delay, lambda: progress("loading the model"))
        self._check_access(job)
        if job.open_fails:
            raise by_code(job.open_fails)(f"opening fails with {job.open_fails}, as asked for")
        if _plan(_values(job)).manifest.digest != manifest.digest:
            raise DataChanged("the manifest is not this job's; plan the job again")
        return FakeEvaluation(self.config.cache, spec)

    def _check_access(self, job: FakeJob) -> None:
        if not job.path:
            return
        path = Path(job.path)
        roots = self.config.roots
        if roots is not None and not any(path.is_relative_to(root) for root in roots):
            raise PathRefused(f"{path} is outside the directories this node may read")
        if not path.exists():
            raise DatasetNotFound(f"{path} does not exist on this node")


class FakeEvaluation:
    """Scores the shards of one fake job."""

    def __init__(self, cache: Path, spec: JobSpec) -> None:
        self._cache = cache
        self._spec = spec
        self._job = FakeJob.of(spec)
        self.closed = False

    def score(self, shard: ShardPlan, beat: Callable[[], None]) -> ScoredShard:
        assert not self.closed, "scored after close"
        begun = time.monotonic()
        job, index = self._job, shard.index
        beat()
        _wait(job.delay * (20 if self._strikes("slow", index) else 1), beat)
        if self._strikes("noise", index):
            print("a library prints this", flush=True)
            os.write(1, b"and this, past Python\n")
        if self._strikes("crash", index):
            os._exit(11)
        if self._strikes("kill", index):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._strikes("bug", index):
            raise RuntimeError(f"a bug met shard {index}")
        if self._strikes("error", index):
            raise ShardError(f"shard {index} fails, as asked for")
        if self._strikes("oom", index):
            raise MemoryError(f"no room for shard {index}")
        while self._strikes("hang", index):
            time.sleep(3600)
        beat()
        if job.tell:
            with Path(job.tell).open("a", encoding="ascii") as told:
                told.write(f"{index}\n")
        execution = Execution(time.monotonic() - begun, "cpu", "float32", 1, 0, {"fake": "1"})
        return ScoredShard(_partial(job, shard), execution)

    def close(self) -> None:
        self.closed = True

    def _strikes(self, fault: str, index: int) -> bool:
        return _strikes(self._cache, self._spec, fault, getattr(self._job, fault), index)


# ---------------------------------------------------------------- values


def _hash(seed: int, shard: int, token: int) -> int:
    """splitmix64: the same everywhere, and quick."""
    mask = (1 << 64) - 1
    x = (seed * 0x9E3779B97F4A7C15 + shard * 0xD1B54A32D192ED03 + token * 0x2545F4914F6CDD1D) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _values(job: FakeJob) -> FakeJob:
    """The part of a job that makes its values: delays and faults change no digest."""
    kept = {name: getattr(job, name) for name in ("shards", "tokens", "documents", "span", "seed")}
    return FakeJob(**kept)


def _rows(job: FakeJob, index: int) -> list[RowSums]:
    """Sums of each document part of a shard, all losses finite."""
    pieces = 1 if job.span > 1 else job.documents
    rows = []
    for piece in range(pieces):
        first, end = piece * job.tokens // pieces, (piece + 1) * job.tokens // pieces
        hashes = [_hash(job.seed, index, token) for token in range(first, end)]
        document = index // job.span if job.span > 1 else index * pieces + piece
        steps = sum(h % (12 * STEPS_PER_NAT) for h in hashes)
        nbytes = sum(1 + (h >> 40) % 7 for h in hashes)
        words = sum((h >> 50) % 2 for h in hashes)
        rows.append(RowSums(document, 1, steps, end - first, nbytes, words))
    return rows


def _partial(job: FakeJob, shard: ShardPlan) -> Partial:
    factor = float(os.environ.get(FACTOR, "1"))
    rows = [replace(row, steps=int(row.steps * factor)) for row in _rows(job, shard.index)]
    places: tuple[NonFinite, ...] = ()
    if str(shard.index) in job.nan.split(","):
        loss = _hash(job.seed, shard.index, 0) % (12 * STEPS_PER_NAT)
        first = rows[0]
        assert first.document is not None
        places = (NonFinite(first.document, 0, "nan"),)[:MAX_PLACES]
        rows[0] = RowSums(first.document, 1, first.steps - loss, first.tokens, first.bytes, first.words)
    steps, tokens = sum(row.steps for row in rows), sum(row.tokens for row in rows)
    nbytes, words = sum(row.bytes for row in rows), sum(row.words for row in rows)
    if shard.lump:
        rows = [RowSums(None, len(rows), steps, tokens, nbytes, words)]
    return Partial(shard.index, steps, tokens, nbytes, words, tuple(rows), len(places), places)


@lru_cache(maxsize=8)
def _plan(job: FakeJob) -> Plan:
    shards = []
    window = 0
    for index in range(job.shards):
        rows = _rows(job, index)
        first = rows[0].document
        last = rows[-1].document
        assert first is not None
        assert last is not None
        shard = ShardPlan(
            index=index,
            first_window=window,
            windows=len(rows),
            tokens=sum(row.tokens for row in rows),
            bytes=sum(row.bytes for row in rows),
            words=sum(row.words for row in rows),
            input_tokens=sum(row.tokens for row in rows),
            first_document=first,
            end_document=last + 1,
            lump=len(rows) > MAX_ROWS,
            digest=digest_json(["fake", job.seed, job.tokens, job.documents, job.span, index]),
        )
        shards.append(shard)
        window += shard.windows
    return Plan(_manifest(job, shards), tuple(shards))


def _manifest(job: FakeJob, shards: list[ShardPlan]) -> Manifest:
    tokens = sum(shard.tokens for shard in shards)
    nbytes = sum(shard.bytes for shard in shards)
    words = sum(shard.words for shard in shards)
    return Manifest(
        data_digest=digest_json(["fake data", job.seed, job.shards, job.tokens, job.documents, job.span]),
        documents=shards[-1].end_document,
        empty_documents=0,
        bytes=nbytes,
        words=words,
        tokens=tokens,
        windows=sum(shard.windows for shard in shards),
        scored_tokens=tokens,
        scored_bytes=nbytes,
        scored_words=words,
        lm_eval_words=words,
        input_tokens=tokens,
        shards=len(shards),
        tokenizer_digest=digest_json("fake tokenizer"),
        weights_digest=digest_json(["fake weights", job.seed]),
        model_type="fake",
        parameters=1,
        vocabulary=2,
        max_context=None,
        dtype="float32",
        policy="rolling",
        context=job.tokens,
        stride=None,
        join=None,
        bos="first",
        prefix_token=0,
        prefix_kind="bos",
        batch_tokens=4096,
        kernel_version=1,
    )


# ---------------------------------------------------------------- delays and faults


def _wait(seconds: float, beat: Callable[[], None]) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, BEAT))
        beat()


def _strikes(cache: Path, spec: JobSpec, fault: str, shards: str, index: int) -> bool:
    """Whether a fault strikes a shard now; "3x2" counts its strikes in the cache directory."""
    for entry in filter(None, shards.split(",")):
        shard, _, times = entry.partition("x")
        if int(shard) != index:
            continue
        if not times:
            return True
        cache.mkdir(parents=True, exist_ok=True)
        for strike in range(int(times)):
            name = digest_json([spec.canonical(), fault, index, strike])[7:27]
            try:
                (cache / f"strike-{name}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
    return False
