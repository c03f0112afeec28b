"""The tables of faults (tests/chaos/README.md) and of threats (coordinator/DESIGN.md) name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_fault_names_a_test() -> None:
    """Each row of the table names a test function of this repository."""
    text = (TESTS / "chaos" / "README.md").read_text("utf-8")
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", text)
    rows = [row for row in text.splitlines() if row.startswith("| ") and not row.startswith("| fault ")]

    assert len(rows) == len(named)
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text("utf-8"), f"{file}::{name}"


def test_every_threat_names_a_test() -> None:
    """Each row of the threat table names a test function of this repository, and there are rows."""
    text = (TESTS.parent / "coordinator" / "DESIGN.md").read_text("utf-8")
    table = text.partition("| threat | what stops it | test |\n|---|---|---|\n")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", table)

    assert len(table.splitlines()) == len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (TESTS / file).read_text("utf-8"), f"{file}::{name}"
