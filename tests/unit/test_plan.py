"""Manifests and plans: tables that contradict themselves are refused, digests see every field."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest

from eval_kernel.plan import BOS_RULES, DTYPES, MAX_COUNT, POLICIES, Manifest, Plan, ShardPlan, digest_json
from eval_kernel.precision.formats import DTYPE_NAMES
from eval_kernel.windows import Bos, Policy
from tests.support.report_cases import k_manifest


def shards() -> tuple[ShardPlan, ...]:
    """Three shards of two windows each that tile the K corpus's manifest."""
    return (
        ShardPlan(0, 0, 2, 6, 6, 1, 6, 0, 1, False, "sha256:a"),
        ShardPlan(1, 2, 2, 6, 6, 2, 6, 0, 3, False, "sha256:b"),
        ShardPlan(2, 4, 2, 4, 4, 2, 4, 3, 5, False, "sha256:c"),
    )


def test_shards_that_tile_the_manifest_make_a_plan() -> None:
    """A consistent table is accepted as it is."""
    assert shards() == Plan(k_manifest(), shards()).shards


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, {"index": 2}, "shard 1: expected to start at window 2"),
        (1, {"first_window": 3}, "shard 1: expected to start at window 2"),
        (2, {"windows": 0}, "shard 2"),
        (2, {"windows": 3}, "windows add up to 7, the manifest says 6"),
        (0, {"tokens": 7}, "tokens add up to 17, the manifest says 16"),
        (0, {"bytes": 7}, "bytes add up to 17"),
        (0, {"words": 0}, "words add up to 4"),
        (0, {"input_tokens": 5}, "input_tokens add up to 15"),
    ],
)
def test_a_table_that_contradicts_the_manifest_is_refused(index: int, change: dict[str, Any], message: str) -> None:
    """The message names the first contradiction."""
    table = list(shards())
    table[index] = replace(table[index], **change)

    with pytest.raises(ValueError, match=message):
        Plan(k_manifest(), tuple(table))


def test_a_missing_shard_is_refused() -> None:
    """The number of shards is part of the manifest."""
    with pytest.raises(ValueError, match="the manifest says 3 shards, the table has 2"):
        Plan(k_manifest(), shards()[:2])


def test_manifest_and_shards_survive_json() -> None:
    """Both read back from JSON text as they were."""
    manifest, shard = k_manifest(stride=4, join="\n"), shards()[1]

    assert manifest == Manifest.from_json(json.loads(json.dumps(manifest.to_json())))
    assert shard == ShardPlan.from_row(json.loads(json.dumps(shard.to_row())))


@pytest.mark.parametrize("name", [f.name for f in fields(Manifest)])
def test_the_digest_sees_every_field(name: str) -> None:
    """Changing any one field changes the manifest's digest."""
    manifest = k_manifest()
    value = getattr(manifest, name)
    others: dict[str, Any] = {"dtype": "bfloat16", "policy": "concat", "bos": "none", "prefix_kind": "eos", "stride": 4}
    change: Any = others.get(name) or (value + 1 if isinstance(value, int) else f"{value}x")
    other = replace(manifest, **{name: change})

    assert manifest.digest != other.digest


def test_a_plan_digest_sees_manifest_and_shards() -> None:
    """Another pack, or another manifest, is another plan."""
    plan = Plan(k_manifest(), shards())
    other_pack = Plan(k_manifest(), (*shards()[:2], replace(shards()[2], digest="sha256:d")))
    other_data = Plan(k_manifest(data_digest="sha256:ff"), shards())

    assert 3 == len({plan.digest, other_pack.digest, other_data.digest})


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    """The canonical JSON form sorts keys."""
    assert digest_json({"a": 1, "b": "é"}) == digest_json({"b": "é", "a": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": float("nan")}, "parameters is nan, not a whole number"),
        ({"documents": 10**400}, "documents is a number of 1329 bits"),
        ({"documents": 10**5000}, "documents is a number of 16610 bits"),
        ({"input_tokens": MAX_COUNT + 1}, "input_tokens is a number of 54 bits, outside"),
        ({"shards": "3"}, "shards is '3', not a whole number"),
        ({"shards": True}, "shards is True, not a whole number"),
        ({"bytes": None}, "bytes is None"),
        ({"words": -1}, "words is -1, outside"),
        ({"lm_eval_words": 1.0}, "lm_eval_words is 1.0"),
        ({"context": 0}, "context is 0, outside"),
        ({"context": {"a": 1}}, "context is {'a': 1}"),
        ({"max_context": "no"}, "max_context is 'no'"),
        ({"stride": 0}, "stride is 0"),
        ({"prefix_token": -1}, "prefix_token is -1"),
        ({"join": ["x"]}, "join is ['x'], not a text"),
        ({"model_type": "\ud800"}, "model_type holds half a surrogate pair"),
        ({"precision_plan": "\ud800"}, "precision_plan holds half a surrogate pair"),
        ({"data_digest": "x" * 201}, "data_digest has 201 characters"),
        ({"dtype": "\ud800"}, "dtype is '\\ud800', not one of bfloat16, float16, float32"),
        ({"policy": ["rolling"]}, "policy is ['rolling'], not one of"),
        ({"bos": "auto"}, "bos is 'auto', not one of"),
        ({"prefix_kind": 5}, "prefix_kind is 5, not one of"),
        ({"empty_documents": 7}, "empty_documents is 7, of 6 documents"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused_at_birth(changes: dict[str, Any], message: str) -> None:
    """Neither the wire nor a journal can bring one in; the message names the field."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Manifest.from_json({**k_manifest().to_json(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -1}, "shard 1: tokens is -1, outside"),
        ({"input_tokens": 1 << 62}, "shard 1: input_tokens is a number of 63 bits, outside"),
        ({"words": 2.0}, "shard 1: words is 2.0, not a whole number"),
        ({"index": "1"}, "shard '1': index is '1'"),
        ({"lump": 0}, "shard 1: lump is 0, not true or false"),
        ({"digest": "\ud800"}, "shard 1: digest holds half a surrogate pair"),
    ],
)
def test_a_shard_that_cannot_be_is_refused_at_birth(changes: dict[str, Any], message: str) -> None:
    """The message names the shard and the field."""
    row = {f.name: getattr(shards()[1], f.name) for f in fields(ShardPlan)}

    with pytest.raises(ValueError, match=re.escape(message)):
        ShardPlan.from_row(list({**row, **changes}.values()))


def test_a_manifest_knows_the_values_that_its_makers_use() -> None:
    """The tables here and the enumerations there are the same."""
    assert {policy.value for policy in Policy} == POLICIES
    assert {bos.value for bos in Bos} == BOS_RULES
    assert set(DTYPE_NAMES.values()) == DTYPES
