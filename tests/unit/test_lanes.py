"""Lanes do every piece of work once, in order of the items, and come to rest whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from eval_kernel import lanes

pytestmark = pytest.mark.torch


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch with that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield int(request.param)
    torch.set_num_threads(before)


def test_results_come_in_order(threads: int) -> None:
    """One result per item, one beat per item, and torch's threads are as before."""
    beats: list[int] = []

    assert [n * n for n in range(20)] == lanes.each(lambda n: n * n, range(20), lambda: beats.append(1))
    assert 20 == len(beats)
    assert threads == torch.get_num_threads()
    assert [] == lanes.each(lambda n: n, [], lambda: None)


@pytest.mark.parametrize("items", [1, 2, 9])
def test_a_lane_has_one_thread(items: int) -> None:
    """However few the items and many the threads: what an item comes to must not depend on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert [1] * items == lanes.each(lambda _: torch.get_num_threads(), range(items), lambda: None)
        assert 4 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_an_error_is_raised_when_all_lanes_rest(threads: int) -> None:
    """No thread of ours is left, and what had not begun is not begun."""

    def work(n: int) -> int:
        if n == 3:
            raise KeyError(n)
        return n

    with pytest.raises(KeyError):
        lanes.each(work, range(1000), lambda: None)

    assert [] == [t.name for t in threading.enumerate() if t.name.startswith("lane")]


def test_a_beat_may_call_it_off(threads: int) -> None:
    """What ``beat`` raises ends the work."""

    def beat() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        lanes.each(lambda n: n, range(1000), beat)

    assert [] == [t.name for t in threading.enumerate() if t.name.startswith("lane")]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")])
def test_what_found_no_memory_is_tried_again_alone(error: Exception) -> None:
    """Only that item, after the others; results and beats are complete."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    tries: list[int] = []
    beats: list[int] = []

    def work(n: int) -> int:
        tries.append(n)
        if n == 2 and threading.current_thread() is not threading.main_thread():
            raise error
        return n

    try:
        assert list(range(6)) == lanes.each(work, range(6), lambda: beats.append(1))
    finally:
        torch.set_num_threads(before)

    assert 2 == tries[-1]
    assert [0, 1, 2, 2, 3, 4, 5] == sorted(tries)
    assert 6 == len(beats)


def test_memory_that_stays_short_is_reported() -> None:
    """The second failure is the caller's to handle."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)

    def work(n: int) -> int:
        raise MemoryError(n)

    try:
        with pytest.raises(MemoryError):
            lanes.each(work, range(3), lambda: None)
    finally:
        torch.set_num_threads(before)
