"""What a shard yields survives its journey through JSON."""

from __future__ import annotations

import json

import pytest

from eval_kernel.partial import Execution, NonFinite, Partial, RowSums


def test_a_partial_survives_json() -> None:
    """A partial read back from its JSON text equals the one written, rows and places included."""
    rows = (RowSums(7, 1, 2**52, 9, 40, 8), RowSums(None, 70, 12, 1, 2, 0))
    before = Partial(3, 2**52 + 12, 10, 42, 8, rows, nonfinite=1, places=(NonFinite(7, 4, "nan"),))

    assert before == Partial.from_json(json.loads(json.dumps(before.to_json())))


def test_partials_differ_when_one_row_does() -> None:
    """Equality looks at rows, not at totals alone."""
    one = Partial(0, 5, 2, 2, 2, (RowSums(0, 1, 2, 1, 1, 1), RowSums(1, 1, 3, 1, 1, 1)))
    other = Partial(0, 5, 2, 2, 2, (RowSums(0, 1, 3, 1, 1, 1), RowSums(1, 1, 2, 1, 1, 1)))

    assert one != other


def test_nats_are_the_steps_on_the_grid() -> None:
    """2^30 steps are one nat."""
    assert 1.5 == Partial(0, 3 << 29, 1, 1, 1, ()).nats


def test_a_partial_cannot_be_changed() -> None:
    """Partials are frozen."""
    with pytest.raises(AttributeError):
        Partial(0, 0, 0, 0, 0, ()).steps = 1  # type: ignore[misc]


def test_an_execution_survives_json() -> None:
    """How a partial was computed reads back as written."""
    before = Execution(1.5, "cuda:0 NVIDIA H100", "bfloat16", 4, 1 << 33, {"torch": "2.13.0"})

    assert before == Execution.from_json(json.loads(json.dumps(before.to_json())))


def test_executions_share_equal_facts() -> None:
    """Two executions with equal software and precision hold the same dicts, so that a million of them stay small."""
    first, second = (
        Execution.from_json(json.loads('{"software": {"torch": "2"}, "precision": {"mlp": "int8"}}')) for _ in range(2)
    )
    assert first == second
    assert first.software is second.software
    assert first.precision is second.precision
