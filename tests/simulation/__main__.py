"""``python -m tests.simulation --seed N ...``: repeats one simulated run and prints what happens in it."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

from tests.simulation.run import check, run
from tests.simulation.scenario import FAULTS, Scenario


def main() -> int:
    """Run one scenario with its story, or many without."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--agents", type=int)
    parser.add_argument("--jobs", help="shards of each job: 3,5")
    parser.add_argument("--faults", help=f"none, or some of {','.join(FAULTS)}")
    parser.add_argument("--chaos", type=float, help="virtual seconds in which faults happen")
    parser.add_argument("--mutant", help="plant one of the bugs of mutants.py first")
    parser.add_argument("--count", type=int, help="run so many seeds from this one on, without their stories")
    given = parser.parse_args()
    if given.mutant:
        from tests.simulation.mutants import MUTANTS

        MUTANTS[given.mutant].plant()
    if given.count:
        begun, events = time.perf_counter(), 0
        for seed in range(given.seed, given.seed + given.count):
            events += check(seed).events
        seconds = time.perf_counter() - begun
        print(f"{given.count} seeds, {events} events, {events / seconds:,.0f} events/s, {seconds:.1f} s")
        return 0
    scenario = Scenario.of(given.seed)
    if given.agents is not None:
        scenario = replace(scenario, agents=given.agents)
    if given.jobs is not None:
        scenario = replace(scenario, jobs=tuple(map(int, given.jobs.split(","))))
    if given.faults is not None:
        faults = () if given.faults == "none" else tuple(given.faults.split(","))
        scenario = replace(scenario, faults=faults)
    if given.chaos is not None:
        scenario = replace(scenario, chaos=given.chaos)
    print(scenario.command)
    world = run(scenario, print)
    print(f"all promises kept: {world.events} events in {world.now:.1f} virtual seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
