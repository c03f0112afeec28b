"""The agent's bookkeeping: what is held, queued, running, unacknowledged. Knows no socket, clock or disk.

Theory. *Held* is what the present registration was given and has not answered for; the heartbeat lists it.
A piece of work waits in the *queue*, is *running* (one at a time), and leaves a *result*. A shard's sums are
*stored* (on disk, by the caller) before they may be sent; failures and plans need no disk: if they are lost,
the lease runs out and the work is done again. While the disk refuses, what was not begun is given back (no
longer named), and after a few refusals so is the shard whose result waits: another agent may score it, and the
first result counts. A result is forgotten on its acknowledgement only. Sequences
count from 1 in each report stream; a new stream sends everything unacknowledged again, in order.

Methods take events and return what the caller must do; ``check`` states the invariants.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from agent.spool import ResultKey, SpoolEntry
from agent.work import Failed, Heartbeat, Held, JobPlan, Outgoing, PlanPart, Settled, Verdict, Work
from eval_kernel.errors import Blame, FedevalError
from eval_kernel.partial import ScoredShard

#: Seconds of work to hold, so that the worker never waits for the coordinator; and its bounds in shards.
HOLD_SECONDS = 2.0
MIN_HELD, MAX_HELD = 2, 64
#: Results in memory that the disk has not taken; with so many, no new work is begun.
MAX_UNSTORED = 8
#: Refused writes in a row after which a shard whose result cannot be stored is given back.
STORE_TRIES = 5


@dataclass(slots=True, eq=False)
class _Result:
    coordinator: str
    job: str
    index: int
    body: ScoredShard | Failed | JobPlan
    stored: bool
    sent_parts: int = 0  # messages of this result that went into the present stream
    parts: int = 1
    unheard: bool = False  # answered in this stream with a verdict we do not know: wait for the next stream

    @property
    def key(self) -> ResultKey:
        return ResultKey(self.coordinator, self.job, self.index)


class Session:
    """What one agent has to do and to say. Not thread-safe; every method returns at once."""

    def __init__(self, *, credit: int, part_shards: int, store_tries: int = STORE_TRIES) -> None:
        """``credit``: messages that may be unacknowledged; ``part_shards``: shards in one ``PlanPart``.

        ``store_tries``: refused writes in a row after which unstored results no longer hold their shards.
        """
        self._credit = credit
        self._part_shards = part_shards
        self._store_tries = store_tries
        self._store_refusals = 0  # in a row
        self.coordinator = ""  # identity of the coordinator registered with; "" before the first time
        self._held: dict[Held, int] = {}  # -> serial number of the grant
        self._grants = 0
        self._queue: deque[Work] = deque()
        self.running: Work | None = None
        self._running_for = ""  # the coordinator that gave the running work
        self._results: list[_Result] = []
        self._stored_keys_to_remove: list[ResultKey] = []
        self._flying: dict[int, _Result] = {}
        self._sequence = 0
        self._shard_seconds: float | None = None
        self.storage_problem = ""  # why results cannot be written; "" when they can
        self.draining = False  # this agent was told to stop
        self.asked_to_drain = False  # the coordinator asks for no new work to be taken

    def __repr__(self) -> str:
        """Show what the session holds, for logs and failing tests."""
        unstored = sum(not r.stored for r in self._results)
        return (
            f"<Session held={list(self._held)} queued={len(self._queue)}"
            f" running={self.running and self.running.held} results={len(self._results)}"
            f" unstored={unstored} flying={len(self._flying)}>"
        )

    # ---------------------------------------------------------------- registration

    def registered(self, coordinator: str, leftovers: Iterable[SpoolEntry] = ()) -> bool:
        """A registration succeeded: leases of before are gone, results of before are still welcome.

        ``leftovers`` are the spool's entries for this coordinator that the session does not know of. Returns
        whether the running work must be stopped, which is so when it came from another coordinator.
        """
        changed = self.coordinator not in ("", coordinator)
        self._queue.clear()
        self._held.clear()
        if changed:
            self._flying.clear()
            # What is on disk stays there for its own coordinator; the rest was never promised to this one.
            self._results = [r for r in self._results if not r.stored]
        self.coordinator = coordinator
        self.asked_to_drain = False
        known = {r.key for r in self._results if isinstance(r.body, ScoredShard)}
        for entry in leftovers:
            if entry.key not in known:
                key = entry.key
                self._results.append(_Result(key.coordinator, key.job, key.shard, entry.scored, stored=True))
        if (running := self._running_held()) is not None:
            self._grant([running])
        return self.running is not None and self._running_for != coordinator

    # ---------------------------------------------------------------- work

    def wanted(self) -> int:
        """How many more shards to ask for now; 0: do not ask."""
        if self.draining or self.asked_to_drain or self._stuck():
            return 0
        waiting = len(self._queue) + (self.running is not None)
        depth = MIN_HELD
        if self._shard_seconds is not None:
            depth = min(max(MIN_HELD, 1 + math.ceil(HOLD_SECONDS / max(self._shard_seconds, 1e-6))), MAX_HELD)
        # Asking for every single shard would cost a call each where shards are fast.
        return depth - waiting if waiting <= depth // 2 else 0

    def assigned(self, works: Sequence[Work]) -> None:
        """Take an assignment. Work that is queued, running or done is held again, but not done twice."""
        if self.draining or self.storage_problem:
            return  # not listed as held from now on: the lease runs out, or the good-bye returns it
        busy: set[Held | None] = {work.held for work in self._queue}
        busy.update((r.job, r.index) for r in self._results if self._is_answer(r))
        busy.add(self._running_held())
        self._grant(work.held for work in works)
        for work in works:
            if work.held not in busy:
                busy.add(work.held)
                self._queue.append(work)

    def next_work(self) -> Work | None:
        """Begin the next piece of work; ``None`` when there is none, or while results cannot be stored."""
        if self.running is not None or not self._queue or self._stuck():
            return None
        self.running = self._queue.popleft()
        self._running_for = self.coordinator
        return self.running

    def finished(self, outcome: ScoredShard | JobPlan | FedevalError) -> None:
        """The running work yielded ``outcome``; an error of job or node settles the job's queue."""
        ours = self._running_for == self.coordinator
        work = self._stop_running()
        job, index = work.held
        if not ours and not isinstance(outcome, ScoredShard):
            return  # a failure or a plan for a coordinator that we left; sums are kept for it on disk
        if isinstance(outcome, FedevalError):
            self._fail(work, outcome)
            if outcome.blame in (Blame.JOB, Blame.NODE):
                # The same thing would happen to each: say so at once instead of loading the model again.
                for other in [w for w in self._queue if w.job == job]:
                    self._queue.remove(other)
                    self._fail(other, outcome)
            return
        if isinstance(outcome, JobPlan):
            parts = max(1, -(-len(outcome.shards) // self._part_shards))
            self._results.append(_Result(self.coordinator, job, index, outcome, stored=True, parts=parts))
            return
        self._results.append(_Result(self._running_for, job, index, outcome, stored=False))
        self._give_back_unstored()
        seconds = outcome.execution.seconds
        self._shard_seconds = seconds if self._shard_seconds is None else (self._shard_seconds + seconds) / 2

    def upcoming(self, most: int) -> list[Work]:
        """Return the shards that are next in the queue."""
        return [work for work in islice(self._queue, most) if work.shard is not None]

    def cancelled(self) -> None:
        """The running work was stopped without an outcome."""
        held = self._running_held()
        self._stop_running()
        if held is not None:
            self._held.pop(held, None)

    # ---------------------------------------------------------------- the heartbeat

    def heartbeat(self) -> Heartbeat:
        """Return what the next heartbeat says."""
        return Heartbeat(tuple(self._held), self._running_held(), self.draining, self._grants)

    def renewed(self, sent: Heartbeat, lost: Iterable[Held], settled_jobs: Iterable[str], drain: bool) -> bool:
        """Take the answer to ``sent``; return whether the running work must be stopped (job settled)."""
        gone, settled = set(lost), set(settled_jobs)
        self.asked_to_drain = drain
        for held, grant in list(self._held.items()):
            # A grant younger than the heartbeat is not what the answer calls lost.
            if (held in gone and grant <= sent.mark) or held[0] in settled:
                del self._held[held]
        self._queue = deque(w for w in self._queue if w.held in self._held)
        running = self._running_held()
        return running is not None and running[0] in settled

    def runs_in_vain(self, done: Iterable[Held]) -> bool:
        """Whether what runs is among the shards that others have done."""
        return self._running_held() in set(done)

    def drain(self) -> None:
        """Take nothing new, drop what was not begun."""
        self.draining = True
        self._give_back_queue()

    @property
    def num_results(self) -> int:
        """Results that were not acknowledged."""
        return len(self._results)

    @property
    def has_results(self) -> bool:
        """Whether a result may be sent to, or waits for an answer of, the present coordinator."""
        return any(r.stored and r.coordinator == self.coordinator for r in self._results)

    # ---------------------------------------------------------------- storage

    def to_store(self) -> list[SpoolEntry]:
        """Return the results that must be put on disk, oldest first."""
        return [SpoolEntry(r.key, r.body) for r in self._results if not r.stored and isinstance(r.body, ScoredShard)]

    def stored(self, keys: Iterable[ResultKey]) -> None:
        """The disk took everything it was given: these results are durable on this machine now, and may be sent."""
        done = set(keys)
        self.storage_problem = ""
        self._store_refusals = 0
        for result in self._results:
            if result.key in done and isinstance(result.body, ScoredShard):
                result.stored = True
        self._results = [r for r in self._results if r.coordinator == self.coordinator or not r.stored]

    def store_failed(self, reason: str) -> int:
        """The disk refused: work pauses, and the caller tries again. Return how many shards were given back."""
        before = len(self._held)
        self.storage_problem = reason
        self._store_refusals += 1
        self._give_back_queue()
        self._give_back_unstored()
        return before - len(self._held)

    def to_remove(self) -> list[ResultKey]:
        """Return, once, the entries whose files are no longer needed; remove them before more is stored."""
        keys, self._stored_keys_to_remove = self._stored_keys_to_remove, []
        return keys

    @property
    def has_removals(self) -> bool:
        """Whether ``to_remove`` would name an entry."""
        return bool(self._stored_keys_to_remove)

    # ---------------------------------------------------------------- reports

    def stream_opened(self) -> None:
        """A new report stream begins: everything unacknowledged is to be sent again."""
        self._sequence = 0
        self._flying.clear()
        for result in self._results:
            result.sent_parts = 0
            result.unheard = False

    def to_send(self) -> list[Outgoing]:
        """Return the messages to write now, in order, within the credit; each is returned once per stream."""
        messages: list[Outgoing] = []
        for result in self._results:
            if not result.stored or result.unheard or result.coordinator != self.coordinator:
                continue
            if len(self._flying) >= self._credit:
                break
            while result.sent_parts < result.parts and len(self._flying) < self._credit:
                self._sequence += 1
                self._flying[self._sequence] = result
                messages.append(Outgoing(self._sequence, result.job, self._body(result, result.sent_parts)))
                result.sent_parts += 1
        return messages

    def acknowledged(self, sequence: int, verdict: Verdict | None, detail: str) -> Settled | None:
        """Take an acknowledgement (``None``: a verdict this version does not know); return what it settled.

        Acknowledgements of unknown sequences are ignored: a coordinator may say a thing twice.
        """
        result = self._flying.pop(sequence, None)
        if result is None or result not in self._results:
            return None
        if verdict is None or result.unheard:
            result.unheard = True
            return None
        early = verdict in (Verdict.ACCEPTED, Verdict.DUPLICATE)
        if early and (result.sent_parts < result.parts or result in self._flying.values()):
            return None  # a part of a plan: the last one makes it take effect
        self._results.remove(result)
        if isinstance(result.body, ScoredShard):
            self._stored_keys_to_remove.append(result.key)
        if not isinstance(result.body, Failed):
            self._held.pop((result.job, result.index), None)
        return Settled(result.job, result.index, verdict, detail)

    # ---------------------------------------------------------------- inside

    def _grant(self, items: Iterable[Held]) -> None:
        for held in items:
            self._grants += 1
            self._held[held] = self._grants

    def _running_held(self) -> Held | None:
        """What is running for the present coordinator."""
        if self.running is None or self._running_for != self.coordinator:
            return None
        return self.running.held

    def _stuck(self) -> bool:
        """Whether the disk does not take what is computed."""
        unstored = sum(not r.stored for r in self._results)
        return unstored >= MAX_UNSTORED or bool(self.storage_problem)

    def _give_back_queue(self) -> None:
        """Hold no longer what was not begun."""
        for work in self._queue:
            self._held.pop(work.held, None)
        self._queue.clear()

    def _give_back_unstored(self) -> None:
        """After too many refusals, hold no longer the shards whose results wait for the disk."""
        if self._store_refusals >= self._store_tries:
            for result in self._unstored_here():
                self._held.pop((result.job, result.index), None)

    def _unstored_here(self) -> list[_Result]:
        return [r for r in self._results if not r.stored and r.coordinator == self.coordinator]

    def _is_answer(self, result: _Result) -> bool:
        """Whether a result answers an assignment; a failure does not, since its shard may be given again."""
        return result.coordinator == self.coordinator and not isinstance(result.body, Failed)

    def _stop_running(self) -> Work:
        assert self.running is not None, "nothing is running"
        work, self.running = self.running, None
        return work

    def _fail(self, work: Work, error: FedevalError) -> None:
        job, index = work.held
        # From here on it is the coordinator's again, who may give it back before it acknowledges the failure.
        self._held.pop(work.held, None)
        self._results.append(_Result(self.coordinator, job, index, Failed(index, error), stored=True))

    def _body(self, result: _Result, part: int) -> ScoredShard | Failed | PlanPart:
        if not isinstance(result.body, JobPlan):
            return result.body
        size = self._part_shards
        return PlanPart(
            result.body.manifest_json,
            result.body.shards[part * size : (part + 1) * size],
            last=part == result.parts - 1,
        )

    def check(self) -> None:
        """Raise ``AssertionError`` if an invariant does not hold."""
        queued = [work.held for work in self._queue]
        assert len(set(queued)) == len(queued), f"queued twice: {queued}"
        assert set(queued) <= set(self._held), f"queued but not held: {self!r}"
        running = self._running_held()
        assert running is None or running not in queued, f"running and queued: {self!r}"
        answers = [r.key for r in self._results if not isinstance(r.body, Failed)]
        assert len(set(answers)) == len(answers), f"two results of one shard: {answers}"
        today = {(r.job, r.index) for r in self._results if self._is_answer(r)}
        assert not today & set(queued), f"done and queued: {self!r}"
        assert running is None or running not in today, f"done and running: {self!r}"
        assert not (self.draining and queued), f"draining with a queue: {self!r}"
        assert not (self.storage_problem and queued), f"holds what it cannot begin: {self!r}"
        if self._store_refusals >= self._store_tries:
            kept = [r.key for r in self._unstored_here() if (r.job, r.index) in self._held]
            assert not kept, f"still held, though their results cannot be stored: {kept}"
        assert len(self._flying) <= self._credit, f"beyond the credit: {self!r}"
        assert all(r.stored for r in self._flying.values()), f"sent before it was stored: {self!r}"
        assert all(r.stored for r in self._results if not isinstance(r.body, ScoredShard))
        foreign = [r for r in self._results if r.coordinator != self.coordinator and r.stored]
        assert not foreign, f"results of another coordinator kept in memory: {foreign}"
