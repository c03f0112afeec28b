"""Quantisation with calibration data: better than rounding, the same on any threads, apart from what is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eval_kernel import checkpoint, tokenizer
from eval_kernel.errors import DatasetEmpty, PrecisionUnsupported, SpecError
from eval_kernel.precision import calibrated, calibration, canonical, gptq, loading, search, skeleton
from eval_kernel.precision.formats import FORMATS, Format
from eval_kernel.precision.plan import PrecisionPlan, resolve
from eval_kernel.precision.policy import CalibrationSpec, PrecisionSpec
from eval_kernel.precision.source import origin
from eval_kernel.spec import ModelSpec
from tests.support.models import ALPHABET, write_char_tokenizer
from tests.support.precision import gemma, gpt2, llama, logits, mixtral, write

pytestmark = pytest.mark.torch

INTEGERS = [f for f in FORMATS.values() if f.quantised and f.name != "fp8" and not f.dynamic]


def inputs(columns: int = 256) -> torch.Tensor:
    """Correlated activations, some channels a hundred times stronger than others."""
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(2048, columns, generator=generator) @ mix * torch.logspace(-1, 1, columns)


@pytest.mark.parametrize("form", INTEGERS, ids=lambda f: f.name)
def test_errors_are_made_good_by_later_columns(form: Format) -> None:
    """The layer's output is off by at most 0.6 times what the best rounding without calibration leaves."""
    w = torch.randn(96, 256, generator=torch.Generator().manual_seed(3)) * 0.05
    x = inputs()
    moments = x.t() @ x

    def error(made: canonical.Quantised) -> float:
        return float(((x @ (canonical.dequantised(made) - w).t()) ** 2).sum())

    plain, calibrated_ = error(search.quantise(w, form, "mse")), error(gptq.quantise(w, moments, form))

    assert calibrated_ <= 0.6 * plain


@pytest.mark.parametrize("name", ["int8", "int4-g64", "int4-g32-asym"])
def test_inputs_that_never_occur_do_no_harm(name: str) -> None:
    """Columns without activations are rounded plainly; without any activations, all are."""
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(4))
    x = inputs(128)
    x[:, 5:20] = 0
    made = gptq.quantise(w, x.t() @ x, FORMATS[name])
    steps = made.scales.float().abs().repeat_interleave(FORMATS[name].group or 128, dim=1)
    off = (canonical.dequantised(made) - w).abs() / steps

    assert bool(torch.isfinite(canonical.dequantised(made)).all())
    assert float(off[:, 5:20].median()) <= 0.5
    assert bool(torch.isfinite(canonical.dequantised(gptq.quantise(w, torch.zeros(128, 128), FORMATS[name]))).all())


# ---------------------------------------------------------------- whole models


def planned(directory: Path, cache: Path, name: str, quantiser: str) -> tuple[checkpoint.Checkpoint, PrecisionPlan]:
    """A checkpoint and the plan of a uniform format."""
    found = checkpoint.find(ModelSpec(source=str(directory)), None, cache, lambda text: None)
    spec = PrecisionSpec(default=name, quantiser=quantiser, calibration=CalibrationSpec(source=("c",)))  # type: ignore[arg-type]
    return found, resolve(spec, skeleton.build(found, torch.float32).outline)


def rows(count: int = 6, length: int = 48) -> torch.Tensor:
    """Token ids to calibrate on."""
    return torch.randint(0, 64, (count, length), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("make", [llama, gpt2, gemma, mixtral])
def test_models_are_calibrated_layer_by_layer(make: Any, tmp_path: Path) -> None:
    """Of every architecture; what the model computes is nearer to what it computed than with rounding."""
    directory = write(tmp_path / "m", make())
    found, exact = planned(directory, tmp_path, "fp32", "mse")
    expected = logits(loading.load(found, "w", exact, torch.device("cpu"), tmp_path, lambda text: None).module)
    errors = {}
    for quantiser in ("mse", "gptq"):
        _, plan = planned(directory, tmp_path, "int4-g32", quantiser)
        loaded = loading.load(found, "w", plan, torch.device("cpu"), tmp_path, lambda text: None, rows())
        errors[quantiser] = float(((logits(loaded.module) - expected) ** 2).sum())

    assert errors["gptq"] < 0.9 * errors["mse"]


def test_packs_do_not_depend_on_threads_or_the_compute_dtype(tmp_path: Path) -> None:
    """One, two and three threads, float32 and bfloat16: one digest."""
    directory = write(tmp_path / "m", llama())
    found, plan = planned(directory, tmp_path, "int4-g64", "gptq")
    before, digests = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            cache = tmp_path / str(threads)
            digests.add(loading.load(found, "w", plan, torch.device("cpu"), cache, lambda text: None, rows()).digest)
    finally:
        torch.set_num_threads(before)
    spec = PrecisionSpec(
        default="int4-g64", compute="bf16", quantiser="gptq", calibration=CalibrationSpec(source=("c",))
    )
    half = resolve(spec, skeleton.build(found, torch.float32).outline)
    digests.add(loading.load(found, "w", half, torch.device("cpu"), tmp_path / "b", lambda t: None, rows()).digest)

    assert 1 == len(digests)


def test_a_model_whose_layers_are_not_called_once_each_is_refused(tmp_path: Path) -> None:
    """With what to write instead."""
    directory = write(tmp_path / "m", llama())
    found, plan = planned(directory, tmp_path, "int4-g64", "gptq")
    built = skeleton.build(found, torch.float32)
    forward = built.module.model.forward

    def twice(**inputs: Any) -> Any:
        forward(**inputs)
        return forward(**inputs)

    built.module.model.forward = twice
    source = origin(found, built, torch.float32)
    with pytest.raises(PrecisionUnsupported, match=r"called once.*use quantiser: mse"):
        list(calibrated.quantised(plan, built.outline, source, rows(), lambda text: None))


# ---------------------------------------------------------------- the text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Four thousand characters of no pattern."""
    path = tmp_path / "text.txt"
    draws = np.random.default_rng(5).integers(0, 54, 4000)
    path.write_text("".join(ALPHABET[i] for i in draws))
    return path


def load(path: Path, tmp_path: Path, **changes: Any) -> calibration.Calibration:
    """Calibration rows of a text under the character tokenizer."""
    tok = tokenizer.load(write_char_tokenizer(tmp_path / "tok"))
    spec = CalibrationSpec(source=(str(path),), **{"context": 64, "windows": 8, **changes})
    return calibration.load(spec, tok, None, tmp_path / "cache", lambda note: None)


def test_rows_come_evenly_from_the_whole_text(text: Path, tmp_path: Path) -> None:
    """First and last tokens included; the digest is over the rows alone."""
    made = load(text, tmp_path)
    letters = text.read_text()

    assert (8, 64) == made.ids.shape
    assert letters[:64] == "".join(ALPHABET[i] for i in made.ids[0])
    assert letters[-64:] == "".join(ALPHABET[i] for i in made.ids[-1])
    assert made.digest == load(text, tmp_path).digest
    assert made.digest != load(text, tmp_path, windows=7).digest


def test_part_of_the_text_can_be_left_alone(text: Path, tmp_path: Path) -> None:
    """``skip`` is a share from its start."""
    made = load(text, tmp_path, skip=0.5)

    assert text.read_text()[2000:2064] == "".join(ALPHABET[i] for i in made.ids[0])


def test_too_little_text_is_refused(text: Path, tmp_path: Path) -> None:
    """Less than one window; fewer windows than asked for are fine."""
    with pytest.raises(DatasetEmpty, match="4000 tokens to calibrate on, less than one window of 5000"):
        load(text, tmp_path, context=5000)
    assert 2 == len(load(text, tmp_path, context=1500).ids)


@pytest.mark.parametrize(("start", "end", "rows_hit"), [(0, 4000, 8), (7, 71, 1), (0, 24, 0), (2000, 2300, 1)])
def test_overlap_is_found_wherever_windows_begin(
    start: int, end: int, rows_hit: int, text: Path, tmp_path: Path
) -> None:
    """A row counts when most of it is evaluated; less than that, or other text, does not."""
    made = load(text, tmp_path)
    tokens = np.array([ALPHABET.index(c) for c in text.read_text()], dtype=np.int32)

    assert rows_hit == calibration.overlap(made, [tokens[start:end]])


def test_overlap_is_refused_unless_allowed(text: Path, tmp_path: Path) -> None:
    """Where it is allowed it is told."""
    made = load(text, tmp_path)
    other = np.random.default_rng(6).integers(0, 54, 4000).astype(np.int32)

    with pytest.raises(SpecError, match=r"8 of 8 rows are text that this job evaluates.*allow_overlap"):
        calibration.check(made, [made.ids.flatten()], allowed=False)
    assert calibration.check(made, [made.ids.flatten()], allowed=True)
    assert not calibration.check(made, [other], allowed=False)
    assert not calibration.check(made, [other[:3]], allowed=False)
