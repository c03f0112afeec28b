"""Quantised weights on disk: a safetensors file per (weights, plan), made once, checked by digest at every use.

The file is written tensor by tensor beside its place and renamed into it under a lock, so that processes share it
and none sees half of it. A damaged one is made again. What is in it is ``canonical``'s to say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from eval_kernel import heap
from eval_kernel.cachedir import locked, unusable
from eval_kernel.checkpoint import TensorInfo, read_header
from eval_kernel.errors import ModelCorrupt, ModelNotFound
from eval_kernel.plan import digest_json
from eval_kernel.precision import canonical
from eval_kernel.precision.canonical import Quantised
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.plan import PrecisionPlan
from eval_kernel.precision.source import Mapped

#: Raised when the bytes that a plan gives change.
PACK_FORMAT = 1
_NAMES = {
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
_NO_DIGEST = "sha256:" + "0" * 64

Note = Callable[[str], None]
#: Makes the quantised weights, each with its name, in any order.
Maker = Callable[[], Iterable[tuple[str, Quantised]]]


@dataclass(frozen=True, slots=True)
class Pack:
    """The quantised weights of a plan by name, mapped from disk, and the digest over all of them."""

    weights: dict[str, Quantised]
    digest: str


def pack_path(cache: Path, weights_digest: str, plan: PrecisionPlan) -> Path:
    """Where the pack of a model and a plan lies."""
    name = f"{weights_digest.removeprefix('sha256:')[:32]}-{plan.digest.removeprefix('sha256:')[:32]}-{PACK_FORMAT}"
    return cache / "precision" / f"{name}.safetensors"


def obtain(cache: Path, weights_digest: str, plan: PrecisionPlan, make: Maker, note: Note) -> Pack:
    """Return the pack of a plan; make it where there is none, or none that is whole. Raises ``DirectoryUnusable``."""
    path = pack_path(cache, weights_digest, plan)
    try:
        with locked(path):
            if path.exists():
                try:
                    return read(path, plan)
                except ModelCorrupt as error:
                    note(f"{error}; it is made again")
            note("quantising the weights (once)")
            _write(path, plan, make)
        return read(path, plan)
    except OSError as error:
        raise unusable(cache, error) from None


def read(path: Path, plan: PrecisionPlan) -> Pack:
    """Map a pack and check every byte of it. Raises ``ModelCorrupt``."""
    try:
        header = read_header(path)
    except ModelNotFound as error:
        raise ModelCorrupt(str(error)) from None
    stated = _stated_digest(path)
    weights, digests = {}, {}
    for t in plan.tensors:
        if not t.quantised:
            continue
        parts, maps = {}, []
        for key, (dtype, shape) in canonical.shapes(FORMATS[t.format], t.rows, t.columns).items():
            info = header.get(f"{t.name}.{key}")
            if info is None or info.dtype != _NAMES[dtype] or info.shape != shape:
                raise ModelCorrupt(f"the pack {path} lacks {t.name}.{key} of shape {list(shape)}")
            maps.append(Mapped(info))
            parts[key] = maps[-1].tensor
        weights[t.name] = Quantised(FORMATS[t.format], t.rows, t.columns, **parts)
        digests[t.name] = weights[t.name].digest()
        for mapped in maps:
            mapped.release()
    digest = digest_of(digests)
    if digest != stated:
        raise ModelCorrupt(
            f"the pack {path} is damaged: its bytes are {digest[:19]}..., its header says {stated[:19]}..."
        )
    return Pack(weights, digest)


def digest_of(digests: dict[str, str]) -> str:
    """Return the digest over the weights' digests."""
    return digest_json(sorted(digests.items()))


def _stated_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return str(json.loads(file.read(length)).get("__metadata__", {}).get("digest", ""))


def _write(path: Path, plan: PrecisionPlan, make: Maker) -> None:
    header: dict[str, object] = {}
    places: dict[str, TensorInfo] = {}
    at = 0
    for t in plan.tensors:
        if t.quantised:
            for key, (dtype, shape) in canonical.shapes(FORMATS[t.format], t.rows, t.columns).items():
                size = torch.Size(shape).numel() * dtype.itemsize
                name = f"{t.name}.{key}"
                header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
                places[name] = TensorInfo(path, at, at + size, _NAMES[dtype], shape)
                at += (size + 7) // 8 * 8  # every tensor begins where any number may
    # Under the lock: what an earlier try left behind when it was killed is nobody's.
    temp = path.with_name(f".new-{path.name}")
    try:
        with temp.open("wb") as file:
            base = _head(file, header, plan, _NO_DIGEST)
            file.truncate(base + at)
            digests = {}
            for name, weight in make():
                for key, part in weight.tensors().items():
                    file.seek(base + places[f"{name}.{key}"].start)
                    file.write(part.contiguous().view(torch.uint8).numpy().data)
                digests[name] = weight.digest()
                heap.trim()
            file.seek(0)
            _head(file, header, plan, digest_of(digests))
            file.flush()
            os.fsync(file.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def _head(file: BinaryIO, header: dict[str, object], plan: PrecisionPlan, digest: str) -> int:
    """Write the header, whose length does not depend on the digest; return where the data begins."""
    about = {
        "digest": digest,
        "plan": plan.digest,
        "quantiser": plan.quantiser,
        "format": f"fedeval.pack/{PACK_FORMAT}",
    }
    text = json.dumps({"__metadata__": about, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return 8 + len(text)
