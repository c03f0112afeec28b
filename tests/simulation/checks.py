"""What must hold in a simulated world, watched from outside: who was told what, what is on the disk, who is to blame.

The scheduler's and the sessions' own invariants are checked by those who call them; here is what only a witness sees.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from agent.spool import ResultKey
from coordinator.core import facts as f
from coordinator.core.calls import Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from eval_kernel.errors import JobIncomplete
from eval_kernel.partial import Partial
from eval_kernel.tally import Tally

Value = tuple[str, int, int]  # job, shard, loss sum


class Witness:
    """Keeps its own, much simpler books, and raises ``AssertionError`` where the others' differ."""

    def __init__(self, shadow: Scheduler) -> None:
        """``shadow`` is an empty scheduler: what is written is applied to it, and nothing else."""
        self.shadow = shadow
        self.commits: dict[tuple[str, int], int] = {}  # durable: (job, shard) -> loss sum
        self.partials: dict[str, list[Partial]] = defaultdict(list)  # durable, by job
        self.tries: Counter[tuple[str, int, str]] = Counter()  # durable: (job, shard, kind)
        self.submitted: set[str] = set()  # durable
        self.settled: set[str] = set()  # durable: failed or cancelled
        self.verdicts: Counter[Verdict] = Counter()
        self._values: set[Value] = set()  # durable: committed or kept as divergent
        self._computed: set[Value] = set()
        self._live: dict[tuple[str, int], int] = {}  # decided in this life of the coordinator, written or not
        self._current: dict[str, str] = {}  # agent -> incarnation that the coordinator knows
        self._superseded: set[str] = set()
        self._claimed: set[tuple[str, str, int]] = set()  # agent, job, shard: said to be running at some time
        self._struck: set[tuple[str, str, int]] = set()  # agent, job, shard: it failed there, or came out wrong
        # In this life of the coordinator: how often an agent was given a shard, less its failures that were counted.
        self._granted: Counter[tuple[str, str, int]] = Counter()

    # ------------------------------------------------------------ agents

    def computed(self, job: str, partial: Partial) -> None:
        """An agent has scored a shard."""
        self._computed.add((job, partial.shard, partial.steps))

    def struck(self, agent: str, job: str, shard: int) -> None:
        """A shard failed on an agent, or came out wrong."""
        self._struck.add((agent, job, shard))

    def granted(self, agent: str, job: str, shards: Iterable[int]) -> None:
        """Shards of a job were given to an agent."""
        self._granted.update((agent, job, shard) for shard in shards)

    def claims(self, agent: str, running: tuple[str, int] | None) -> None:
        """A heartbeat said what runs."""
        if running is not None:
            self._claimed.add((agent, *running))

    def removed(self, agent: str, key: ResultKey, partial: Partial) -> None:
        """An agent has deleted a result: then it is safe, or nobody will ever want it."""
        value = (key.job, partial.shard, partial.steps)
        safe = value in self._values or key.job in self.settled or partial.tokens == 11
        assert safe, f"{agent} deleted its result {value}, which is not in the journal"

    # ------------------------------------------------------------ calls

    def registered(self, agent: str, incarnation: str) -> None:
        """A life of an agent was let in."""
        assert incarnation not in self._superseded, f"{incarnation} was let in after a later life of {agent}"
        old = self._current.get(agent)
        if old is not None and old != incarnation:
            self._superseded.add(old)
        self._current[agent] = incarnation

    def served(self, agent: str, incarnation: str) -> None:
        """A call of an agent was answered, not refused."""
        assert incarnation not in self._superseded, f"{incarnation} was served after a later life of {agent} registered"
        assert self._current.get(agent, incarnation) == incarnation, f"{incarnation} was served without registering"

    def judged(self, scheduler: Scheduler, job: str, partial: Partial, verdict: Verdict, wrong: bool) -> None:
        """A result got its verdict."""
        self.verdicts[verdict] += 1
        before = self._live.get((job, partial.shard))
        state = scheduler.state(job)
        if verdict is Verdict.UNWANTED:
            unwanted = state in (JobState.FAILED, JobState.CANCELLED)
            assert unwanted, f"a result of {job}/{partial.shard} was thrown away while the job is {state.name}"
        elif wrong:
            assert verdict is Verdict.REFUSED, f"a result that breaks a rule is {verdict.name}"
        elif before is None:
            assert verdict is Verdict.ACCEPTED, f"the first result of {job}/{partial.shard} is {verdict.name}"
            self._live[job, partial.shard] = partial.steps
        else:
            wanted = Verdict.DUPLICATE if before == partial.steps else Verdict.DIVERGENT
            assert verdict is wanted, f"a later result of {job}/{partial.shard} is {verdict.name}, not {wanted.name}"

    def told(self, kind: str, request: dict[str, Any], answer: Any) -> None:
        """An answer leaves the coordinator: whatever it says must be on the disk."""
        match kind, answer:
            case "scored", Verdict.ACCEPTED | Verdict.DUPLICATE:
                partial = request["scored"].partial
                written = self.commits.get((request["job"], partial.shard))
                assert written == partial.steps, f"{answer.name} was told of {partial}, the journal has {written}"
            case "scored", Verdict.DIVERGENT:
                partial = request["scored"].partial
                kept = (request["job"], partial.shard, partial.steps) in self._values
                assert kept, f"DIVERGENT was told of {partial}, which is not in the journal"
            case "scored", Verdict.UNWANTED:
                assert request["job"] in self.settled, f"UNWANTED was told, but {request['job']} may yet go on"
            case "planned", Verdict.ACCEPTED | Verdict.DUPLICATE:
                assert self.shadow.job(request["job"]).manifest is not None, "a plan was acknowledged and not written"
            case "submit", str():
                assert answer in self.submitted, f"{answer} was told to a client and not written"
            case "cancel", str():
                state = self.shadow.state(answer)
                assert state.settled, f"cancelling {answer} was acknowledged, in the journal it is {state.name}"
            case "renew", (_, settled, _):
                for job in settled:
                    assert self.shadow.state(job).settled, f"{job} was told to be settled, the journal knows nothing"
            case _:
                pass

    # ------------------------------------------------------------ facts

    def decided(self, facts: f.Facts) -> None:
        """The scheduler made facts: blame must fall on what was running, or failed, and on nothing else."""
        for fact in facts:
            if isinstance(fact, f.ShardExpired):
                claimed = (fact.agent, fact.job, fact.shard) in self._claimed
                assert claimed, f"{fact} although {fact.agent} never said that it runs the shard"
            elif isinstance(fact, f.ShardFailed):
                where = (fact.agent, fact.job, fact.shard)
                assert where in self._struck, f"{fact} although it never failed there"
                self._granted[where] -= 1
                assert self._granted[where] >= 0, f"{fact} was counted more often than the shard was given there"

    def written(self, facts: list[f.Fact]) -> None:
        """Facts have become durable."""
        for fact in facts:
            self.shadow.apply(fact)
            match fact:
                case f.JobSubmitted():
                    self.submitted.add(fact.job)
                case f.JobFailed() | f.JobCancelled():
                    self.settled.add(fact.job)
                case f.ShardCommitted():
                    partial = fact.scored.partial
                    value = (fact.job, partial.shard, partial.steps)
                    assert value in self._computed, f"{value} is in the journal, and no agent has computed it"
                    assert value[:2] not in self.commits, f"shard {value[:2]} is in the journal twice"
                    self.commits[value[:2]] = partial.steps
                    self.partials[fact.job].append(partial)
                    self._values.add(value)
                case f.ShardDiverged():
                    self._values.add((fact.job, fact.shard, fact.scored.partial.steps))
                case f.ShardFailed():
                    self.tries[fact.job, fact.shard, "failure"] += 1
                case f.ShardExpired():
                    self.tries[fact.job, fact.shard, "expiry"] += 1
                case _:
                    pass

    def restarted(self, scheduler: Scheduler) -> None:
        """A coordinator has replayed the journal: it knows what is in it, no more and no less."""
        assert self.shadow.durable() == scheduler.durable(), "a replay comes to something else than what was written"
        self._live = dict(self.commits)
        self._current.clear()
        self._superseded.clear()
        self._granted.clear()

    # ------------------------------------------------------------ the end

    def over(self, scheduler: Scheduler, shards: dict[str, int], faults: tuple[str, ...], tries: int) -> None:
        """All jobs are settled: each total is the sum of what is in the journal, each shard once."""
        for view in scheduler.jobs():
            tally = Tally()
            for partial in self.partials[view.job]:
                tally.add(partial)
            assert tally.digest() == view.tally.digest(), f"{view.job}: the total is not the sum of the journal's rows"
            count = shards[view.spec_json]
            if view.state is JobState.SUCCEEDED:
                done = sorted(partial.shard for partial in self.partials[view.job])
                assert list(range(count)) == done, f"{view.job} succeeded with the shards {done} of {count}"
            elif view.state is JobState.CANCELLED:
                assert "cancel" in faults, f"{view.job} was cancelled by nobody"
            else:
                self._gave_up(scheduler, view.job, tries)
        for node in scheduler.nodes(0.0):
            assert not node.held, f"{node.agent} still holds {node.held}"

    def _gave_up(self, scheduler: Scheduler, job: str, tries: int) -> None:
        """A job failed: everything that could be scored was, and what was given up had its tries."""
        view = scheduler.job(job)
        assert view.failure is not None
        assert view.failure.code == JobIncomplete.code, f"{job} failed with {view.failure}"
        for item in scheduler.missing(job):
            index = item.plan.index
            failed, expired = (self.tries[job, index, kind] for kind in ("failure", "expiry"))
            enough = failed >= tries or expired >= 2 * tries
            assert item.quarantined, f"{job} failed although shard {index} could still be tried"
            assert enough, f"shard {job}/{index} was given up after {failed} failures and {expired} expiries"
            assert item.failure is not None, f"shard {job}/{index} was given up without a reason"
