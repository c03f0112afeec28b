"""Bugs to be planted: each takes away one protection. A simulator that does not notice one of them proves nothing.

They are planted by replacing methods while a test runs; the product has no switch for any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agent.session import Session
from coordinator.core import results
from coordinator.core.board import Board
from coordinator.core.calls import Outcome, Verdict
from coordinator.core.jobs import Job
from coordinator.core.results import Results
from coordinator.core.scheduler import Scheduler
from coordinator.core.states import JobState, NodeEvent, NodeState
from coordinator.journal import MemoryJournal
from coordinator.journal.base import encode
from eval_kernel.errors import JournalFull
from eval_kernel.tally import Tally
from tests.simulation.coordinator import Coordinator

#: Makes a method's replacement from the method.
Change = Callable[[Any], Any]


@dataclass
class Mutant:
    """One bug: which attribute of what becomes what; ``promise`` is what it breaks."""

    promise: str
    target: Any
    attribute: str
    change: Change
    _original: Any = field(default=None, repr=False)

    def plant(self) -> None:
        """Put the bug in."""
        self._original = getattr(self.target, self.attribute)
        setattr(self.target, self.attribute, self.change(self._original))

    def remove(self) -> None:
        """Take it out again."""
        setattr(self.target, self.attribute, self._original)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run something with the bug in it."""
    mutant.plant()
    try:
        yield
    finally:
        mutant.remove()


# ---------------------------------------------------------------- the coordinator's answers and the journal


def _tell_at_once(original: Any) -> Any:
    return lambda self, number, answer: answer()


def _write_before_refusing(original: Any) -> Any:
    def append(self: MemoryJournal, facts: Any) -> None:
        try:
            original(self, facts)
        except JournalFull:
            self._rows += [encode(fact) for fact in facts[:1]]
            raise

    return append


def _lose_the_last(original: Any) -> Any:
    return lambda self, facts: original(self, facts[:-1] if len(facts) > 1 else facts)


def _tally_forgotten(original: Any) -> Any:
    def replay(self: Board, facts: Any) -> None:
        original(self, facts)
        for job in self.jobs.values():
            job.tally = Tally()

    return replay


def _keys_forgotten(original: Any) -> Any:
    def replay(self: Board, facts: Any) -> None:
        original(self, facts)
        self.keys.clear()

    return replay


def _tries_forgotten(original: Any) -> Any:
    def replay(self: Board, facts: Any) -> None:
        original(self, (fact for fact in facts if fact.kind not in ("shard_failed", "shard_expired")))

    return replay


def _silent_cancel(original: Any) -> Any:
    def cancel(*args: Any) -> Any:
        original(*args)
        return ()

    return cancel


def _last_commit_unwritten(original: Any) -> Any:
    def scored(self: Results, agent: str, incarnation: str, job: str, *rest: Any) -> Outcome:
        outcome: Outcome = original(self, agent, incarnation, job, *rest)
        done = self._board.jobs[job].state is JobState.SUCCEEDED
        return replace(outcome, facts=()) if done else outcome

    return scored


# ---------------------------------------------------------------- judging results


def _every_digest_new(original: Any) -> Any:
    return lambda partial: f"{original(partial)}{id(partial)}"


def _recommit(original: Any) -> Any:
    def scored(self: Results, agent: str, incarnation: str, job: str, scored: Any, now: float) -> Outcome:
        found = self._board.jobs.get(job)
        if found is not None and found.state is JobState.RUNNING:
            found.commits.pop(scored.partial.shard, None)
        outcome: Outcome = original(self, agent, incarnation, job, scored, now)
        return outcome

    return scored


def _only_holders(original: Any) -> Any:
    def scored(self: Results, agent: str, incarnation: str, job: str, scored: Any, now: float) -> Outcome:
        node = self._board.node(agent, incarnation, now, may_have_left=True)
        holds = any((h.job, h.shard) == (job, scored.partial.shard) for h in node.leases)
        outcome: Outcome = original(self, agent, incarnation, job, scored, now) if holds else Outcome(Verdict.UNWANTED)
        return outcome

    return scored


def _divergent_forgotten(original: Any) -> Any:
    return lambda self, *args: replace(original(self, *args), facts=())


def _anything_goes(original: Any) -> Any:
    return lambda plan, scored: None


# ---------------------------------------------------------------- tries and blame


def _always_granted(original: Any) -> Any:
    def try_failed(self: Results, node: Any, job: Job, shard: Any, *rest: Any) -> Any:
        facts = original(self, node, job, shard, *rest)
        shard.granted |= {node.agent}
        return facts

    return try_failed


def _impatient(original: Any) -> Any:
    def init(self: Results, config: Any) -> None:
        original(self, replace(config, max_tries=1))

    return init


def _patient_for_ever(original: Any) -> Any:
    def init(self: Results, config: Any) -> None:
        original(self, replace(config, max_tries=1 << 40))

    return init


def _never_exhausted(original: Any) -> Any:
    return lambda self, job, now: ()


def _blame_what_waited(original: Any) -> Any:
    def register(self: Board, info: Any, now: float) -> Any:
        old = self.nodes.get(info.agent)
        again = old is not None and old.info.incarnation != info.incarnation
        held = next(iter(old.leases), None) if old is not None and again else None
        return original(self, info, now) or (held if held is not None and held.shard >= 0 else None)

    return register


# ---------------------------------------------------------------- leases and nodes


def _return_without_queue(original: Any) -> Any:
    def return_shard(self: Job, shard: Any) -> None:
        waiting = list(self._waiting)
        original(self, shard)
        self._waiting[:] = waiting

    return return_shard


def _leases_for_ever(original: Any) -> Any:
    def lease(self: Board, node: Any, job: Job, shard: Any, now: float) -> Any:
        return original(self, node, job, shard, now + 1e9)

    return lease


def _leave_with_leases(original: Any) -> Any:
    def renew(self: Scheduler, agent: str, incarnation: str, *rest: Any) -> Any:
        *others, leaving, now = rest
        answer = original(self, agent, incarnation, *others, False, now)
        node = self._board.nodes[agent]
        if leaving and node.state in (NodeState.ACTIVE, NodeState.DRAINING):
            node.advance(NodeEvent.LEAVE)
        return answer

    return renew


def _no_fence(original: Any) -> Any:
    def node(self: Board, agent: str, incarnation: str, now: float, **options: Any) -> Any:
        self._superseded.pop(agent, None)
        known = self.nodes.get(agent)
        return original(self, agent, known.info.incarnation if known else incarnation, now, **options)

    return node


def _forget_the_dead(original: Any) -> Any:
    def register(self: Board, info: Any, now: float) -> Any:
        self.nodes.pop(info.agent, None)
        return original(self, info, now)

    return register


# ---------------------------------------------------------------- the agent's session


def _delete_when_sent(original: Any) -> Any:
    def to_send(self: Session) -> Any:
        messages = original(self)
        self._stored_keys_to_remove += [r.key for r in self._flying.values() if r.index >= 0]
        return messages

    return to_send


def _never_again(original: Any) -> Any:
    def stream_opened(self: Session) -> None:
        sent = [result.sent_parts for result in self._results]
        original(self)
        for result, parts in zip(self._results, sent, strict=True):
            result.sent_parts = parts

    return stream_opened


def _spool_ignored(original: Any) -> Any:
    return lambda self, coordinator, leftovers=(): original(self, coordinator, ())


def _first_of_those_flying(original: Any) -> Any:
    def acknowledged(self: Session, sequence: int, *rest: Any) -> Any:
        return original(self, min(self._flying, default=sequence), *rest)

    return acknowledged


def _queued_twice(original: Any) -> Any:
    def assigned(self: Session, works: Any) -> None:
        original(self, works)
        if not self.draining and not self.storage_problem:
            self._queue.extend(work for work in works if work not in self._queue)

    return assigned


def _unnamed(original: Any) -> Any:
    return lambda self: replace(original(self), holdings=())


def _kept_after_refusal(original: Any) -> Any:
    def to_remove(self: Session) -> Any:
        original(self)
        return []

    return to_remove


MUTANTS: dict[str, Mutant] = {
    "acknowledge before the journal": Mutant("nothing lost", Coordinator, "tell", _tell_at_once),
    "a full journal takes half a batch": Mutant("nothing lost", MemoryJournal, "append", _write_before_refusing),
    "the journal drops the end of a batch": Mutant("nothing lost", MemoryJournal, "append", _lose_the_last),
    "the tally is not restored": Mutant("exact", Board, "replay", _tally_forgotten),
    "keys of jobs are not restored": Mutant("nothing twice", Board, "replay", _keys_forgotten),
    "tries are not restored": Mutant("nothing lost", Board, "replay", _tries_forgotten),
    "a cancellation is not journaled": Mutant("nothing lost", Scheduler, "cancel", _silent_cancel),
    "the last commit is not journaled": Mutant("nothing lost", Results, "scored", _last_commit_unwritten),
    "no duplicate is known": Mutant("nothing twice", results, "partial_digest", _every_digest_new),
    "a second commit is taken": Mutant("nothing twice", Results, "scored", _recommit),
    "results of those without a lease are dropped": Mutant("nothing lost", Results, "scored", _only_holders),
    "divergent results are not kept": Mutant("complete or says so", Results, "_diverged", _divergent_forgotten),
    "results are not checked against the plan": Mutant("exact", results, "contradiction", _anything_goes),
    "a failure counts as often as it is told": Mutant("blame", Results, "_try_failed", _always_granted),
    "a shard is given up too early": Mutant("complete or says so", Results, "__init__", _impatient),
    "a poisonous shard is never given up": Mutant("complete or says so", Results, "__init__", _patient_for_ever),
    "a job without hope is not ended": Mutant("complete or says so", Results, "_fail_if_exhausted", _never_exhausted),
    "what only waited is blamed for a death": Mutant("blame", Board, "register", _blame_what_waited),
    "a returned shard is not queued": Mutant("nothing lost", Job, "return_shard", _return_without_queue),
    "leases do not run out": Mutant("nothing lost", Board, "lease", _leases_for_ever),
    "leases leak when an agent leaves": Mutant("nothing lost", Scheduler, "renew", _leave_with_leases),
    "earlier lives are not fenced off": Mutant("nothing twice", Board, "node", _no_fence),
    "a dead life's leases are forgotten": Mutant("nothing lost", Board, "register", _forget_the_dead),
    "results are deleted when sent": Mutant("nothing lost", Session, "to_send", _delete_when_sent),
    "a broken stream is not made up for": Mutant("nothing lost", Session, "stream_opened", _never_again),
    "the spool is not read at the start": Mutant("nothing lost", Session, "registered", _spool_ignored),
    "an acknowledgement settles another result": Mutant(
        "nothing lost", Session, "acknowledged", _first_of_those_flying
    ),
    "work is queued twice": Mutant("nothing twice", Session, "assigned", _queued_twice),
    "the heartbeat names nothing": Mutant("leases save work", Session, "heartbeat", _unnamed),
    "acknowledged results stay on the disk": Mutant("no rest", Session, "to_remove", _kept_after_refusal),
}
