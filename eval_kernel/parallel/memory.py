"""How much memory is free, and what share of a model's layers must be streamed to live within it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

#: Of the free memory, what is left to activations, logits, libraries and other programs: a share, and at least so much.
HEADROOM, LEAST_HEADROOM = 0.25, 256 << 20
#: Layers that are in memory beside the resident ones: the one at work and the one that is being fetched.
SLOTS = 2


def free_bytes(device: torch.device) -> int:
    """Return the bytes that are free on a device; on a CPU what the system and this process's control group leave."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    return min(_available(), _cgroup_free())


def for_weights(free: int) -> int:
    """Return what weights may take of free memory."""
    return max(0, free - max(LEAST_HEADROOM, int(free * HEADROOM)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's weights: each decoder layer's, and what is always resident."""

    layers: tuple[int, ...]
    outside: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.outside + sum(self.layers)

    def resident(self, fraction: float) -> int:
        """Bytes in memory at one time when so much of the layers is streamed."""
        gone = streamed(len(self.layers), fraction)
        kept = sum(size for size, away in zip(self.layers, gone, strict=True) if not away)
        return self.outside + kept + (SLOTS * max(self.layers) if any(gone) else 0)


def fraction_for(sizes: Sizes, budget: int) -> float:
    """Return the smallest share of the layers to stream so that weights fit in a budget; 1.0 where none is enough."""
    count = len(sizes.layers)
    for number in range(count + 1):
        if sizes.resident(number / count) <= budget:
            return number / count
    return 1.0


def streamed(layers: int, fraction: float) -> Sequence[bool]:
    """Return for each layer whether it is streamed: spread evenly, so that resident ones hide the fetching."""
    count = math.ceil(fraction * layers - 1e-9)
    return [(number + 1) * count // layers > number * count // layers for number in range(layers)]


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # no Linux: the number of free pages is a lower bound
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_free() -> int:
    """What the control group (version 2) leaves; without one, or without a limit, more than any machine has."""
    unlimited = 1 << 62
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        reclaimable = [
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        ]
    except (OSError, ValueError, IndexError):
        return unlimited
    return unlimited if limit == "max" else max(0, int(limit) - used + sum(reclaimable))
