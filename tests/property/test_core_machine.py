"""The scheduler under any order of calls, with its journal, crashes and restarts; every invariant after every step."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.core import facts as f
from coordinator.core.calls import PLANNING, Holding, PlanWork, SchedulerConfig, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState, Role
from coordinator.journal import MemoryJournal
from eval_kernel.errors import NotRegistered, StaleIncarnation
from eval_kernel.partial import Partial
from eval_kernel.tally import Tally
from tests.support.core_cases import info, make_plan, make_scored, with_partial

FEW_TRIES, SOME_TRIES, AUDITED = (
    SchedulerConfig(
        lease_seconds=10.0,
        heartbeat_seconds=2.0,
        suspect_after_seconds=5.0,
        max_tries=tries,
        audit_share=share,
        audit_patience_seconds=20.0,
        canary=share > 0,
        reuse=share > 0,
    )
    for tries, share in ((1, 0.0), (2, 0.0), (2, 0.6))
)
AGENTS = ("a1", "a2", "a3")
JOBS = ("j1", "j2")
SHARDS = 3
ROLES = (frozenset(Role), frozenset({Role.FORWARD}), frozenset({Role.PREPROCESS}))
CODES = ("OUT_OF_MEMORY", "WORKER_CRASHED", "MODEL_NOT_FOUND", "MODEL_NOT_FINITE", "NEVER_HEARD_OF", "REFUSED")

agents, jobs, shards = st.sampled_from(AGENTS), st.sampled_from(JOBS), st.integers(0, SHARDS - 1)


class Coordinator(RuleBasedStateMachine):
    """Agents that do anything at any time. What was told to somebody must survive every crash."""

    def __init__(self) -> None:
        """An empty coordinator at time 0."""
        super().__init__()
        self.now = 0.0
        self.journal = MemoryJournal("m")
        self.config = SOME_TRIES
        self.scheduler = Scheduler(self.config)
        self.durable = Scheduler(SOME_TRIES)  # what a restart would come to, whatever its configuration
        self.pending: list[f.Facts] = []
        self.lives = dict.fromkeys(AGENTS, 0)
        self.held: dict[str, list[Holding]] = {agent: [] for agent in AGENTS}
        self.untold: list[tuple[str, int, str]] = []
        self.told: set[tuple[str, int, str]] = set()  # acknowledged as accepted: job, shard, digest

    @initialize(config=st.sampled_from((FEW_TRIES, SOME_TRIES, AUDITED)))
    def first_job(self, config: SchedulerConfig) -> None:
        """Most runs are about a job that runs."""
        self.config = config
        self.scheduler = Scheduler(config)
        self.register("a1", ROLES[0])
        self.submit("j1")
        self.plan("a1", "j1", "data")

    def record(self, facts: f.Facts) -> None:
        """Queue the facts of one call for the journal."""
        if facts:
            self.pending.append(facts)

    def call(self, agent: str) -> tuple[str, str]:
        """An agent's name and incarnation, registered first where it has to be."""
        known = {node.agent: node for node in self.scheduler.nodes(self.now)}
        if agent not in known or known[agent].state.name in ("LOST", "LEFT"):
            self.register(agent, ROLES[0])
        return agent, str(self.lives[agent])

    # ------------------------------------------------------------ clients

    @rule(job=jobs)
    def submit(self, job: str) -> None:
        """Submit, perhaps again."""
        submitted = self.scheduler.submit(job, f"key-{job}", "{}", job, self.now)
        assert submitted.existed == (submitted.facts == ())
        self.record(submitted.facts)

    @precondition(lambda self: self.scheduler.jobs())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel, rarely."""
        if data.draw(st.integers(0, 9)) == 0:
            view = data.draw(st.sampled_from(self.scheduler.jobs()))
            facts = self.scheduler.cancel(view.job, "enough", self.now)
            assert view.state.settled == (facts == ())
            self.record(facts)

    # ------------------------------------------------------------ agents

    @rule(agent=agents, roles=st.sampled_from(ROLES))
    def register(self, agent: str, roles: frozenset[Role]) -> None:
        """Announce oneself again, as the same life."""
        self.record(self.scheduler.register(info(agent, str(self.lives[agent]), roles), self.now))

    @rule(agent=agents)
    def restart_agent(self, agent: str) -> None:
        """A new life, that knows nothing of its leases; the old one is refused from then on."""
        old = str(self.lives[agent])
        was_known = any(node.agent == agent for node in self.scheduler.nodes(self.now))
        self.lives[agent] += 1
        self.held[agent].clear()
        self.register(agent, ROLES[0])
        if was_known:
            try:
                self.scheduler.acquire(agent, old, 1, "", self.now)
            except StaleIncarnation:
                return
            raise AssertionError(f"incarnation {old} of {agent} was served after its successor registered")

    @rule(agent=agents, count=st.integers(0, 4), loaded=st.sampled_from(("", *JOBS)), answer_arrives=st.booleans())
    def acquire(self, agent: str, count: int, loaded: str, answer_arrives: bool) -> None:
        """Ask for work; the answer may get lost."""
        work = self.scheduler.acquire(*self.call(agent), count, loaded, self.now)
        if work is None or not answer_arrives:
            return
        numbers = [PLANNING] if isinstance(work, PlanWork) else [shard.index for shard in work.shards]
        assert isinstance(work, PlanWork) or 1 <= len(numbers) <= count
        self.held[agent] += [Holding(work.job, number) for number in numbers]

    @rule(agent=agents, data=st.data(), draining=st.booleans(), leaving=st.booleans())
    def renew(self, agent: str, data: st.DataObject, draining: bool, leaving: bool) -> None:
        """Name some holdings, real or imagined, and obey the answer."""
        imagined = st.builds(Holding, jobs, st.integers(PLANNING, SHARDS))
        holdings = data.draw(st.lists(st.sampled_from(self.held[agent]) if self.held[agent] else imagined, max_size=4))
        holdings += data.draw(st.lists(imagined, max_size=1))
        running = data.draw(st.sampled_from([None, *holdings]))
        leaving = leaving and data.draw(st.integers(0, 3)) == 0
        answer = self.scheduler.renew(
            *self.call(agent), holdings, data.draw(st.sampled_from(("", "busy"))), running, draining, leaving, self.now
        )
        ours = {h for node in self.scheduler.nodes(self.now) if node.agent == agent for h in node.held}
        if not leaving:
            kept = set(holdings) - set(answer.lost) - {h for h in holdings if h.job in answer.settled_jobs}
            assert kept <= ours, f"{kept - ours} were neither renewed nor lost"
        assert not set(answer.lost) & ours
        self.held[agent] = [h for h in self.held[agent] if h in ours]

    @rule(agent=agents, job=jobs, shard=shards, shift=st.sampled_from((0, 0, 0, 0, 1)))
    def score(self, agent: str, job: str, shard: int, shift: int) -> None:
        """Report a result: held or not, first or again, now and then another value."""
        states = {view.job: view.state for view in self.scheduler.jobs()}
        before = {commit.shard: commit for commit in self.scheduler.commits(job)} if job in states else {}
        scored = make_scored(shard, shift, seconds=0.5 * (1 + len(agent)))
        outcome = self.scheduler.scored(*self.call(agent), job, scored, self.now)
        self.record(outcome.facts)
        if any(isinstance(fact, f.AuditOpinion) for fact in outcome.facts):
            assert outcome.verdict is Verdict.ACCEPTED
            assert shard in before
        elif outcome.verdict is Verdict.ACCEPTED:
            assert shard not in before
            self.untold.append((job, shard, self.digest(job, shard)))
        elif outcome.verdict in (Verdict.DUPLICATE, Verdict.DIVERGENT):
            same = before[shard].steps == scored.partial.steps
            assert same == (outcome.verdict is Verdict.DUPLICATE)
        else:
            planned = states.get(job) in (JobState.RUNNING, JobState.SUCCEEDED)
            assert not planned, f"{outcome} although the job is {states[job]}"

    @rule(agent=agents, job=jobs, shard=shards)
    def score_wrongly(self, agent: str, job: str, shard: int) -> None:
        """A result that breaks a rule is never added."""
        outcome = self.scheduler.scored(
            *self.call(agent), job, with_partial(make_scored(shard), tokens=11, shard=shard), self.now
        )
        assert outcome.verdict in (Verdict.REFUSED, Verdict.UNWANTED)
        self.record(outcome.facts)

    @rule(agent=agents, job=jobs, shard=shards, code=st.sampled_from(CODES))
    def fail(self, agent: str, job: str, shard: int, code: str) -> None:
        """Fail a shard, or the planning."""
        who = self.call(agent)
        if Holding(job, PLANNING) in self.held[agent]:
            outcome = self.scheduler.plan_failed(*who, job, code, "no", self.now)
        else:
            outcome = self.scheduler.shard_failed(*who, job, shard, code, "no", self.now)
        self.record(outcome.facts)

    @rule(agent=agents, wrongly=st.booleans())
    def struggle(self, agent: str, wrongly: bool) -> None:
        """Take what there is and fail all of it, or report nonsense; each is a try, and a repetition is none."""
        work = self.scheduler.acquire(*self.call(agent), 2, "", self.now)
        if work is None or isinstance(work, PlanWork):
            return
        done = {commit.shard for commit in self.scheduler.commits(work.job)}
        for shard in work.shards:
            audit = shard.index in done  # a second opinion that fails is no try
            for repetition in range(2):
                failures = self.scheduler.job(work.job).failures
                if wrongly:
                    scored = with_partial(make_scored(shard.index), words=0)
                    outcome = self.scheduler.scored(*self.call(agent), work.job, scored, self.now)
                else:
                    outcome = self.scheduler.shard_failed(
                        *self.call(agent), work.job, shard.index, "OUT_OF_MEMORY", "no", self.now
                    )
                self.record(outcome.facts)
                counted = self.scheduler.job(work.job).failures - failures
                settled = outcome.verdict is Verdict.UNWANTED
                assert counted == int(repetition == 0 and not settled and not audit), (
                    f"{outcome} counted {counted} times"
                )

    @rule(agent=agents, job=jobs, label=st.sampled_from(("data", "data", "other")))
    def plan(self, agent: str, job: str, label: str) -> None:
        """Report a plan: the first, the same again, or another."""
        self.record(self.scheduler.planned(*self.call(agent), job, make_plan(SHARDS, label), self.now).facts)

    # ------------------------------------------------------------ time, disk, crash

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0, 6.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        """Leases run out, nodes fall silent."""
        self.now += seconds
        self.record(self.scheduler.tick(self.now))

    @rule()
    def journal_is_written(self) -> None:
        """All that is pending becomes durable, and is told."""
        for facts in self.pending:
            self.journal.append(facts)
            for fact in facts:
                self.durable.apply(fact)
        self.pending.clear()
        self.told.update(self.untold)
        self.untold.clear()
        assert self.durable.durable() == self.scheduler.durable()

    @rule()
    def coordinator_crashes(self) -> None:
        """What was pending is gone, whoever waited for it was told nothing; the journal brings back the rest."""
        self.pending.clear()
        self.untold.clear()
        restarted = Scheduler(self.config)
        restarted.replay(self.journal.facts())
        assert self.durable.durable() == restarted.durable()
        assert () == restarted.nodes(self.now)
        self.scheduler = restarted
        for agent, life in self.lives.items():
            try:
                restarted.acquire(agent, str(life), 1, "", self.now)
            except NotRegistered:
                continue
            raise AssertionError(f"{agent} was served by a coordinator that cannot know it")

    # ------------------------------------------------------------ always

    def digest(self, job: str, shard: int) -> str:
        """The digest of a committed partial; empty where there is none."""
        return next((c.digest for c in self.scheduler.commits(job) if c.shard == shard), "")

    @invariant()
    def invariants_hold(self) -> None:
        """The scheduler's own."""
        self.scheduler.check()

    @invariant()
    def nothing_told_is_lost(self) -> None:
        """An acknowledged partial stays committed, with the value that was acknowledged."""
        for job, shard, digest in self.told:
            assert digest == self.digest(job, shard), f"{job}/{shard} was acknowledged and is gone"

    @invariant()
    def waiting_is_explained(self) -> None:
        """A job that is not settled and on which nobody works says why."""
        for view in self.scheduler.jobs():
            lines = self.scheduler.waiting(view.job, self.now)
            assert all("\n" not in line for line in lines)
            if view.state.settled:
                assert not lines
            elif not view.shards_held:
                assert lines, f"{view.job} waits and nobody knows why"

    def counted(self) -> dict[str, dict[int, Partial]]:
        """The partials of each job that the journal says count, by shard."""
        of: dict[str, dict[int, Partial]] = defaultdict(dict)
        for fact in self.journal.facts():
            if isinstance(fact, f.ShardCommitted):
                assert fact.shard not in of[fact.job], f"{fact} was committed twice"
                of[fact.job][fact.shard] = fact.scored.partial
            elif isinstance(fact, f.JobReused):
                assert not of[fact.job]
                of[fact.job].update(of[fact.source])
        return of

    def teardown(self) -> None:
        """The tally of each job is the sum of the partials in the journal, each shard once."""
        self.journal_is_written()
        for view in self.scheduler.jobs():
            tally = Tally()
            for partial in self.counted()[view.job].values():
                tally.add(partial)
            assert tally.digest() == view.tally.digest()
            assert tally.shards == view.shards_done


TestCoordinator = Coordinator.TestCase
TestCoordinator.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
