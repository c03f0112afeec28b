"""Small corpora on disk whose right numbers are known. What they are scored with is in ``tests.support.models``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from eval_kernel.corpus import Corpus

#: Under the dyadic model: 8 + 4 x 2 x 3 = 32 bits on 16 tokens of one byte; naive averages give other numbers.
K_DOCUMENTS = ("a" * 8, "dd", "dd", "dd", "dd")

#: sha256 of the first 12,234 bytes (whole lines) of the wikitext-2 test text.
HEAD_SHA256 = "e071aaf634f3668c27491cd15766d2c5f5c83b1c7cf398f80f1840287e2c3046"
HEAD_LIMIT = 12288
FULL_SHA256 = "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"


def write_jsonl(path: Path, documents: Sequence[str]) -> Path:
    """One ``{"text": ...}`` per line."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def write_k_corpus(directory: Path) -> Path:
    """The K corpus as jsonl."""
    return write_jsonl(directory / "k.jsonl", K_DOCUMENTS)


def full_text() -> Path:
    """The wikitext-2 test text; skips where ``FEDEVAL_TEST_DATA`` does not have it."""
    root = os.environ.get("FEDEVAL_TEST_DATA")
    path = Path(root or "") / "data" / "wikitext-2" / "test.txt"
    if not root or not path.exists():
        pytest.skip("needs FEDEVAL_TEST_DATA with data/wikitext-2/test.txt")
    assert FULL_SHA256 == hashlib.sha256(path.read_bytes()).hexdigest(), f"{path} is another text"
    return path


def write_head(directory: Path) -> Path:
    """Whole lines of the wikitext-2 test text from its start, at most 12,288 bytes of them."""
    head = b""
    for line in full_text().read_bytes().splitlines(keepends=True):
        if len(head) + len(line) > HEAD_LIMIT:
            break
        head += line
    assert HEAD_SHA256 == hashlib.sha256(head).hexdigest()
    path = directory / "head.txt"
    path.write_bytes(head)
    return path


def corpus_of(lengths: Sequence[int], *, joined: bool = False, seed: int = 0) -> Corpus:
    """A corpus in memory: documents of so many random tokens, one byte each, every third token a word."""
    total = sum(lengths)
    draw = np.random.default_rng(seed)
    ones = np.ones(total, dtype=np.int32)
    words = np.array(np.arange(total) % 3 == 0, dtype=np.int32)
    return Corpus(
        tokens=draw.integers(0, 1000, total).astype(np.int32),
        bytes=ones,
        words=words,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        joined=joined,
        data_digest="sha256:0",
        source_bytes=total,
        source_words=int(words.sum()),
        lm_eval_words=int(words.sum()),
    )
