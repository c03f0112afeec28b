"""Two precisions on the same tokens: the paired difference, worked by hand, and what cannot be compared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eval_kernel.errors import PlanRefused
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.partial import NonFinite, Partial, RowSums
from eval_kernel.precision.compare import check_manifests, compare
from tests.support.report_cases import k_manifest


def shard(index: int, *rows: tuple[int | None, float, int]) -> Partial:
    """A partial with rows of (document, nats, tokens)."""
    made = tuple(RowSums(d, 1, round(nats * STEPS_PER_NAT), tokens, tokens, 1) for d, nats, tokens in rows)
    return Partial(index, sum(r.steps for r in made), sum(r.tokens for r in made), 0, 0, made)


def test_the_difference_is_paired() -> None:
    """Four shards of 10 tokens whose losses differ by 1, 2, 3 and 2 nats: 0.2 nats per token, and its error by hand."""
    reference = [shard(i, (0, 10.0 * (i + 1), 10)) for i in range(4)]
    other = [shard(i, (0, 10.0 * (i + 1) + extra, 10)) for i, extra in enumerate((1.0, 2.0, 3.0, 2.0))]
    found = compare(reference, other)

    assert ("shard", 4, 40) == (found.unit, found.clusters, found.tokens)
    assert math.isclose(0.2, found.delta)
    # sqrt(4/3 * (1 + 0 + 1 + 0)) / 40, and Student's t with 3 degrees of freedom.
    assert math.isclose(math.sqrt(8 / 3) / 40, found.se or 0)
    assert math.isclose(3.182446305284263 * math.sqrt(8 / 3) / 40, (found.high or 0) - found.delta, rel_tol=1e-9)
    assert math.isclose(math.expm1(0.2), found.change)
    assert math.isclose(math.exp(2.5), found.reference_perplexity)
    assert math.isclose(math.exp(2.7), found.perplexity)


def test_a_gain_has_an_interval_below_zero() -> None:
    """Losses cannot be negative; differences can."""
    reference = [shard(i, (0, 10.0, 10)) for i in range(3)]
    other = [shard(i, (0, 9.0 - 0.001 * i, 10)) for i in range(3)]
    found = compare(reference, other)

    assert found.low is not None
    assert found.high is not None
    assert found.low < found.delta < found.high < 0


def test_documents_are_the_unit_where_there_are_more_of_them() -> None:
    """One that is spread over two shards is put together; unless shards are asked for."""
    reference = [shard(0, (0, 5.0, 5), (1, 5.0, 5), (2, 1.0, 2)), shard(1, (2, 2.0, 3), (3, 5.0, 5))]
    other = [shard(0, (0, 6.0, 5), (1, 5.0, 5), (2, 2.0, 2)), shard(1, (2, 1.0, 3), (3, 5.0, 5))]

    found = compare(reference, other)
    assert ("document", 4) == (found.unit, found.clusters)
    assert math.isclose(1.0 / 20, found.delta)
    assert ("shard", 2) == (compare(reference, other, by="shard").unit, compare(reference, other, by="shard").clusters)
    assert found.delta == compare(reference, other, by="shard").delta


def test_lumps_are_units_too() -> None:
    """A shard's whole documents, added up at their site."""
    reference = [shard(i, (None, 5.0, 5)) for i in range(3)]

    assert 3 == compare(reference, reference, by="document").clusters
    assert 0.0 == compare(reference, reference).delta


def test_one_cluster_has_no_interval() -> None:
    """The difference is there all the same."""
    found = compare([shard(0, (0, 5.0, 5))], [shard(0, (0, 6.0, 5))])

    assert (0.2, None, None) == (found.delta, found.low, found.change_high)


def test_what_did_not_score_the_same_tokens_is_refused() -> None:
    """Other shards, other counts, losses that are not finite, or nothing."""
    one, two = shard(0, (0, 5.0, 5)), shard(1, (0, 5.0, 5))
    spoiled = replace(one, nonfinite=1, places=(NonFinite(0, 1, "nan"),))
    for a, b, words in (
        ([one, two], [one], "different shards"),
        ([one], [shard(0, (0, 5.0, 6))], "shard 0"),
        ([one], [spoiled], "shard 0"),
        ([], [], "nothing was scored"),
    ):
        with pytest.raises(PlanRefused, match=words):
            compare(a, b)


def test_manifests_may_differ_in_precision_only() -> None:
    """Other data, other windows or another model are refused by name."""
    manifest = k_manifest()
    check_manifests(manifest, replace(manifest, dtype="bfloat16", precision_plan="{}"))
    with pytest.raises(PlanRefused, match="context differs"):
        check_manifests(manifest, replace(manifest, context=7))


def test_comparisons_are_json() -> None:
    """For reports."""
    found = compare([shard(0, (0, 5.0, 5))], [shard(0, (0, 6.0, 5))]).to_json()

    assert 0.2 == found["delta"]
    assert found["low"] is None
