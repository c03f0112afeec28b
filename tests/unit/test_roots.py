"""Which files a source names, and which it may."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_kernel.errors import PathRefused
from eval_kernel.roots import allowed, expand


def touch(*paths: Path) -> None:
    """Make empty files, and the folders around them."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_a_folder_gives_its_files_of_the_wanted_kinds_in_order(tmp_path: Path) -> None:
    """Folders below it too; hidden files and what lies in hidden folders are left out."""
    kept = [tmp_path / "a.txt", tmp_path / "b" / "c.TXT", tmp_path / "z.txt"]
    touch(*kept, tmp_path / ".hidden.txt", tmp_path / ".git" / "x.txt", tmp_path / "image.png")

    assert kept == expand(str(tmp_path), None, (".txt",))


def test_a_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    """Whoever names a file means it."""
    touch(tmp_path / "data")

    assert [tmp_path / "data"] == expand(str(tmp_path / "data"), None, (".txt",))


def test_a_pattern_gives_its_matches_in_order(tmp_path: Path) -> None:
    """Two stars go through folders; folders themselves are no match."""
    touch(tmp_path / "b.txt", tmp_path / "a" / "b.txt", tmp_path / "c.txt" / "d.md")

    assert [tmp_path / "a" / "b.txt", tmp_path / "b.txt"] == expand(f"{tmp_path}/**/*.txt", None, ())


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    """Brackets in the name of a file that is there are no pattern."""
    touch(tmp_path / "a[1].txt")

    assert [tmp_path / "a[1].txt"] == expand(str(tmp_path / "a[1].txt"), (tmp_path,), ())


def test_links_are_followed_before_they_are_judged(tmp_path: Path) -> None:
    """A link to a file inside is that file; the root itself may be reached through a link."""
    root = tmp_path / "root"
    touch(root / "a.txt")
    (root / "b.txt").symlink_to(root / "a.txt")
    (tmp_path / "alias").symlink_to(root)

    assert root / "a.txt" == allowed(root / "b.txt", (tmp_path / "alias",))
    assert root / "a.txt" == allowed(tmp_path / "alias" / "a.txt", (root,))


def test_a_name_that_begins_like_a_root_is_not_inside_it(tmp_path: Path) -> None:
    """/data-2 is not inside /data."""
    with pytest.raises(PathRefused, match="outside"):
        allowed(tmp_path / "data-2" / "x", (tmp_path / "data",))
