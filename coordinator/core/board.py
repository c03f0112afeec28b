"""Jobs, nodes and leases together: what must change together, changes here. What should change is the scheduler's.

Durable state changes in ``apply`` alone; leases, nodes and incarnations are soft and change in the other methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.core import facts as f
from coordinator.core.affinity import typical
from coordinator.core.calls import PLANNING, Holding, NodeInfo
from coordinator.core.facts import Fact, Facts
from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Lease, Node
from coordinator.core.queueing import Shares
from coordinator.core.speculation import Tails
from coordinator.core.states import JobState, NodeEvent, NodeState, Role, ShardState
from coordinator.core.throughput import Fleet, Fleets
from coordinator.core.trust import Audit
from eval_kernel.errors import FedevalError, JournalCorrupt, NotRegistered, StaleIncarnation, UnknownJob


class Board:
    """All that the scheduler knows."""

    def __init__(self, lease_seconds: float) -> None:
        """Begin with nothing."""
        self.jobs: dict[str, Job] = {}  # in order of submission
        self.keys: dict[str, str] = {}  # client key -> job
        self.nodes: dict[str, Node] = {}
        self.open: dict[str, Job] = {}  # those that are not settled, in order of submission
        self.nodes_changed = 0
        self.members = 0  # grows when a node comes or goes, or may or may not take a job any more
        self.offers = 0
        self.wakes: set[str] = set()  # agents that were given nothing, and may be given something now
        self.held_back: set[str] = set()  # agents that asked and were given nothing
        self.fleets = Fleets()
        self.shares = Shares()
        self.tails = Tails()
        self.draining = False
        self.quarantined: dict[str, str] = {}  # agents that compute otherwise than others -> what was seen
        self.packers: set[str] = set()  # agents that serve packs
        self._lease_seconds = lease_seconds
        self._superseded: dict[str, set[str]] = {}  # agent -> incarnations that have been replaced

    # ------------------------------------------------------------ durable

    def replay(self, facts: Iterable[Fact]) -> None:
        """Apply a journal's facts in order; raises ``JournalCorrupt`` for one that cannot follow those before it."""
        for number, fact in enumerate(facts, start=1):
            try:
                self.apply(fact)
            except (KeyError, IndexError, ValueError, FedevalError) as error:
                raise JournalCorrupt(
                    f"fact {number} of the journal ({fact.kind}, job {fact.job}) contradicts those before it: "
                    f"{error!r}; restore the data directory from a backup, or start with an empty one"
                ) from None

    def record(self, *facts: Fact) -> Facts:
        """Make facts true and return them, to be journaled."""
        for fact in facts:
            self.apply(fact)
        return facts

    def apply(self, fact: Fact) -> None:
        """Make one fact true, live or in replay. Raises as ``Job.apply``; ``KeyError`` for an unknown job."""
        if isinstance(fact, f.JobSubmitted):
            if fact.job in self.jobs or fact.key in self.keys:
                raise ValueError(f"the job {fact.job} or its key {fact.key!r} was used before")
            self.jobs[fact.job] = self.open[fact.job] = Job(fact, len(self.jobs))
            self.keys[fact.key] = fact.job
            self.shares.enter(self.jobs[fact.job])
            self.offers += 1
            return
        job = self.jobs[fact.job]
        match fact:
            case f.AgentQuarantined():
                self._quarantine(fact)
                return
            case f.JobReused():
                job.reuse(self.jobs[fact.source], fact.at)
            case f.ShardsWithdrawn():
                audits = [job.audits.of.get(index) for index in fact.shards]
                job.apply(fact)
                for lease in [audit.lease for audit in audits if audit is not None and audit.lease is not None]:
                    self.give_back(lease)
                self.offers += 1
            case _:
                job.apply(fact)  # first, since it may refuse: then nothing has changed
        match fact:
            case f.JobFailed() | f.JobCancelled():
                self.return_job(job, self.nodes.values())
            case f.JobPlanned():
                self.offers += 1
                if job.plan_lease is not None:
                    self._drop(job, job.plan_lease)
                job.plan_lease = None
            case f.ShardCommitted() | f.ShardFailed(gives_up=True) | f.ShardExpired(gives_up=True):
                shard = job.shards[fact.shard]
                for lease in shard.leases:
                    self._drop(job, lease)
                    job.end_lease(shard, lease)
        if job.settled and self.open.pop(fact.job, None) is not None:
            self.return_job(job, self.nodes.values())  # what is left are second opinions
            self.fleets.forget(fact.job)
            self.tails.forget(fact.job)
            self.shares.leave(job)
            for node in self.nodes.values():
                node.refusals.pop(fact.job, None)

    def durable(self) -> list[dict[str, Any]]:
        """Return what the facts came to, in canonical form: equal before a crash and after the replay."""
        quarantined = [{"quarantined": dict(self.quarantined)}] if self.quarantined else []
        return [job.durable() for job in self.jobs.values()] + quarantined

    # ------------------------------------------------------------ finding

    def find(self, prefix: str) -> Job:
        """Return a job by id or unambiguous prefix of it; raises ``UnknownJob``."""
        if prefix in self.jobs:
            return self.jobs[prefix]
        matches = [name for name in self.jobs if prefix and name.startswith(prefix)]
        if len(matches) == 1:
            return self.jobs[matches[0]]
        if matches:
            raise UnknownJob(
                f"{len(matches)} jobs begin with {prefix!r}: {', '.join(matches[:5])}; give more of the id"
            )
        raise UnknownJob(f"no job {prefix!r} is known here; `eval-coordinator jobs` lists them")

    def node(self, agent: str, incarnation: str, now: float, *, may_have_left: bool = False) -> Node:
        """Return the node that calls, having heard it. Raises ``StaleIncarnation``, ``NotRegistered``."""
        if incarnation in self._superseded.get(agent, ()):
            raise StaleIncarnation(_stale(agent))
        node = self.nodes.get(agent)
        if node is None or node.info.incarnation != incarnation:
            raise NotRegistered(f"agent {agent!r} is not registered here; register, then repeat the call")
        if not node.connected and not (may_have_left and node.state is NodeState.LEFT):
            raise NotRegistered(f"agent {agent!r} is {node.state.name} here; register again, then repeat the call")
        node.heard = now
        if node.state is NodeState.SUSPECT:
            node.advance(NodeEvent.HEAR)
            self.nodes_changed += 1
            self.members += 1
        return node

    # ------------------------------------------------------------ nodes and leases

    def register(self, info: NodeInfo, now: float) -> Holding | None:
        """Take a node in; a fresh incarnation ends the life before, whose leases return.

        Returns the work under lease that this interrupted, if any. Raises ``StaleIncarnation``.
        """
        superseded = self._superseded.setdefault(info.agent, set())
        if info.incarnation in superseded:
            raise StaleIncarnation(_stale(info.agent))
        self.nodes_changed += 1
        self.members += 1
        (self.packers.add if info.pack_address else self.packers.discard)(info.agent)
        old = self.nodes.get(info.agent)
        if old is None:
            self.nodes[info.agent] = Node(info, now)
            return None
        if info.incarnation == old.info.incarnation:
            old.advance(NodeEvent.REGISTER)
            old.info, old.heard = info, now
            old.refusals.clear()
            return None
        superseded.add(old.info.incarnation)
        interrupted = old.running if old.running in old.leases else None
        for lease in list(old.leases.values()):
            self.give_back(lease)
        self.shares.place(old, "")
        fresh = self.nodes[info.agent] = Node(info, now)
        fresh.shards_done = old.shards_done
        return interrupted

    def lease(self, node: Node, job: Job, shard: Shard | None, now: float) -> None:
        """Give a shard, or (``None``) the planning of the job, to a node."""
        holding = Holding(job.id, PLANNING if shard is None else shard.plan.index)
        lease = Lease(node.agent, holding, now + self._lease_seconds)
        if not node.leases:
            node.busy_since = now
        if shard is not None and shard.state is ShardState.COMMITTED:
            lease.audit, lease.cost = True, shard.plan.input_tokens
            job.audits.of.setdefault(shard.plan.index, Audit(shard.plan.index)).lease = lease
            self.shares.place(node, job.key)
        elif shard is None:
            job.plan_lease = lease
            job.plan_granted.add(node.agent)
            job.changed += 1
        else:
            lease.cost = shard.plan.input_tokens
            rate = node.rate(job.key) or typical(node)
            lease.charge = lease.cost / rate if rate > 0 else 0.0
            job.lease_shard(shard, lease)
            self.shares.hold(job, lease.charge)
            self.shares.place(node, job.key)
        node.leases[holding] = lease

    def extend(self, node: Node, holding: Holding, now: float) -> bool:
        """Renew a node's lease, or give it the work back if nobody else has it; false where it is lost to the node."""
        lease = node.leases.get(holding)
        if lease is not None:
            lease.expires = now + self._lease_seconds
            return True
        job = self.jobs[holding.job]
        if holding.shard == PLANNING:
            if (
                job.state is JobState.PLANNING
                and job.plan_lease is None
                and self._able(node, job, Role.PREPROCESS, now)
            ):
                self.lease(node, job, None, now)
                return True
        elif 0 <= holding.shard < len(job.shards):
            shard = job.shards[holding.shard]
            # A node that has just reported a failure of the shard may still name it in a call on its way.
            able = node.agent not in shard.failed_on and self._able(node, job, Role.FORWARD, now)
            if able and shard.state is ShardState.WAITING:
                job.adopt(shard)
                self.lease(node, job, shard, now)
                return True
            audit = job.audits.open.get(holding.shard)
            if able and audit is not None and job.wants(audit, node.agent):
                self.lease(node, job, shard, now)
                return True
            # What was taken from it as not begun had begun: now there are two at it.
            if able and holding == node.running and len(shard.leases) == 1:
                self.lease(node, job, shard, now)
                return True
        return False

    def give_back(self, lease: Lease) -> None:
        """End a lease: its work waits again."""
        self.offers += 1
        job = self.jobs[lease.holding.job]
        self._drop(job, lease)
        if lease.audit:
            job.audits.of[lease.holding.shard].lease = None
        elif lease.holding.shard == PLANNING:
            job.plan_lease = None
            job.changed += 1
        else:
            job.return_shard(job.shards[lease.holding.shard], lease)

    def take_over(self, node: Node, job: Job, shard: Shard, now: float) -> None:
        """Give a node a shard that another one holds and has not begun: that one learns it from its next heartbeat."""
        (old,) = shard.leases
        self.lease(node, job, shard, now)
        self._drop(job, old)
        job.return_shard(shard, old)

    def hold_back(self, node: Node) -> None:
        """Note that a node asked and was given nothing: there may be something for it soon."""
        node.held_back = True
        self.held_back.add(node.agent)

    def freed(self, node: Node) -> None:
        """A node has finished something: if it asked in vain before, it should ask again."""
        if node.held_back:
            node.held_back = False
            self.held_back.discard(node.agent)
            self.wakes.add(node.agent)

    def look_again(self, now: float) -> None:
        """Have the nodes that asked in vain ask again while others still hold something."""
        if self.held_back and any(job.counts[ShardState.SCORING] for job in self.open.values()):
            self.wakes |= self.held_back
            self.held_back.clear()

    def gone(self, node: Node) -> None:
        """A node has come back, fallen silent or left."""
        self.members += 1
        if not node.connected:
            self.held_back.discard(node.agent)
            self.shares.place(node, "")

    def fleet(self, job: Job, now: float) -> Fleet:
        """Return the nodes that may score a job."""
        return self.fleets.of(job.id, job.key, self.nodes.values(), self.members, now)

    def return_job(self, job: Job, nodes: Iterable[Node]) -> None:
        """End all leases on a job that these nodes hold."""
        for node in nodes:
            for lease in [lease for holding, lease in node.leases.items() if holding.job == job.id]:
                self.give_back(lease)

    def _quarantine(self, fact: f.AgentQuarantined) -> None:
        """Take from an agent all it holds; it is given nothing more."""
        self.quarantined[fact.agent] = fact.message
        node = self.nodes.get(fact.agent)
        if node is not None:
            for lease in list(node.leases.values()):
                self.give_back(lease)
            self.held_back.discard(fact.agent)
            self.shares.place(node, "")
        self.members += 1
        self.nodes_changed += 1

    def _drop(self, job: Job, lease: Lease) -> None:
        """Remove a lease from its node."""
        del self.nodes[lease.agent].leases[lease.holding]
        self.shares.release(job, lease.charge)

    def _able(self, node: Node, job: Job, role: Role, now: float) -> bool:
        """Whether a node may go on with work it has; a draining one may."""
        known = node.connected and node.agent not in self.quarantined
        return known and node.has(role) and node.refuses(job.id, now) is None


def _stale(agent: str) -> str:
    return f"a later life of agent {agent!r} has registered; this one must stop"
