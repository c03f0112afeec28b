"""A job's ingredients where other nodes make the packs: checkpoint and tokenizer are here, its text need not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from eval_kernel import KERNEL_VERSION, checkpoint, tokenizer
from eval_kernel.corpus import Corpus
from eval_kernel.evaluation import Inputs
from eval_kernel.layout import Layout
from eval_kernel.plan import Manifest
from eval_kernel.roots import Roots
from eval_kernel.spec import JobSpec
from eval_kernel.windows import Bos


def inputs(spec: JobSpec, manifest: Manifest, roots: Roots, cache: Path, note: Callable[[str], None]) -> Inputs:
    """Return ingredients with an empty text, and those facts of the manifest that can be told without one.

    Raises the errors of the model's files.
    """
    note("reading the model's files")
    found = checkpoint.find(spec.model, roots, cache, note)
    tok = tokenizer.load(found.tokenizer)
    none, empty = np.zeros(0, np.int32), np.zeros(1, np.int64)
    nothing = Corpus(none, none, none, empty, False, manifest.data_digest, 0, 0, 0)
    facts = {
        "tokenizer_digest": tok.digest,
        "weights_digest": checkpoint.weights_digest(found, cache),
        "model_type": str(found.config["model_type"]),
        "parameters": found.num_parameters,
        "vocabulary": found.vocabulary,
        "max_context": found.max_context,
        "kernel_version": KERNEL_VERSION,
    }
    cut = Layout(nothing, spec.window.rule(manifest.context, Bos(manifest.bos)))
    return Inputs(found, tok, None, nothing, cut, manifest.prefix_token, facts, None)
