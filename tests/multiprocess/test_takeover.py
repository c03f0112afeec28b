"""A leader and a coordinator that stands by, on one PostgreSQL journal: whatever happens, nothing is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator.core.facts import ShardCommitted
from coordinator.fleet import Process
from coordinator.journal.postgres import verified
from coordinator.journal.postgres_upkeep import read_only
from coordinator.serve import ADDRESS_FILE
from eval_kernel.errors import LeadershipLost
from eval_kernel.spec import JobSpec
from tests.support.cluster import Cluster
from tests.support.fake_engine import fake_spec, reference_tally
from tests.support.postgres import PASSWORD, PASSWORD_IN_URL, PostgresServer
from tests.support.processes import until

#: Seconds within which somebody must lead again.
TAKEOVER = 10.0
SHARDS = 60


def says(process: Process, text: str) -> bool:
    """Whether a process's log has a line with this text."""
    return text in process.log.read_text(errors="replace")


def commits(url: str) -> Counter[int]:
    """Return how often the journal commits each shard, every row verified."""
    database, connection, identity = read_only(url)
    with connection:
        row = connection.execute("SELECT count(*) FROM fedeval_fact").fetchone()
        assert row is not None
        facts = verified(connection, database, identity, row[0])
        return Counter(fact.shard for fact in facts if isinstance(fact, ShardCommitted))


async def led(cluster: Cluster, url: str) -> Process:
    """Start a standby and three agents beside the leader; return the standby once it stands by."""
    standby = cluster.start_standby()
    for name in ("one", "two", "three"):
        cluster.start_agent(name)
    await until(lambda: says(standby, "standing by") or standby.code is not None)
    assert standby.code is None, cluster.logs()
    assert not (cluster.standby_data / ADDRESS_FILE).exists()
    return standby


def check(report: dict[str, Any], spec: JobSpec, url: str, directory: Path) -> None:
    """Hold a report and the journal against the reference."""
    assert report["complete"]
    assert reference_tally(spec).digest() == report["totals"]["digest"]
    assert SHARDS == report["accounting"]["accepted"]
    assert [] == report["accounting"]["divergent"]
    assert dict.fromkeys(range(SHARDS), 1) == commits(url)
    for log in directory.glob("*.log"):
        assert not any(secret in log.read_text(errors="replace") for secret in (PASSWORD, PASSWORD_IN_URL))


def test_a_killed_leader_is_followed_within_seconds_and_nothing_is_lost(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """SIGKILL under load: the standby listens within ten seconds, and the job ends with the same bits."""
    url = postgres_server.journal()
    spec = fake_spec("killed", shards=SHARDS, delay=0.1, span=5, seed=7)

    async def main() -> dict[str, Any]:
        async with Cluster(tmp_path, serve=("--journal", url)) as cluster:
            await led(cluster, url)
            job = await cluster.submit(spec)
            await cluster.reach(job, 15)
            begin = time.monotonic()
            cluster.kill_coordinator()
            await until((cluster.standby_data / ADDRESS_FILE).exists, TAKEOVER)
            print(f"the standby listened {time.monotonic() - begin:.2f} s after SIGKILL of the leader")

            assert 15 <= await cluster.done(job)
            return await cluster.report(job)

    check(asyncio.run(main()), spec, url, tmp_path)


def test_a_leader_that_stands_still_is_followed_and_cannot_write_when_it_wakes(
    tmp_path: Path, postgres_server: PostgresServer
) -> None:
    """SIGSTOP under load: the standby leads within ten seconds; after SIGCONT the old leader ends with its own code."""
    url = postgres_server.journal()
    spec = fake_spec("stopped", shards=SHARDS, delay=0.1, span=5, seed=8)

    async def main() -> dict[str, Any]:
        async with Cluster(tmp_path, serve=("--journal", url)) as cluster:
            standby = await led(cluster, url)
            job = await cluster.submit(spec)
            await cluster.reach(job, 15)
            old = cluster.coordinator
            assert old is not None
            begin = time.monotonic()
            os.kill(old.pid, signal.SIGSTOP)
            try:
                await until(lambda: says(standby, "leading"), TAKEOVER)
                print(f"the standby led {time.monotonic() - begin:.2f} s after SIGSTOP of the leader")
                # The stopped process still has the address: the kernel lets nobody else listen there.
                await until(lambda: says(standby, "waiting for the address"), 5)
                before = sum(commits(url).values())
            finally:
                os.kill(old.pid, signal.SIGCONT)
            await until(lambda: old.code is not None, 10)

            assert LeadershipLost.exit_code == old.code
            assert "another coordinator leads" in old.last_line()
            assert not says(old, "Traceback")
            assert not says(old, "never retrieved")
            await until((cluster.standby_data / ADDRESS_FILE).exists, 10)
            assert before <= await cluster.done(job)
            return await cluster.report(job)

    check(asyncio.run(main()), spec, url, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_leaders_killed_one_after_the_other_change_no_bit(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Each one that stands by leads, and is killed at a random moment; the job ends in the eleventh epoch, exact."""
    url = postgres_server.journal()
    spec = fake_spec("often", shards=SHARDS, delay=0.2, span=5, seed=9)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: put it in place of SystemRandom to repeat the choice of instants")
    chance = random.Random(seed)
    instants = sorted(chance.sample(range(1, SHARDS - 5), 10))
    seconds = []

    async def main() -> dict[str, Any]:
        async with Cluster(tmp_path, serve=("--journal", url)) as cluster:
            leader = cluster.coordinator
            assert leader is not None
            for name in ("one", "two", "three"):
                cluster.start_agent(name)
            job = await cluster.submit(spec)
            for number, instant in enumerate(instants):
                standby = cluster.start_standby(f"standby-{number}")
                await until(lambda standby=standby: says(standby, "standing by"))
                await cluster.reach(job, instant)
                await asyncio.sleep(chance.uniform(0, 0.1))  # the instant itself is random too
                told = await cluster.done(job)
                begin = time.monotonic()
                leader.kill()
                await until((cluster.directory / f"standby-{number}" / ADDRESS_FILE).exists, TAKEOVER)
                seconds.append(time.monotonic() - begin)
                leader = standby

                assert told <= await cluster.done(job)
            return await cluster.report(job)

    check(asyncio.run(main()), spec, url, tmp_path)
    print(f"takeovers: {', '.join(f'{second:.2f}' for second in sorted(seconds))} s")
    with postgres_server.admin(url=url) as session:
        assert (11,) == session.execute("SELECT epoch FROM fedeval_leader").fetchone()
