"""Groups, sensitivities and the choice among formats: no torch, no model."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from eval_kernel.errors import SpecError
from eval_kernel.precision.choose import Table, baselines, tradeoffs
from eval_kernel.precision.groups import (
    Cell,
    Group,
    Sensitivity,
    choice_of,
    groups_of,
    policy_of,
    predicted,
    read_sensitivity,
)
from eval_kernel.precision.plan import Weight, bytes_by_class, resolve
from tests.support.outlines import linear, llama

FORMATS = ("bf16", "int8", "int4-g64")


def made_up(groups: list[Group], base: str = "fp32", formats: tuple[str, ...] = FORMATS) -> Sensitivity:
    """Measurements in which fewer bits cost more, and groups differ a hundredfold."""
    draw, found = random.Random(3), Sensitivity("sha256:w", "sha256:c", base, "mse")
    for group in groups:
        weight = 10 ** draw.uniform(-1, 1)
        for name, cost in (("bf16", 1e-6), ("int8", 1e-4), ("int4-g64", 2e-2)):
            if name in formats and group.bytes_in(name) is not None:
                cell = Cell(1000, int(weight * cost * 1000 * 2**30), draw.randint(-5, 5), 990)
                found = found.with_cell(group.name, name, cell)
    return found


def table(**outline: object) -> Table:
    """A table of made-up measurements of a Llama."""
    shape = llama(**{"layers": 6, "wide": 192, **outline})  # type: ignore[arg-type]
    groups = groups_of(shape)
    return Table(groups, shape, made_up(groups))


def test_groups_are_what_shares_its_input_or_its_output() -> None:
    """Per layer {q, k, v}, {o}, {gate, up}, {down}; embedding and head apart."""
    groups = {g.name: [w.module.rpartition(".")[2] for w in g.weights] for g in groups_of(llama(layers=1, tied=False))}

    assert {
        "embedding": ["embed_tokens"],
        "layers.0.qkv": ["q_proj", "k_proj", "v_proj"],
        "layers.0.o": ["o_proj"],
        "layers.0.gate_up": ["gate_proj", "up_proj"],
        "layers.0.down": ["down_proj"],
        "head": ["lm_head"],
    } == groups


@pytest.mark.parametrize(
    ("module", "role", "name"),
    [
        ("transformer.h.3.attn.c_attn", "attention", "layers.3.qkv"),
        ("transformer.h.3.attn.c_proj", "attention", "layers.3.o"),
        ("transformer.h.3.mlp.c_fc", "mlp", "layers.3.gate_up"),
        ("transformer.h.3.mlp.c_proj", "mlp", "layers.3.down"),
        ("gpt_neox.layers.2.attention.query_key_value", "attention", "layers.2.qkv"),
        ("gpt_neox.layers.2.attention.dense", "attention", "layers.2.o"),
        ("gpt_neox.layers.2.mlp.dense_4h_to_h", "mlp", "layers.2.down"),
        ("model.project_in", "other", "model.project_in"),
    ],
)
def test_other_architectures_have_groups_too(module: str, role: str, name: str) -> None:
    """By the last word of a module's path."""
    outline = llama(layers=0, change=lambda w: w)
    weights = (*outline.weights, linear(module, role, 64, 64))
    shape = type(outline)(weights, outline.dtype, outline.embedding, outline.head, outline.tied)

    assert name in [g.name for g in groups_of(shape)]


def test_bytes_of_a_group_are_those_of_the_plan() -> None:
    """Scales included; a group that does not divide has none."""
    outline = llama(layers=1)
    group = next(g for g in groups_of(outline) if g.name == "layers.0.qkv")
    plan = resolve(
        policy_of(groups_of(outline), dict.fromkeys([g.name for g in groups_of(outline)], "int8"), "fp32"),
        outline,
    )

    assert sum(
        t.value_bytes + t.scale_bytes for t in plan.tensors if t.module.endswith(("q_proj", "k_proj", "v_proj"))
    ) == (group.bytes_in("int8"))
    assert group.bytes_in("int4-g128") is None


def test_a_choice_becomes_a_policy_and_comes_back() -> None:
    """The policy gives every group its format on the same model, and nothing else changes."""
    outline = llama(layers=3)
    groups, draw = groups_of(outline), random.Random(8)
    for _ in range(20):
        choice = {g.name: draw.choice(["fp32", "bf16", "int8", "int4-g64"]) for g in groups}
        plan = resolve(policy_of(groups, choice, "fp32"), outline)

        assert choice == choice_of(groups, {t.name: t.format for t in plan.tensors}, "fp32")
        assert "float32" == plan.compute


def test_sensitivities_survive_their_file(tmp_path: Path) -> None:
    """Equal after writing and reading; predictions add up what was chosen."""
    groups = groups_of(llama(layers=2))
    found = made_up(groups)
    path = tmp_path / "sensitivity.json"
    path.write_text(json.dumps(found.to_json()))

    assert found == read_sensitivity(path)
    choice = {g.name: "int8" for g in groups}
    expected = sum(found.cells[g.name]["int8"].divergence for g in groups) / 1000 / 2**30
    assert math.isclose(expected, predicted(found, choice), rel_tol=1e-12)
    assert 0.0 == predicted(found, {g.name: "fp32" for g in groups})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": "other/1"}', '{"schema": "fedeval.sensitivity/1"}'])
def test_a_file_that_is_no_sensitivities_is_refused(text: str, tmp_path: Path) -> None:
    """In one line that names the file."""
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"s\.json: no file of sensitivities"):
        read_sensitivity(path)
    with pytest.raises(SpecError, match="cannot read the sensitivities"):
        read_sensitivity(tmp_path / "none.json")


def test_bytes_of_a_choice_are_those_of_its_plan() -> None:
    """To the byte, with vectors and whatever is not chosen."""
    found = table()
    for share in (0.15, 0.3, 0.6, 1.0):
        chosen = found.within(int(found.checkpoint * share))
        assert chosen is not None
        plan = resolve(chosen.policy, found.outline)

        assert chosen.bytes == bytes_by_class(plan)["total"]["bytes"]
        assert chosen.bytes <= found.checkpoint * share


def test_more_bytes_never_predict_more_change() -> None:
    """And each budget is at least as good as every rule that fits into it, at equal or fewer bytes."""
    found = table()
    before = math.inf
    for share in (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 1.0):
        budget = int(found.checkpoint * share)
        chosen = found.within(budget)
        assert chosen is not None
        for label, choice in baselines(found).items():
            if found.bytes_of(choice) <= budget:
                assert chosen.predicted <= predicted(found.sensitivity, choice) * (1 + 1e-9), label
        assert chosen.predicted <= before * (1 + 1e-9)
        assert 0.0 <= chosen.gap <= 0.2
        before = chosen.predicted


def test_the_rules_of_thumb_are_all_there() -> None:
    """Uniform formats with and without embedding and head, high ends, and the brief."""
    labels = set(baselines(table()))

    assert {"brief", "uniform int8", "int4-g64, ends high", "uniform int4-g64, embedding and head too"} <= labels


def test_a_limit_on_the_change_gives_the_fewest_bytes() -> None:
    """No limit is exceeded, and a wider one never needs more bytes."""
    found = table()
    before = found.checkpoint + 1
    for nats in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 100.0):
        chosen = found.least_bytes(nats)
        assert chosen is not None
        assert chosen.predicted <= nats + 1e-12
        assert chosen.bytes <= before
        before = chosen.bytes
    assert before == found.smallest


def test_a_budget_below_the_smallest_plan_has_no_choice() -> None:
    """Neither has a negative limit."""
    found = table()

    assert found.within(found.smallest - 1) is None
    assert found.within(found.smallest) is not None
    assert found.least_bytes(-1.0) is None


def test_nothing_measured_is_refused() -> None:
    """A table needs something to choose from."""
    outline = llama()
    with pytest.raises(SpecError, match="no group has a measured format"):
        Table(groups_of(outline), outline, Sensitivity("w", "c", "fp32", "mse"))


def test_tradeoffs_are_in_order_of_bytes() -> None:
    """Budgets and rules in one table; budgets say their gap."""
    rows = tradeoffs(table(), (0.3, 0.5))

    assert sorted(row["bytes"] for row in rows) == [row["bytes"] for row in rows]
    assert {"auto, budget 30%", "auto, budget 50%", "brief"} <= {row["plan"] for row in rows}
    assert all((row["gap"] is not None) == row["plan"].startswith("auto") for row in rows)


def test_tables_of_positions_are_groups_of_their_own() -> None:
    """What is looked up besides the embedding may be chosen for as well."""
    outline = llama(layers=1)
    positions = Weight("model.wpe.weight", "model.wpe", "other", "table", 64, 64)
    shape = type(outline)((*outline.weights, positions), outline.dtype, outline.embedding, outline.head, outline.tied)

    assert "model.wpe" in [g.name for g in groups_of(shape)]
