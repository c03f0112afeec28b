"""What this machine is, found without torch: processor, memory, disk, libraries, NVIDIA devices through NVML.

What the libraries can really do here (dtypes, threads) is the engine's to say, in the worker; see ``engine``.
"""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import socket
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agent.config import usable_cpus
from agent.work import INSTALL
from eval_kernel.errors import WorkerUnusable

#: What an agent needs, and what it reports versions of.
LIBRARIES = (
    "fedeval",
    "grpcio",
    "protobuf",
    "torch",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "datasets",
    "numpy",
    "psutil",
    "nvidia-ml-py",
)
#: Processor features that decide which precisions are fast.
FLAGS = (
    *("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "sve2", "bf16", "i8mm"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator. Memory in bytes."""

    kind: str  # "cuda"
    index: int
    name: str
    memory_total: int
    memory_free: int
    compute_capability: str
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an agent announces. Sizes in bytes; ``degraded`` says in one line each what does not work as it should."""

    host: str
    os: str
    python: str
    cpu_model: str
    cpus: int  # that this process may use
    cpu_flags: tuple[str, ...]
    memory_total: int
    memory_available: int
    disk_free: int  # where the cache is
    libraries: dict[str, str]
    devices: tuple[Device, ...]
    degraded: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)  # the engine's own probe, once it was made

    def to_json(self) -> str:
        """Return the JSON text that travels."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def probe(cache: Path) -> Capabilities:
    """Look at this machine; ``cache`` is the directory whose disk matters. Takes some tens of milliseconds.

    Raises ``WorkerUnusable`` where what agents need is not installed.
    """
    try:
        import psutil  # the command's help must work without the extra
    except ImportError as error:
        raise WorkerUnusable(f"what agents need is not installed ({error}): {INSTALL}") from None
    memory = psutil.virtual_memory()
    devices, problem = nvidia_devices(_import_nvml(), nvidia_files())
    return Capabilities(
        host=socket.gethostname(),
        os=platform.platform(),
        python=platform.python_version(),
        cpu_model=cpu_model(),
        cpus=usable_cpus(),
        cpu_flags=cpu_flags(),
        memory_total=memory.total,
        memory_available=memory.available,
        disk_free=free_bytes(cache),
        libraries=library_versions(),
        devices=devices,
        degraded=(problem,) if problem else (),
    )


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, or would if it existed."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def library_versions() -> dict[str, str]:
    """Return the installed ones of ``LIBRARIES`` with their versions, importing none."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # its absence is the finding
    return found


def cpu_model() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> tuple[str, ...]:
    """Return those of ``FLAGS`` that the processor has (Linux only)."""
    present = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return tuple(flag for flag in FLAGS if flag in present)


def nvidia_files() -> bool:
    """Whether the system has device files of NVIDIA accelerators."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/nvidiactl").exists()


def nvidia_devices(nvml: Any, files: bool) -> tuple[tuple[Device, ...], str]:
    """Return the NVIDIA devices, and what is wrong if ``files`` promise some that NVML does not show."""
    remedy = "run nvidia-smi on this machine and repair the driver"
    if nvml is None:
        missing = f"/dev/nvidia* exists but nvidia-ml-py is not installed: {INSTALL}"
        return (), missing if files else ""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return (), f"/dev/nvidia* exists but NVML does not start ({error}): {remedy}" if files else ""
    try:
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = tuple(_device(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as error:
        return (), f"NVML fails ({error}): {remedy}"
    finally:
        nvml.nvmlShutdown()
    return devices, "" if devices or not files else f"/dev/nvidia* exists but NVML shows no device: {remedy}"


def _device(nvml: Any, index: int, driver: str) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        kind="cuda",
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        compute_capability=f"{major}.{minor}",
        driver=driver,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _import_nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _cpuinfo(key: str) -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
    except OSError:
        return ""  # no Linux
