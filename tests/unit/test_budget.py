"""A measured budget grows while that pays and memory lasts, and is remembered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eval_kernel import budget
from eval_kernel.budget import FIRST, LAST, Budget, Measured

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def settle(found: Measured, rate: Callable[[int], float]) -> list[int]:
    """Feed full batches at ``rate(tokens)`` tokens/s until it has made up its mind; return the sizes it tried."""
    sizes = []
    while not found.settled:
        sizes.append(found.tokens)
        found.took(found.tokens, found.tokens / rate(found.tokens))
    return sizes


def test_a_given_budget_stays(tmp_path: Path) -> None:
    """Rows that fit into it go together, at least one; only lack of memory halves it."""
    fixed = Budget(4096)
    fixed.took(4096, 1e-9)

    assert [4, 1] == [fixed.rows(1000), fixed.rows(5000)]
    fixed.failed(4000)
    assert 2000 == fixed.tokens


def test_it_grows_while_that_is_faster(tmp_path: Path) -> None:
    """Tokens/s double up to 8192 and stay: 8192 it is, after two batches of each size."""
    found = Measured(CPU, tmp_path, "model")
    sizes = settle(found, lambda tokens: float(min(tokens, 8192)))

    assert 8192 == found.tokens
    assert sizes == [s for size in (FIRST, 2048, 4096, 8192, 16384) for s in (size, size)]


def test_it_ends_at_the_largest(tmp_path: Path) -> None:
    """However much faster it would be."""
    found = Measured(CPU, tmp_path, "model")
    settle(found, float)

    assert LAST == found.tokens


def test_it_stops_where_twice_as_much_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is asked before a larger batch is tried."""
    monkeypatch.setattr(budget.Memory, "fits_twice", lambda self: False)
    found = Measured(CPU, tmp_path, "model")
    settle(found, float)

    assert FIRST == found.tokens


def test_a_failure_settles_it_at_half(tmp_path: Path) -> None:
    """And the next job on this node begins there."""
    found = Measured(CPU, tmp_path, "model")
    found.failed(3000)

    assert (1500, True) == (found.tokens, found.settled)
    assert 1500 == Measured(CPU, tmp_path, "model").tokens


def test_small_batches_teach_nothing(tmp_path: Path) -> None:
    """A shard's last rows are slower for another reason than their size."""
    found = Measured(CPU, tmp_path, "model")
    for _ in range(9):
        found.took(FIRST // 2, 1.0)

    assert (FIRST, False) == (found.tokens, found.settled)


def test_what_was_measured_is_remembered_by_key(tmp_path: Path) -> None:
    """The same model, plan and context begin with it; another one measures."""
    settle(Measured(CPU, tmp_path, "model", 1024), float)

    assert (LAST, True) == (lambda m: (m.tokens, m.settled))(Measured(CPU, tmp_path, "model", 1024))
    assert not Measured(CPU, tmp_path, "model", 512).settled


@pytest.mark.parametrize("text", ["", "{}", '{"tokens": 0}', '{"tokens": "9"}', '{"tokens": 9e99}', "[]"])
def test_a_damaged_memory_is_measured_again(tmp_path: Path, text: str) -> None:
    """Whatever its file holds."""
    Measured(CPU, tmp_path, "model").failed(3000)
    (file,) = (tmp_path / "budgets").iterdir()
    file.write_text(text)

    assert (FIRST, False) == (lambda m: (m.tokens, m.settled))(Measured(CPU, tmp_path, "model"))


def test_growth_is_held_against_free_memory() -> None:
    """A process that has grown by more than half of what is free does not double that."""
    memory = budget.Memory(CPU)

    assert memory.fits_twice()
    memory._base -= 1 << 45
    memory._free = lambda: 0  # type: ignore[method-assign]
    memory._now = lambda: memory._base  # type: ignore[method-assign]
    assert not memory.fits_twice()
