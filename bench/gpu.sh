#!/bin/sh
# Checks scoring on one GPU and measures it, in under 5 minutes: `sh bench/gpu.sh`, in a checkout.
# PYTHON names an interpreter with torch (CUDA), transformers, safetensors, grpcio, protobuf, pydantic, pyyaml,
# numpy, and torchao where its kernels are wanted. With pytest as well, tests/gpu runs first.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PYTHONPATH=.:proto
export PYTHONPATH
"$PYTHON" -c '
import sys
try:
    import torch
except ImportError:
    sys.exit(f"bench/gpu.sh: {sys.executable} has no torch; name an interpreter that has: PYTHON=... sh bench/gpu.sh")
sys.exit(None if torch.cuda.is_available() else "bench/gpu.sh: torch sees no CUDA device here")
'
if "$PYTHON" -c 'import pytest, pytest_timeout' 2>/dev/null; then
    "$PYTHON" -m pytest -q -m gpu tests/gpu
else
    echo "pytest and pytest-timeout are not installed: tests/gpu is left out"
fi
exec "$PYTHON" bench/gpu.py "$@"
