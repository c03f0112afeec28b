"""Opens one small checkpoint in several ways to run. What they should come to is the tests' business."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from eval_kernel import checkpoint, model, scoring
from eval_kernel.precision import loading, skeleton
from eval_kernel.precision.plan import resolve
from eval_kernel.precision.policy import as_spec, label_of
from eval_kernel.spec import ModelSpec

CPU = torch.device("cpu")


def ingredients(directory: Path, precision: str, cache: Path) -> tuple[loading.Ingredients, str, checkpoint.Checkpoint]:
    """What a model in a precision is put together from, its weights' digest, and its files."""
    found = checkpoint.find(ModelSpec(source=str(directory)), None, cache, lambda _: None)
    plan = resolve(as_spec(precision), skeleton.build(found, torch.float32).outline, label_of(precision))
    digest = checkpoint.weights_digest(found, cache)
    return loading.ingredients(found, digest, plan, cache, lambda _: None), digest, found


def resident(directory: Path, precision: str, cache: Path) -> model.Model:
    """The model in one process, all weights in memory."""
    made, digest, found = ingredients(directory, precision, cache)
    loaded = loading.load(found, digest, made.plan, CPU, cache, lambda _: None)
    return model.prepare(loaded.module, CPU, getattr(torch, made.plan.compute), "test")


def resident_uses(directory: Path, precision: str, cache: Path) -> dict[str, str]:
    """What each class of weights is held and multiplied in where all are in memory."""
    made, digest, found = ingredients(directory, precision, cache)
    return loading.load(found, digest, made.plan, CPU, cache, lambda _: None).used


def rows(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[scoring.Row]:
    """Random windows; the last but one token of each is the first that is scored."""
    draw = np.random.default_rng(seed)
    return [
        scoring.Row(
            draw.integers(0, vocabulary, n).astype(np.int32),
            draw.integers(0, vocabulary, max(1, n - 2)).astype(np.int32),
        )
        for n in lengths
    ]


def equal(a: Sequence[scoring.Losses], b: Sequence[scoring.Losses]) -> bool:
    """Whether losses are the same to the last bit."""
    return len(a) == len(b) and all(
        np.array_equal(x.steps, y.steps) and np.array_equal(x.finite, y.finite) for x, y in zip(a, b, strict=True)
    )
