"""Several ranks are one engine: what they score together is what one process scores, in every layout and precision."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from eval_kernel.engine import Engine
from eval_kernel.errors import LayoutUnsupported, RankLost
from eval_kernel.parallel.group import EngineConfig, GroupEngine
from eval_kernel.partial import Partial, ScoredShard
from eval_kernel.plan import Plan
from eval_kernel.spec import JobSpec, parse_spec
from tests.support import models
from tests.support.corpora import write_jsonl
from tests.support.evaluations import Evaluator
from tests.support.processes import alive, children

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]
TEXTS = ["the cat sat on the mat. " * 20, "a dog", "hello world " * 30, "xyz abc " * 10]
#: Seconds of silence after which a rank is lost, where that is what is tested.
WATCHDOG = 5.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": -1},
    "sharded": {"dp_shard": -1},
    "tensor": {"tp": -1},
    "streamed": {"streaming_fraction": 1.0},
}


class Case:
    """A small model, a text, and groups that score it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = models.write_char_tokenizer(models.write_random_llama(directory / "model"))
        self.data = write_jsonl(directory / "text.jsonl", TEXTS)
        self.alone = Evaluator(directory).engine
        self._threads = torch.get_num_threads()
        self._group: GroupEngine | None = None

    def spec(self, precision: str = "fp32", **job: Any) -> JobSpec:
        window, shard = {"policy": "rolling", "context": 64}, {"tokens": 256}
        given = {"model": str(self.model), "dataset": str(self.data), "precision": precision}
        return parse_spec({**given, "window": window, "shard": shard, **job}, where="test")

    def group(self, world: int) -> GroupEngine:
        """An engine of ``world`` ranks. A process is in one group at a time."""
        if self._group is None or self._group.config.ranks != world:
            self.close()
            self._group = GroupEngine(EngineConfig(self.directory / "cache", None, "cpu", 1, world, 20.0))
        return self._group

    def expected(self, spec: JobSpec) -> tuple[Plan, list[Partial]]:
        """The plan, and what one process makes of it."""
        plain = spec.model_copy(update={"parallel": "auto"})
        plan = self.alone.plan(plain, _silent)
        return plan, [scored.partial for scored in scores(self.alone, plain, plan)]

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        torch.set_num_threads(self._threads)


def _silent(_: str) -> None:
    """Progress is not looked at."""


def scores(engine: Engine | GroupEngine, spec: JobSpec, plan: Plan) -> list[ScoredShard]:
    """Score all shards of a job."""
    evaluation = engine.open(spec, plan.manifest, _silent)
    return [evaluation.score(shard, lambda: None) for shard in plan.shards]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """One model for all tests; groups are formed once for each size."""
    made = Case(tmp_path_factory.mktemp("group"))
    yield made
    made.close()
    assert [pid for pid in children(os.getpid()) if _is_rank(pid)] == []


def _is_rank(pid: int) -> bool:
    return alive(pid) and b"parallel.helper" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4-g32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_score_what_one_process_does(case: Case, layout: str, precision: str) -> None:
    """Whole layers give the same bits; layers cut between ranks the same counts, and losses up to float32 sums."""
    spec = case.spec(precision, parallel=LAYOUTS[layout])
    plan, expected = case.expected(spec)
    got = scores(case.group(2), spec, plan)
    assert [scored.execution.software["ranks"] for scored in got] == ["2"] * len(plan.shards)
    compare(layout, [scored.partial for scored in got], expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sharded", "tensor"])
def test_four_ranks_score_what_one_process_does(case: Case, layout: str) -> None:
    """Two heads of keys do not divide by four ranks: attention is computed whole on each, and the sums stay right."""
    spec = case.spec(parallel=LAYOUTS[layout])
    plan, expected = case.expected(spec)
    got = scores(case.group(4), spec, plan)
    kernel = got[0].execution.software["kernel"]
    assert ("attention whole on every rank" in kernel) == (layout == "tensor")
    compare(layout, [scored.partial for scored in got], expected)


def compare(layout: str, got: list[Partial], expected: list[Partial]) -> None:
    """Equal to the last bit, or, where layers are cut, in counts and up to 1e-5 of the loss."""
    if layout != "tensor":
        assert got == expected
        return
    counts = [(p.shard, p.tokens, p.bytes, p.words, p.nonfinite, len(p.rows)) for p in got]
    assert counts == [(p.shard, p.tokens, p.bytes, p.words, p.nonfinite, len(p.rows)) for p in expected]
    total = sum(p.steps for p in expected)
    assert abs(sum(p.steps for p in got) - total) <= 1e-5 * total


def test_calibration_sums_are_added_over_ranks(case: Case) -> None:
    """A job's extra sums are those of one process."""
    spec = case.spec(metrics=["calibration"], parallel=LAYOUTS["sharded"])
    plan, expected = case.expected(spec)
    assert [scored.partial for scored in scores(case.group(2), spec, plan)] == expected
    assert expected[0].extra


def test_ranks_of_one_node_listen_on_loopback_only(case: Case) -> None:
    """Neither the rendezvous nor the ranks' links can be reached from another machine."""
    engine = case.group(2)
    spec = case.spec(parallel=LAYOUTS["replicas"])
    plan, _ = case.expected(spec)
    engine.open(spec, plan.manifest, _silent)
    assert engine.formed is not None
    addresses = [a for pid in (os.getpid(), engine.formed.helpers[0].pid) for a in listening(pid)]
    assert len(addresses) >= 3
    assert {address.partition(":")[0] for address in addresses} == {"0100007F"}


def listening(pid: int) -> list[str]:
    """Addresses that a process listens at, in the kernel's hexadecimal."""
    sockets = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def test_a_degree_that_is_not_the_groups_names_those_that_work(case: Case) -> None:
    """The message says what the degrees make, what the group has, and what to write."""
    spec = case.spec(parallel={"tp": 3})
    plan, _ = case.expected(spec)
    with pytest.raises(LayoutUnsupported, match=r"tp=3 makes 3 ranks, but the group has 2.*tp=2"):
        case.group(2).open(spec, plan.manifest, _silent)


def test_a_rank_that_is_killed_dissolves_the_group_and_the_next_one_gives_the_same(case: Case) -> None:
    """The shard fails with the rank's name, all ranks are reaped, and a group formed anew scores every bit equally."""
    spec = case.spec(parallel=LAYOUTS["sharded"])
    plan, expected = case.expected(spec)
    engine = case.group(2)
    evaluation = engine.open(spec, plan.manifest, _silent)
    first = engine.formed
    assert first is not None

    def kill_once() -> None:
        first.helpers[0].kill()

    with pytest.raises(RankLost, match="rank 1 ended"):
        evaluation.score(plan.shards[0], kill_once)
    assert evaluation.broken
    assert all(helper.returncode is not None for helper in first.helpers)
    assert [scored.partial for scored in scores(engine, spec, plan)] == expected
    assert engine.formed is not first


def test_a_rank_ten_times_slower_than_the_other_is_not_taken_for_dead(case: Case) -> None:
    """A rank that runs a tenth of the time still gives signs of life: work goes on far beyond the watchdog's time."""
    spec = case.spec(parallel=LAYOUTS["sharded"])
    plan, expected = case.expected(spec)
    case.close()
    engine = GroupEngine(EngineConfig(case.directory / "cache", None, "cpu", 1, 2, WATCHDOG))
    try:
        evaluation = engine.open(spec, plan.manifest, _silent)
        group = engine.formed
        assert group is not None
        end = time.monotonic() + 2 * WATCHDOG
        with slowed(group.helpers[0].pid, 0.45, 0.05):
            while time.monotonic() < end:
                assert [evaluation.score(shard, lambda: None).partial for shard in plan.shards] == expected
        assert engine.formed is group
        assert group.lost is None
    finally:
        engine.close()


@contextmanager
def slowed(pid: int, stopped: float, running: float) -> Iterator[None]:
    """Stop a process for ``stopped`` seconds, let it run for ``running``, and so on."""
    done = Event()

    def alternate() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(stopped)
            os.kill(pid, signal.SIGCONT)
            done.wait(running)

    thread = Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
