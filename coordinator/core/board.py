"""Jobs, nodes and leases together: what must change together, changes here. What should change is the scheduler's.

Durable state changes in ``apply`` alone; leases, nodes and incarnations are soft and change in the other methods.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coordinator.core import facts as f
from coordinator.core.calls import PLANNING, Holding, NodeInfo
from coordinator.core.facts import Fact, Facts
from coordinator.core.jobs import Job, Shard
from coordinator.core.nodes import Lease, Node
from coordinator.core.states import JobState, NodeEvent, NodeState, Role, ShardState
from eval_kernel.errors import FedevalError, JournalCorrupt, NotRegistered, StaleIncarnation, UnknownJob


class Board:
    """All that the scheduler knows."""

    def __init__(self, lease_seconds: float) -> None:
        """Begin with nothing."""
        self.jobs: dict[str, Job] = {}  # in order of submission
        self.keys: dict[str, str] = {}  # client key -> job
        self.nodes: dict[str, Node] = {}
        self.nodes_changed = 0
        self.offers = 0
        self.draining = False
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
            self.jobs[fact.job] = Job(fact, len(self.jobs))
            self.keys[fact.key] = fact.job
            self.offers += 1
            return
        job = self.jobs[fact.job]
        job.apply(fact)  # first, since it may refuse: then nothing has changed
        match fact:
            case f.JobFailed() | f.JobCancelled():
                self.return_job(job, self.nodes.values())
            case f.JobPlanned():
                self.offers += 1
                self._drop(job.plan_lease)
                job.plan_lease = None
            case f.ShardCommitted() | f.ShardFailed(gives_up=True) | f.ShardExpired(gives_up=True):
                shard = job.shards[fact.shard]
                self._drop(shard.lease)
                shard.lease = None
        if job.settled:
            for node in self.nodes.values():
                node.forget(fact.job)

    def durable(self) -> list[dict[str, Any]]:
        """Return what the facts came to, in canonical form: equal before a crash and after the replay."""
        return [job.durable() for job in self.jobs.values()]

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
        fresh = self.nodes[info.agent] = Node(info, now)
        fresh.shards_done = old.shards_done
        return interrupted

    def lease(self, node: Node, job: Job, shard: Shard | None, now: float) -> None:
        """Give a shard, or (``None``) the planning of the job, to a node."""
        holding = Holding(job.id, PLANNING if shard is None else shard.plan.index)
        lease = Lease(node.agent, holding, now + self._lease_seconds)
        if shard is None:
            job.plan_lease = lease
            job.plan_granted.add(node.agent)
            job.changed += 1
        else:
            job.lease_shard(shard, lease)
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
            free = shard.state is ShardState.WAITING and node.agent not in shard.failed_on
            if free and self._able(node, job, Role.FORWARD, now):
                job.adopt(shard)
                self.lease(node, job, shard, now)
                return True
        return False

    def give_back(self, lease: Lease) -> None:
        """End a lease: its work waits again."""
        self.offers += 1
        self._drop(lease)
        job = self.jobs[lease.holding.job]
        if lease.holding.shard == PLANNING:
            job.plan_lease = None
            job.changed += 1
        else:
            job.return_shard(job.shards[lease.holding.shard])

    def return_job(self, job: Job, nodes: Iterable[Node]) -> None:
        """End all leases on a job that these nodes hold."""
        for node in nodes:
            for lease in [lease for holding, lease in node.leases.items() if holding.job == job.id]:
                self.give_back(lease)

    def _drop(self, lease: Lease | None) -> None:
        """Remove a lease from its node."""
        if lease is not None:
            del self.nodes[lease.agent].leases[lease.holding]

    def _able(self, node: Node, job: Job, role: Role, now: float) -> bool:
        """Whether a node may go on with work it has; a draining one may."""
        return node.connected and node.has(role) and node.refuses(job.id, now) is None


def _stale(agent: str) -> str:
    return f"a later life of agent {agent!r} has registered; this one must stop"
