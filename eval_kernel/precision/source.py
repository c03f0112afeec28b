"""Where weights come from: files, mapped and read piece by piece, or a model that only transformers can load.

Every value that passes is checked to be finite, and pages that were read are given back. What becomes of the values
is ``loading``'s and ``packs``' business.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from eval_kernel.checkpoint import Checkpoint, TensorInfo
from eval_kernel.conversion import without_reports
from eval_kernel.errors import ModelCorrupt, ModelNotFinite, ModelUnsupported, reason
from eval_kernel.precision.plan import Weight
from eval_kernel.precision.skeleton import Skeleton

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: Elements read at one time.
PIECE = 1 << 20


class Mapped:
    """One tensor as it lies in its file, mapped, not copied. Nothing is written back.

    The file stays mapped as long as ``tensor`` is used anywhere, and not longer.
    """

    tensor: torch.Tensor

    def __init__(self, info: TensorInfo) -> None:
        dtype = DTYPES[info.dtype]
        if info.start == info.end:
            self._map = None
            self.tensor = torch.empty(info.shape, dtype=dtype)
            return
        begin = info.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with info.file.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), info.end - begin, access=mmap.ACCESS_COPY, offset=begin)
        count = (info.end - info.start) // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=info.start - begin)
        self.tensor = flat.reshape(info.shape)

    def release(self) -> None:
        """Give the pages back to the system; they are read again when they are touched again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class Origin(Protocol):
    """What ``loading`` asks of either source. ``module`` is what the weights are put into."""

    module: Any

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A parameter or stored buffer in a dtype on a device."""
        ...

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, end, rows as float32) of a matrix or table."""
        ...


def origin(checkpoint: Checkpoint, skeleton: Skeleton, compute: torch.dtype) -> Origin:
    """Return the files as a source if they can be read one by one, else the model as transformers loads it."""
    return Files(checkpoint, skeleton) if skeleton.tensors is not None else Whole(checkpoint, compute)


class Files:
    """A checkpoint whose tensors are the model's, one by one."""

    def __init__(self, checkpoint: Checkpoint, skeleton: Skeleton) -> None:
        assert skeleton.tensors is not None
        self.module, self._tensors = skeleton.module, skeleton.tensors
        self._where = f"model {checkpoint.directory}"

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The mapped tensor itself where nothing changes, else a copy made in pieces."""
        mapped = Mapped(self._tensors[name])
        view = mapped.tensor
        if view.dtype == dtype and device.type == "cpu":
            check_finite(view, name, self._where)
            mapped.release()  # read so far for its check alone; who uses it first may replace it
            return view
        out = torch.empty(view.shape, dtype=dtype, device=device)
        source, target = view.reshape(-1), out.reshape(-1)
        for start in range(0, len(source), PIECE):
            target[start : start + PIECE].copy_(source[start : start + PIECE])
            mapped.release()
        check_finite(out, name, self._where)
        return out

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See ``Origin``."""
        mapped = Mapped(self._tensors[weight.name])
        for found in _rows(mapped.tensor, weight, chunks, self._where):
            yield found
            mapped.release()


class Whole:
    """A checkpoint that transformers converts while it loads: the module's weights are there from the start."""

    def __init__(self, checkpoint: Checkpoint, compute: torch.dtype) -> None:
        self._checkpoint, self._where = checkpoint, f"model {checkpoint.directory}"
        self._compute = compute
        self._original: Any = None
        self.module = _by_transformers(checkpoint, compute)
        for name, tensor in self.module.state_dict().items():
            check_finite(tensor, name, self._where)

    def floats(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """In the compute dtype, what transformers made of it: that may be wider, where the model needs it."""
        if dtype == self._compute or not dtype.is_floating_point:
            found: torch.Tensor = self.module.state_dict()[name]
            return found.to(device)
        stored: torch.Tensor = self._as_stored().state_dict()[name]
        return stored.to(device=device, dtype=dtype)

    def rows(self, weight: Weight, chunks: list[tuple[int, int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """See ``Origin``. From the checkpoint's own dtype: quantised weights do not depend on who read them."""
        yield from _rows(self._as_stored().get_parameter(weight.name), weight, chunks, self._where)

    def _as_stored(self) -> Any:
        if self._original is None:
            self._original = _by_transformers(self._checkpoint, "auto")
        return self._original


def _rows(
    full: torch.Tensor, weight: Weight, chunks: list[tuple[int, int]], where: str
) -> Iterator[tuple[int, int, torch.Tensor]]:
    for start, end in chunks:
        part = full[:, start:end].t() if weight.transposed else full[start:end]
        floats = part.float().contiguous()
        check_finite(floats, weight.name, where, first=start)
        yield start, end, floats


def _by_transformers(checkpoint: Checkpoint, dtype: torch.dtype | str) -> Any:
    """Have transformers load a model. Raises ``ModelCorrupt`` and ``ModelUnsupported``."""
    from transformers import AutoModelForCausalLM

    where = f"model {checkpoint.directory}"
    try:
        with without_reports():
            module, info = AutoModelForCausalLM.from_pretrained(
                str(checkpoint.directory),
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below by name, instead of in a table on the terminal
            )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except ImportError as error:
        raise ModelUnsupported(f"{where}: needs a library that is not installed here ({reason(error)})") from None
    except Exception as error:  # noqa: BLE001 - transformers and safetensors raise a dozen types; all mean: not loadable
        raise ModelCorrupt(f"{where}: cannot be loaded ({reason(error)}); copy the checkpoint again") from None
    # transformers fills what it does not find with random numbers.
    if missing := sorted(info["missing_keys"]):
        raise ModelCorrupt(f"{where}: {len(missing)} weights are missing, {missing[0]} among them; copy it again")
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise ModelCorrupt(
            f"{where}: {len(wrong)} weights are not of the shape config.json asks for: {name} is {list(stored)}, "
            f"not {list(expected)}; put the config.json that belongs to them beside them"
        )
    return module.eval().requires_grad_(False)


def check_finite(tensor: torch.Tensor, name: str, where: str, first: int = 0) -> None:
    """Raise ``ModelNotFinite`` naming the first NaN or infinity; the tensor's row 0 is the weight's row ``first``."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # Both pass a NaN on, and neither needs memory; only when one is not finite is the place looked for.
    if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor)):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    if len(bad):
        value = float(tensor[tuple(bad[0])])
        bad[0][0] += first
        place = ", ".join(str(int(i)) for i in bad[0])
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ModelNotFinite(
            f"{where}: the weight {name}[{place}] is {value} in {dtype}; "
            "the checkpoint is damaged, or needs a wider precision"
        )
