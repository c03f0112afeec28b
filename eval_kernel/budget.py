"""How many tokens go through a model together: a number that a job gives, or one found while it is scored.

Measuring costs nothing: the batches that are timed are the job's own, a little larger each time. Whatever the budget,
a loss is the same on a CPU; on a GPU its last bits may depend on the batch's shape. Models whose rows go one by one
(``fast``) have no use for a budget.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import torch

from eval_kernel import cachedir

#: Where a measured budget begins, and the largest one that is tried.
FIRST, LAST = 1024, 1 << 16
#: How much faster a doubled batch must be to be worth its memory.
GAIN = 1.04
#: Full batches that are timed at each size; the best counts, since the first pays for what is allocated.
SAMPLES = 2


class Budget:
    """Tokens per forward pass: what was asked for, until memory runs out."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def rows(self, length: int) -> int:
        """How many rows of ``length`` tokens go together: at least one."""
        return max(1, self.tokens // length)

    def took(self, tokens: int, seconds: float) -> None:
        """A batch was scored; a budget that was asked for learns nothing from it."""

    def failed(self, tokens: int) -> None:
        """A batch of so many tokens did not fit into memory: none that large is tried again."""
        self.tokens = max(1, tokens // 2)


class Measured(Budget):
    """Doubled while that makes scoring faster and memory allows; remembered in the node's cache under a key."""

    def __init__(self, device: torch.device, cache: Path, *key: Any) -> None:
        digest = hashlib.sha256(json.dumps([*key, str(device), _machine(device)]).encode()).hexdigest()
        self._cache, self._file = cache, cache / "budgets" / f"{digest}.json"
        self._memory = Memory(device)
        self._rates: list[float] = []
        self._before = 0.0  # tokens/s at half the size
        known = self._known()
        super().__init__(known or FIRST)
        self.settled = known is not None

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a batch, unless it was less than half full."""
        if self.settled or 2 * tokens <= self.tokens:
            return
        self._rates.append(tokens / seconds)
        if len(self._rates) < SAMPLES:
            return
        rate = max(self._rates)
        if rate < self._before * GAIN:
            self._settle(self.tokens // 2)
        elif self.tokens >= LAST or not self._memory.fits_twice():
            self._settle(self.tokens)
        else:
            self.tokens, self._before, self._rates = 2 * self.tokens, rate, []

    def failed(self, tokens: int) -> None:
        """Stay below what did not fit, now and in the jobs to come."""
        self._settle(max(1, tokens // 2))

    def _settle(self, tokens: int) -> None:
        self.tokens, self.settled = tokens, True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temp = self._file.with_name(f"{self._file.name}.{os.getpid()}.{threading.get_ident()}")
            temp.write_text(json.dumps({"tokens": tokens}))
            temp.replace(self._file)
        except OSError as error:
            raise cachedir.unusable(self._cache, error) from None

    def _known(self) -> int | None:
        try:
            tokens = json.loads(self._file.read_text())["tokens"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there yet, or damaged: measured again
        return tokens if isinstance(tokens, int) and 1 <= tokens <= LAST else None


class Memory:
    """What scoring has needed since the model was loaded, and what is left of the device's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self._now()

    def fits_twice(self) -> bool:
        """Whether twice the growth so far, and a quarter more, would fit."""
        growth = max(0, self._peak() - self._base)
        return 2.5 * growth <= self._free() + max(0, self._now() - self._base)

    def _now(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.memory_allocated(self._device))
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() if _LINUX else self._peak()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _free(self) -> int:
        if self._device.type == "cuda":
            kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return int(torch.cuda.mem_get_info(self._device)[0] + kept)
        if not _LINUX:
            return 0  # unknown: batches stay as they are
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        return next(int(words[1]) for words in lines if words[0] == "MemAvailable:") * 1024


_LINUX = Path("/proc/meminfo").exists()


def _machine(device: torch.device) -> list[Any]:
    """What else a good size depends on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.get_num_threads()
    return [name, torch.__version__]
