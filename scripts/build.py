"""Build the wheel, install it into an environment of its own, and run both commands there, outside the checkout.

The first environment has what the coordinator needs and no torch: `import coordinator` must work there. The second
sees the packages of the environment this runs in, so that the agent can be tried without downloading torch again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command and return what it printed; exits with its output when it fails."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"build: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build, install, try; exits with a message at the first thing that does not work."""
    dist = ROOT / "dist"
    for old in dist.glob("fedeval-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=ROOT)
    wheel = next(dist.glob("fedeval-*.whl"))
    with tempfile.TemporaryDirectory() as temp:
        here = Path(temp)
        bare = here / "coordinator"
        venv.create(bare, with_pip=True)
        run(bare / "bin/python", "-m", "pip", "install", "--quiet", wheel, cwd=here)
        run(bare / "bin/python", "-c", "import coordinator, coordinator.cli", cwd=here)
        has_torch = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
        run(bare / "bin/python", "-c", has_torch, cwd=here)
        run(bare / "bin/eval-coordinator", "--help", cwd=here)
        print(run(bare / "bin/eval-coordinator", "--version", cwd=here).strip(), "(without torch)")
        full = here / "agent"
        venv.create(full, with_pip=True)
        run(full / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=here)
        env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
        print(run(full / "bin/eval-agent", "--version", cwd=here, env=env).strip())
        run(full / "bin/eval-agent", "probe", "--json", cwd=here, env=env)
        where = run(full / "bin/python", "-c", "import agent; print(agent.__file__)", cwd=here, env=env).strip()
        if not Path(where).is_relative_to(full):
            sys.exit(f"build: the agent was imported from {where}, not from the wheel")
    print(f"built {wheel.name} and {next(dist.glob('fedeval-*.tar.gz')).name}; both commands run from the wheel")


if __name__ == "__main__":
    main()
