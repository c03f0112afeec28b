"""The tokenizer, reduced to what scoring needs: text to ids with character offsets, its special tokens, its digest."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_kernel.conversion import without_reports
from eval_kernel.errors import ModelNeedsCode, ModelUnsupported, reason
from eval_kernel.plan import digest_json

#: Files that hold a vocabulary, in transformers' formats.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken", "spiece.model", "sentencepiece*.model")


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """``backend`` is a ``tokenizers.Tokenizer`` that neither truncates nor pads; ids come without special tokens."""

    backend: Any
    bos: int | None
    eos: int | None
    adds_bos: bool  # whether the tokenizer itself puts BOS in front of a text
    digest: str


def warm() -> None:
    """Import what ``load`` needs, which takes seconds, before it is needed."""
    for name in ("models.auto.tokenization_auto", "tokenization_utils_fast"):
        importlib.import_module(f"transformers.{name}")


def load(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model directory. Raises ``ModelUnsupported`` and ``ModelNeedsCode``."""
    from transformers import AutoTokenizer

    # Without any of these, transformers may make up a tokenizer that knows nothing.
    if not any(found for pattern in VOCABULARIES for found in directory.glob(pattern)):
        raise ModelUnsupported(
            f"tokenizer {directory}: no tokenizer file in it (looked for {', '.join(VOCABULARIES)}); "
            "set model.tokenizer to a directory or hub:owner/name that has one"
        )
    try:
        with without_reports():
            outer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, use_fast=True
            )
    except Exception as error:  # noqa: BLE001 - missing files, bad JSON, unknown classes each raise a type of their own
        if "trust_remote_code" in str(error):
            raise ModelNeedsCode(
                f"tokenizer {directory}: needs Python code from its repository, which is never run; "
                "set model.tokenizer to one that transformers knows"
            ) from None
        raise ModelUnsupported(
            f"tokenizer {directory}: cannot be loaded ({reason(error)}); set model.tokenizer to one that can"
        ) from None
    backend = getattr(outer, "backend_tokenizer", None)
    if backend is None:
        raise ModelUnsupported(
            f"tokenizer {directory}: {type(outer).__name__} gives no character offsets; "
            "use its fast form (tokenizer.json)"
        )
    backend.no_truncation()
    backend.no_padding()
    bos, eos = outer.bos_token_id, outer.eos_token_id
    begins = backend.encode("a", add_special_tokens=True).ids[:1]
    adds_bos = bos is not None and begins == [bos] and backend.encode("a", add_special_tokens=False).ids[:1] != [bos]
    digest = digest_json([json.loads(backend.to_str()), bos, eos])
    return Tokenizer(backend, bos, eos, adds_bos, digest)
