"""Draws the state diagrams of coordinator/DESIGN.md from the transition tables; ``--check`` fails when they differ.

What stands between the markers is written by this script; the text around them is written by people.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from coordinator.core.states import JOB_TABLE, NODE_TABLE, SHARD_TABLE, JobState, NodeState, ShardState

DESIGN = Path(__file__).resolve().parents[1] / "coordinator" / "DESIGN.md"
MACHINES: Mapping[str, tuple[Mapping[Any, Mapping[Any, Any]], Enum]] = {
    "job": (JOB_TABLE, JobState.PLANNING),
    "shard": (SHARD_TABLE, ShardState.WAITING),
    "node": (NODE_TABLE, NodeState.ACTIVE),
}


def diagram(table: Mapping[Any, Mapping[Any, Any]], first: Enum) -> str:
    """Return one machine as a Mermaid state diagram, in the order of its table."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    for state, steps in table.items():
        lines += [f"    {state.name} --> {target.name}: {event.value}" for event, target in steps.items()]
        if not steps:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


def drawn(text: str) -> str:
    """Return the document with every diagram drawn anew. Raises ``SystemExit`` where a marker is missing."""
    for name, (table, first) in MACHINES.items():
        begin, end = f"<!-- diagram: {name} -->", f"<!-- end of diagram: {name} -->"
        found = re.findall(f"{re.escape(begin)}.*?{re.escape(end)}", text, re.DOTALL)
        if len(found) != 1:
            sys.exit(f"{DESIGN}: expected {begin} and {end} once; put them where the diagram belongs")
        text = text.replace(found[0], f"{begin}\n{diagram(table, first)}\n{end}")
    return text


def main() -> None:
    """Draw, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a diagram is out of date")
    check = parser.parse_args().check
    old = DESIGN.read_text(encoding="utf-8")
    new = drawn(old)
    if check and new != old:
        sys.exit(f"{DESIGN}: a diagram differs from its transition table; run `make diagrams`")
    if not check:
        DESIGN.write_text(new, encoding="utf-8")
        print(f"{DESIGN.name}: {', '.join(MACHINES)} drawn")


if __name__ == "__main__":
    main()
