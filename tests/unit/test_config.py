"""The coordinator's configuration checks itself at birth."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import (
    DEFAULT_ADDRESS,
    ServeConfig,
    Timings,
    checked_address,
    default_data_dir,
    scheduler_config,
)
from eval_kernel.errors import ConfigError


def test_the_defaults_are_loopback_and_the_xdg_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a word the coordinator listens on this machine only and keeps its journal in the user's data home."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = ServeConfig()

    assert "127.0.0.1:50051" == DEFAULT_ADDRESS == config.listen
    assert tmp_path / "fedeval" == config.data_dir == default_data_dir()

    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert tmp_path / ".local" / "share" / "fedeval" == default_data_dir()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:65535", "[::1]:50051", "127.1.2.3:7"])
def test_loopback_addresses_are_taken(address: str) -> None:
    """Every name of this machine will do."""
    assert address == checked_address(address, listening=False)


@pytest.mark.parametrize(
    "address", ["", "localhost", ":1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    """The message shows the address."""
    with pytest.raises(ConfigError, match=r"HOST:PORT|outside"):
        checked_address(address, listening=True)


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "10.0.0.7:50051", "[::]:50051", "example.org:50051"])
def test_addresses_beyond_this_machine_need_mutual_tls(address: str) -> None:
    """There it is used by itself; to leave it out is refused, with the reason and what to use instead."""
    assert ServeConfig(listen=address).secure
    assert not ServeConfig(listen="127.0.0.1:50051").secure
    with pytest.raises(ConfigError, match=r"mutual TLS.*127\.0\.0\.1:50051"):
        ServeConfig(listen=address, tls="never")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tls": "sometimes"}, "auto, always or never"),
        ({"advertise": ("a b",)}, "--advertise a b"),
        ({"advertise": ("http://host",)}, "--advertise"),
        ({"enrolment": "nowhere"}, "HOST:PORT"),
        ({"listen": "10.0.0.7:65535"}, "outside"),
        ({"certificate_life": timedelta(0)}, "398 days"),
    ],
)
def test_options_about_certificates_are_checked(options: dict[str, Any], text: str) -> None:
    """Each wrong one is refused at birth."""
    with pytest.raises(ConfigError, match=text):
        ServeConfig(**options)


def test_port_zero_is_for_listening_only() -> None:
    """Any free port can be listened on, but not connected to."""
    assert "127.0.0.1:0" == checked_address("127.0.0.1:0", listening=True)
    with pytest.raises(ConfigError, match="outside 1 to 65535"):
        checked_address("127.0.0.1:0", listening=False)


def test_the_data_directory_is_no_file(tmp_path: Path) -> None:
    """A file in its place is refused."""
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        ServeConfig(data_dir=file)


@pytest.mark.parametrize(("heartbeat", "lease"), [(0.0, 30.0), (5.0, 9.0), (601.0, 5000.0), (5.0, 90_000.0)])
def test_a_lease_outlives_a_lost_heartbeat(heartbeat: float, lease: float) -> None:
    """Timings under which healthy agents would lose their work are refused."""
    with pytest.raises(ConfigError, match="seconds"):
        scheduler_config(heartbeat, lease)


def test_the_scheduler_suspects_after_three_heartbeats() -> None:
    """Suspicion follows the heartbeat and never comes after the lease's end."""
    assert (15.0, 0.8) == (
        scheduler_config(5.0, 30.0).suspect_after_seconds,
        scheduler_config(0.3, 0.8).suspect_after_seconds,
    )


@pytest.mark.parametrize("name", Timings.__slots__)
def test_every_timing_is_positive(name: str) -> None:
    """A duration of zero is refused by name."""
    with pytest.raises(ConfigError, match=name):
        Timings(**{name: 0.0})
