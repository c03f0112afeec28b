"""The node's cache directory: one lock per entry, digests that are remembered, and what is said when it fails.

What is cached is other modules' business.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eval_kernel.errors import DirectoryUnusable


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of one entry against every other thread and process of this node. Raises ``OSError``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remembered(cache: Path, files: list[Path], compute: Callable[[], str]) -> str:
    """Return a digest of files, computed once per path, size and time of change."""
    state = [[str(path), s.st_size, s.st_mtime_ns, s.st_ino] for path in files for s in [path.stat()]]
    memo = cache / "digests" / hashlib.sha256(json.dumps(state).encode()).hexdigest()
    try:
        known = memo.read_text("ascii")
        if re.fullmatch(r"sha256:[0-9a-f]{64}", known):
            return known
    except (OSError, ValueError):
        pass  # not there yet, or damaged: computed below
    digest = compute()
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        # Two threads of one process may be here at once, and each must have a file of its own to put in place.
        temp = memo.with_name(f"{memo.name}.{os.getpid()}.{threading.get_ident()}")
        temp.write_text(digest)
        temp.replace(memo)
    except OSError as error:
        raise unusable(cache, error) from None
    return digest


def unusable(cache: Path, error: OSError) -> DirectoryUnusable:
    """Return what to raise when the cache cannot be read or written."""
    return DirectoryUnusable(
        f"the cache directory {cache} cannot be used ({error.strerror or error}): free space or choose another"
    )
