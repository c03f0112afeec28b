"""The ranks of one group as a rank sees them: joining, the axes of a layout, and exact sums over all of them.

gloo on CPUs, NCCL on GPUs; the rendezvous is a TCPStore that rank 0 keeps. Every wait has a timeout: whoever waits
longer gets an error, and a group that had one is never used again. Starting and ending ranks is ``group``'s business.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from eval_kernel.errors import RankLost, reason
from eval_kernel.parallel.dims import ParallelDims

#: Ranks that are still starting (importing torch) get so long to come.
JOIN_SECONDS = 180.0
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Axes:
    """A layout as this rank sees it: the process group of each axis that has more than one rank, else None."""

    dims: ParallelDims
    row_rank: int
    tp_rank: int
    tp: Any
    dp_shard: Any


class Ranks:
    """This process's membership in a group. ``timeout``: seconds that a collective may take."""

    def __init__(self, rank: int, world: int, device: torch.device, timeout: float, port: int = 0) -> None:
        """Prepare; rank 0 opens the rendezvous on a free port, the others name that port. ``join`` does the rest."""
        self.rank, self.world, self.device = rank, world, device
        self._timeout = timedelta(seconds=timeout)
        self._axes: dict[ParallelDims, Axes] = {}
        joining = timedelta(seconds=JOIN_SECONDS)
        if Path("/sys/class/net/lo").exists():
            # Ranks of one node: gloo would take the address that the host's name resolves to, if it resolves at all.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        listener = None
        if rank == 0:
            # Without this the store would listen on every interface.
            with socket.create_server((HOST, port), backlog=world) as opened:
                port, listener = opened.getsockname()[1], opened.detach()
        self._store = dist.TCPStore(
            HOST, port, world, rank == 0, joining, wait_for_workers=False, master_listen_fd=listener
        )
        self.port = int(self._store.port)

    def join(self) -> None:
        """Meet the others. Raises ``RankLost`` when one does not come."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        # A process group has a device of its own: a GPU's is told, so that NCCL need not guess.
        options: dict[str, Any] = {"device_id": self.device} if backend == "nccl" else {}
        try:
            self._store.add("arrived", 1)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.world,
                timeout=self._timeout,
                **options,
            )
            dist.barrier()
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"the group of {self.world} ranks did not form ({reason(error)})") from None

    def axes(self, dims: ParallelDims) -> Axes:
        """Return the process groups of a layout. All ranks call this in the same order."""
        found = self._axes.get(dims)
        if found is None:
            mine = dims.coordinates(self.rank)
            groups: dict[str, Any] = {}
            for axis in ("dp_shard", "tp"):
                groups[axis] = None
                if getattr(dims, axis) > 1:
                    for members in _lines(dims, axis):
                        made = dist.new_group(members, timeout=self._timeout)
                        if self.rank in members:
                            groups[axis] = made
            found = Axes(dims, dims.row_rank(self.rank), mine["tp"], groups["tp"], groups["dp_shard"])
            self._axes[dims] = found
        return found

    def sums(
        self, nats: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Add up over all ranks: float64 on the loss grid, which is exact below 2^23 nats, and int64."""
        wide = torch.from_numpy(nats).to(self.device)
        whole = torch.from_numpy(counts).to(self.device)
        dist.all_reduce(wide)
        dist.all_reduce(whole)
        return wide.cpu().numpy(), whole.cpu().numpy()

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks."""
        found = torch.tensor(list(values), dtype=torch.int64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [int(value) for value in found]

    def every(self, value: Any) -> list[Any]:
        """What each rank gives, on all of them: anything that JSON can say."""
        text = json.dumps(value).encode()
        longest = self.largest([len(text)])[0]
        padded = np.frombuffer(text.ljust(longest), dtype=np.uint8).astype(np.int64)
        mine = torch.from_numpy(padded).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(found, mine)
        return [json.loads(part.cpu().numpy().astype(np.uint8).tobytes()) for part in found]

    def leave(self) -> None:
        """Leave the group, without waiting for others."""
        self._axes.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _lines(dims: ParallelDims, axis: str) -> list[list[int]]:
    """The ranks that share an axis: equal on all others."""
    lines: dict[tuple[int, ...], list[int]] = {}
    for rank in range(dims.world_size):
        at = dims.coordinates(rank)
        lines.setdefault(tuple(v for name, v in at.items() if name != axis), []).append(rank)
    return list(lines.values())
