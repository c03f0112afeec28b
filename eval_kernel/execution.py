"""What this process says of how it computed: device, dtype, threads, memory, libraries. No part of any result."""

from __future__ import annotations

import resource
from importlib.metadata import version

import torch

from eval_kernel.partial import Execution


def execution(device: torch.device, dtype: torch.dtype, seconds: float, kernel: str, used: dict[str, str]) -> Execution:
    """Return the facts after ``seconds`` of work; ``kernel`` says how products were computed, ``used`` in what."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = str(dtype).removeprefix("torch.")
    # Compiling never pays back here and would change bits (bench/compile.py), so that readers need not ask.
    libraries = {**software(), "kernel": kernel, "torch.compile": "not used"}
    return Execution(seconds, device_name(device), name, torch.get_num_threads(), peak, libraries, used)


def device_name(device: torch.device) -> str:
    """The device's kind and, of a GPU, its model."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def software() -> dict[str, str]:
    """Versions of the libraries that take part."""
    return {name: version(name) for name in ("torch", "transformers", "tokenizers", "fedeval")}
