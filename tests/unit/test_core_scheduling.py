"""Lease sizes, taking over at the end of a job, and the order of jobs: decisions, without a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.core.calls import Holding, SchedulerConfig, ScoreWork, SubmitOptions, Verdict
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState
from eval_kernel.errors import RequestInvalid
from tests.support.core_cases import CONFIG, COST, info, make_plan, make_scored, running_job
from tests.support.virtual import NodeModel, VirtualCluster, ideal_seconds, plan_of


def take(scheduler: Scheduler, agent: str, now: float, loaded: str = "", most: int = 1) -> tuple[str, list[int]]:
    """What an agent of incarnation 1 is given: the job and the shards; an empty job for nothing."""
    work = scheduler.acquire(agent, "1", most, loaded, now)
    scheduler.check()
    return (work.job, [shard.index for shard in work.shards]) if isinstance(work, ScoreWork) else ("", [])


def measure(scheduler: Scheduler, agent: str, shard: int, seconds: float, now: float, job: str = "j1") -> None:
    """Have an agent report a shard that took so long."""
    assert Verdict.ACCEPTED is scheduler.scored(agent, "1", job, make_scored(shard, seconds=seconds), now).verdict


def beat(scheduler: Scheduler, agent: str, now: float, held: list[int], running: int | None = None) -> list[int]:
    """Renew shards of j1; return those that are lost."""
    at = None if running is None else Holding("j1", running)
    answer = scheduler.renew(agent, "1", [Holding("j1", s) for s in held], "", at, False, False, now)
    scheduler.check()
    return [holding.shard for holding in answer.lost]


class TestLeases:
    """How much one lease is."""

    def test_leases_of_unequal_nodes_take_equal_time(self) -> None:
        """A node that is four times as fast is given four times as many shards."""
        scheduler = running_job(1000, agents=2)
        measure(scheduler, "a1", 0, 1.0, 1.0)
        measure(scheduler, "a2", 1, 4.0, 1.0)

        assert CONFIG.target_seconds == len(take(scheduler, "a1", 2.0, most=64)[1])
        assert 2 == len(take(scheduler, "a2", 2.0, most=64)[1])

    def test_a_slow_node_is_not_given_a_second_shard_at_the_end(self) -> None:
        """What others will have done before it is free again is left to them; then it is told to ask again."""
        scheduler = running_job(12, agents=2)
        measure(scheduler, "a1", 0, 0.1, 1.0)
        measure(scheduler, "a2", 1, 10.0, 1.0)
        assert [2] == take(scheduler, "a2", 1.0)[1]

        assert [] == take(scheduler, "a2", 1.0)[1]
        assert set() == scheduler.wakes()
        measure(scheduler, "a2", 2, 10.0, 11.0)
        assert {"a2"} == scheduler.wakes()
        assert set() == scheduler.wakes(), "each is told once"
        assert [3] == take(scheduler, "a2", 11.0)[1], "an agent with nothing is always given something"


class TestTakeover:
    """The end of a job."""

    def end_of_a_job(self) -> Scheduler:
        """a2 is 100 times slower than a1, and holds shards 2 (begun at 1 s) and 3; nothing waits."""
        scheduler = running_job(4, agents=2)
        measure(scheduler, "a1", 0, 1.0, 1.0)
        measure(scheduler, "a2", 1, 1.0, 1.0)
        assert [2] == take(scheduler, "a2", 1.0)[1]
        beat(scheduler, "a2", 1.0, [2, 3], running=2)
        return scheduler

    def test_what_is_not_begun_changes_hands(self) -> None:
        """The idle node is given the last shard of the long queue; the other learns it from its heartbeat."""
        scheduler = self.end_of_a_job()

        assert ("j1", [3]) == take(scheduler, "a1", 1.0)
        assert [3] == beat(scheduler, "a2", 2.0, [2, 3], running=2)
        assert 2 == scheduler.job("j1").shards_held

    def test_a_stolen_shard_that_had_begun_is_at_two_nodes(self) -> None:
        """The heartbeat that says so gives the lease back: then the first partial counts, the other is a duplicate."""
        scheduler = self.end_of_a_job()
        take(scheduler, "a1", 1.0)

        assert [] == beat(scheduler, "a2", 2.0, [2, 3], running=3)
        measure(scheduler, "a1", 3, 1.0, 2.0)
        again = scheduler.scored("a2", "1", "j1", make_scored(3, seconds=2.0), 3.0)
        assert (Verdict.DUPLICATE, ()) == (again.verdict, again.facts)
        scheduler.check()

    def test_what_is_begun_and_late_is_doubled_once(self) -> None:
        """The loser is told to stop; a third node is not given the shard."""
        scheduler = running_job(3, agents=3)
        for agent, shard in (("a1", 0), ("a2", 1)):
            measure(scheduler, agent, shard, 1.0, 1.0)
        assert [2] == take(scheduler, "a2", 1.0)[1]
        beat(scheduler, "a2", 2.0, [2], running=2)
        assert [] == take(scheduler, "a1", 1.5)[1], "it is as quick there as here"

        assert ("j1", [2]) == take(scheduler, "a1", 9.0)
        assert ("", []) == take(scheduler, "a3", 9.0)
        measure(scheduler, "a1", 2, 1.0, 10.0)
        answer = scheduler.renew("a2", "1", [Holding("j1", 2)], "", Holding("j1", 2), False, False, 11.0)
        assert JobState.SUCCEEDED is scheduler.job("j1").state
        assert ("j1",) == answer.settled_jobs

    def test_the_loser_of_a_job_that_goes_on_is_told_to_stop(self) -> None:
        """What it runs was committed by another: to go on is no use."""
        scheduler = self.end_of_a_job()
        measure(scheduler, "a1", 2, 1.0, 2.0)
        answer = scheduler.renew("a2", "1", [Holding("j1", 2)], "", Holding("j1", 2), False, False, 3.0)

        assert (Holding("j1", 2),) == answer.done == answer.lost

    def test_a_node_that_failed_a_shard_does_not_take_it_over(self) -> None:
        """It would fail again."""
        scheduler = running_job(3, agents=2)
        measure(scheduler, "a1", 0, 1.0, 1.0)
        measure(scheduler, "a2", 1, 1.0, 1.0)
        assert [2] == take(scheduler, "a1", 1.0)[1]
        scheduler.shard_failed("a1", "1", "j1", 2, "OUT_OF_MEMORY", "no", 1.0)
        assert [2] == take(scheduler, "a2", 1.0)[1]

        assert [] == take(scheduler, "a1", 20.0)[1]

    def test_the_death_of_one_of_two_leaves_the_other_its_lease(self) -> None:
        """Only the last lease's end makes a shard wait again."""
        scheduler = self.end_of_a_job()
        measure(scheduler, "a1", 3, 1.0, 2.0)
        assert ("j1", [2]) == take(scheduler, "a1", 9.0)
        scheduler.register(info("a1", "2"), 10.0)
        scheduler.check()

        assert [] == beat(scheduler, "a2", 11.0, [2], running=2)
        assert 1 == scheduler.job("j1").shards_held


def queued(jobs: list[tuple[str, str, SubmitOptions]], agents: int = 1, shards: int = 4) -> Scheduler:
    """A scheduler with planned jobs: id, model, options."""
    scheduler = Scheduler(SchedulerConfig(ageing_seconds=100.0))
    for i in range(1, agents + 1):
        scheduler.register(info(f"a{i}"), 0.0)
    for number, (job, model, options) in enumerate(jobs):
        scheduler.submit(job, job, f'{{"model": "{model}"}}', job, float(number), options)
        scheduler.planned("a1", "1", job, make_plan(shards, job), float(number))
    return scheduler


class TestQueue:
    """Whose job goes first."""

    def test_the_higher_priority_goes_first_and_stops_the_lower_at_a_shard_boundary(self) -> None:
        """A job that arrives later and is more urgent is given the next shards, though another model is loaded."""
        scheduler = queued([("low", "m", SubmitOptions())])
        assert "low" == take(scheduler, "a1", 1.0, "low")[0]
        scheduler.submit("high", "high", '{"model": "n"}', "", 2.0, SubmitOptions(priority=1))
        scheduler.planned("a1", "1", "high", make_plan(4, "high"), 2.0)

        assert "high" == take(scheduler, "a1", 3.0, "low")[0]

    def test_age_raises_a_job_to_the_highest_priority_there_is(self) -> None:
        """After so long the old job has its turn beside the urgent ones, whose submitter has used more."""
        scheduler = queued([("old", "m", SubmitOptions("ann")), ("new", "n", SubmitOptions("bob", priority=2))])
        measure(scheduler, "a1", 0, 5.0, 2.0, "new")

        scheduler.register(info("a2"), 150.0)

        assert "new" == take(scheduler, "a2", 150.0)[0]
        assert "old" == take(scheduler, "a2", 250.0)[0]

    def test_the_submitter_who_has_used_least_goes_first(self) -> None:
        """Seconds of nodes count, not jobs."""
        jobs = [
            ("b1", "m1", SubmitOptions("bob")),
            ("b2", "m2", SubmitOptions("bob")),
            ("a", "m3", SubmitOptions("ann")),
        ]
        scheduler = queued(jobs)
        measure(scheduler, "a1", 0, 50.0, 3.0, "b1")
        scheduler.register(info("a2"), 3.0)

        assert "a" == take(scheduler, "a2", 4.0)[0]

    def test_who_comes_later_does_not_catch_up_on_the_past(self) -> None:
        """A newcomer begins where the poorest of those present stands."""
        scheduler = queued([("b1", "m", SubmitOptions("bob"))], shards=8)
        for shard in range(4):
            measure(scheduler, "a1", shard, 1000.0, 3.0, "b1")
        scheduler.submit("a", "a", '{"model": "n"}', "", 4.0, SubmitOptions("ann"))
        scheduler.planned("a1", "1", "a", make_plan(8, "a"), 4.0)
        scheduler.register(info("a2"), 4.0)
        scheduler.register(info("a3"), 4.0)
        measure(scheduler, "a2", 0, 100.0, 5.0, "a")

        assert "b1" == take(scheduler, "a3", 6.0)[0]

    def test_a_loaded_model_is_kept_across_jobs(self) -> None:
        """The next job with the same model goes before an older one with another."""
        scheduler = queued([("j1", "m", SubmitOptions()), ("j2", "n", SubmitOptions()), ("j3", "m", SubmitOptions())])
        for shard in range(4):
            measure(scheduler, "a1", shard, 1.0, 3.0, "j1")

        assert "j3" == take(scheduler, "a1", 4.0, "j1")[0]

    def test_nodes_spread_over_models_where_loading_is_dear(self) -> None:
        """Two nodes and two short jobs: each takes one, instead of both loading both models."""
        scheduler = queued([("j1", "m", SubmitOptions()), ("j2", "n", SubmitOptions())], agents=2)

        assert "j1" == take(scheduler, "a1", 2.0)[0]
        measure(scheduler, "a1", 0, 1.0, 32.0, "j1")
        assert "j1" == take(scheduler, "a1", 32.0, "j1")[0]
        assert "j2" == take(scheduler, "a2", 33.0)[0]

    def test_nodes_that_come_together_turn_to_different_submitters(self) -> None:
        """Before anything is measured, too: a node that has just been sent to a model counts for its submitter."""
        jobs = [(f"{who}{i}", f"m{who}{i}", SubmitOptions(who)) for who in ("ann", "bob") for i in range(2)]
        scheduler = queued(jobs, agents=2)

        assert {"ann0", "bob0"} == {take(scheduler, agent, 5.0)[0] for agent in ("a1", "a2")}

    def test_a_model_that_others_will_have_done_soon_is_not_loaded(self) -> None:
        """Loading takes longer than leaving it to the one who has it."""
        scheduler = queued([("j", "m", SubmitOptions())], agents=2, shards=8)
        assert "j" == take(scheduler, "a1", 8.0)[0]
        measure(scheduler, "a1", 0, 1.0, 29.0, "j")  # loading took 20 s
        assert "j" == take(scheduler, "a1", 29.0, "j")[0]

        assert "" == take(scheduler, "a2", 29.0)[0]

    def test_queued_jobs_that_share_models_are_done_with_few_loads_in_fair_shares(self) -> None:
        """Each model is loaded little more than once, though nodes differ ten-fold and submitters alternate."""
        nodes = [NodeModel(name=f"n{i}", speed=x * COST, load=20.0) for i, x in enumerate((10, 3, 1, 1))]
        cluster = VirtualCluster(Scheduler(SchedulerConfig()), nodes, seed=4)
        cluster.run(lambda: all(node.registered for node in cluster.nodes.values()))
        for i in range(32):
            who = ("ann", "bob")[i % 2]
            cluster.submit(f"{who}{i}", plan_of([COST] * 100), f"{who}{i // 8}", SubmitOptions(submitter=who))
        cluster.run(lambda: any(sum(job.startswith(who) for job in cluster.done_at) == 16 for who in ("ann", "bob")))
        used = {who: sum(s for job, s in cluster.seconds_by_job.items() if job.startswith(who)) for who in "ab"}
        cluster.run(cluster.settled)
        cluster.scheduler.check()

        assert sum(node.loads for node in cluster.nodes.values()) <= 8 + len(nodes)
        assert abs(used["a"] - used["b"]) < 0.15 * (used["a"] + used["b"])

    def test_a_job_may_be_limited_to_some_nodes(self) -> None:
        """Who holds shards of it goes on, others are given none."""
        scheduler = queued([("j1", "m", SubmitOptions(max_nodes=1))], agents=2)

        assert "j1" == take(scheduler, "a1", 1.0)[0]
        assert "" == take(scheduler, "a2", 1.0)[0]
        assert any("limit" in line for line in scheduler.waiting("j1", 1.0))
        assert "j1" == take(scheduler, "a1", 1.0)[0]

    def test_a_node_holds_shards_of_two_jobs_at_most(self) -> None:
        """One that is scored, one to follow."""
        jobs = [(f"j{i}", f"m{i}", SubmitOptions(priority=i)) for i in (1, 2, 3)]
        scheduler = queued(jobs[:1])
        given = [take(scheduler, "a1", 1.0)[0]]
        for job, model, options in jobs[1:]:
            scheduler.submit(job, job, f'{{"model": "{model}"}}', "", 1.0, options)
            scheduler.planned("a1", "1", job, make_plan(4, job), 1.0)
            given.append(take(scheduler, "a1", 1.0)[0])

        assert ["j1", "j2", "j2"] == given

    @pytest.mark.parametrize("wrong", [{"priority": 101}, {"max_nodes": -1}, {"submitter": "x" * 101}])
    def test_options_that_make_no_sense_are_refused(self, wrong: dict[str, object]) -> None:
        """With the bound in the message."""
        with pytest.raises(RequestInvalid):
            SubmitOptions(**wrong)  # type: ignore[arg-type]


class TestSimulation:
    """Whole jobs in virtual time: bounds far from what is measured, so that only a broken scheduler exceeds them."""

    def test_unequal_nodes_end_together(self) -> None:
        """Ten-fold differences and jitter cost little; each shard is counted once."""
        nodes = [NodeModel(name=f"n{i}", speed=speed) for i, speed in enumerate((10 * COST, 3 * COST, COST, COST))]
        cluster = VirtualCluster(Scheduler(CONFIG), nodes, seed=1)
        cluster.run(lambda: all(node.registered for node in cluster.nodes.values()))
        cluster.submit("j", plan_of([COST] * 600))
        makespan = cluster.run(cluster.settled)
        cluster.scheduler.check()

        assert makespan < 1.1 * ideal_seconds(nodes, 600 * COST)
        assert 600 == cluster.scheduler.job("j").accepted

    def test_a_node_that_grows_slow_and_one_that_dies_do_not_hold_the_job_up(self) -> None:
        """Without takeovers the slow one alone would need 50 s for each shard it holds."""
        nodes = [NodeModel(name=f"n{i}", speed=COST) for i in range(6)]
        nodes.append(NodeModel(name="slow", speed=COST, slows=20.0, slowdown=50.0))
        nodes.append(NodeModel(name="dead", speed=COST, dies=30.0))
        cluster = VirtualCluster(Scheduler(CONFIG), nodes, seed=2)
        cluster.run(lambda: all(node.registered for node in cluster.nodes.values()))
        cluster.submit("j", plan_of([COST] * 400))
        makespan = cluster.run(cluster.settled)
        cluster.scheduler.check()

        assert makespan < 1.15 * ideal_seconds(nodes, 400 * COST)

    def test_a_node_that_joins_late_shortens_the_job(self) -> None:
        """It is used from its arrival on."""
        nodes = [NodeModel(name="first", speed=COST), NodeModel(name="late", speed=4 * COST, joins=20.0)]
        cluster = VirtualCluster(Scheduler(CONFIG), nodes, seed=3)
        cluster.run(lambda: cluster.nodes["first"].registered)
        cluster.submit("j", plan_of([COST] * 200))

        assert cluster.run(cluster.settled) < 1.1 * ideal_seconds(nodes, 200 * COST)


def test_agents_learn_of_those_of_their_own_site_that_serve_packs() -> None:
    """Not of another site's, not of themselves, and no more of one that has left."""
    scheduler = Scheduler(CONFIG)
    for name, site, address in (("p1", "x", "h:1"), ("p2", "x", "h:2"), ("p3", "y", "h:3"), ("f", "x", "")):
        scheduler.register(replace(info(name), site=site, pack_address=address), 0.0)

    assert ("h:1", "h:2") == scheduler.pack_addresses("f")
    assert ("h:2",) == scheduler.pack_addresses("p1")
    assert () == scheduler.pack_addresses("p3") == scheduler.pack_addresses("nobody")
    scheduler.renew("p1", "1", [], "", None, False, True, 1.0)
    assert ("h:2",) == scheduler.pack_addresses("f")
    scheduler.register(replace(info("p2"), site="x"), 2.0)
    assert () == scheduler.pack_addresses("f")
