"""Generate the protobuf and gRPC modules with their stubs beside the .proto files; `--check` only compares."""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def generate(out: Path) -> None:
    """Write the generated modules of every .proto file under ``out``; raises on a protoc error."""
    files = sorted(str(p.relative_to(PROTO)) for p in PROTO.glob("fedeval/v1/*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTO}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
    ]
    plugins = Path(sys.executable).parent
    for name in ("mypy", "mypy_grpc"):
        command += [f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}", f"--{name}_out={out}"]
    subprocess.run([*command, *files], check=True, cwd=PROTO)


def main() -> int:
    """Generate in place, or with ``--check`` report the files that are out of date and return 1."""
    if "--check" not in sys.argv[1:]:
        generate(PROTO)
        return 0
    with tempfile.TemporaryDirectory() as temp:
        generate(Path(temp))
        stale = [
            str(fresh.relative_to(temp))
            for fresh in sorted(Path(temp).rglob("*.py*"))
            if not (PROTO / fresh.relative_to(temp)).exists()
            or not filecmp.cmp(fresh, PROTO / fresh.relative_to(temp), shallow=False)
        ]
    for name in stale:
        print(f"proto/{name} is out of date: run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
