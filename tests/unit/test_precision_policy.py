"""What may stand under ``precision:``, and the one line that says what is wrong with what may not."""

from __future__ import annotations

from typing import Any

import pytest

from eval_kernel.errors import SpecError
from eval_kernel.precision.formats import FORMATS, format_of
from eval_kernel.precision.policy import PrecisionSpec, as_spec, label_of
from eval_kernel.spec import JobSpec, parse_spec

JOB: dict[str, Any] = {"model": "m", "dataset": "d"}


def refusal(precision: Any) -> str:
    """The message with which a job of this precision is refused."""
    with pytest.raises(SpecError) as caught:
        parse_spec({**JOB, "precision": precision}, where="job.yaml")
    return str(caught.value)


@pytest.mark.parametrize("name", ["auto", "brief", *FORMATS])
def test_every_format_may_stand_alone(name: str) -> None:
    """A name is kept as it was written, and stands for a whole policy."""
    spec = parse_spec({**JOB, "precision": name}, where="job.yaml")

    assert name == spec.precision
    assert name == label_of(spec.precision)
    assert isinstance(as_spec(spec.precision), PrecisionSpec)


def test_a_mapping_names_roles_and_modules() -> None:
    """It becomes a policy, which survives the canonical text."""
    written = {"default": "int8", "attention": "auto", "modules": {r".*\.down_proj": "int4-g64"}, "budget": "40%"}
    spec = parse_spec({**JOB, "precision": written}, where="job.yaml")

    assert "mixed" == label_of(spec.precision)
    policy = as_spec(spec.precision)
    assert ("int8", "auto", None) == (policy.default, policy.attention, policy.mlp)
    assert {r".*\.down_proj": "int4-g64"} == policy.modules
    assert 0.4 == policy.budget
    assert policy.to_be_planned
    assert spec == JobSpec.from_canonical(spec.canonical())


@pytest.mark.parametrize(
    ("precision", "parts"),
    [
        ("int9", ["precision is 'int9'", "did you mean 'int8'? allowed: auto, fp32, bf16", ", brief, or a mapping"]),
        ("int4", ["precision is 'int4'", "'int4-g32' or 'int4-g64' or 'int4-g128'"]),
        ("quick", ["precision is 'quick'", "allowed: auto, fp32", "brief, or a mapping"]),
        (8, ["precision is 8"]),
        (None, ["precision is None"]),
        ([], ["precision is []"]),
        ({"atention": "int8"}, ["unknown key 'precision.atention'", "did you mean 'attention'?"]),
        ({"attention": "int7"}, ["precision.attention is 'int7'", "did you mean 'int8'?"]),
        ({"attention": "brief"}, ["precision.attention is 'brief'", "bf16"]),
        ({"modules": {"(": "int8"}}, ["precision.modules", "not a regular expression"]),
        ({"modules": {"a": "int5"}}, ["precision.modules.a is 'int5'", "did you mean 'int8'?"]),
        ({"compute": "int8"}, ["precision.compute is 'int8'", "'fp32'"]),
        ({"quantiser": "awk"}, ["precision.quantiser is 'awk'", "'rtn', 'mse'"]),
        ({"quantiser": "gptq"}, ["precision.quantiser gptq needs text", "calibration"]),
        ({"budget": "40"}, ["precision.budget is '40'", "number"]),
        ({"budget": "140%"}, ["precision.budget is '140%'", "less than or equal to 1"]),
        ({"budget": 0.0}, ["precision.budget is 0.0", "greater than 0"]),
        ({"budget": 0.4, "max_ppl_increase": 0.01}, ["precision.budget and max_ppl_increase exclude each other"]),
        ({"calibration": {"source": "c", "windows": 0}}, ["precision.calibration.windows is 0"]),
        ({"calibration": {}}, ["the key 'precision.calibration.source' is required"]),
    ],
)
def test_a_bad_precision_gives_one_line(precision: Any, parts: list[str]) -> None:
    """The line names the key, the value and what is allowed or near."""
    message = refusal(precision)

    assert "\n" not in message
    assert [] == [part for part in parts if part not in message], message


def test_the_brief_keeps_attention_high() -> None:
    """Feed-forward in int8, attention as the checkpoint has it, the rest in int4."""
    policy = as_spec("brief")

    assert ("auto", "int8", "int4-g64", "int4-g64") == (policy.attention, policy.mlp, policy.embedding, policy.head)


@pytest.mark.parametrize(
    ("name", "bits_per_weight"),
    [
        ("fp32", 32),
        ("bf16", 16),
        ("int8-g64", 8.25),
        ("int4-g64", 4.25),
        ("int4-g128", 4.125),
        ("int4-g32-asym", 4.625),
    ],
)
def test_bytes_include_scales_and_zeros(name: str, bits_per_weight: float) -> None:
    """A scale of a group takes 16 bits, a zero 4."""
    form = format_of(name)

    assert bits_per_weight == 8 * (form.value_bytes(64, 256) + form.scale_bytes(64, 256)) / (64 * 256)


def test_four_bit_groups_stay_below_27_percent_of_bf16() -> None:
    """At groups of 64, scales included."""
    form = format_of("int4-g64")
    taken = form.value_bytes(576, 576) + form.scale_bytes(576, 576)

    assert taken / (576 * 576 * 2) <= 0.27
