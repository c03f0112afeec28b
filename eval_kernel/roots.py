"""Which paths a job may read: real paths under the roots this node was told of. Nothing else opens a job's paths."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from eval_kernel.errors import PathRefused

Roots = tuple[Path, ...] | None  # None: no restriction (a person runs their own job)


def allowed(path: Path, roots: Roots) -> Path:
    """Return the real path of ``path``; raises ``PathRefused`` when it leaves the roots, links followed."""
    real = Path(os.path.realpath(path))
    if roots is None or any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return real
    listed = ", ".join(str(root) for root in roots) or "none"
    raise PathRefused(
        f"{path} is outside the directories this node may read ({listed}); start its agent with --root DIR"
    )


def expand(source: str, roots: Roots, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files a source names, sorted: a file, a folder's files with one of ``suffixes``, or a glob's matches.

    Returns an empty list where nothing matches. Raises ``PathRefused``, and ``OSError`` where it may not look.
    """
    path = Path(source)
    # Before anything is looked for: what lies outside is refused in the same words whether or not it is there.
    allowed(_fixed_part(path, roots), roots)
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file() and not _hidden(p, path)]
    elif path.is_file():
        found = [path]
    else:
        found = [p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file()]  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [allowed(p, roots) for p in sorted(found)]


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _fixed_part(path: Path, roots: Roots) -> Path:
    """The part of a path before its first wildcard. Raises ``PathRefused`` for ``..`` after it, if there are roots."""
    magic = next((i for i, part in enumerate(path.parts) if glob.has_magic(part)), len(path.parts))
    if roots is not None and ".." in path.parts[magic:]:
        raise PathRefused(f"{path}: '..' after a wildcard is not followed on this node; write the path without it")
    return Path(*path.parts[:magic])
