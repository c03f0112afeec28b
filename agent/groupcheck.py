"""`eval-agent check --group`: proves that ranks can work together here: sums, link, versions, environment variables.

The ranks are real ones, started by ``eval_kernel.parallel.selftest`` in processes of their own; nothing of torch is
imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

from agent.check import Finding, judge
from agent.config import usable_cpus
from agent.probe import Capabilities
from agent.work import INSTALL
from eval_kernel.errors import ConfigError

#: Seconds that the ranks may take to start, meet, and measure.
PATIENCE = 180.0
#: What must be equal on all ranks of a group: they run the same program on the same kind of device.
AGREE = ("device", "torch", "nccl", "cuda", "python")
#: Variables that torch.distributed, NCCL, gloo and thread pools read; a star stands for any end.
KNOWN = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_*"),
    *("NCCL_*", "TORCH_NCCL_*", "TORCH_DISTRIBUTED_*", "TORCH_CPP_LOG_LEVEL", "GLOO_*", "TP_SOCKET_IFNAME"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF"),
    *("OMP_*", "MKL_NUM_THREADS", "KMP_*", "GOMP_CPU_AFFINITY"),
)
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
#: Ways between GPUs that NCCL is told not to use.
SWITCHES = {
    "NCCL_P2P_DISABLE": "direct copies between GPUs",
    "NCCL_SHM_DISABLE": "shared memory",
    "NCCL_IB_DISABLE": "",
}


async def group_findings(
    device: str, ranks: int | None, threads: int, capabilities: Capabilities
) -> AsyncIterator[Finding]:
    """Yield what is found; ``ranks``: None for one a GPU, else two."""
    yield environment(os.environ, interfaces())
    yield drivers(capabilities)
    if ranks is not None and not 1 <= ranks <= threads:
        why = f"{ranks} ranks need a thread each, and there are {threads}"
        yield Finding("ranks", False, why, "lower --ranks, or raise --threads")
        return
    found = await selftest(device, ranks)
    if "error" in found:
        remedy = INSTALL if found["code"] == "MISSING" else "look at the line; --ranks 1 tells a rank from a link"
        if found["code"] in (ConfigError.code, "PRECISION_UNSUPPORTED"):
            remedy = "name a device that is there with --device, or fewer --ranks"
        yield Finding("ranks", False, found["error"], remedy)
        return
    for finding in judged(found):
        yield finding


def judged(found: Mapping[str, Any]) -> list[Finding]:
    """Return what to say of a self-test's result."""
    ranks = found["ranks"]
    devices = ", ".join(f"{rank['rank']}: {rank['device']}" for rank in ranks)
    result = [judge("ranks", True, f"{len(ranks)} over {found['backend']} ({devices})", "")]
    unequal = {name: sorted({str(rank[name]) for rank in ranks}) for name in AGREE}
    unequal["device"] = sorted({kind(rank["device"]) for rank in ranks})
    differing = [f"{name} is {' and '.join(values)}" for name, values in unequal.items() if len(values) > 1]
    same = ", ".join(f"{name} {values[0]}" for name, values in unequal.items() if values[0] != "None")
    result.append(
        judge(
            "versions",
            not differing,
            "; ".join(differing) if differing else f"equal on all ranks: {same}",
            "install the same versions everywhere, and put only devices of one kind into a group",
        )
    )
    wrong = [name for name, right in found["exact"].items() if not right]
    result.append(
        judge(
            "all_reduce",
            not wrong,
            f"wrong sums in {', '.join(wrong)}" if wrong else f"right to the last bit in {', '.join(found['exact'])}",
            "do not use groups here: results would be wrong; try --device cpu to tell the GPU link from the program",
        )
    )
    for dtype, link in found["links"].items():
        rate, wait = link["bytes_per_second"] / 1e9, link["latency_seconds"] * 1e6
        result.append(
            judge(f"link, {dtype}", True, f"16 MiB summed at {rate:.2f} GB/s; one number in {wait:.0f} µs", "")
        )
    result.append(
        judge("shard", True, f"its losses summed over the ranks in {found['shard_seconds'] * 1e3:.1f} ms", "")
    )
    return result


def kind(device: str) -> str:
    """A device without its number: ``cuda:1 NVIDIA H100`` is ``cuda NVIDIA H100``."""
    first, _, model = device.partition(" ")
    return f"{first.partition(':')[0]} {model}".strip()


def drivers(capabilities: Capabilities) -> Finding:
    """Name the drivers of the devices; those of one machine are one."""
    versions = sorted({device.driver for device in capabilities.devices})
    detail = f"NVIDIA driver {', '.join(versions)}" if versions else "no NVIDIA device"
    problem = "; ".join(capabilities.degraded)
    return judge("drivers", not problem, problem or detail, "do what the line says")


def interfaces() -> list[str]:
    """Return the names of this machine's network interfaces (Linux; elsewhere none is known)."""
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    return []


def environment(variables: Mapping[str, str], there: Collection[str], cpus: int | None = None) -> Finding:
    """Show the usual variables and what is odd about them: what breaks a group fails, the rest gets a remark."""
    shown, wrong = [], []
    for name in sorted(variables):
        if not any(name == known or (known.endswith("*") and name.startswith(known[:-1])) for known in KNOWN):
            continue
        value = variables[name]
        remark = broken(name, value, there)
        if remark:
            wrong.append(f"{name}={value}: {remark}")
            continue
        remark = odd(name, value, usable_cpus() if cpus is None else cpus)
        shown.append(f"{name}={value}" + (f" ({remark})" if remark else ""))
    detail = "; ".join([*wrong, *shown]) or "none of the usual variables is set, and none is needed"
    return judge("environment", not wrong, detail, f"unset {', '.join(w.partition('=')[0] for w in wrong)}")


def broken(name: str, value: str, there: Collection[str]) -> str:
    """What a value breaks; empty where it breaks nothing."""
    if name in INTERFACES and there:
        # NCCL: prefixes, "=" for whole names, "^" for all but these. gloo: whole names.
        exact, exclude = name == "GLOO_SOCKET_IFNAME" or value.startswith("="), value.startswith("^")
        names = [part for part in value.lstrip("=^").split(",") if part]
        known = [part for part in names if any(i == part if exact else i.startswith(part) for i in there)]
        if not exclude and len(known) < (len(names) if exact else 1):
            return f"this machine has no such network interface (it has {', '.join(there)})"
    if name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING") and value == "0":
        return "ranks would wait for ever for one that is lost"
    if name == "OMP_NUM_THREADS" and not all(part.strip().isdigit() and int(part) for part in value.split(",")):
        return "it is no number of threads"
    return ""


def odd(name: str, value: str, cpus: int) -> str:
    """What is worth a remark; empty where nothing is."""
    if name in LAUNCHER or name.startswith("TORCHELASTIC_"):
        return "a launcher's; not used: agents form their groups themselves"
    if name in SWITCHES and value not in ("", "0"):
        return f"slower: NCCL may not use {SWITCHES[name] or 'InfiniBand'}"
    if name == "NCCL_DEBUG" and value.upper() in ("INFO", "TRACE"):
        return "fills the worker's log"
    if name == "TORCH_DISTRIBUTED_DEBUG" and value.upper() == "DETAIL":
        return "slow: every collective is compared between ranks"
    if name.startswith("NCCL_ASYNC") or name == "NCCL_BLOCKING_WAIT":
        return f"an old name; torch reads TORCH_{name}"
    if name == "CUDA_LAUNCH_BLOCKING" and value not in ("", "0"):
        return "slow: every kernel is waited for"
    if name == "CUDA_VISIBLE_DEVICES" and value in ("", "-1"):
        return "hides every GPU"
    if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        over = f", more than the {cpus} processors" if value.isdigit() and int(value) > cpus else ""
        return f"not used{over}: --threads decides"
    return ""


async def selftest(device: str, ranks: int | None) -> dict[str, Any]:
    """Start ranks and return what they found, ``error`` and ``code`` where they could not. None of them is left."""
    command = [sys.executable, "-P", "-m", "eval_kernel.parallel.selftest", "--device", device]
    command += [] if ranks is None else ["--ranks", str(ranks)]
    paths = os.pathsep.join(path for path in sys.path if path)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except TimeoutError:
        return {"error": f"the ranks were not done after {PATIENCE:g} s", "code": "TIMEOUT"}
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    lines = out.decode(errors="replace").strip().splitlines()
    if lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    code = "MISSING" if "ModuleNotFoundError" in last else "CRASHED"
    return {"error": f"rank 0 ended with code {process.returncode}: {last}", "code": code}
