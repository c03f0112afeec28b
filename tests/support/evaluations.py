"""Plans and scores jobs in the test's own process, and gives the totals. What they should be is the tests' business."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_kernel.engine import Engine, EngineConfig
from eval_kernel.gridsum import to_nats
from eval_kernel.partial import Partial, RowSums
from eval_kernel.plan import Plan
from eval_kernel.spec import JobSpec, parse_spec
from eval_kernel.tally import Tally
from tests.support.corpora import write_jsonl


@dataclass(frozen=True)
class Result:
    """A job's plan and its partials, in the order of the shards."""

    plan: Plan
    partials: tuple[Partial, ...]

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.partials)

    @property
    def nats(self) -> float:
        return to_nats(sum(p.steps for p in self.partials))

    @property
    def nats_per_token(self) -> float:
        """Over the finite losses."""
        return self.nats / (self.tokens - sum(p.nonfinite for p in self.partials))

    @property
    def tally(self) -> Tally:
        tally = Tally()
        for partial in self.partials:
            tally.add(partial)
        return tally

    @property
    def rows(self) -> dict[int | None, RowSums]:
        """One row per document, its parts added up; the lumps under None."""
        rows: dict[int | None, RowSums] = {}
        for row in (row for partial in self.partials for row in partial.rows):
            old = rows.get(row.document, RowSums(row.document, 0, 0, 0, 0, 0))
            documents = row.documents if row.document is not None else old.documents + row.documents
            rows[row.document] = RowSums(
                row.document,
                documents,
                old.steps + row.steps,
                old.tokens + row.tokens,
                old.bytes + row.bytes,
                old.words + row.words,
            )
        return rows


class Evaluator:
    """An engine with a cache directory of its own, fed with models and texts."""

    def __init__(self, directory: Path, threads: int = 1) -> None:
        self.directory = directory
        self.cache = directory / "cache"
        self.engine = Engine(EngineConfig(self.cache, threads=threads, device="cpu"))
        self._texts = 0

    def spec(self, directory: Path, dataset: Path | list[str] | str, **job: Any) -> JobSpec:
        """A job in fp32 unless said otherwise. ``dataset`` is a path, one text, or the texts of several documents."""
        if not isinstance(dataset, Path):
            self._texts += 1
            documents = [dataset] if isinstance(dataset, str) else dataset
            dataset = write_jsonl(self.directory / f"texts-{self._texts}.jsonl", documents)
        source = {"source": str(dataset), **job.pop("data", {})}
        return parse_spec({"model": str(directory), "dataset": source, "precision": "fp32", **job}, where="test")

    def run(self, directory: Path, dataset: Path | list[str] | str, **job: Any) -> Result:
        """Plan a job and score all its shards."""
        return self.score(self.spec(directory, dataset, **job))

    def score(self, spec: JobSpec) -> Result:
        """Plan a job and score all its shards."""
        plan = self.engine.plan(spec, silent)
        evaluation = self.engine.open(spec, plan.manifest, silent)
        return Result(plan, tuple(evaluation.score(shard, lambda: None).partial for shard in plan.shards))


def silent(_: str) -> None:
    """Take a note of progress and say nothing."""
