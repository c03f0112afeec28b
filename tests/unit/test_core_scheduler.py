"""The scheduler call by call: what it answers, and which facts it wants journaled."""

from __future__ import annotations

import pytest

from coordinator.core import facts as f
from coordinator.core.calls import PLANNING, Holding, PlanWork, RenewAnswer, SchedulerConfig, ScoreWork, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState, NodeState, Role
from eval_kernel.errors import ConfigError, JobKeyConflict, NotRegistered, StaleIncarnation, UnknownJob
from eval_kernel.plan import Plan
from tests.support.core_cases import (
    BOTH,
    CONFIG,
    COST,
    add_job,
    info,
    make_plan,
    make_scored,
    running_job,
    with_partial,
)


def shards_of(work: PlanWork | ScoreWork | None) -> list[int]:
    """The shard numbers of an assignment."""
    assert isinstance(work, ScoreWork), f"expected shards, got {work}"
    return [shard.index for shard in work.shards]


def take(scheduler: Scheduler, agent: str, now: float, loaded: str = "", max_shards: int = 1) -> list[int]:
    """Acquire as an agent of incarnation 1."""
    return shards_of(scheduler.acquire(agent, "1", max_shards, loaded, now))


def beat(
    scheduler: Scheduler,
    agent: str,
    now: float,
    *held: tuple[str, int],
    running: tuple[str, int] | None = None,
    draining: bool = False,
    leaving: bool = False,
) -> RenewAnswer:
    """Renew as an agent of incarnation 1; the first holding runs unless another is named."""
    holdings = [Holding(*h) for h in held]
    now_running = Holding(*running) if running else (holdings[0] if holdings else None)
    scheduler.check()
    return scheduler.renew(agent, "1", holdings, "scoring", now_running, draining, leaving, now)


class TestSubmit:
    """Clients' calls."""

    def test_the_same_key_and_spec_give_the_same_job_without_a_fact(self) -> None:
        """A repeated submission is answered and not journaled."""
        scheduler = Scheduler(CONFIG)
        first = scheduler.submit("j1", "k", "{}", "name", 5.0)
        again = scheduler.submit("j2", "k", "{}", "name", 6.0)

        assert (f.JobSubmitted("j1", "k", "name", "{}", 5.0),) == first.facts
        assert ("j1", True, ()) == (again.job, again.existed, again.facts)

    def test_the_same_key_with_another_spec_is_refused(self) -> None:
        """A key names one specification for ever."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        with pytest.raises(JobKeyConflict, match="choose another key"):
            scheduler.submit("j2", "k", '{"a":1}', "", 0.0)

        assert ["j1"] == [job.job for job in scheduler.jobs()]

    def test_an_id_is_not_used_twice(self) -> None:
        """An id in use is the caller's bug."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        with pytest.raises(ValueError, match="used before"):
            scheduler.submit("j1", "other", "{}", "", 0.0)

    def test_jobs_are_found_by_an_unambiguous_prefix(self) -> None:
        """A prefix of one id finds it; of two, or of none, is an error that says so."""
        scheduler = Scheduler(CONFIG)
        for job in ("ab1", "ab2", "cd", "c"):
            scheduler.submit(job, job, "{}", "", 0.0)

        assert "ab1" == scheduler.job("ab1").job
        assert "cd" == scheduler.job("cd").job
        assert "c" == scheduler.job("c").job
        for prefix, message in (("ab", "2 jobs begin with"), ("x", "no job 'x'"), ("", "no job ''")):
            with pytest.raises(UnknownJob, match=message):
                scheduler.job(prefix)

    def test_cancelling_twice_is_no_error(self) -> None:
        """A settled job stays settled, whatever is asked of it."""
        scheduler = running_job(2)
        take(scheduler, "a1", 0.0)

        assert (f.JobCancelled("j1", "no need", 1.0),) == scheduler.cancel("j", "no  need\n", 1.0)
        assert () == scheduler.cancel("j1", "again", 2.0)
        scheduler.check()
        view = scheduler.job("j1")
        assert (JobState.CANCELLED, 1.0, 0) == (view.state, view.settled_at, view.shards_held)
        assert RenewAnswer((), ("j1",), False) == beat(scheduler, "a1", 2.0, ("j1", 0))


class TestNodes:
    """Registration, incarnations, drain, silence."""

    def test_who_is_not_registered_is_told_so(self) -> None:
        """Unknown agents, and unknown incarnations of known ones, must register."""
        scheduler = Scheduler(CONFIG)
        with pytest.raises(NotRegistered):
            scheduler.acquire("a1", "1", 1, "", 0.0)
        scheduler.register(info("a1"), 0.0)
        with pytest.raises(NotRegistered):
            scheduler.acquire("a1", "2", 1, "", 0.0)

    def test_a_fresh_incarnation_replaces_the_one_before_for_good(self) -> None:
        """The old life must stop; its leases return and what it was running counts an expiry."""
        scheduler = running_job(8, agents=2)
        scheduler.scored("a1", "1", "j1", make_scored(0), 0.0)
        assert [1] == take(scheduler, "a1", 0.0)
        beat(scheduler, "a1", 1.0, ("j1", 1))
        facts = scheduler.register(info("a1", "2"), 2.0)
        scheduler.check()

        assert (f.ShardExpired("j1", 1, "a1", False),) == facts
        assert [1] == take(scheduler, "a2", 2.0)
        with pytest.raises(StaleIncarnation):
            scheduler.renew("a1", "1", [], "", None, False, False, 3.0)
        with pytest.raises(StaleIncarnation):
            scheduler.register(info("a1", "1"), 3.0)

    def test_registering_again_keeps_the_leases(self) -> None:
        """A repeated Register of one life replaces what was announced and costs nothing."""
        scheduler = running_job(2)
        take(scheduler, "a1", 0.0)
        facts = scheduler.register(info("a1", "1", frozenset({Role.FORWARD})), 1.0)

        assert () == facts
        (node,) = scheduler.nodes(1.0)
        assert (frozenset({Role.FORWARD}), (Holding("j1", 0),)) == (node.roles, node.held)

    def test_silence_makes_a_node_suspect_then_lost(self) -> None:
        """A call ends suspicion; a lost node has to register again."""
        scheduler = running_job(2)
        take(scheduler, "a1", 0.0)
        states = []
        for now in (14.9, 15.0):
            scheduler.tick(now)
            states.append(scheduler.nodes(now)[0].state)
        beat(scheduler, "a1", 16.0, ("j1", 0))
        for now in (16.0, 31.0, 46.0):
            scheduler.tick(now)
            scheduler.check()
            states.append(scheduler.nodes(now)[0].state)

        assert [NodeState.ACTIVE, NodeState.SUSPECT, NodeState.ACTIVE, NodeState.SUSPECT, NodeState.LOST] == states
        with pytest.raises(NotRegistered, match="LOST"):
            scheduler.scored("a1", "1", "j1", make_scored(0), 47.0)
        scheduler.register(info("a1"), 47.0)
        assert Verdict.ACCEPTED is scheduler.scored("a1", "1", "j1", make_scored(0), 47.0).verdict

    def test_a_draining_node_is_given_nothing_and_keeps_what_it_has(self) -> None:
        """Drain lets a node finish; it may change its mind."""
        scheduler = running_job(8)
        take(scheduler, "a1", 0.0)
        beat(scheduler, "a1", 1.0, ("j1", 0), draining=True)

        assert NodeState.DRAINING is scheduler.nodes(1.0)[0].state
        assert scheduler.acquire("a1", "1", 1, "", 1.0) is None
        assert RenewAnswer((), (), False) == beat(scheduler, "a1", 2.0, ("j1", 0), draining=True)
        beat(scheduler, "a1", 3.0, ("j1", 0))
        assert [1] == take(scheduler, "a1", 3.0)

    def test_leaving_returns_everything_at_once_and_is_no_try(self) -> None:
        """The last call of an orderly end may be repeated; results still count; new work needs registering."""
        scheduler = running_job(2, agents=2)
        take(scheduler, "a1", 0.0)
        beat(scheduler, "a1", 1.0, ("j1", 0))
        for _ in range(2):
            beat(scheduler, "a1", 2.0, ("j1", 0), leaving=True)
        scheduler.check()

        assert [0] == take(scheduler, "a2", 2.0)
        assert 0 == scheduler.job("j1").expiries
        with pytest.raises(NotRegistered, match="LEFT"):
            scheduler.acquire("a1", "1", 1, "", 3.0)
        assert Verdict.ACCEPTED is scheduler.scored("a1", "1", "j1", make_scored(0), 3.0).verdict
        scheduler.check()

    def test_a_draining_coordinator_gives_nothing_out_and_takes_results(self) -> None:
        """Drain of the coordinator is told with every renewal."""
        scheduler = running_job(2)
        take(scheduler, "a1", 0.0)
        scheduler.drain()

        assert scheduler.acquire("a1", "1", 1, "", 1.0) is None
        assert beat(scheduler, "a1", 1.0, ("j1", 0)).drain
        assert Verdict.ACCEPTED is scheduler.scored("a1", "1", "j1", make_scored(0), 1.0).verdict
        assert "the coordinator is draining and gives nothing out" in scheduler.waiting("j1", 1.0)


class TestPlanning:
    """Planning is leased work."""

    def test_a_job_is_planned_by_one_agent_with_the_role(self) -> None:
        """The first agent that may is given it, alone."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", '{"x":1}', "", 0.0)
        scheduler.register(info("fwd", roles=frozenset({Role.FORWARD})), 0.0)
        scheduler.register(info("a1"), 0.0)
        scheduler.register(info("a2"), 0.0)

        assert scheduler.acquire("fwd", "1", 1, "", 0.0) is None
        assert PlanWork("j1", '{"x":1}') == scheduler.acquire("a1", "1", 0, "", 0.0)
        assert scheduler.acquire("a2", "1", 1, "", 0.0) is None
        assert ["planning on agent a1"] == scheduler.waiting("j1", 0.0)

    def test_the_first_plan_wins(self) -> None:
        """An equal second plan is a duplicate, another one is refused and told what differs."""
        scheduler = running_job(3, agents=2)
        same = scheduler.planned("a2", "1", "j1", make_plan(3), 1.0)
        other = scheduler.planned("a2", "1", "j1", make_plan(3, "other"), 1.0)

        assert (Verdict.DUPLICATE, ()) == (same.verdict, same.facts)
        assert (Verdict.REFUSED, ()) == (other.verdict, other.facts)
        assert "data_digest differ (data_digest: sha256:data planned, sha256:other here)" in other.detail

    def test_a_plan_without_shards_counts_as_a_failure(self) -> None:
        """A plan that cannot be run is refused, and its agent has failed the job once."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        scheduler.register(info("a1"), 0.0)
        scheduler.acquire("a1", "1", 1, "", 0.0)
        outcome = scheduler.planned("a1", "1", "j1", make_plan(0), 1.0)

        assert Verdict.REFUSED is outcome.verdict
        assert (f.PlanFailed("j1", "a1", "REFUSED", "the plan has no shard"),) == outcome.facts

    def test_a_failure_that_is_the_jobs_fault_ends_it(self) -> None:
        """Malformed data is malformed everywhere."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        scheduler.register(info("a1"), 0.0)
        scheduler.acquire("a1", "1", 1, "", 0.0)
        outcome = scheduler.plan_failed("a1", "1", "j1", "DATASET_MALFORMED", "x.jsonl: line 7\nis bad", 1.0)

        expected = f.JobFailed("j1", "DATASET_MALFORMED", "planning on agent a1: x.jsonl: line 7 is bad", 1.0)
        assert (expected,) == outcome.facts
        assert Verdict.UNWANTED is scheduler.planned("a1", "1", "j1", make_plan(1), 2.0).verdict
        scheduler.check()

    def test_planning_is_tried_three_times(self) -> None:
        """Failures that are nobody's for sure are tries; a report sent twice counts once."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        scheduler.register(info("a1"), 0.0)
        kinds = []
        for now in (1.0, 2.0, 3.0):
            scheduler.acquire("a1", "1", 1, "", now)
            for _ in range(2):
                outcome = scheduler.plan_failed("a1", "1", "j1", "WORKER_CRASHED", "signal 11", now)
                kinds.append([fact.kind for fact in outcome.facts])
            scheduler.check()

        assert [["plan_failed"], [], ["plan_failed"], [], ["plan_failed", "job_failed"], []] == kinds
        failure = scheduler.job("j1").failure
        assert failure is not None
        assert ("WORKER_CRASHED", "planning failed 3 times, last on agent a1: signal 11") == (
            failure.code,
            failure.message,
        )

    def test_an_agent_that_dies_planning_is_an_expiry_and_six_end_the_job(self) -> None:
        """A job whose planning kills every agent does not go round for ever."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        facts: f.Facts = ()
        for life in range(6):
            facts += scheduler.register(info("a1", str(life)), float(life))
            scheduler.acquire("a1", str(life), 1, "", float(life))
            plan = Holding("j1", PLANNING)
            scheduler.renew("a1", str(life), [plan], "planning", plan, False, False, float(life))
        facts += scheduler.register(info("a1", "end"), 9.0)
        scheduler.check()

        assert ["plan_expired"] * 6 + ["job_failed"] == [fact.kind for fact in facts]
        assert JobState.FAILED is scheduler.job("j1").state


class TestPlacement:
    """Who is given what."""

    def test_the_first_assignment_is_one_shard_then_speed_decides(self) -> None:
        """About target_seconds at the measured speed: 10 s at 1 s a shard is 10 shards."""
        scheduler = running_job(100)

        assert [0] == take(scheduler, "a1", 0.0, max_shards=50)
        scheduler.scored("a1", "1", "j1", make_scored(0, seconds=1.0), 1.0)
        assert list(range(1, 11)) == take(scheduler, "a1", 1.0, max_shards=50)
        assert COST == scheduler.nodes(1.0)[0].tokens_per_second
        assert [11, 12, 13] == take(scheduler, "a1", 1.0, max_shards=3)

    def test_a_slow_node_gets_one_shard_at_a_time(self) -> None:
        """A shard longer than the target is still given, alone."""
        scheduler = running_job(100)
        scheduler.scored("a1", "1", "j1", make_scored(0, seconds=60.0), 1.0)

        assert [1] == take(scheduler, "a1", 1.0, max_shards=50)

    def test_assignments_shrink_towards_the_end(self) -> None:
        """Never more than half of a node's share of what waits; what others will do sooner is left to them."""
        scheduler = running_job(21, agents=2)
        scheduler.scored("a1", "1", "j1", make_scored(0, seconds=0.001), 0.001)
        sizes = []
        while work := scheduler.acquire("a1", "1", 50, "", 1.0):
            sizes.append(len(shards_of(work)))

        assert [5, 3, 3] == sizes
        assert [12] == take(scheduler, "a2", 1.0), "an agent that was not measured yet begins with one"

    def test_the_loaded_job_goes_first_then_the_oldest(self) -> None:
        """Loading a model costs more than a queue's order is worth."""
        scheduler = running_job(2)
        add_job(scheduler, 2, "j2")

        assert ["j2", "j1", "j1", "j2", None] == [
            None if work is None else work.job
            for work in (scheduler.acquire("a1", "1", 1, loaded, 0.0) for loaded in ("j2", "", "j1", "j1", "j1"))
        ]

    def test_planning_goes_before_scoring(self) -> None:
        """A new job is opened to all before the old one is finished."""
        scheduler = running_job(2)
        scheduler.submit("j2", "k2", "{}", "", 0.0)

        assert PlanWork("j2", "{}") == scheduler.acquire("a1", "1", 1, "j1", 0.0)
        assert [0] == take(scheduler, "a1", 0.0, "j1")

    def test_a_node_that_cannot_is_left_out_for_a_while(self) -> None:
        """No access is the node's fault: no try, its shards return, and it is asked again after a minute."""
        scheduler = running_job(8, agents=2)
        scheduler.scored("a1", "1", "j1", make_scored(0, seconds=1.0), 0.0)
        assert [1, 2] == take(scheduler, "a1", 0.0, max_shards=2) + take(scheduler, "a1", 0.0, max_shards=1)
        outcome = scheduler.shard_failed("a1", "1", "j1", 1, "MODEL_NOT_FOUND", "/models/x is missing", 1.0)
        scheduler.check()

        assert (Verdict.ACCEPTED, ()) == (outcome.verdict, outcome.facts)
        assert scheduler.acquire("a1", "1", 1, "", 60.9) is None
        line = "agent a1 cannot read the model: /models/x is missing (next try in 42 s)"
        assert [line] == [text for text in scheduler.waiting("j1", 19.0) if "a1" in text]
        assert RenewAnswer((Holding("j1", 2),), (), False) == beat(scheduler, "a1", 5.0, ("j1", 2))
        assert [1] == take(scheduler, "a1", 61.0)

    def test_registering_again_ends_the_waiting(self) -> None:
        """An operator who mends the access restarts the agent, or has it register."""
        scheduler = running_job(2)
        scheduler.shard_failed("a1", "1", "j1", 0, "DATASET_NOT_FOUND", "no /data", 1.0)
        assert scheduler.acquire("a1", "1", 1, "", 2.0) is None
        scheduler.register(info("a1"), 3.0)

        assert [0] == take(scheduler, "a1", 3.0)

    def test_a_shard_that_failed_on_a_node_goes_to_another_first(self) -> None:
        """Where another node is able, the one that failed gets other shards."""
        scheduler = running_job(3, agents=2)
        assert [0] == take(scheduler, "a1", 0.0)
        scheduler.shard_failed("a1", "1", "j1", 0, "OUT_OF_MEMORY", "8 GB", 0.0)

        assert [1] == take(scheduler, "a1", 0.0)
        assert [0] == take(scheduler, "a2", 0.0)
        scheduler.shard_failed("a2", "1", "j1", 0, "OUT_OF_MEMORY", "4 GB", 0.0)
        assert [0] == take(scheduler, "a1", 0.0), "all have failed it: anyone may try again"


class TestLeases:
    """Leases save work; they are no matter of correctness."""

    def test_a_lease_runs_out_unless_renewed(self) -> None:
        """A renewed holding stays, one that is not named returns after lease_seconds."""
        scheduler = running_job(8)
        scheduler.scored("a1", "1", "j1", make_scored(0), 0.0)
        assert [1, 2] == take(scheduler, "a1", 0.0) + take(scheduler, "a1", 0.0)
        beat(scheduler, "a1", 20.0, ("j1", 2))
        scheduler.tick(29.9)
        assert 2 == scheduler.job("j1").shards_held

        assert () == scheduler.tick(30.0), "what was not running counts no expiry"
        scheduler.check()
        assert (Holding("j1", 2),) == scheduler.nodes(30.0)[0].held
        assert (f.ShardExpired("j1", 2, "a1", False),) == scheduler.tick(50.0)

    def test_only_the_running_shard_is_charged(self) -> None:
        """Of several leases of a silent node one counts: the one it was running."""
        scheduler = running_job(20)
        scheduler.scored("a1", "1", "j1", make_scored(0), 0.0)
        held = take(scheduler, "a1", 0.0, max_shards=4)
        beat(scheduler, "a1", 1.0, *(("j1", shard) for shard in held), running=("j1", 3))

        assert (f.ShardExpired("j1", 3, "a1", False),) == scheduler.tick(31.0)

    def test_lost_holdings_are_named(self) -> None:
        """Another's, done, given up or impossible: the agent learns that it may drop it."""
        scheduler = running_job(3, agents=2)
        scheduler.scored("a2", "1", "j1", make_scored(0), 0.0)
        assert [1] == take(scheduler, "a2", 0.0)
        answer = beat(scheduler, "a1", 1.0, ("j1", 0), ("j1", 1), ("j1", 99), ("j1", PLANNING), ("gone", 3))

        lost = tuple(Holding("j1", shard) for shard in (0, 1, 99, PLANNING))
        assert RenewAnswer(lost, ("gone",), False, (Holding("j1", 0),)) == answer, "what runs in vain is named"

    def test_work_that_nobody_else_holds_becomes_the_agents_again(self) -> None:
        """After a restart of the coordinator agents go on with what they were doing."""
        facts = [
            f.JobSubmitted("j1", "k", "", "{}", 0.0),
            f.JobPlanned("j1", "a1", make_plan(5), 0.0),
            f.JobSubmitted("j2", "k2", "", "{}", 0.0),
        ]
        scheduler = Scheduler(CONFIG)
        scheduler.replay(facts)
        scheduler.register(info("a1"), 0.0)
        scheduler.register(info("a2"), 0.0)
        answer = beat(scheduler, "a1", 0.0, ("j1", 2), ("j2", PLANNING))
        scheduler.check()

        assert RenewAnswer((), (), False) == answer
        assert [0, 1, 3] == [take(scheduler, "a2", 0.0)[0] for _ in range(3)]
        assert scheduler.acquire("a2", "1", 1, "", 0.0) is None, "the last one is for who is free first"

    def test_a_failed_shard_is_not_taken_up_again_by_a_late_renewal(self) -> None:
        """A renewal that was on its way when the failure was reported does not win the shard back."""
        scheduler = running_job(1)
        take(scheduler, "a1", 0.0)
        scheduler.shard_failed("a1", "1", "j1", 0, "WORKER_CRASHED", "signal 9", 1.0)

        assert RenewAnswer((Holding("j1", 0),), (), False) == beat(scheduler, "a1", 1.0, ("j1", 0))


class TestResults:
    """Partials, and failures in their place."""

    def test_the_first_partial_wins(self) -> None:
        """An equal second is a duplicate, an unequal one is kept once per agent and value."""
        scheduler = running_job(2, agents=2)
        first = scheduler.scored("a1", "1", "j1", make_scored(0), 1.0)
        again = scheduler.scored("a2", "1", "j1", make_scored(0, seconds=9.0), 2.0)
        other = scheduler.scored("a2", "1", "j1", make_scored(0, shift=1), 3.0)
        repeat = scheduler.scored("a2", "1", "j1", make_scored(0, shift=1), 4.0)

        assert (f.ShardCommitted("j1", "a1", make_scored(0), 1.0),) == first.facts
        assert (Verdict.DUPLICATE, ()) == (again.verdict, again.facts)
        assert (f.ShardDiverged("j1", "a2", make_scored(0, shift=1), 3.0),) == other.facts
        assert (Verdict.DIVERGENT, ()) == (repeat.verdict, repeat.facts)
        view = scheduler.job("j1")
        assert (1, 1, other.facts) == (view.accepted, view.duplicates, view.divergents)
        assert make_scored(0).partial.steps == view.tally.steps

    def test_divergent_values_kept_are_bounded(self) -> None:
        """An agent that never computes the same twice does not fill the journal."""
        scheduler = running_job(2)
        scheduler.scored("a1", "1", "j1", make_scored(0), 0.0)
        outcomes = [scheduler.scored("a1", "1", "j1", make_scored(0, shift=i), 0.0) for i in range(1, 40)]

        assert {Verdict.DIVERGENT} == {outcome.verdict for outcome in outcomes}
        assert 16 == sum(len(outcome.facts) for outcome in outcomes) == len(scheduler.job("j1").divergents)

    def test_the_last_commit_makes_the_job_succeed(self) -> None:
        """Success needs no fact of its own; late results are told apart even then."""
        scheduler = running_job(2)
        for shard in (1, 0):
            outcome = scheduler.scored("a1", "1", "j1", make_scored(shard), 5.0 + shard)
            assert ["shard_committed"] == [fact.kind for fact in outcome.facts]
        view = scheduler.job("j1")

        assert (JobState.SUCCEEDED, 5.0, 2 * COST) == (view.state, view.settled_at, view.input_tokens_done)
        assert Verdict.DUPLICATE is scheduler.scored("a1", "1", "j1", make_scored(0), 9.0).verdict
        assert Verdict.DIVERGENT is scheduler.scored("a1", "1", "j1", make_scored(0, shift=3), 9.0).verdict
        scheduler.check()

    def test_results_are_taken_from_anyone_whenever(self) -> None:
        """Neither a lease nor its holder matters: the holder learns that it lost the shard."""
        scheduler = running_job(8, agents=2)
        assert [0] == take(scheduler, "a1", 0.0)

        assert Verdict.ACCEPTED is scheduler.scored("a2", "1", "j1", make_scored(0), 1.0).verdict
        assert Verdict.ACCEPTED is scheduler.scored("a2", "1", "j1", make_scored(5), 1.0).verdict
        scheduler.check()
        assert (Holding("j1", 0),) == beat(scheduler, "a1", 2.0, ("j1", 0)).lost

    def test_results_of_settled_and_unknown_jobs_are_unwanted(self) -> None:
        """The agent is told to forget them."""
        scheduler = running_job(2)
        scheduler.cancel("j1", "", 0.0)

        assert Verdict.UNWANTED is scheduler.scored("a1", "1", "j1", make_scored(0), 1.0).verdict
        assert Verdict.UNWANTED is scheduler.scored("a1", "1", "j9", make_scored(0), 1.0).verdict
        assert Verdict.UNWANTED is scheduler.shard_failed("a1", "1", "j1", 0, "SHARD_FAILED", "", 1.0).verdict
        assert Verdict.UNWANTED is scheduler.plan_failed("a1", "1", "j9", "SHARD_FAILED", "", 1.0).verdict

    def test_a_refused_partial_is_a_try_of_its_holder(self) -> None:
        """A result that breaks a rule counts as a failure, so that it cannot go round for ever."""
        scheduler = running_job(1)
        bad = with_partial(make_scored(0), tokens=11)
        kinds = []
        for now in (1.0, 2.0, 3.0):
            take(scheduler, "a1", now)
            outcome = scheduler.scored("a1", "1", "j1", bad, now)
            assert Verdict.REFUSED is outcome.verdict
            kinds.append([fact.kind for fact in outcome.facts])
            scheduler.check()

        assert [["shard_failed"], ["shard_failed"], ["shard_failed", "job_failed"]] == kinds
        assert 3 == scheduler.job("j1").refused

    def test_a_shard_is_given_up_after_three_failures_and_healed_by_a_result(self) -> None:
        """A quarantined shard is given to nobody; a late partial still counts while the job runs."""
        scheduler = running_job(2)
        for now in (1.0, 2.0, 3.0):
            assert [0] == take(scheduler, "a1", now)
            scheduler.shard_failed("a1", "1", "j1", 0, "WORKER_HUNG", "no progress", now)
            scheduler.check()
        view = scheduler.job("j1")

        assert (JobState.RUNNING, 1) == (view.state, view.shards_quarantined)
        (given_up,) = view.quarantined
        assert (0, 3, True) == (given_up.plan.index, given_up.failures, given_up.quarantined)
        assert [1] == take(scheduler, "a1", 4.0)
        assert Verdict.ACCEPTED is scheduler.scored("a1", "1", "j1", make_scored(0), 5.0).verdict
        scheduler.scored("a1", "1", "j1", make_scored(1), 5.0)
        scheduler.check()
        assert JobState.SUCCEEDED is scheduler.job("j1").state

    def test_a_job_that_lacks_a_shard_fails_and_says_what(self) -> None:
        """Nothing but quarantined shards left: the job failed, with counts and the first reason."""
        scheduler = running_job(2)
        for now in (1.0, 2.0, 3.0):
            take(scheduler, "a1", now)
            scheduler.shard_failed("a1", "1", "j1", 0, "WORKER_CRASHED", "signal 9", now)
        outcome = scheduler.scored("a1", "1", "j1", make_scored(1), 4.0)
        scheduler.check()

        reason = "first shard 0: WORKER_CRASHED: agent a1: signal 9"
        text = f"1 of 2 shards with 2 documents could not be scored; {reason}"
        assert f.JobFailed("j1", "JOB_INCOMPLETE", text, 4.0) == outcome.facts[-1]
        assert [0] == [item.plan.index for item in scheduler.missing("j1")]
        assert [1] == [commit.shard for commit in scheduler.commits("j1")]

    def test_a_failure_counts_once_and_only_for_who_was_given_the_shard(self) -> None:
        """Reports are repeated; a repeated failure is none, and a stranger's is none."""
        scheduler = running_job(2, agents=2)
        take(scheduler, "a1", 0.0)
        counted = [
            bool(scheduler.shard_failed(agent, "1", "j1", 0, "SHARD_FAILED", "x", 1.0).facts)
            for agent in ("a2", "a1", "a1")
        ]

        assert [False, True, False] == counted
        assert 1 == scheduler.job("j1").failures

    def test_a_late_failure_leaves_the_present_holder_alone(self) -> None:
        """A node whose lease ran out fails the shard later: a try, but the other goes on."""
        scheduler = running_job(1, agents=2)
        take(scheduler, "a1", 0.0)
        beat(scheduler, "a1", 1.0, ("j1", 0))
        beat(scheduler, "a2", 30.0)
        scheduler.tick(31.0)
        scheduler.register(info("a1"), 31.0)
        assert [0] == take(scheduler, "a2", 31.0)
        outcome = scheduler.shard_failed("a1", "1", "j1", 0, "SHARD_FAILED", "x", 32.0)
        scheduler.check()

        assert (f.ShardFailed("j1", 0, "a1", "SHARD_FAILED", "x", False),) == outcome.facts
        assert RenewAnswer((), (), False) == beat(scheduler, "a2", 33.0, ("j1", 0))

    def test_a_fault_of_the_job_found_while_scoring_ends_it(self) -> None:
        """A model with a NaN in it is the same everywhere."""
        scheduler = running_job(4)
        take(scheduler, "a1", 0.0)
        outcome = scheduler.shard_failed("a1", "1", "j1", 0, "MODEL_NOT_FINITE", "lm_head", 1.0)
        scheduler.check()

        assert (f.JobFailed("j1", "MODEL_NOT_FINITE", "shard 0 on agent a1: lm_head", 1.0),) == outcome.facts

    def test_a_fault_of_the_job_on_one_node_only_is_that_nodes(self) -> None:
        """Where others have scored shards, a damaged copy of the model keeps its node from the job, no more."""
        scheduler = running_job(4, agents=2)
        scheduler.scored("a1", "1", "j1", make_scored(0), 0.0)
        take(scheduler, "a2", 0.0)
        outcome = scheduler.shard_failed("a2", "1", "j1", 1, "MODEL_CORRUPT", "model.safetensors is cut off", 1.0)
        scheduler.check()

        assert () == outcome.facts
        assert JobState.RUNNING is scheduler.job("j1").state
        assert scheduler.acquire("a2", "1", 1, "", 2.0) is None
        assert [1] == take(scheduler, "a1", 2.0)

    def test_six_agents_that_die_on_a_shard_quarantine_it(self) -> None:
        """Expiries are borne twice as often as failures, not for ever."""
        scheduler = running_job(2)
        facts: f.Facts = ()
        for life in range(2, 9):
            incarnation = str(life)
            facts += scheduler.register(info("a1", incarnation), float(life))
            work = scheduler.acquire("a1", incarnation, 1, "", float(life))
            shard = Holding("j1", shards_of(work)[0])
            scheduler.renew("a1", incarnation, [shard], "scoring", shard, False, False, float(life))
            scheduler.check()

        assert [False] * 5 + [True] == [fact.gives_up for fact in facts if isinstance(fact, f.ShardExpired)]
        assert 1 == scheduler.job("j1").shards_quarantined


class TestWaiting:
    """Why nothing happens is always said."""

    def test_reasons_follow_who_is_there(self) -> None:
        """From no agent at all to one that has not asked yet."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        said = [scheduler.waiting("j1", 0.0)]
        scheduler.register(info("f", roles=frozenset({Role.FORWARD})), 0.0)
        said.append(scheduler.waiting("j1", 0.0))
        scheduler.register(info("p", roles=frozenset({Role.PREPROCESS})), 0.0)
        said.append(scheduler.waiting("j1", 0.0))
        scheduler.acquire("p", "1", 1, "", 0.0)
        said.append(scheduler.waiting("j1", 0.0))
        scheduler.planned("p", "1", "j1", make_plan(2), 0.0)
        scheduler.register(info("f", "2", frozenset({Role.PREPROCESS})), 0.0)
        said.append(scheduler.waiting("j1", 0.0))
        scheduler.register(info("f", "3", BOTH), 0.0)
        scheduler.acquire("f", "3", 1, "", 0.0)
        said.append(scheduler.waiting("j1", 0.0))
        scheduler.cancel("j1", "", 0.0)
        said.append(scheduler.waiting("j1", 0.0))

        assert [
            ["no agent is connected"],
            ["no agent with the role PREPROCESS is connected"],
            ["agent p has not asked for work yet"],
            ["planning on agent p"],
            ["no agent with the role FORWARD is connected"],
            [],
            [],
        ] == said

    def test_an_agent_without_access_is_named(self) -> None:
        """The job waits with that reason, for planning as for scoring."""
        scheduler = Scheduler(CONFIG)
        scheduler.submit("j1", "k", "{}", "", 0.0)
        scheduler.register(info("a1"), 0.0)
        scheduler.acquire("a1", "1", 1, "", 0.0)
        scheduler.plan_failed("a1", "1", "j1", "DATASET_NOT_FOUND", "no /data/x", 0.0)

        assert ["agent a1 cannot read the dataset: no /data/x (next try in 60 s)"] == scheduler.waiting("j1", 0.0)
        assert JobState.PLANNING is scheduler.job("j1").state
        assert PlanWork("j1", "{}") == scheduler.acquire("a1", "1", 1, "", 60.0)

    def test_a_paused_agent_is_named_while_others_score(self) -> None:
        """It keeps the job from ending, however well the others do."""
        scheduler = running_job(4, agents=2)
        take(scheduler, "a1", 0.0)
        take(scheduler, "a2", 0.0)
        scheduler.renew("a1", "1", [Holding("j1", 0)], "paused: no space", None, False, False, 0.0)
        held = scheduler.waiting("j1", 0.0)
        scheduler.renew("a1", "1", [Holding("j1", 0)], "scoring", None, False, False, 0.0)

        assert ["agent a1, which holds 1 shard, is paused: no space"] == held
        assert [] == scheduler.waiting("j1", 0.0)

    def test_an_agent_without_work_says_what_it_does(self) -> None:
        """Idle, busy with what holds no lease, and paused are told apart."""
        scheduler = running_job(1)
        said = []
        for activity in ("idle", "loading the model", "paused: no space"):
            scheduler.renew("a1", "1", [], activity, None, False, False, 0.0)
            said += scheduler.waiting("j1", 0.0)

        assert [
            "agent a1 has not asked for work yet",
            "agent a1 is busy (loading the model)",
            "agent a1 is paused: no space",
        ] == said

    def test_busy_silent_and_draining_agents_are_named(self) -> None:
        """Each agent that could work on a job and does not is explained."""
        scheduler = running_job(1, agents=3)
        take(scheduler, "a1", 0.0)
        beat(scheduler, "a2", 0.0, draining=True)
        add_job(scheduler, 1, "j2")
        beat(scheduler, "a1", 16.0, ("j1", 0))
        beat(scheduler, "a2", 16.0, draining=True)
        scheduler.tick(16.0)

        assert [
            "agent a1 is busy with job j1",
            "agent a2 is draining",
            "agent a3 has been silent for 16 s",
        ] == scheduler.waiting("j2", 16.0)


class TestViews:
    """What readers see."""

    def test_progress_is_told_per_node(self) -> None:
        """Done and held shards, and speed, of each node that took part."""
        scheduler = running_job(8, agents=2)
        scheduler.scored("a1", "1", "j1", make_scored(0, seconds=2.0), 1.0)
        take(scheduler, "a1", 1.0)
        take(scheduler, "a2", 1.0)
        view = scheduler.job("j1")

        assert [("a1", 1, COST, COST / 2, 1), ("a2", 0, 0, 0.0, 1)] == [
            (n.agent, n.shards_done, n.input_tokens_done, n.tokens_per_second, n.shards_held) for n in view.nodes
        ]
        assert (8, 1, 2, COST / 2) == (view.shards, view.shards_done, view.shards_held, view.tokens_per_second)

    def test_a_change_moves_the_counter(self) -> None:
        """Watchers see by one number whether there is anything new."""
        scheduler = running_job(2)
        seen = [scheduler.changed("j1")]
        take(scheduler, "a1", 0.0)
        seen.append(scheduler.changed("j1"))
        beat(scheduler, "a1", 1.0, ("j1", 0))
        seen.append(scheduler.changed("j1"))
        beat(scheduler, "a1", 2.0, ("j1", 0))
        quiet = scheduler.changed("j1")
        scheduler.scored("a1", "1", "j1", make_scored(0), 3.0)
        seen.append(scheduler.changed("j1"))

        assert sorted(set(seen)) == seen
        assert seen[2] == quiet

    def test_new_work_moves_the_counter_of_offers(self) -> None:
        """Who waits for work sees by one number when to ask again: also where nothing was journaled."""
        scheduler = running_job(2, agents=2)
        seen = [scheduler.offers]
        take(scheduler, "a1", 0.0)
        assert seen[-1] == scheduler.offers, "giving out is no offer"
        scheduler.shard_failed("a1", "1", "j1", 0, "MODEL_NOT_FOUND", "no", 0.0)
        seen.append(scheduler.offers)
        take(scheduler, "a2", 10.0)
        beat(scheduler, "a2", 30.0)
        assert () == scheduler.tick(40.0)
        seen.append(scheduler.offers)
        scheduler.register(info("a1"), 59.0)
        scheduler.shard_failed("a1", "1", "j1", 0, "MODEL_NOT_FOUND", "no", 60.0)
        beat(scheduler, "a1", 119.0)
        scheduler.tick(119.0)
        before = scheduler.offers
        scheduler.tick(120.0)
        assert before < scheduler.offers, "the refusal has lapsed"
        seen.append(scheduler.offers)
        add_job(scheduler, 1, "j2", 120.0)
        seen.append(scheduler.offers)

        assert sorted(set(seen)) == seen

    def test_config_that_makes_no_sense_is_refused(self) -> None:
        """Durations are positive and in order."""
        for wrong in ({"lease_seconds": 10.0}, {"max_tries": 0}, {"heartbeat_seconds": 20.0}):
            with pytest.raises(ConfigError):
                SchedulerConfig(**wrong)


class _Undigestible(Plan):
    """A plan whose digest cannot be computed."""

    @property
    def digest(self) -> str:
        raise ValueError("no digest")


def test_a_fact_that_cannot_be_made_true_changes_nothing() -> None:
    """State, lease and offers stay as they were, and the job can still be planned."""
    scheduler = Scheduler(CONFIG)
    scheduler.register(info("a1"), 0.0)
    scheduler.submit("j1", "k", "{}", "", 0.0)
    scheduler.acquire("a1", "1", 1, "", 0.0)
    good = make_plan(2)
    before = scheduler.durable(), scheduler.waiting("j1", 0.0), scheduler.offers
    with pytest.raises(ValueError, match="no digest"):
        scheduler.apply(f.JobPlanned("j1", "a1", _Undigestible(good.manifest, good.shards), 0.0))
    after = scheduler.durable(), scheduler.waiting("j1", 0.0), scheduler.offers
    scheduler.check()

    assert before == after
    assert Verdict.ACCEPTED is scheduler.planned("a1", "1", "j1", good, 0.0).verdict
