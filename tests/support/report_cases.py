"""Manifests, tallies and reports of the K corpus on the dyadic model, whose every figure is known in advance.

K: D0 = 8 tokens of 1 bit; D1 .. D4 = 2 tokens of 3 bits each. 32 bits, 16 tokens, 16 bytes; perplexity 4.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.partial import Partial, RowSums
from eval_kernel.plan import Manifest
from eval_kernel.report import Accounting, NodeWork, build_report
from eval_kernel.spec import JobSpec, parse_spec
from eval_kernel.tally import Tally


def bits(number: float) -> int:
    """Bits as grid steps, rounded once."""
    return round(number * math.log(2.0) * STEPS_PER_NAT)


def row(document: int | None, steps: int, tokens: int, *, documents: int = 1, words: int = 1) -> RowSums:
    """A row with one byte per token."""
    return RowSums(document, documents, steps, tokens, tokens, words)


def partial(shard: int, *rows: RowSums, **changes: Any) -> Partial:
    """A partial whose totals are its rows' sums."""
    sums = [sum(getattr(r, name) for r in rows) for name in ("steps", "tokens", "bytes", "words")]
    return replace(Partial(shard, *sums, rows=rows), **changes)


def k_partials() -> list[Partial]:
    """The K corpus in three shards; D0 is spread over two of them."""
    one, three = bits(1), bits(3)
    return [
        partial(0, row(0, 5 * one, 5)),
        partial(1, row(0, 3 * one, 3, words=0), row(1, 2 * three, 2), row(2, 2 * three, 2)),
        partial(2, row(3, 2 * three, 2), row(4, 2 * three, 2)),
    ]


def tally_of(*partials: Partial) -> Tally:
    """A tally of these partials, added in this order."""
    tally = Tally()
    for p in partials:
        tally.add(p)
    return tally


def k_spec(**changes: Any) -> JobSpec:
    """A job over the K corpus."""
    return parse_spec({"model": "/models/dyadic", "dataset": "/data/k.txt", **changes}, where="job")


def k_manifest(**changes: Any) -> Manifest:
    """The K corpus's manifest, with one empty document besides."""
    manifest = Manifest(
        data_digest="sha256:da",
        documents=6,
        empty_documents=1,
        bytes=16,
        words=5,
        lm_eval_words=8,
        tokens=16,
        windows=6,
        scored_tokens=16,
        scored_bytes=16,
        scored_words=5,
        input_tokens=16,
        shards=3,
        tokenizer_digest="sha256:70",
        weights_digest="sha256:3e",
        model_type="llama",
        parameters=1234,
        vocabulary=64,
        max_context=2048,
        dtype="float32",
        policy="rolling",
        context=1024,
        stride=None,
        join=None,
        bos="first",
        prefix_token=0,
        prefix_kind="bos",
        batch_tokens=4096,
        kernel_version=1,
    )
    return replace(manifest, **changes)


def k_work() -> list[NodeWork]:
    """Two unequal nodes that scored the K corpus."""
    software = {"torch": "2.13.0", "transformers": "5.24.0"}
    return [
        NodeWork("beta", 1, 4, 2.0, "cuda:1 NVIDIA H100", "float32", software),
        NodeWork("alpha", 2, 12, 4.0, "cpu", "float32", software),
    ]


def k_report(**changes: Any) -> dict[str, Any]:
    """The report of a complete run over the K corpus; keywords replace arguments of ``build_report``."""
    arguments: dict[str, Any] = {
        "job": "job-1",
        "name": "K",
        "state": "SUCCEEDED",
        "failure": None,
        "spec": k_spec(),
        "manifest": k_manifest(),
        "plan_digest": "sha256:91",
        "tally": tally_of(*k_partials()),
        "missing": [],
        "accounting": Accounting(accepted=3, duplicates=1),
        "work": k_work(),
        "wall_seconds": 8.0,
    }
    return build_report(**{**arguments, **changes})
