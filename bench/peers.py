"""Other tools as sides of ``bench/score.py``: lm-evaluation-harness in its own Python, and llama.cpp's perplexity tool.

Each takes turns as our own sides do. This file is also what runs inside lm-evaluation-harness's Python, which need not
have this project: there it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: llama.cpp's name of a format, and the side of ours with as many bits.
EQUALS = {"F32": "fp32", "F16": "bf16", "Q8_0": "int8", "Q4_0": "int8"}


class LmEval:
    """lm-evaluation-harness's own model class on the same windows, fp32, batch 1, in the Python given."""

    def __init__(self, python: str, directory: Path, tokens: list[int], options: Any, cache: Path) -> None:
        self.name = "lm-eval fp32"
        path = cache / "bench-lm-eval.json"
        path.write_text(json.dumps(tokens))
        self._process = subprocess.Popen(
            [python, __file__, str(directory), str(path), str(options.context), str(options.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self.facts = self._read()
        self.turns: list[dict[str, float]] = []

    def turn(self, first: int, count: int) -> None:
        """Have it score some windows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"[{first}, {count}]\n")
        self._process.stdin.flush()
        self.turns.append(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        sys.exit(f"bench: lm-eval failed:\n{self._process.communicate()[1][-2000:]}")


class LlamaCpp:
    """``llama-perplexity`` on the same text and context, a process for each turn; its log's times tell the speed.

    It feeds every token, but makes logits for the second half of each window only: less work than ours.
    """

    #: Lines of its log between which it does nothing but score; each begins with minutes, seconds, and so on.
    _MARKS = ("calculating perplexity", "Final estimate")

    def __init__(self, tools: Path, kind: str, gguf: Path, text: Path, options: Any, cache: Path) -> None:
        self.name = f"llama.cpp {kind}"
        self._options, self._text, self._tool = options, text, tools / "llama-perplexity"
        self._model = cache / f"bench-{kind}.gguf"
        if not self._model.exists():
            quantise = [str(tools / "llama-quantize"), "--allow-requantize", str(gguf), str(self._model), kind]
            done = subprocess.run(quantise, check=False, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"bench: llama-quantize failed:\n{done.stderr[-2000:]}")
        self.facts = {"kernel": kind, "bytes": self._model.stat().st_size}
        self.turns: list[dict[str, float]] = []

    def turn(self, first: int, count: int) -> None:
        """Have it read the first ``count`` windows of the text; where in the text they lie makes no difference."""
        command = [str(self._tool), "-m", str(self._model), "-f", str(self._text), "-c", str(self._options.context)]
        command += ["--chunks", str(count), "-t", str(self._options.threads), "-tb", str(self._options.threads)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        log = done.stdout + done.stderr
        begin, end = (re.search(rf"(\d+)\.(\d+)\.(\d+)\.(\d+) I.*{words}", log) for words in self._MARKS)
        if done.returncode or begin is None or end is None:
            sys.exit(f"bench: llama-perplexity failed:\n{log[-2000:]}")
        times = [60 * int(m[1]) + int(m[2]) + int(m[3]) / 1e3 + int(m[4]) / 1e6 for m in (begin, end)]
        self.turns.append({"wall": times[1] - times[0], "tokens": count * self._options.context})

    def close(self) -> None:
        """Nothing runs between turns."""


def serve(directory: str, path: str, context: int, threads: int) -> None:
    """Inside lm-evaluation-harness's Python: load, then score the windows that the standard input names."""
    import torch

    torch.set_num_threads(threads)
    tokens = json.loads(Path(path).read_text())
    from lm_eval.models.huggingface import HFLM

    started = time.perf_counter()
    model = HFLM(pretrained=directory, device="cpu", dtype="float32", batch_size=1, max_length=context)
    loaded = time.perf_counter() - started
    print(json.dumps({"kernel": "lm_eval.HFLM", "load": loaded, "bytes": 4 * model.model.num_parameters()}), flush=True)
    for line in sys.stdin:
        first, count = json.loads(line)
        windows = [tokens[w * context : (w + 1) * context] for w in range(first, first + count)]
        requests = [(("", ""), w[:1], w[1:]) for w in windows]
        wall, cpu = time.perf_counter(), time.process_time()
        found = model._loglikelihood_tokens(requests, disable_tqdm=True)
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(spent | {"nll": -sum(value for value, _ in found)}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
