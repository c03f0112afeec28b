"""Every decision of the coordinator, as one plain class: methods in, facts out, ``now`` an argument.

Clock, disk and wire are the runtime's; theory and invariants are in ../DESIGN.md. State changes at once in memory.
**The facts a call returns must be durable before anything that was learnt from it, or after it, is told to anyone.**
``now`` is seconds on any clock that never steps back while the process lives; leases and silences are measured on it.
Facts carry it for people (``at``), so a clock that also goes on across restarts makes ages right there too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.core import facts as f
from coordinator.core import invariants
from coordinator.core.calls import (
    DEFAULT_OPTIONS,
    Holding,
    NodeInfo,
    PlanWork,
    RenewAnswer,
    ScoreWork,
    SubmitOptions,
    Submitted,
)
from coordinator.core.explain import reasons
from coordinator.core.facts import Fact, Facts
from coordinator.core.nodes import Node
from coordinator.core.placement import job_to_plan, shards_to_score
from coordinator.core.results import Results, one_line
from coordinator.core.states import JobState, NodeEvent, NodeState
from coordinator.core.viewing import job_view, missing, node_view
from coordinator.core.views import Commit, JobView, Missing, NodeView
from eval_kernel.errors import JobKeyConflict


class Scheduler(Results):
    """Jobs, shards, nodes and leases, and what follows from each call."""

    # ------------------------------------------------------------ restart

    def replay(self, facts: Iterable[Fact]) -> None:
        """Apply a journal's facts in order; raises ``JournalCorrupt`` for one that cannot follow those before it."""
        self._board.replay(facts)

    def apply(self, fact: Fact) -> None:
        """Apply one fact. Raises ``IllegalTransition``, or a ``LookupError`` or ``ValueError``, if it cannot follow."""
        self._board.apply(fact)

    def durable(self) -> list[dict[str, Any]]:
        """Return what the facts came to, in canonical form: equal before a crash and after the replay."""
        return self._board.durable()

    # ------------------------------------------------------------ clients

    def submit(
        self, job: str, key: str, spec_json: str, name: str, now: float, options: SubmitOptions = DEFAULT_OPTIONS
    ) -> Submitted:
        """Make the job ``job`` (an id chosen by the caller), or return the one made under this key before.

        Raises ``JobKeyConflict`` for the same key with another specification, ``ValueError`` for an id in use.
        """
        if key in self._board.keys:
            old = self._board.jobs[self._board.keys[key]]
            if old.submitted.spec_json != spec_json:
                raise JobKeyConflict(
                    f"the key {key!r} was used for job {old.id} with another specification; choose another key"
                )
            return Submitted(old.id, True, ())
        o = options
        fact = f.JobSubmitted(job, key, name, spec_json, now, o.submitter, o.priority, o.max_nodes, o.fresh)
        return Submitted(job, False, self._board.record(fact))

    def cancel(self, job: str, reason: str, now: float) -> Facts:
        """Cancel a job named by id or prefix; a settled one stays as it is. Raises ``UnknownJob``."""
        found = self._board.find(job)
        return () if found.settled else self._board.record(f.JobCancelled(found.id, one_line(reason), now))

    # ------------------------------------------------------------ agents: life and leases

    def register(self, info: NodeInfo, now: float) -> Facts:
        """Take a node in, replacing what it had announced; a fresh incarnation ends the one before.

        The old incarnation's leases return, and the shard it was running counts an expiry. Raises
        ``StaleIncarnation`` for an incarnation that has been replaced itself.
        """
        interrupted = self._board.register(info, now)
        return () if interrupted is None else self._expired(info.agent, interrupted, now)

    def acquire(
        self, agent: str, incarnation: str, max_shards: int, loaded_job: str, now: float
    ) -> PlanWork | ScoreWork | None:
        """Give the node work under lease: a job to plan, or at most ``max_shards`` shards of one job; or nothing.

        ``loaded_job`` (may be empty) is the job whose model the node has in memory: it is preferred.
        Raises ``StaleIncarnation``, ``NotRegistered``.
        """
        node = self._board.node(agent, incarnation, now)
        if self._board.draining or node.state is not NodeState.ACTIVE:
            return None
        board = self._board
        quarantined = agent in board.quarantined
        job = None if quarantined else job_to_plan(node, board.open.values(), now)
        if job is not None:
            board.lease(node, job, None, now)
            return PlanWork(job.id, job.submitted.spec_json)
        if max_shards < 1:
            return None
        if loaded_job in board.jobs:
            node.loaded = board.jobs[loaded_job].key
        choice = shards_to_score(node, board, self._config, max_shards, loaded_job, now)
        if choice is None:
            board.hold_back(node)
            return None
        job = choice.job
        assert job.plan is not None
        node.placed[job.id] = choice.why
        for shard in choice.shards:
            if shard.plan.index in choice.stolen:
                board.take_over(node, job, shard, now)
            else:
                board.lease(node, job, shard, now)
        plans = tuple(shard.plan for shard in choice.shards)
        return ScoreWork(job.id, job.submitted.spec_json, job.plan.manifest, plans)

    def renew(
        self,
        agent: str,
        incarnation: str,
        holdings: Iterable[Holding],
        activity: str,
        running: Holding | None,
        draining: bool,
        leaving: bool,
        now: float,
    ) -> RenewAnswer:
        """Extend the leases named, and tell what has become of each.

        A lease that is not named is left to run out: the answer that granted it may be on its way. Work that the node
        names and that nobody else holds (this coordinator has restarted, or the lease ran out) becomes its own again.
        ``leaving`` returns everything at once. Raises ``StaleIncarnation``, ``NotRegistered``.
        """
        node = self._board.node(agent, incarnation, now, may_have_left=leaving)
        before = node.state, node.activity, node.running
        node.activity, node.running = activity, running
        if node.state is NodeState.ACTIVE and draining:
            node.advance(NodeEvent.DRAIN)
        elif node.state is NodeState.DRAINING and not draining and not leaving:
            node.advance(NodeEvent.RESUME)
        lost: list[Holding] = []
        done: list[Holding] = []
        settled: dict[str, None] = {}
        for holding in dict.fromkeys(holdings):
            job = self._board.jobs.get(holding.job)
            if job is None or job.settled:
                settled[holding.job] = None
            elif not (leaving or self._board.extend(node, holding, now)):
                lost.append(holding)
                if holding == running and holding.shard in job.commits:
                    done.append(holding)
        if leaving and node.state is not NodeState.LEFT:
            for lease in list(node.leases.values()):
                self._board.give_back(lease)
            node.advance(NodeEvent.LEAVE)
            self._board.gone(node)
        self._board.nodes_changed += before != (node.state, node.activity, node.running)
        return RenewAnswer(tuple(lost), tuple(settled), self._board.draining, tuple(done))

    def pack_addresses(self, agent: str) -> tuple[str, ...]:
        """Return where an agent gets packs: from others of its own site that make them and are there, by name."""
        node = self._board.nodes.get(agent)
        if node is None:
            return ()
        found = (self._board.nodes[name] for name in sorted(self._board.packers))
        return tuple(
            other.info.pack_address
            for other in found
            if other is not node and other.connected and other.info.site == node.info.site
        )

    # ------------------------------------------------------------ time

    def drain(self) -> None:
        """Give nothing new out from now on; results are still taken."""
        self._board.draining = True
        self._board.nodes_changed += 1

    def tick(self, now: float) -> Facts:
        """Let leases run out and silent nodes be suspected, then lost. Wanted about once a second."""
        facts: Facts = ()
        self._board.look_again(now)
        for job in list(self._board.open.values()):
            facts += self._close_audits(job, now)
        for node in self._board.nodes.values():
            if now >= node.quiet_until:
                facts += self._expire(node, now)
            for lapsed in [name for name in node.refusals if node.refuses(name, now) is None]:
                del node.refusals[lapsed]
                self._board.offers += 1
            before = node.state
            # A lease never outlives its node: it is granted or renewed by a call, which is a sign of life.
            if node.connected and now >= node.heard + self._config.lease_seconds:
                node.advance(NodeEvent.SILENT)
            elif node.state is NodeState.ACTIVE and now >= node.heard + self._config.suspect_after_seconds:
                node.advance(NodeEvent.OVERDUE)
            if before is not node.state:
                self._board.nodes_changed += 1
                # What was kept for a node that is gone now may go to others.
                self._board.offers += 1
                self._board.gone(node)
        return facts

    def _expire(self, node: Node, now: float) -> Facts:
        """Let a node's leases run out."""
        facts: Facts = ()
        for lease in [lease for lease in node.leases.values() if now >= lease.expires]:
            # An expiry before it may have settled the job, and ended this lease with it.
            if lease.holding in node.leases:
                self._board.give_back(lease)
                if lease.holding == node.running:
                    facts += self._expired(node.agent, lease.holding, now)
        # Leases are only ever extended, and new ones end later: nothing runs out before.
        earliest = min((lease.expires for lease in node.leases.values()), default=now + self._config.lease_seconds)
        node.quiet_until = earliest
        return facts

    # ------------------------------------------------------------ readers

    def job(self, prefix: str) -> JobView:
        """Return a job by id or unambiguous prefix of it; raises ``UnknownJob``."""
        job = self._board.find(prefix)
        return job_view(job, self._board.nodes, self.changed(job.id))

    def state(self, prefix: str) -> JobState:
        """Return where a job stands; raises ``UnknownJob``."""
        return self._board.find(prefix).state

    def jobs(self) -> tuple[JobView, ...]:
        """Return all jobs, newest first."""
        return tuple(self.job(name) for name in reversed(self._board.jobs))

    def commits(self, prefix: str) -> tuple[Commit, ...]:
        """Return who scored each accepted shard of a job, and how, in order of shards; raises ``UnknownJob``."""
        return tuple(commit for _, commit in sorted(self._board.find(prefix).commits.items()))

    def missing(self, prefix: str) -> tuple[Missing, ...]:
        """Return the shards of a job that have no partial, in order, and why; raises ``UnknownJob``."""
        return missing(self._board.find(prefix))

    def nodes(self, now: float) -> tuple[NodeView, ...]:
        """Return every node known since the coordinator started, by name."""
        why = self._board.quarantined
        return tuple(node_view(node, now, why.get(name)) for name, node in sorted(self._board.nodes.items()))

    def waiting(self, prefix: str, now: float) -> list[str]:
        """Return why a job waits, one line each (see ``explain.reasons``); raises ``UnknownJob``."""
        return reasons(self._board.find(prefix), self._board.nodes.values(), self._board.draining, now)

    def changed(self, prefix: str) -> int:
        """Return a number that grows with each change of a job, or of a node, worth showing; raises ``UnknownJob``."""
        return self._board.find(prefix).changed + self._board.nodes_changed

    def wakes(self) -> set[str]:
        """Return, once, the agents that were given nothing and should ask again now."""
        wakes, self._board.wakes = self._board.wakes, set()
        return wakes

    @property
    def offers(self) -> int:
        """A number that grows whenever ``acquire`` may give something that it did not give before."""
        return self._board.offers

    def check(self) -> None:
        """Raise ``AssertionError`` with a story when an invariant does not hold."""
        invariants.check(self._board.jobs, self._board.keys, self._board.nodes)
