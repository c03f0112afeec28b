"""Independent pieces of work on a CPU's cores: a lane per core, and within a lane one thread.

A piece must not depend on which lane runs it. One thread, because the last bits of a matrix product may depend on how
many share it (oneDNN's bfloat16 on AMX, MKL's float32 with many terms); and lanes waste no time on barriers, which
under load cost most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def each(work: Callable[[Item], Result], items: Sequence[Item], beat: Callable[[], None]) -> list[Result]:
    """Return ``work(item)`` for each item, in order. ``beat`` is called in this thread as often as an item is done.

    An item for which memory runs out is tried once more when the others are done, alone. Raises what ``work`` raises,
    and what ``beat`` raises, after the lanes have come to rest.
    """
    threads = torch.get_num_threads()
    lanes = min(threads, len(items))
    if lanes <= 1:
        with one_thread():
            return [_alone(work, item, beat) for item in items]
    # torch keeps the number per thread, and the last one set as the default of threads to come.
    pool = ThreadPoolExecutor(lanes, "lane", torch.set_num_threads, (1,))
    try:
        futures = [pool.submit(work, item) for item in items]
        _watch(futures, beat)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)
    results: list[Result] = []
    with one_thread():
        for item, future in zip(items, futures, strict=True):
            error = future.exception()
            if error is None:
                results.append(future.result())
            elif is_memory(error):
                results.append(_alone(work, item, beat))
            else:
                raise error
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out; torch's CPU allocator says it with a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def _alone(work: Callable[[Item], Result], item: Item, beat: Callable[[], None]) -> Result:
    result = work(item)
    beat()
    return result


def _watch(futures: Sequence[Future[Result]], beat: Callable[[], None]) -> None:
    """Beat for each future that is done; return early when one failed for another reason than memory."""
    left = set(futures)
    while left:
        done, left = wait(left, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if error is not None and not is_memory(error):
                return
            if error is None:
                beat()
