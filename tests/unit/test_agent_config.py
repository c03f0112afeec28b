"""What the agent may be told, and what it finds out about its machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent import probe as probe_module
from agent.check import directory, libraries
from agent.config import AgentConfig, Role, default_cache, default_state
from agent.logs import TAIL_LINES, WORKER_LOG_BYTES, WorkerLog
from agent.probe import Device, nvidia_devices, probe
from eval_kernel.errors import ConfigError


def test_the_defaults_are_valid() -> None:
    """A configuration without any option is accepted and plays both common roles."""
    config = AgentConfig()

    assert (Role.FORWARD, Role.PREPROCESS) == config.roles
    assert config.threads >= 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"coordinator": "localhost"}, "HOST:PORT"),
        ({"coordinator": ":1"}, "HOST:PORT"),
        ({"coordinator": "127.0.0.1:70000"}, "outside 1 to 65535"),
        ({"coordinator": "example.org:50051"}, "not a loopback address"),
        ({"name": ""}, "not allowed"),
        ({"name": "../up"}, "not allowed"),
        ({"site": "a b"}, "not allowed"),
        ({"roles": ()}, "needs a role; allowed: forward, preprocess, aggregate"),
        ({"device": "tpu"}, "unknown"),
        ({"device": "mps"}, "allowed: auto, cpu, cuda, cuda:N"),
        ({"threads": 0}, "1 to 4096"),
        ({"threads": 2, "ranks": 3}, "1 to 2, the number of threads"),
        ({"watchdog_seconds": 1.0}, "watchdog-seconds is 1.0; it must be 3 or more"),
        ({"hang_seconds": 0.0}, "hang-seconds"),
        ({"drain_seconds": float("nan")}, "drain-seconds"),
        ({"give_up_after": -1.0}, "give-up-after"),
        ({"engine": "a.b"}, "MODULE:CLASS"),
        ({"engine": "a-b:C"}, "MODULE:CLASS"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], text: str) -> None:
    """Every wrong value is refused at birth, with what is allowed."""
    with pytest.raises(ConfigError, match=text):
        AgentConfig(**options)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:50051", "[::1]:50051", "127.1.2.3:9"])
def test_loopback_addresses_are_accepted(address: str) -> None:
    """Any way to name this machine will do."""
    assert address == AgentConfig(coordinator=address).coordinator


def test_directories_follow_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    """State and cache lie where XDG says; each named agent has its own state."""
    monkeypatch.setenv("XDG_STATE_HOME", "/x/state")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/cache")

    assert Path("/x/state/fedeval/agent") == default_state(None)
    assert Path("/x/state/fedeval/agent-b") == default_state("b")
    assert Path("/x/cache/fedeval") == default_cache()


# ---------------------------------------------------------------- the machine


class FakeNvmlError(Exception):
    pass


def fake_nvml(broken: str = "", count: int = 1) -> Any:
    """Return a stand-in for pynvml whose function ``broken`` raises."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: b"580.1",
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30, free=79 << 30),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
    }

    def fail(*arguments: object) -> None:
        raise FakeNvmlError("Driver/library version mismatch")

    if broken:
        answers[broken] = fail
    return SimpleNamespace(NVMLError=FakeNvmlError, **answers)


def test_devices_are_described() -> None:
    """A working NVML gives each device's name, memory, compute capability and driver."""
    expected = Device(
        kind="cuda",
        index=0,
        name="NVIDIA H100",
        memory_total=80 << 30,
        memory_free=79 << 30,
        compute_capability="9.0",
        driver="580.1",
    )

    assert ((expected,), "") == nvidia_devices(fake_nvml(), files=True)


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_a_failing_nvml_is_degraded(broken: str) -> None:
    """Where device files exist, an NVML failure is named with a remedy; it does not make a processor-only node."""
    devices, problem = nvidia_devices(fake_nvml(broken), files=True)

    assert () == devices
    assert "Driver/library version mismatch" in problem
    assert "nvidia-smi" in problem


def test_device_files_without_devices_are_degraded() -> None:
    """Neither a missing library nor an empty list explains away the device files."""
    assert "not installed" in nvidia_devices(None, files=True)[1]
    assert "shows no device" in nvidia_devices(fake_nvml(count=0), files=True)[1]


def test_a_machine_without_nvidia_is_sound() -> None:
    """Without device files a missing or failing NVML means nothing."""
    assert ((), "") == nvidia_devices(None, files=False)
    assert ((), "") == nvidia_devices(fake_nvml("nvmlInit"), files=False)


def test_capabilities_are_json(tmp_path: Path) -> None:
    """What is announced parses, and names the machine's essentials."""
    facts = json.loads(replace(probe(tmp_path / "not" / "yet"), engine={"dtypes": ["float32"]}).to_json())

    assert facts["cpus"] >= 1
    assert facts["memory_total"] > 0
    assert facts["disk_free"] > 0
    assert {"dtypes": ["float32"]} == facts["engine"]


def test_missing_processor_information_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no /proc/cpuinfo the flags are empty and the model has some name."""
    monkeypatch.setattr(probe_module, "_cpuinfo", lambda key: "")

    assert () == probe_module.cpu_flags()
    assert probe_module.cpu_model()


# ---------------------------------------------------------------- check and logs


def test_check_names_missing_libraries() -> None:
    """The finding lists what is missing and how to install it."""
    finding = libraries({"torch": "2.9", "numpy": "2"})

    assert not finding.ok
    assert "missing: transformers, tokenizers, safetensors, gguf, datasets" == finding.detail
    assert "pip install" in finding.remedy


def test_check_wants_space(tmp_path: Path) -> None:
    """A directory that can be written but has too little space fails."""
    assert directory("state", tmp_path, 1, "--state").ok
    assert not directory("state", tmp_path, 1 << 62, "--state").ok
    assert [] == list(tmp_path.iterdir())


def test_the_remedy_of_a_directory_fits_its_fault(tmp_path: Path) -> None:
    """Too little space asks for space, a file on the path for another path; what is well has no remedy."""
    (tmp_path / "file").write_text("")

    assert "free space" in directory("state", tmp_path, 1 << 62, "--state").remedy
    assert "no directory" in directory("state", tmp_path / "file" / "below", 1, "--state").remedy
    assert "" == directory("state", tmp_path, 1, "--state").remedy


def test_the_worker_s_log_rotates(tmp_path: Path) -> None:
    """The log never grows beyond its limit by more than one write, and one older file is kept."""
    log = WorkerLog(tmp_path / "worker.log")
    for number in range(40):
        log.write(f"{number:06d} ".encode() * 10_000 + b"\n")

    assert ["worker.log", "worker.log.1"] == sorted(p.name for p in tmp_path.iterdir())
    assert all(p.stat().st_size <= WORKER_LOG_BYTES for p in tmp_path.iterdir())


def test_the_last_lines_are_kept_without_a_file() -> None:
    """The tail has the last lines, an unfinished one included, and blank ones left out."""
    log = WorkerLog(None)
    log.write(b"".join(b"line %d\n\n" % number for number in range(30)))
    log.write(b"unfin")
    log.write(b"ished")

    expected = [f"line {number}" for number in range(30 - TAIL_LINES, 30)] + ["unfinished"]
    assert expected == log.tail()


def test_a_progress_bar_is_one_line() -> None:
    """Of a line that was written over again and again the last state is kept."""
    log = WorkerLog(None)
    log.write(b"\r 1%\r50%\r100%\nthen\r\n")

    assert ["100%", "then"] == log.tail()


def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """An unwritable log file is mentioned in the tail, and that is all."""
    log = WorkerLog(tmp_path / "no" / "such" / "worker.log")
    log.write(b"hello\n")

    assert "hello" == log.tail()[0]
    assert "cannot be written" in log.tail()[1]
