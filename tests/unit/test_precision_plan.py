"""A policy applied to names and shapes: which weight gets which format, what is refused, what it comes to in bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from eval_kernel.errors import PrecisionUnsupported, SpecError
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.plan import (
    PrecisionPlan,
    Weight,
    as_mapping,
    bytes_by_class,
    formats_by_class,
    patterns,
    resolve,
)
from eval_kernel.precision.policy import PrecisionSpec, as_spec, label_of
from eval_kernel.spec import parse_spec
from tests.support.outlines import llama


def plan(precision: Any, **outline: Any) -> PrecisionPlan:
    """The plan of a precision, as a job would give it, for a small Llama."""
    spec = parse_spec({"model": "m", "dataset": "d", "precision": precision}, where="job")
    return resolve(as_spec(spec.precision), llama(**outline), label_of(spec.precision))


def formats(made: PrecisionPlan) -> dict[str, set[str]]:
    """The formats by role."""
    found: dict[str, set[str]] = {}
    for t in made.tensors:
        found.setdefault(t.role, set()).add(t.format)
    return found


@pytest.mark.parametrize(("name", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16"), ("auto", "bfloat16")])
def test_a_float_format_is_that_of_everything(name: str, dtype: str) -> None:
    """Activations too; ``auto`` is what the checkpoint has."""
    made = plan(name, dtype="bfloat16")

    assert made.uniform
    assert not made.quantised
    assert dtype == made.compute
    assert {dtype} == {FORMATS[t.format].text for t in made.tensors}


def test_an_integer_format_is_for_the_layers() -> None:
    """Embedding, head and norms stay as the checkpoint has them unless they are named."""
    made = plan("int8", dtype="bfloat16")

    assert {"attention": {"int8"}, "mlp": {"int8"}, "embedding": {"bf16"}, "vector": {"bf16"}} == formats(made)
    assert made.tied
    assert not made.uniform


def test_modules_win_over_roles_and_roles_over_the_default() -> None:
    """A pattern matches whole module names."""
    made = plan({"default": "int8", "mlp": "int4-g32", "modules": {r"model\.layers\.1\.mlp\.down_proj": "bf16"}})
    named = {t.module: t.format for t in made.tensors}

    assert "int8" == named["model.layers.0.self_attn.q_proj"]
    assert "int4-g32" == named["model.layers.0.mlp.down_proj"]
    assert "bf16" == named["model.layers.1.mlp.down_proj"]


def test_a_bias_does_not_change_its_layers_format() -> None:
    """It stays a float beside integers; so do tables of positions, unless they are named."""
    bias = Weight("model.layers.0.mlp.up_proj.bias", "model.layers.0.mlp.up_proj", "vector", "vector", 1, 128)
    positions = Weight("model.wpe.weight", "model.wpe", "other", "table", 64, 64)
    outline = llama()
    wider = replace(outline, weights=(*outline.weights, bias, positions))
    named = resolve(as_spec("int8"), wider).named()

    assert ["int8", "fp32", "fp32"] == [
        named[name].format for name in ("model.layers.0.mlp.up_proj.weight", bias.name, positions.name)
    ]
    assert "int8" == resolve(PrecisionSpec(other="int8"), wider).named()[positions.name].format


def test_the_brief_quantises_a_tied_table_once() -> None:
    """Embedding and head in one format stay one tensor."""
    made = plan("brief")

    assert made.tied
    assert {"attention": {"fp32"}, "mlp": {"int8"}, "embedding": {"int4-g64"}, "vector": {"fp32"}} == formats(made)


def test_a_head_in_another_format_is_untied_and_says_so() -> None:
    """It becomes a tensor of its own, whose bytes count."""
    made = plan({"default": "fp32", "head": "int8"})
    head = made.named()["lm_head.weight"]

    assert made.untied
    assert not made.tied
    assert ("int8", "head") == (head.format, head.role)
    assert "untied" in head.note
    table = bytes_by_class(made)
    assert (0, 96 * 64 + 96 * 4) == (table["head"]["fp32"], table["head"]["bytes"])


def test_a_head_of_its_own_has_its_own_format() -> None:
    """An untied checkpoint's head is a tensor like any other."""
    made = plan({"default": "int8", "head": "int4-g32"}, tied=False)

    assert "int4-g32" == made.named()["lm_head.weight"].format
    assert not made.untied


def test_a_row_that_is_no_multiple_of_the_group_is_kept_and_told() -> None:
    """Hidden size 64 does not divide by 128; the wide layers do."""
    made = plan("int4-g128", wide=256)
    kept = [t for t in made.tensors if t.note]

    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} == {
        t.module for t in made.tensors if t.quantised
    }
    assert 12 == len(kept)
    assert {"64 columns are no multiple of 128"} == {t.note for t in kept}
    assert {"fp32"} == {t.format for t in kept}


@pytest.mark.parametrize(
    ("precision", "outline", "parts"),
    [
        (
            "int4-g128",
            {"wide": 96},
            ["precision.default: int4-g128 fits none of", "64", "no multiple of 128", "smaller group"],
        ),
        (
            {"default": "int8", "attention": "int4-g128"},
            {"wide": 256},
            ["precision.attention: int4-g128 fits none of model.layers.0.self_attn.q_proj"],
        ),
        ({"modules": {"layers.0": "int8"}}, {}, ["'layers.0' matches no module", "named like model.embed_tokens"]),
        (
            {"modules": {"model.layers.0.mlp.dwn_proj": "int8"}},
            {},
            ["did you mean 'model.layers.0.mlp.down_proj'?"],
        ),
        (
            {"modules": {".*down_proj": "int8", r".*\.0\..*": "bf16"}},
            {},
            ["'.*\\\\.0\\\\..*' says bf16", "'.*down_proj' says int8", "model.layers.0.mlp.down_proj"],
        ),
    ],
)
def test_a_policy_that_does_not_fit_the_model_is_refused(precision: Any, outline: Any, parts: list[str]) -> None:
    """One line that names the key and the modules."""
    with pytest.raises(SpecError) as caught:
        plan(precision, **outline)

    assert "\n" not in str(caught.value)
    assert [] == [part for part in parts if part not in str(caught.value)], str(caught.value)


def test_a_checkpoint_of_8_bit_floats_needs_a_precision() -> None:
    """What cannot be multiplied as it is is refused, with what to write."""
    with pytest.raises(PrecisionUnsupported, match="write precision: fp32 or bf16"):
        plan("auto", dtype="float8_e4m3fn")


def test_a_table_is_looked_up_so_activations_are_not_rounded() -> None:
    """A dynamic format becomes its static one for an embedding, and the note says why."""
    made = plan({"default": "int8-dynamic", "embedding": "int8-dynamic"})
    table = made.named()["model.embed_tokens.weight"]

    assert "int8" == table.format
    assert "looked up" in table.note


def test_bytes_add_up() -> None:
    """Each class's bytes are values and scales of its tensors, and the total is their sum."""
    made = plan("int8")
    table = bytes_by_class(made)

    assert sum(row["bytes"] for key, row in table.items() if key != "total") == table["total"]["bytes"]
    assert 2 * 4 * (64 * 64 + 64 * 4) == table["attention"]["bytes"]
    assert 2 * 4 * 64 * 4 == table["attention"]["scales"]
    assert 2 * 4 * 64 * 64 * 4 == table["attention"]["fp32"]
    assert {"attention": {"int8": 8}, "mlp": {"int8": 6}, "embedding": {"fp32": 1}, "vectors": {"fp32": 3}} == (
        formats_by_class(made)
    )


@pytest.mark.parametrize(
    "precision",
    [
        "fp32",
        "bf16",
        "int8",
        "brief",
        "8da4w",
        {"default": "bf16", "head": "int8", "mlp": "int4-g64", "quantiser": "rtn"},
    ],
)
def test_a_plan_written_as_a_mapping_gives_the_plan_again(precision: Any) -> None:
    """Same digest: whatever a plan came from, its mapping may stand in any later job."""
    made = plan(precision, layers=12)
    again = plan(json.loads(json.dumps(as_mapping(made))), layers=12)

    assert made.digest == again.digest
    assert made.tied == again.tied


def test_plans_survive_json() -> None:
    """The canonical text gives an equal plan."""
    made = plan("brief")

    assert made == PrecisionPlan.from_canonical(made.canonical())


def test_digests_tell_plans_apart() -> None:
    """Format, quantiser and compute dtype count; the label does not."""
    digests = [
        plan(p).digest
        for p in (
            "int8",
            "int8-g64",
            {"default": "int8", "quantiser": "rtn"},
            {"default": "int8", "compute": "bf16"},
        )
    ]

    assert 4 == len(set(digests))
    assert digests[0] == plan({"default": "int8"}).digest


def test_patterns_are_few() -> None:
    """Names that differ in a layer's number share one pattern."""
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 3, 11)] + ["lm_head"]

    assert [r"model\.layers\.(0|3|11)\.mlp\.up_proj", "lm_head"] == patterns(names)
