"""The table of faults in tests/chaos/README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_fault_names_a_test() -> None:
    """Each row of the table names a test function of this repository."""
    text = (TESTS / "chaos" / "README.md").read_text("utf-8")
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", text)

    assert len([row for row in text.splitlines() if row.startswith("| ") and "|---" not in row]) - 4 == len(named)
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text("utf-8"), f"{file}::{name}"
