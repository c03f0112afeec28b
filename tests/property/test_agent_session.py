"""The session under any order of events: nothing is lost, sent before it is stored, or forgotten unacknowledged."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.session import MAX_HELD, Session
from agent.spool import ResultKey, SpoolEntry
from agent.work import Failed, Heartbeat, JobPlan, Outgoing, PlanPart, Verdict, Work
from eval_kernel.errors import FedevalError, ModelNotFound, ShardError, SpecError
from eval_kernel.partial import Execution, Partial, ScoredShard
from eval_kernel.plan import ShardPlan

CREDIT, PART, STORE_TRIES = 5, 3, 3
JOBS = ("j0", "j1")
COORDINATORS = ("c0", "c1")


def shard(index: int) -> ShardPlan:
    """Return a shard's plan; only its index matters here."""
    return ShardPlan(index, index, 1, 1, 1, 1, 1, index, index + 1, False, f"sha256:{index}")


def scored(index: int, seconds: float = 0.1) -> ScoredShard:
    """Return a shard's result."""
    return ScoredShard(Partial(index, index, 1, 1, 1, ()), Execution(seconds))


class SessionMachine(RuleBasedStateMachine):
    """Plays the coordinator, the worker and the disk against one session."""

    def __init__(self) -> None:
        super().__init__()
        self.session = Session(credit=CREDIT, part_shards=PART, store_tries=STORE_TRIES)
        self.disk: dict[ResultKey, ScoredShard] = {}
        self.acknowledged: set[ResultKey] = set()
        self.computed: set[ResultKey] = set()
        self.flying: dict[int, Outgoing] = {}
        self.beat: Heartbeat | None = None
        self.running_for = ""
        self.register("c0")

    # ---------------------------------------------------------------- the coordinator

    @rule(coordinator=st.sampled_from(COORDINATORS))
    def register(self, coordinator: str) -> None:
        changed = coordinator != self.session.coordinator
        leftovers = [SpoolEntry(k, s) for k, s in self.disk.items() if k.coordinator == coordinator]
        must_stop = self.session.registered(coordinator, leftovers if changed else ())
        if changed:
            self.flying.clear()
            self.session.stream_opened()
            self.beat = None  # its answer is dropped by whoever waits for it
        running = self.session.running
        assert must_stop == (running is not None and self.running_for != coordinator)

    @rule(job=st.sampled_from(JOBS), indices=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
    def assign(self, job: str, indices: list[int]) -> None:
        self.session.assigned([Work(job, "{}", "{}", shard(index)) for index in indices])

    @rule(job=st.sampled_from(JOBS))
    def assign_planning(self, job: str) -> None:
        self.session.assigned([Work(job, "{}")])

    @rule()
    def send_heartbeat(self) -> None:
        self.beat = self.session.heartbeat()

    @precondition(lambda self: self.beat is not None)
    @rule(data=st.data(), drain=st.booleans())
    def answer_heartbeat(self, data: st.DataObject, drain: bool) -> None:
        assert self.beat is not None
        holdings = self.beat.holdings
        lost = data.draw(st.lists(st.sampled_from(holdings), unique=True)) if holdings else []
        settled = data.draw(st.lists(st.sampled_from(JOBS), unique=True, max_size=1))
        before = set(self.session.heartbeat().holdings)
        must_stop = self.session.renewed(self.beat, lost, settled, drain)
        after = set(self.session.heartbeat().holdings)

        gone = before - after
        assert gone <= {h for h in before if h in lost or h[0] in settled}
        assert all(h[0] not in settled for h in after)
        running = self.session.running
        ours = running is not None and self.running_for == self.session.coordinator
        assert must_stop == (ours and running is not None and running.job in settled)
        self.beat = None

    # ---------------------------------------------------------------- the worker

    @rule()
    def begin(self) -> None:
        idle = self.session.running is None
        work = self.session.next_work()
        if work is not None:
            assert idle
            self.running_for = self.session.coordinator

    @precondition(lambda self: self.session.running is not None)
    @rule(
        error=st.sampled_from([None, None, None, ShardError("s"), ModelNotFound("m"), SpecError("j")]),
        rows=st.integers(0, 8),
    )
    def finish(self, error: FedevalError | None, rows: int) -> None:
        work = self.session.running
        assert work is not None
        if error is not None:
            self.session.finished(error)
        elif work.shard is None:
            self.session.finished(JobPlan("{}", tuple(shard(i) for i in range(rows))))
        else:
            self.session.finished(scored(work.shard.index))
            key = ResultKey(self.running_for, *work.held)
            self.computed.add(key)
            self.acknowledged.discard(key)  # scored anew after it was settled: this result counts for itself
        assert self.session.running is None

    @precondition(lambda self: self.session.running is not None)
    @rule()
    def call_off(self) -> None:
        self.session.cancelled()
        assert self.session.running is None

    # ---------------------------------------------------------------- the disk

    @rule(count=st.integers(1, 9))
    def store(self, count: int) -> None:
        self.clean()  # as the daemon does: first what may go, then what comes
        entries = self.session.to_store()[:count]
        self.disk.update({entry.key: entry.scored for entry in entries})
        self.session.stored(entry.key for entry in entries)

    @rule()
    def disk_full(self) -> None:
        before = set(self.session.heartbeat().holdings)
        given_back = self.session.store_failed("no space")
        after = set(self.session.heartbeat().holdings)

        assert after <= before
        assert given_back == len(before - after)

    @rule()
    def clean(self) -> None:
        for key in self.session.to_remove():
            del self.disk[key]

    # ---------------------------------------------------------------- reports

    @rule()
    def open_stream(self) -> None:
        self.session.stream_opened()
        self.flying.clear()

    @rule()
    def send(self) -> None:
        for message in self.session.to_send():
            assert message.sequence not in self.flying
            assert message.sequence > max(self.flying, default=0)
            if isinstance(message.body, ScoredShard):
                key = ResultKey(self.session.coordinator, message.job, message.body.partial.shard)
                assert self.disk[key] == message.body
            self.flying[message.sequence] = message

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), verdict=st.sampled_from([*Verdict, None]))
    def acknowledge(self, data: st.DataObject, verdict: Verdict | None) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.flying)))
        message = self.flying.pop(sequence)
        settled = self.session.acknowledged(sequence, verdict, "")
        assert self.session.acknowledged(sequence, verdict, "") is None
        if settled is not None and isinstance(message.body, ScoredShard):
            self.acknowledged.add(ResultKey(self.session.coordinator, message.job, settled.shard))

    @rule(sequence=st.integers(1000, 2000))
    def acknowledge_nonsense(self, sequence: int) -> None:
        assert self.session.acknowledged(sequence, Verdict.ACCEPTED, "") is None

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def sound(self) -> None:
        self.session.check()

    @invariant()
    def nothing_is_lost(self) -> None:
        """A computed result is in memory on its way to the disk, on the disk, or was acknowledged."""
        on_the_way = {entry.key for entry in self.session.to_store()}
        missing = self.computed - on_the_way - set(self.disk) - self.acknowledged
        assert not missing, f"lost: {missing}"

    @invariant()
    def requests_are_bounded(self) -> None:
        assert 0 <= self.session.wanted() <= MAX_HELD

    @invariant()
    def a_broken_disk_takes_nothing_new(self) -> None:
        assert not self.session.storage_problem or self.session.wanted() == 0

    def teardown(self) -> None:
        """Left in peace, the session comes to rest with everything acknowledged."""
        session = self.session
        session.renewed(session.heartbeat(), (), (), False)
        for _ in range(200):
            self.store(9)
            if session.next_work() is not None:
                self.running_for = session.coordinator
            if session.running is not None:
                self.finish(None, 7)
            self.open_stream()
            for _ in range(4):
                self.send()
                for sequence in sorted(self.flying):
                    message = self.flying.pop(sequence)
                    if session.acknowledged(sequence, Verdict.ACCEPTED, "") and isinstance(message.body, ScoredShard):
                        key = ResultKey(session.coordinator, message.job, message.body.partial.shard)
                        self.acknowledged.add(key)
            self.clean()
            if session.running is None and not session.num_results and not session.heartbeat().holdings:
                break

        assert 0 == session.num_results
        assert () == session.heartbeat().holdings
        assert {key.coordinator for key in self.disk} <= set(COORDINATORS) - {session.coordinator}


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def drive(count: int) -> Session:
    """Return a session that was given ``count`` shards of one job."""
    session = Session(credit=CREDIT, part_shards=PART)
    session.registered("c0")
    session.assigned([Work("j0", "{}", "{}", shard(index)) for index in range(count)])
    return session


def test_a_plan_is_cut_and_settled_by_its_last_part() -> None:
    """Seven shards make three parts, the last one marked; the plan is forgotten with the last acknowledgement."""
    session = Session(credit=CREDIT, part_shards=PART)
    session.registered("c0")
    session.assigned([Work("j0", "{}")])
    session.next_work()
    session.finished(JobPlan("m", tuple(shard(i) for i in range(7))))
    session.stream_opened()
    parts = [message.body for message in session.to_send()]
    settled = [session.acknowledged(sequence, Verdict.ACCEPTED, "") for sequence in (1, 2, 3)]

    expected = [
        PlanPart("m", (shard(0), shard(1), shard(2)), False),
        PlanPart("m", (shard(3), shard(4), shard(5)), False),
        PlanPart("m", (shard(6),), True),
    ]
    assert expected == parts
    assert [None, None] == settled[:2]
    assert settled[2] is not None
    assert 0 == session.num_results


def test_an_unwanted_part_ends_the_plan() -> None:
    """A plan whose job is settled is dropped at the first answer that says so."""
    session = Session(credit=1, part_shards=1)
    session.registered("c0")
    session.assigned([Work("j0", "{}")])
    session.next_work()
    session.finished(JobPlan("m", (shard(0), shard(1))))
    session.stream_opened()
    session.to_send()
    session.acknowledged(1, Verdict.UNWANTED, "settled")

    assert [] == session.to_send()
    assert 0 == session.num_results


def test_a_broken_stream_sends_all_again_in_order() -> None:
    """After a break every unacknowledged result goes out again, numbered from one."""
    session = drive(3)
    for index in range(3):
        session.next_work()
        session.finished(scored(index))
    session.stored([entry.key for entry in session.to_store()])
    session.stream_opened()
    first = session.to_send()
    session.acknowledged(2, Verdict.ACCEPTED, "")
    session.stream_opened()
    again = session.to_send()

    assert [1, 2, 3] == [message.sequence for message in first]
    assert [(1, scored(0)), (2, scored(2))] == [(message.sequence, message.body) for message in again]


def test_an_unknown_verdict_keeps_the_result_for_the_next_stream() -> None:
    """What a newer coordinator says and we do not understand forgets nothing, and is not repeated at once."""
    session = drive(1)
    session.next_work()
    session.finished(scored(0))
    session.stored([entry.key for entry in session.to_store()])
    session.stream_opened()
    session.to_send()
    session.acknowledged(1, None, "")
    quiet = session.to_send()
    session.stream_opened()

    assert [] == quiet
    assert [scored(0)] == [message.body for message in session.to_send()]


def test_a_failed_shard_may_come_back_before_its_failure_is_acknowledged() -> None:
    """The coordinator answers on two calls at once: the new assignment is work, not a repetition."""
    session = drive(1)
    session.next_work()
    session.finished(ShardError("no luck"))
    session.stream_opened()
    body = session.to_send()[0].body
    session.assigned([Work("j0", "{}", "{}", shard(0))])
    again = session.next_work()
    session.acknowledged(1, Verdict.ACCEPTED, "")

    assert isinstance(body, Failed)
    assert again is not None
    assert (("j0", 0),) == session.heartbeat().holdings


def test_an_error_of_the_node_answers_for_the_whole_queue() -> None:
    """A model that cannot be loaded here fails every held shard of the job and none of another job."""
    session = drive(3)
    session.assigned([Work("j1", "{}", "{}", shard(7))])
    session.next_work()
    session.finished(ModelNotFound("not here"))
    session.stream_opened()
    failed = [message.body.shard for message in session.to_send() if isinstance(message.body, Failed)]

    assert [0, 1, 2] == failed
    assert (("j1", 7),) == session.heartbeat().holdings


def test_a_late_answer_does_not_take_a_new_grant() -> None:
    """A shard that was lost and given again between a heartbeat and its answer stays."""
    session = drive(2)
    beat = session.heartbeat()
    session.assigned([Work("j0", "{}", "{}", shard(1))])
    session.renewed(beat, [("j0", 0), ("j0", 1)], (), False)

    assert (("j0", 1),) == session.heartbeat().holdings


def test_fast_shards_are_asked_for_in_larger_numbers() -> None:
    """The queue is deep enough for two seconds of work, and is not refilled one by one."""
    session = drive(2)
    slow = session.wanted()
    session.next_work()
    session.finished(scored(0, seconds=0.05))
    session.stored([entry.key for entry in session.to_store()])
    fast = session.wanted()
    session.assigned([Work("j0", "{}", "{}", shard(index)) for index in range(2, 2 + fast)])

    assert 0 == slow
    assert 40 == fast
    assert 0 == session.wanted()


def test_a_full_disk_stops_work_and_requests() -> None:
    """While a result cannot be stored nothing is begun, asked for, taken or sent."""
    session = drive(2)
    session.next_work()
    session.finished(scored(0))
    session.store_failed("no space")
    session.assigned([Work("j0", "{}", "{}", shard(2))])
    session.stream_opened()

    assert None is session.next_work()
    assert 0 == session.wanted()
    assert [] == session.to_send()

    session.stored([entry.key for entry in session.to_store()])
    session.assigned([Work("j0", "{}", "{}", shard(1))])
    assert 1 == len(session.to_send())
    assert session.next_work() is not None


def test_a_broken_disk_gives_shards_back_and_keeps_the_result() -> None:
    """The first refusal gives back what was not begun, the third the shard that waits; its result is still sent."""
    session = Session(credit=CREDIT, part_shards=PART, store_tries=3)
    session.registered("c0")
    session.assigned([Work("j0", "{}", "{}", shard(index)) for index in range(3)])
    session.next_work()
    session.finished(scored(0))
    named = [session.heartbeat().holdings]
    given_back = []
    for _ in range(4):
        given_back.append(session.store_failed("no such directory"))
        named.append(session.heartbeat().holdings)
    session.stream_opened()
    session.stored([entry.key for entry in session.to_store()])

    waiting = (("j0", 0),)
    assert [(*waiting, ("j0", 1), ("j0", 2)), waiting, waiting, (), ()] == named
    assert [2, 0, 1, 0] == given_back
    assert [scored(0)] == [message.body for message in session.to_send()]


def test_answers_to_the_rest_of_a_dropped_plan_are_ignored() -> None:
    """After one part was unwanted, what is said of the parts in flight changes nothing."""
    session = Session(credit=CREDIT, part_shards=1)
    session.registered("c0")
    session.assigned([Work("j0", "{}")])
    session.next_work()
    session.finished(JobPlan("m", (shard(0), shard(1), shard(2))))
    session.stream_opened()
    session.to_send()
    answers = [session.acknowledged(sequence, Verdict.UNWANTED, "settled") for sequence in (2, 1, 3)]

    assert [True, False, False] == [answer is not None for answer in answers]
    assert 0 == session.num_results
