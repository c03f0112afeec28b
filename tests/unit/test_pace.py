"""What a node says of the speed of its products comes from measured times, each measured once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from eval_kernel import pace
from eval_kernel.errors import DirectoryUnusable

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


class Slow(torch.nn.Module):
    """A layer that takes at least so many seconds."""

    def __init__(self, size: int, seconds: float) -> None:
        super().__init__()
        self.in_features = self.out_features = size
        self.seconds, self.calls = seconds, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take one's time."""
        self.calls += 1
        deadline = time.perf_counter() + self.seconds
        while time.perf_counter() < deadline:
            pass
        return x


@pytest.fixture(autouse=True)
def small_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a test are worth measuring."""
    monkeypatch.setattr(pace, "LEAST_WEIGHTS", 1000)


def test_a_slow_kernel_is_called_slow(tmp_path: Path) -> None:
    """A layer that takes 50 ms for what float32 does in microseconds is said to be slower, in capitals."""
    layer = Slow(64, 0.05)
    found = pace.finding(torch.nn.Sequential(layer), CPU, torch.bfloat16, True, tmp_path)

    assert "SLOWER" in found[pace.KEY]
    assert ": 0.0" in found[pace.KEY]


def test_a_kernel_is_measured_once_on_a_machine(tmp_path: Path) -> None:
    """The second model of the same layers takes the times of the first."""
    first, second = Slow(64, 0.01), Slow(64, 0.01)
    told = pace.finding(torch.nn.Sequential(first), CPU, torch.bfloat16, True, tmp_path)

    assert told == pace.finding(torch.nn.Sequential(second), CPU, torch.bfloat16, True, tmp_path)
    assert (0 < first.calls <= pace.REPEATS, second.calls) == (True, 0)


def test_threads_are_as_before(tmp_path: Path) -> None:
    """Rows that run one by one are measured on one thread, which then are as many as they were."""
    threads = torch.get_num_threads()
    pace.finding(torch.nn.Sequential(Slow(64, 0.0)), CPU, torch.bfloat16, True, tmp_path)

    assert threads == torch.get_num_threads()


def test_a_small_model_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to gain or lose."""
    monkeypatch.setattr(pace, "LEAST_WEIGHTS", 1_000_000)
    layer = Slow(64, 0.0)

    assert {} == pace.finding(torch.nn.Sequential(layer), CPU, torch.bfloat16, True, tmp_path)
    assert 0 == layer.calls


@pytest.mark.parametrize("text", ["", "[]", '{"a": -1.0}', '{"a": "x"}'])
def test_damaged_times_are_measured_again(tmp_path: Path, text: str) -> None:
    """Whatever the file holds, and it is whole again afterwards."""
    pace.finding(torch.nn.Sequential(Slow(64, 0.0)), CPU, torch.bfloat16, True, tmp_path)
    (file,) = (tmp_path / "pace").glob("*.json")
    file.write_text(text)
    layer = Slow(64, 0.0)
    pace.finding(torch.nn.Sequential(layer), CPU, torch.bfloat16, True, tmp_path)

    assert layer.calls > 0
    assert 2 == len(json.loads(file.read_text()))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """It names the directory."""
    (tmp_path / "pace").write_text("a file")
    with pytest.raises(DirectoryUnusable, match="cache directory"):
        pace.finding(torch.nn.Sequential(Slow(64, 0.0)), CPU, torch.bfloat16, True, tmp_path)
