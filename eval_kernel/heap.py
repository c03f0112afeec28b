"""Memory that was freed, given back to the system: glibc keeps it, in pieces too scattered to be used again."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Return free heap pages to the system, where the C library can (glibc); a millisecond or so."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if release is not None:
            release(0)
