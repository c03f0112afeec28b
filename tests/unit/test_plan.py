"""Manifests and plans: tables that contradict themselves are refused, digests see every field."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from eval_kernel.plan import Manifest, Plan, ShardPlan, digest_json
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
    other = replace(manifest, **{name: value + 1 if isinstance(value, int) else f"{value}x"})

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
