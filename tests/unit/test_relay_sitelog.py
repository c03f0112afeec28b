"""The site's log: what was appended comes back after any end, and goes once it was acknowledged."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.relay.sitelog import SiteLog
from eval_kernel.errors import DirectoryUnusable


def results(*numbers: int) -> list[tuple[str, bytes]]:
    """Return results as they are appended."""
    return [("coordinator", b"result %d" % number) for number in numbers]


def test_what_was_appended_comes_back_in_order(tmp_path: Path) -> None:
    """A log that was never closed gives back every record, with its coordinator."""
    log = SiteLog(tmp_path)
    log.append(results(1, 2))
    log.append([("other", b"\x00\xff")])
    again = SiteLog(tmp_path)
    assert [*results(1, 2), ("other", b"\x00\xff")] == [(r.coordinator, r.report) for r in again.leftovers]
    assert 3 == again.pending


def test_what_was_acknowledged_goes_with_its_segment(tmp_path: Path) -> None:
    """A segment's file is removed when its last record was acknowledged, and records are numbered across segments."""
    log = SiteLog(tmp_path, segment_bytes=1)
    (first,), (second,) = log.append(results(1)), log.append(results(2))
    assert 2 == len(list(tmp_path.iterdir()))
    log.acknowledged([first.number])
    assert 1 == len(list(tmp_path.iterdir()))
    log.acknowledged([second.number])
    assert [] == list(tmp_path.iterdir())
    assert 0 == log.pending
    log.append(results(3))
    log.close()
    assert results(3) == [(r.coordinator, r.report) for r in SiteLog(tmp_path).leftovers]


def test_a_torn_end_is_dropped_wherever_it_is_torn(tmp_path: Path) -> None:
    """A file cut at any byte gives back exactly the records that are whole before the cut, and nothing is damaged."""
    log = SiteLog(tmp_path / "whole")
    log.append(results(1, 2, 3))
    (path,) = (tmp_path / "whole").iterdir()
    data = path.read_bytes()
    size = len(data) // 3
    for cut in range(len(data)):
        torn = tmp_path / f"torn-{cut}"
        torn.mkdir()
        (torn / path.name).write_bytes(data[:cut])
        again = SiteLog(torn)
        assert cut // size == len(again.leftovers)
        assert [] == again.damaged


def test_damage_within_is_named_and_kept(tmp_path: Path) -> None:
    """A changed byte costs the records from there on, which are kept in a file of their own and named."""
    log = SiteLog(tmp_path)
    log.append(results(1, 2, 3))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 3 + 20] ^= 1
    path.write_bytes(data)
    again = SiteLog(tmp_path)
    assert results(1) == [(r.coordinator, r.report) for r in again.leftovers]
    assert [f"{path} is damaged at byte {len(data) // 3}; the rest is kept in {path.stem}.damaged"] == again.damaged
    assert bytes(data[len(data) // 3 :]) == path.with_suffix(".damaged").read_bytes()


def test_a_refused_write_promises_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full in the middle of a write leaves no half record behind."""
    log = SiteLog(tmp_path)
    log.append(results(1))
    with monkeypatch.context() as patch:
        patch.setattr("agent.relay.sitelog.os.fdatasync", lambda file: (_ for _ in ()).throw(OSError(28, "no space")))
        with pytest.raises(OSError, match="no space"):
            log.append(results(2))
    log.append(results(3))
    log.close()
    assert results(1, 3) == [(r.coordinator, r.report) for r in SiteLog(tmp_path).leftovers]


def test_an_unusable_directory_is_one_line(tmp_path: Path) -> None:
    """A file in the directory's place is refused with the directory's name."""
    (tmp_path / "log").write_text("")
    with pytest.raises(DirectoryUnusable, match="log"):
        SiteLog(tmp_path / "log")
