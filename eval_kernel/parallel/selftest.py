"""What the ranks of a group can do together on this machine: exact sums, latency, bandwidth, versions on every rank.

This process is rank 0. It starts the others, and prints one JSON object, with ``error`` in it where a group did not
form. What is good enough is for the agent's ``check --group`` to say.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eval_kernel.errors import ConfigError, FedevalError, RankLost, reason
from eval_kernel.execution import device_name
from eval_kernel.lifetime import die_with_parent
from eval_kernel.model import choose_device
from eval_kernel.parallel.ranks import Ranks

#: Ranks on a CPU where nobody says how many.
DEFAULT_RANKS = 2
#: Seconds that one collective may take.
TIMEOUT = 60.0
#: Bytes that are summed to measure bandwidth, how often; and how often one number is, to measure latency.
LINK_BYTES, LINK_ROUNDS, LATENCY_ROUNDS = 16 << 20, 5, 200
#: Scored tokens of a shard, unless said otherwise: a job's default.
SHARD_TOKENS = 16384
#: What is measured, and what a sum of the ranks' numbers must be exact in.
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def ranks_for(device: torch.device, wanted: int | None) -> int:
    """Return how many ranks to try: one a GPU, else two. Raises ``ConfigError`` for more than there are GPUs."""
    if device.type != "cuda":
        return wanted or DEFAULT_RANKS
    there = torch.cuda.device_count()
    if wanted is not None and wanted > there:
        raise ConfigError(
            f"{wanted} ranks need as many GPUs, and this node has {there}; lower --ranks, or say --device cpu"
        )
    return wanted or there


def facts(ranks: Ranks) -> dict[str, Any]:
    """Return what must agree between ranks, and what is good to know of each."""
    cuda = ranks.device.type == "cuda"
    return {
        "rank": ranks.rank,
        "host": platform.node(),
        "device": device_name(ranks.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cuda": torch.version.cuda,
    }


def exact(ranks: Ranks) -> dict[str, bool]:
    """Sum numbers over all ranks whose sum is known, in each dtype: whether every one of them is right everywhere."""
    world, rank = ranks.world, ranks.rank
    index = torch.arange(4096, dtype=torch.int64)
    # On the grid of losses, near its bound: any rounding shows.
    steps = (index + 1) * ((1 << 40) // world) + index * rank
    wide = (steps.double() / (1 << 30)).to(ranks.device)
    dist.all_reduce(wide)
    total = (index + 1) * ((1 << 40) // world) * world + index * (world * (world - 1) // 2)
    found = {"float64": bool((wide.cpu() * (1 << 30)).equal(total.double()))}
    counts = (steps * 4001).to(ranks.device)
    dist.all_reduce(counts)
    found["int64"] = bool(counts.cpu().equal(total * 4001))
    # Small numbers: bfloat16 holds integers up to 256.
    narrow = ((index + rank) % 2).to(torch.bfloat16).to(ranks.device)
    dist.all_reduce(narrow)
    expected = sum((index + other) % 2 for other in range(world))
    found["bfloat16"] = bool(narrow.cpu().float().equal(torch.as_tensor(expected).float()))
    every = ranks.every(found)
    return {name: all(one[name] for one in every) for name in found}


def link(ranks: Ranks, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds of an all_reduce of one number (median), and the bytes a second of a large one (best)."""
    one = torch.zeros(1, dtype=dtype, device=ranks.device)
    waits = [_timed(ranks, one) for _ in range(LATENCY_ROUNDS)]
    large = torch.zeros(LINK_BYTES // dtype.itemsize, dtype=dtype, device=ranks.device)
    best = min(_timed(ranks, large) for _ in range(LINK_ROUNDS))
    return {"latency_seconds": median(waits), "bytes_per_second": LINK_BYTES / best}


def _timed(ranks: Ranks, values: torch.Tensor) -> float:
    begun = time.perf_counter()
    dist.all_reduce(values)
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    return time.perf_counter() - begun


def shard(ranks: Ranks, tokens: int) -> float:
    """Return the seconds that summing a shard's losses and flags over all ranks takes (median)."""
    nats, flags = np.zeros(tokens), np.zeros(tokens, np.int64)
    waits = []
    for _ in range(LATENCY_ROUNDS):
        begun = time.perf_counter()
        nats, flags = ranks.sums(nats, flags)
        waits.append(time.perf_counter() - begun)
    return median(waits)


def examine(ranks: Ranks, tokens: int) -> dict[str, Any]:
    """Look at everything; all ranks call this."""
    return {
        "backend": "nccl" if ranks.device.type == "cuda" else "gloo",
        "ranks": ranks.every(facts(ranks)),
        "exact": exact(ranks),
        "links": {name: link(ranks, dtype) for name, dtype in DTYPES.items()},
        "shard_seconds": shard(ranks, tokens),
    }


def main() -> None:
    """Be a rank: the first starts the others and prints."""
    parser = argparse.ArgumentParser(prog="python -m eval_kernel.parallel.selftest", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ranks", type=int, help="default: one a GPU, else 2")
    parser.add_argument("--tokens", type=int, default=SHARD_TOKENS, help="of the shard whose sums are timed")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.parent is not None:
        die_with_parent(given.parent)
    torch.set_num_threads(1)
    try:
        device = choose_device(given.device)
        world = ranks_for(device, given.ranks)
        if device.type == "cuda":
            device = torch.device("cuda", given.rank)
        ranks = Ranks(given.rank, world, device, TIMEOUT, given.port)
        if given.rank == 0:
            for rank in range(1, world):
                threading.Thread(target=_follow, args=(rank, device, ranks, given.tokens), daemon=True).start()
        ranks.join()
        found = examine(ranks, given.tokens)
    except FedevalError as error:
        _end({"error": str(error), "code": error.code})
    except RuntimeError as error:
        # A collective that fails says so like this, on whichever rank.
        _others_first()
        _end({"error": reason(error), "code": RankLost.code})
    _end(found)


def _follow(rank: int, device: torch.device, ranks: Ranks, tokens: int) -> None:
    """Start a rank; if it fails, this one ends with its words, instead of waiting for it."""
    command = [sys.executable, "-P", "-m", "eval_kernel.parallel.selftest", "--device", str(device)]
    command += ["--rank", str(rank), "--ranks", str(ranks.world), "--tokens", str(tokens)]
    command += ["--port", str(ranks.port), "--parent", str(os.getpid())]
    with tempfile.TemporaryFile() as said:
        code = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False).returncode
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if code:
        last = json.loads(lines[-1])["error"] if lines[-1].startswith('{"error"') else lines[-1]
        _end({"error": f"rank {rank} ended with code {code}: {last}", "code": RankLost.code})


_ended = threading.Lock()


def _others_first() -> None:
    """A rank that fails fails the others' collectives: what it said itself says more than they do."""
    time.sleep(2.0)


def _end(found: dict[str, Any]) -> None:
    """Print, once, and end the process: library threads may still wait for peers."""
    if _ended.acquire(blocking=False):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
        os._exit(1 if "error" in found else 0)
    threading.Event().wait()


if __name__ == "__main__":
    main()
