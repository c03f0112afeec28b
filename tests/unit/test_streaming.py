"""Weights that are fetched layer by layer give what resident weights give, and no more of them is in memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from eval_kernel import scoring
from eval_kernel.errors import LayoutUnsupported
from eval_kernel.parallel.layers import Layers, sizes
from eval_kernel.parallel.memory import Sizes, fraction_for, streamed
from eval_kernel.parallel.opening import open_streamed
from tests.support import models, ways
from tests.support import precision as families

pytestmark = pytest.mark.torch
LENGTHS = (300, 300, 77, 41, 20, 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a head of its own."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4-g32", "int8-dynamic"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_streamed_losses_are_those_of_resident_weights(
    llama: Path, tmp_path: Path, precision: str, fraction: float
) -> None:
    """To the last bit, in every kind of precision, for rows of any length, whatever share is streamed."""
    made, _, _ = ways.ingredients(llama, precision, tmp_path)
    way, used = open_streamed(made, ways.CPU, fraction, "test")
    rows = ways.rows(LENGTHS, models.V)
    expected = scoring.score(ways.resident(llama, precision, tmp_path), rows, 4096, lambda: None)
    assert way.kernel.startswith("rows/")
    assert used == ways.resident_uses(llama, precision, tmp_path)
    assert ways.equal(scoring.score(way, rows, 4096, lambda: None), expected)


@pytest.mark.parametrize("make", ["gpt2", "gemma"])
def test_other_families_are_streamed_through_transformers(make: str, tmp_path: Path) -> None:
    """Layers that the fast path does not know are called as transformers calls them, and give the same bits."""
    directory = families.write(tmp_path / make, getattr(families, make)())
    made, _, _ = ways.ingredients(directory, "fp32", tmp_path)
    way, _ = open_streamed(made, ways.CPU, 1.0, "test")
    rows = ways.rows((60, 50, 50, 3), models.V)
    expected = scoring.score(ways.resident(directory, "fp32", tmp_path), rows, 4096, lambda: None)
    assert ways.equal(scoring.score(way, rows, 4096, lambda: None), expected)


def test_sums_for_calibration_are_streamed_too(llama: Path, tmp_path: Path) -> None:
    """A job's extra sums are those of resident weights."""
    made, _, _ = ways.ingredients(llama, "fp32", tmp_path)
    way, _ = open_streamed(made, ways.CPU, 1.0, "test")
    rows = ways.rows(LENGTHS, models.V)
    here, there = scoring.Extra(), scoring.Extra()
    expected = scoring.score(ways.resident(llama, "fp32", tmp_path), rows, 4096, lambda: None, there)
    assert ways.equal(scoring.score(way, rows, 4096, lambda: None, here), expected)
    assert here == there
    assert here


def test_a_visit_leaves_no_weights_behind(llama: Path, tmp_path: Path) -> None:
    """While one layer is visited at most the next one is there; after the last visit none is."""
    made, _, _ = ways.ingredients(llama, "fp32", tmp_path)
    alive: list[torch.nn.Module] = []
    layers = Layers(made, ways.CPU, 1.0, lambda layer: alive.append(layer))
    refs = []
    with torch.inference_mode():
        for number, layer in layers.visits():
            refs.append(weakref.ref(layer))
            alive.clear()
            del layer
            assert all(ref() is None for ref in refs[:number])
    assert refs[-1]() is None
    assert layers.kept == {}
    assert all(p.device.type == "meta" for number in range(len(layers)) for p in layers.bare(number).parameters())


def test_a_model_without_a_list_of_layers_is_refused(llama: Path, tmp_path: Path) -> None:
    """Where layers cannot be had one by one, the message says what to do instead."""
    made, _, _ = ways.ingredients(llama, "fp32", tmp_path)
    made.source.module.model.layers = torch.nn.ModuleDict()
    with pytest.raises(LayoutUnsupported, match="no list of decoder layers; use a node where it fits"):
        Layers(made, ways.CPU, 1.0, lambda layer: None)


# ---------------------------------------------------------------- how much is streamed


def test_the_smallest_fraction_that_fits_is_chosen() -> None:
    """All resident if it fits; else as few streamed as possible beside the two slots; all if nothing is enough."""
    sized = Sizes((10,) * 10, 5)
    assert fraction_for(sized, 105) == 0.0
    assert fraction_for(sized, 104) == 0.3
    assert sized.resident(0.3) == 95
    assert fraction_for(sized, 25) == 1.0
    assert fraction_for(sized, 1) == 1.0


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, []), (0.5, [1, 3]), (0.6, [1, 2, 3]), (1.0, [0, 1, 2, 3])])
def test_streamed_layers_are_spread_evenly(fraction: float, expected: list[int]) -> None:
    """Resident layers lie between streamed ones, so that their work hides the fetching."""
    assert [number for number, away in enumerate(streamed(4, fraction)) if away] == expected


def test_sizes_are_read_off_the_plan(llama: Path, tmp_path: Path) -> None:
    """The bytes of layers and of what lies outside are those of the weights in their formats."""
    made, _, _ = ways.ingredients(llama, "fp32", tmp_path)
    sized = sizes(made.plan)
    assert len(sized.layers) == 2
    assert sized.total == 4 * sum(t.rows * t.columns for t in made.plan.tensors)
