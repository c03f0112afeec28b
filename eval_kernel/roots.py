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

    Returns an empty list where nothing matches. Raises ``PathRefused``.
    """
    path = Path(source)
    if path.is_dir():
        found = [
            p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in suffixes and not p.name.startswith(".")
        ]
    elif path.exists():
        found = [path]
    else:
        found = [p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file()]  # noqa: PTH207 - Path.glob takes no absolute pattern
    allowed(_fixed_part(path), roots)
    return [allowed(p, roots) for p in sorted(found)]


def _fixed_part(path: Path) -> Path:
    """The part of a path before its first wildcard: refused even when nothing matches; a refusal tells nothing."""
    parts: list[str] = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)
