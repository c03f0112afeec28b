"""`eval-agent check --group`: what is odd in the environment is named, and what the ranks found is judged."""

from __future__ import annotations

from typing import Any

import pytest

from agent.groupcheck import environment, judged

THERE = ("eth0", "lo")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("GLOO_SOCKET_IFNAME", "eth7", "no such network interface (it has eth0, lo)"),
        ("GLOO_SOCKET_IFNAME", "eth", "no such network interface"),
        ("NCCL_SOCKET_IFNAME", "ib,wlan", "no such network interface"),
        ("NCCL_SOCKET_IFNAME", "=eth", "no such network interface"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "wait for ever"),
        ("OMP_NUM_THREADS", "many", "no number of threads"),
    ],
)
def test_a_value_that_breaks_groups_fails(name: str, value: str, text: str) -> None:
    """The line says what is wrong, the remedy which variable to unset."""
    found = environment({name: value, "HOME": "/home/x"}, THERE, 2)

    assert not found.ok
    assert found.detail.startswith(f"{name}={value}: ")
    assert text in found.detail
    assert "HOME" not in found.detail
    assert f"unset {name}" == found.remedy


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("MASTER_ADDR", "10.0.0.1", "a launcher's; not used"),
        ("WORLD_SIZE", "2", "a launcher's; not used"),
        ("NCCL_P2P_DISABLE", "1", "slower: NCCL may not use direct copies between GPUs"),
        ("NCCL_IB_DISABLE", "1", "slower: NCCL may not use InfiniBand"),
        ("NCCL_DEBUG", "info", "fills the worker's log"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "an old name; torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("CUDA_VISIBLE_DEVICES", "", "hides every GPU"),
        ("OMP_NUM_THREADS", "8", "not used, more than the 2 processors: --threads decides"),
        ("OMP_NUM_THREADS", "2", "not used: --threads decides"),
    ],
)
def test_an_odd_value_gets_a_remark(name: str, value: str, text: str) -> None:
    """It is shown with what it does, and fails nothing."""
    found = environment({name: value}, THERE, 2)

    assert found.ok
    assert f"{name}={value} ({text}" in found.detail


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
        ("NCCL_ALGO", "Ring"),
    ],
)
def test_a_value_that_is_fine_is_shown(name: str, value: str) -> None:
    """It stands there as it is."""
    found = environment({name: value}, THERE, 2)

    assert found.ok
    assert f"{name}={value}" == found.detail


def result(**second: Any) -> dict[str, Any]:
    """What two equal ranks find, the second one changed."""
    rank = {"rank": 0, "host": "h", "device": "cuda:0 NVIDIA H100", "python": "3.11.7"}
    rank |= {"torch": "2.13.0", "nccl": "2.27.5", "cuda": "12.8"}
    link = {"latency_seconds": 2e-5, "bytes_per_second": 4e9}
    return {
        "backend": "nccl",
        "ranks": [rank, {**rank, "rank": 1, "device": "cuda:1 NVIDIA H100", **second}],
        "exact": {"float64": True, "int64": True, "bfloat16": True},
        "links": {"float64": link, "bfloat16": link},
        "shard_seconds": 0.0012,
    }


def test_equal_ranks_are_good() -> None:
    """Versions, sums and both links are shown with their figures."""
    found = judged(result())

    assert all(finding.ok for finding in found)
    assert ["ranks", "versions", "all_reduce", "link, float64", "link, bfloat16", "shard"] == [f.name for f in found]
    assert "nccl 2.27.5" in found[1].detail
    assert "16 MiB summed at 4.00 GB/s; one number in 20 µs" == found[3].detail


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("nccl", "2.21.5", "nccl is 2.21.5 and 2.27.5"),
        ("torch", "2.9.0", "torch is 2.13.0 and 2.9.0"),
        ("device", "cuda:1 NVIDIA A100", "device is cuda NVIDIA A100 and cuda NVIDIA H100"),
    ],
)
def test_what_must_agree_and_does_not_fails(name: str, value: str, text: str) -> None:
    """The line names both values."""
    versions = judged(result(**{name: value}))[1]

    assert not versions.ok
    assert text == versions.detail
    assert versions.remedy


def test_a_wrong_sum_fails() -> None:
    """The dtype is named; nobody may use such a group."""
    sums = judged({**result(), "exact": {"float64": False, "bfloat16": True}})[2]

    assert not sums.ok
    assert "wrong sums in float64" == sums.detail
    assert "do not use groups here" in sums.remedy
