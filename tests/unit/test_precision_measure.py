"""Sensitivities on real modules: the short way equals the long one, nothing stays changed, threads change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eval_kernel import checkpoint
from eval_kernel.precision import canonical, loading, measure, search, skeleton
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.groups import Cell, Group, groups_of
from eval_kernel.precision.measure import Meter
from eval_kernel.spec import ModelSpec
from tests.support.precision import gemma, gpt2, llama, write

pytestmark = pytest.mark.torch

ROWS = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(3))
OTHER_ROWS = torch.randint(0, 64, (4, 40), generator=torch.Generator().manual_seed(4))


def opened(make: Any, tmp_path: Path) -> tuple[Any, list[Group]]:
    """A float module and its groups."""
    directory = write(tmp_path / "m", make())
    found = checkpoint.find(ModelSpec(source=str(directory)), None, tmp_path, lambda text: None)
    module = loading.load_floats(found, "float32", torch.device("cpu"))
    return module, groups_of(skeleton.build(found, torch.float32).outline)


def by_hand(module: Any, group: Group, name: str) -> float:
    """The divergence per token, computed the long way with copies of the weights."""

    def logs() -> torch.Tensor:
        with torch.inference_mode():
            return torch.log_softmax(module(input_ids=ROWS, use_cache=False).logits[:, :-1].double(), -1)

    p = logs()
    kept = {w.name: module.get_parameter(w.name).detach().clone() for w in group.weights}
    with torch.no_grad():
        for w in group.weights:
            parameter = module.get_parameter(w.name)
            rows = parameter.t().contiguous() if w.transposed else parameter
            floats = canonical.dequantised(search.quantise(rows.detach(), FORMATS[name], "mse"))
            parameter.copy_(floats.t() if w.transposed else floats)
        q = logs()
        for full, values in kept.items():
            module.get_parameter(full).copy_(values)
    return float((p.exp() * (p - q)).sum() / p[..., 0].numel())


@pytest.mark.parametrize("make", [llama, gpt2, gemma])
def test_cached_layers_change_nothing(make: Any, tmp_path: Path) -> None:
    """Each group's divergence is that of the whole model run anew; tied tables change in both places."""
    module, groups = opened(make, tmp_path)
    meter = Meter(module, ROWS, "mse", None)

    assert 5 <= len(groups)
    for group in groups:
        if group.bytes_in("int4-g32") is None:
            continue
        cell = meter.measure(group, "int4-g32")
        expected = by_hand(module, group, "int4-g32")
        assert 78 == cell.tokens
        assert abs(cell.divergence / cell.tokens / 2**30 - expected) <= 1e-4 * expected + 1e-6, group.name
        assert 0 <= cell.agreements <= cell.tokens


def test_a_measurement_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Same parameters, same logits; measured twice, the same numbers."""
    module, groups = opened(llama, tmp_path)
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    meter = Meter(module, ROWS, "mse", None)
    first = [meter.measure(group, "int8") for group in groups]

    assert before == {name: p.data_ptr() for name, p in module.named_parameters()}
    assert first == [meter.measure(group, "int8") for group in groups]


def test_fewer_bits_diverge_more(tmp_path: Path) -> None:
    """bf16 least, then int8, then int4, for every group."""
    module, groups = opened(llama, tmp_path)
    meter = Meter(module, ROWS, "mse", None)
    for group in groups:
        found = [meter.measure(group, name).divergence for name in ("bf16", "int8", "int4-g64")]
        assert found[0] < found[1] < found[2], group.name


def test_threads_and_order_change_nothing(tmp_path: Path) -> None:
    """One thread or three, forwards or backwards: the same integers."""
    module, groups = opened(llama, tmp_path)
    before, found = torch.get_num_threads(), list[dict[str, Cell]]()
    try:
        for threads, order in ((1, groups), (3, groups[::-1])):
            torch.set_num_threads(threads)
            meter = Meter(module, ROWS, "mse", None)
            found.append({group.name: meter.measure(group, "int4-g64") for group in order})
    finally:
        torch.set_num_threads(before)

    assert found[0] == found[1]


def test_calibrated_groups_are_measured_calibrated(tmp_path: Path) -> None:
    """With other rows to calibrate on, four bits diverge less in sum."""
    module, groups = opened(llama, tmp_path)
    layers = [g for g in groups if g.layer is not None]
    plain, calibrated = Meter(module, ROWS, "mse", None), Meter(module, ROWS, "gptq", OTHER_ROWS)
    sums = [sum(meter.measure(g, "int4-g64").divergence for g in layers) for meter in (plain, calibrated)]

    assert sums[1] < sums[0]


def test_tokens_are_compared_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded token by token, so the sums are the same integers."""
    module, groups = opened(llama, tmp_path)
    found = []
    for size in (128, 7):
        monkeypatch.setattr(measure, "CHUNK", size)
        found.append(Meter(module, ROWS, "mse", None).measure(groups[3], "int4-g64"))

    assert found[0] == found[1]
