"""The job that proves a plan, and files written whole or not at all. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eval_kernel.errors import DirectoryUnusable
from eval_kernel.spec import JobSpec


def proof_job(spec: JobSpec, precision: Any, windows: int) -> JobSpec:
    """The job on its first windows, a window to a shard, in some precision."""
    own = spec.window.max_windows
    data = spec.model_dump(mode="json")
    data["window"]["max_windows"] = windows if own is None else min(own, windows)
    data["shard"]["tokens"], data["precision"], data["metrics"] = 1, precision, []
    return JobSpec.model_validate_json(json.dumps(data))


def write(path: Path, text: str) -> None:
    """Write a file. Raises ``DirectoryUnusable``."""
    temp = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)
    except OSError as error:
        raise DirectoryUnusable(f"{path} cannot be written ({error.strerror}); choose another place") from None
