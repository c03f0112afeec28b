"""An agent of a simulated world: the real session, driven as the daemon drives it, with a disk that survives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from agent.session import Session
from agent.spool import ResultKey, SpoolEntry
from agent.work import Failed, JobPlan, PlanPart, Verdict, Work
from eval_kernel.errors import ModelNotFound, NotRegistered, StaleIncarnation, WorkerCrashed
from eval_kernel.partial import ScoredShard
from tests.simulation.checks import Witness
from tests.simulation.coordinator import plan_of
from tests.simulation.world import World
from tests.support.core_cases import make_scored, with_partial

HEARTBEAT, PAUSE, STORE, STORE_RETRY = 1.5, 0.7, 0.003, 0.6
#: An unanswered call, and a stream on which nothing comes back, are given up after so long.
PATIENCE = 2.5
PLANNING_SECONDS = 0.3


class Agent:
    """One agent, through all its lives; each life is a process, with an incarnation and a session of its own."""

    def __init__(self, world: World, witness: Witness, name: str, shards: dict[str, int], speed: float) -> None:
        """``shards``: the number of shards of each job, by its specification; ``speed``: seconds a shard."""
        self._world = world
        self._witness = witness
        self.name = name
        self._shards = shards
        self._speed = speed
        self.disk: dict[ResultKey, SpoolEntry] = {}
        self.alive = False
        self.life = 0
        self._paused_until = self._full_until = self._blind_until = 0.0
        self.scored: Counter[tuple[str, int]] = Counter()
        self._boot()

    @property
    def calm(self) -> bool:
        """Whether it has nothing to do, to send or to clean up."""
        return self.alive and not self.disk and self.session.running is None and not self.session.num_results

    # ------------------------------------------------------------ its life

    def _boot(self) -> None:
        if self.alive:
            return
        self.alive = True
        self.life += 1
        self.incarnation = f"{self.name}.{self.life}"
        self.session = Session(credit=4, part_shards=1000, store_tries=3)
        self._registered = self._registering = self._acquiring = self._storing = self._leaving = False
        self._stream = -1  # none
        self._heard = 0.0  # on the stream
        self._not_before = 0.0  # of the next Acquire
        self._reopen = 0.0
        self._specs: dict[str, str] = {}
        self._world.say(f"{self.incarnation} lives, {len(self.disk)} results on its disk")
        self._pump()
        self._later(HEARTBEAT, self._heartbeat, self.life)

    def kill(self, down: float) -> None:
        """Die; the disk stays."""
        if self.alive:
            self._world.say(f"{self.incarnation} dies: {self.session!r}")
            self.alive = False
            self._world.at(down, self._boot)

    def pause(self, seconds: float) -> None:
        """Do nothing for a while, as under SIGSTOP."""
        self._world.say(f"{self.name} stops for {seconds:.1f} s")
        self._paused_until = max(self._paused_until, self._world.now + seconds)

    def fill(self, seconds: float) -> None:
        """Have a full disk for a while."""
        self._world.say(f"the disk of {self.name} is full for {seconds:.1f} s")
        self._full_until = max(self._full_until, self._world.now + seconds)

    def leave(self, away: float) -> None:
        """Drain, say good-bye, come back after ``away`` seconds."""
        if self.alive and not self._leaving:
            self._world.say(f"{self.name} drains")
            self._leaving = True
            self.session.drain()
            self._later(2.0, self._good_bye, away)

    def _good_bye(self, away: float) -> None:
        if self._registered:
            self._call("renew", self._beat(leaving=True), lambda answer: None)
        self.alive = False
        self._world.at(away, self._boot)

    def double(self) -> None:
        """Start a second process under this name, with a disk of its own."""
        twin = Agent(self._world, self._witness, self.name, self._shards, self._speed)
        twin.life += 1000 * len(self._world.agents)
        twin.incarnation = f"{twin.name}.{twin.life}"
        self._world.agents.append(twin)

    def _replaced(self) -> None:
        """A later life of this name has registered: end, and do as the message says."""
        self.alive = False
        self.name = f"{self.name.partition('~')[0]}~{self._world.serial()}"
        self._world.at(1.0, self._boot)

    def _later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._world.at(delay, self._when_alive, self.life, call, args)

    def _when_alive(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive or life != self.life:
            return
        if self._world.now < self._paused_until:
            self._world.at(self._paused_until - self._world.now, self._when_alive, life, call, args)
            return
        call(*args)
        if self.alive:
            self._pump()
            self.session.check()

    # ------------------------------------------------------------ calls

    def _call(self, kind: str, request: dict[str, Any], answered: Callable[[Any], None]) -> bool:
        """Send a request; its answer comes back through the network, at most once for this caller."""
        life, name, open_ = self.life, self.name, [True]

        def take(answer: Any) -> None:
            if open_[0]:
                open_[0] = False
                self._answer(answer, answered)

        def reply(answer: Any) -> None:
            self._world.send(name, False, self._when_alive, life, take, (answer,))

        request = {"agent": name, "incarnation": self.incarnation, **request}
        coordinator = self._world.coordinator
        return self._world.send(name, True, coordinator.receive, coordinator.life, kind, request, reply)

    def _answer(self, answer: Any, answered: Callable[[Any], None]) -> None:
        if isinstance(answer, StaleIncarnation):
            self._world.say(f"{self.incarnation} was replaced")
            self._replaced()
        elif isinstance(answer, NotRegistered):
            self._registered = False
            self._stream = -1
        elif isinstance(answer, Exception):
            raise answer
        else:
            answered(answer)

    def _pump(self) -> None:
        """Do whatever the session wants done now."""
        if not self._registered and not self._registering:
            self._registering = True
            self._call("register", {}, self._welcome)
            self._later(PATIENCE, self._give_up, "_registering")
        self._work()
        self._store()
        if not self._registered:
            return
        if not self._acquiring and self._world.now >= self._not_before and (wanted := self.session.wanted()):
            self._acquiring = True
            loaded = next(iter(self._specs), "")
            self._call("acquire", {"count": wanted, "loaded": loaded}, self._assigned)
            self._later(PATIENCE, self._give_up, "_acquiring")
        self._report()

    def _give_up(self, flag: str) -> None:
        setattr(self, flag, False)

    def _welcome(self, coordinator: str) -> None:
        self._registering, self._registered = False, True
        fresh = coordinator != self.session.coordinator
        self.session.registered(coordinator, list(self.disk.values()) if fresh else [])
        self._acquiring, self._stream = False, -1

    def _heartbeat(self, life: int) -> None:
        if self._registered:
            beat = self.session.heartbeat()
            self._call("renew", self._beat(), lambda answer: self._renewed(beat, answer))
        self._later(HEARTBEAT, self._heartbeat, life)

    def _beat(self, leaving: bool = False) -> dict[str, Any]:
        beat = self.session.heartbeat()
        return {"held": beat.holdings, "running": beat.running, "draining": beat.draining, "leaving": leaving}

    def _renewed(self, beat: Any, answer: Any) -> None:
        lost, settled, drain = answer
        if self.session.renewed(beat, lost, settled, drain):
            self.session.cancelled()

    def _assigned(self, answer: Any) -> None:
        self._acquiring = False
        if answer is None:
            self._not_before = self._world.now + PAUSE
            self._later(PAUSE, lambda: None)
            return
        job, spec, shards = answer
        self._specs = {job: spec}
        works = [Work(job, spec, "", shard) for shard in shards] or [Work(job, spec)]
        self.session.assigned(works)

    # ------------------------------------------------------------ the worker

    def _work(self) -> None:
        work = self.session.next_work()
        if work is not None:
            seconds = PLANNING_SECONDS if work.shard is None else self._speed
            self._later(seconds, self._done, work)

    def _done(self, work: Work) -> None:
        if self.session.running is not work:
            return  # it was called off
        outcome = self._outcome(work)
        self._world.say(f"{self.name} has {work.held}: {type(outcome).__name__}")
        self.session.finished(outcome)

    def _outcome(self, work: Work) -> Any:
        poison = "poison" in self._world.scenario.faults
        if self._world.strikes("refuse"):
            self._blind_until = self._world.now + 2.0
        if self._world.now < self._blind_until:
            return ModelNotFound("it cannot be read here")
        if work.shard is None:
            return JobPlan("{}", plan_of(self._shards[work.spec_json]).shards)
        index = work.shard.index
        if (poison and index == 0) or (not poison and self._world.strikes("crash")):
            self._witness.struck(self.name, work.job, index)
            return WorkerCrashed("it died")
        self.scored[work.held] += 1
        scored = make_scored(index, seconds=self._speed)
        if not poison and self._world.strikes("wrong"):
            self._witness.struck(self.name, work.job, index)
            return with_partial(scored, tokens=11)
        if self._world.strikes("diverge"):
            other = make_scored(index, shift=1 + self.life, seconds=self._speed)
            # Both values are reported, in whichever order they arrive: one by the session, one out of the blue.
            scored, stray = (other, scored) if self._world.network.random() < 0.5 else (scored, other)
            request = {"job": work.job, "scored": stray, "wrong": False}
            self._later(self._world.network.uniform(0.0, 3.0), self._call, "scored", request, lambda verdict: None)
            self._witness.computed(work.job, stray.partial)
        self._witness.computed(work.job, scored.partial)
        return scored

    # ------------------------------------------------------------ the disk

    def _store(self) -> None:
        if self._storing:
            return
        for key in self.session.to_remove():
            entry = self.disk.pop(key, None)
            if entry is not None:
                self._witness.removed(self.name, key, entry.scored.partial)
        entries = self.session.to_store()
        if entries:
            self._storing = True
            self._later(STORE, self._stored, entries)

    def _stored(self, entries: list[SpoolEntry]) -> None:
        if self._world.now < self._full_until and self._world.chaotic:
            self.session.store_failed("no space")
            self._later(STORE_RETRY, self._stored, self.session.to_store())
            return
        self._storing = False
        self.disk.update({entry.key: entry for entry in entries})
        self.session.stored(entry.key for entry in entries)

    # ------------------------------------------------------------ the report stream

    def _report(self) -> None:
        if self._stream < 0:
            if not self.session.has_results or self._world.now < self._reopen:
                return
            self._stream = self._world.serial()
            self._heard = self._world.now
            self.session.stream_opened()
            self._later(PATIENCE, self._watch, self._stream)
        for message in self.session.to_send():
            self._send(self._stream, message.sequence, message.job, message.body)

    def _send(self, stream: int, sequence: int, job: str, body: ScoredShard | Failed | PlanPart) -> None:
        match body:
            case ScoredShard():
                kind, request = "scored", {"job": job, "scored": body, "wrong": body.partial.tokens == 11}
            case Failed():
                kind, request = "failed", {"job": job, "shard": body.shard, "code": body.error.code}
            case PlanPart():
                kind, request = "planned", {"job": job, "shards": len(body.shards)}
        self._call(kind, request, lambda verdict: self._acknowledged(stream, sequence, verdict))

    def _acknowledged(self, stream: int, sequence: int, verdict: Any) -> None:
        if stream == self._stream:
            self._heard = self._world.now
            self.session.acknowledged(sequence, Verdict[verdict.name], "")

    def _watch(self, stream: int) -> None:
        """Give a stream up on which something was lost, as TCP would."""
        if stream != self._stream:
            return
        if self.session.has_results and self._world.now - self._heard >= PATIENCE:
            self._stream = -1
            self._reopen = self._world.now + PAUSE
            self._later(PAUSE, lambda: None)
        else:
            self._later(PATIENCE, self._watch, stream)
