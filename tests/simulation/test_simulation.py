"""Thousands of small worlds full of faults, each repeatable by its seed; bugs are planted to see them noticed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator.core.calls import Verdict
from tests.simulation.mutants import MUTANTS, planted
from tests.simulation.run import Failure, check, failure, run, shrink
from tests.simulation.scenario import FAULTS, Scenario

ROOT = Path(__file__).resolve().parents[2]
#: Seeds of `make test`: at least 2,000, in blocks so that a failing one stops little.
BLOCKS, BLOCK = 10, 250


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_fault_breaks_a_promise(block: int) -> None:
    """Whatever happens: nothing told is lost, each shard counts once, totals are exact, and all jobs come to an end."""
    begun, events = time.perf_counter(), 0
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        events += check(seed).events
    seconds = time.perf_counter() - begun
    print(f"{BLOCK} seeds, {events:,} events, {events / seconds:,.0f} events/s")


def test_every_fault_strikes() -> None:
    """Over its seeds the simulator does each thing that it says it does, often, and sees each verdict."""
    worlds = [run(Scenario.of(seed)) for seed in range(200)]
    struck = {fault: sum(world.happened[fault] for world in worlds) for fault in FAULTS if fault != "poison"}
    verdicts = {verdict: sum(world.witness.verdicts[verdict] for world in worlds) for verdict in Verdict}

    assert {} == {fault: times for fault, times in struck.items() if times < 10}
    assert {} == {verdict: times for verdict, times in verdicts.items() if times < 10}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_noticed(name: str) -> None:
    """Each bug makes at least one of the seeds of this suite fail, and is gone afterwards."""
    with planted(MUTANTS[name]):
        noticed = next((seed for seed in range(BLOCKS * BLOCK) if failure(Scenario.of(seed)) is not None), None)

    assert noticed is not None, f"{name}: not noticed in {BLOCKS * BLOCK} seeds"
    print(f"{name}: seed {noticed}")
    assert failure(Scenario.of(noticed)) is None


def test_a_failing_seed_comes_with_a_smaller_one_and_its_command() -> None:
    """The message of a failure holds the command that repeats it, with less in it than the seed had."""
    name = "the spool is not read at the start"
    with planted(MUTANTS[name]):
        seed = next(seed for seed in range(1000) if failure(Scenario.of(seed)) is not None)
        with pytest.raises(Failure, match=r"repeat with: python -m tests\.simulation --seed \d+") as caught:
            check(seed)
        small = shrink(Scenario.of(seed))

    assert small.command in str(caught.value)
    assert len(small.faults) < len(Scenario.of(seed).faults)
    command = [sys.executable, *small.command.split()[1:], "--mutant", name]
    repeated = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert repeated.returncode != 0
    assert "AssertionError: not over" in repeated.stderr
    sound = subprocess.run(command[:-2], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "all promises kept" in sound.stdout


def test_the_same_seed_is_the_same_story() -> None:
    """A run depends on its scenario and on nothing else."""
    stories: list[list[str]] = [[], []]
    for story in stories:
        run(Scenario.of(11), story.append)

    assert stories[0] == stories[1]
    assert len(stories[0]) > 10
