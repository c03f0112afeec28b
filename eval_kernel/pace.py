"""Whether a model's products run faster or slower here than in float32, measured layer by layer and remembered.

It says so in the report; it chooses nothing. Kernels of one format differ in their last bits, so a choice by the clock
would make the result depend on how busy a machine was: which kernel serves a format is fixed, and proved, elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eval_kernel import cachedir, kernels

#: Tokens of a measured product: a block of the fast path.
ROWS = 256
#: Outputs of the float32 product at most: the rest is taken to cost as much for each.
OUTPUTS = 4096
#: Each product is repeated so often, or for so many seconds, and the least time counts.
REPEATS, SECONDS = 5, 0.3
#: A model with fewer weights in its products is not worth the measurement.
LEAST_WEIGHTS = 10_000_000
#: Times that differ by less say nothing.
NOISE = 0.05
#: Key of the finding among what a node says of its precision.
KEY = "speed"


def finding(module: Any, device: torch.device, compute: torch.dtype, one_by_one: bool, cache: Path) -> dict[str, str]:
    """Return {``KEY``: words} on the speed of a module's products against float32's; nothing for a small model.

    ``one_by_one``: each row runs on one thread. Raises ``DirectoryUnusable`` when the cache cannot be written.
    """
    layers = Counter(_kind(layer, compute) for layer in module.modules() if _multiplies(layer))
    if sum(out * columns * n for (_, _, out, columns), n in layers.items()) < LEAST_WEIGHTS:
        return {}
    examples = {_kind(layer, compute): layer for layer in module.modules() if _multiplies(layer)}
    with _threads(device, one_by_one) as threads, _memory(cache, device, threads) as known:
        ours = theirs = 0.0
        for kind, count in layers.items():
            _, _, out, columns = kind
            ours += count * _seconds(known, kind, device, compute, columns, partial(examples.__getitem__, kind))
            most = min(out, OUTPUTS)
            plain = ("float32", "float32", most, columns)
            theirs += (
                count * (out / most) * _seconds(known, plain, device, torch.float32, columns, _plain(plain, device))
            )
    ratio = theirs / ours
    how = (
        "SLOWER here than"
        if ratio < 1 - NOISE
        else "faster here than"
        if ratio > 1 + NOISE
        else "here about as fast as"
    )
    return {KEY: f"products are {how} in float32: {ratio:.2f} x its speed, measured"}


def _multiplies(layer: Any) -> bool:
    return hasattr(layer, "in_features") and hasattr(layer, "out_features")


def _kind(layer: Any, compute: torch.dtype) -> tuple[str, str, int, int]:
    """What products of one kind have in common: kernel, dtype, outputs, inputs."""
    quantised = getattr(layer, "quantised", None)
    form = "" if quantised is None else f" {quantised.format.name}"
    return (f"{type(layer).__name__}{form}", str(compute), int(layer.out_features), int(layer.in_features))


def _plain(kind: tuple[str, str, int, int], device: torch.device) -> Callable[[], Any]:
    return lambda: kernels.linear(torch.randn(kind[2], kind[3], device=device), None)


def _seconds(
    known: dict[str, float],
    kind: tuple[str, str, int, int],
    device: torch.device,
    dtype: torch.dtype,
    columns: int,
    make: Callable[[], Any],
) -> float:
    """The least time of a product, from what is known or measured now."""
    name = " ".join(map(str, kind))
    if name not in known:
        x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(5)).to(device=device, dtype=dtype)
        layer, best, begun = make(), float("inf"), time.perf_counter()
        with torch.inference_mode():
            for _ in range(REPEATS):
                started = time.perf_counter()
                layer(x)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - started)
                if time.perf_counter() - begun > SECONDS:
                    break
        known[name] = best
    return known[name]


@contextmanager
def _threads(device: torch.device, one_by_one: bool) -> Iterator[int]:
    """Measure with as many threads as a row has."""
    before = torch.get_num_threads()
    if one_by_one and device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def _memory(cache: Path, device: torch.device, threads: int) -> Iterator[dict[str, float]]:
    """What this machine has measured so far; what is added is kept."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    state = [platform.node(), name, threads, torch.__version__]
    file = cache / "pace" / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()}.json"
    try:
        with cachedir.locked(file):
            known = _read(file)
            before = dict(known)
            yield known
            if known != before:
                temp = file.with_suffix(".new")
                temp.write_text(json.dumps(known))
                temp.replace(file)
    except OSError as error:
        raise cachedir.unusable(cache, error) from None


def _read(file: Path) -> dict[str, float]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}  # not there yet, or damaged: measured again
    if not isinstance(found, dict) or not all(isinstance(v, float) and v > 0 for v in found.values()):
        return {}
    return found
