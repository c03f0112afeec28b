"""Partials put together: documents over shards, lumps, places, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eval_kernel.partial import NonFinite
from eval_kernel.tally import MAX_TALLY_PLACES, Cluster, Tally
from tests.support.report_cases import bits, k_partials, partial, row, tally_of


def test_a_document_over_two_shards_is_one_cluster() -> None:
    """Its parts are added up, and it counts as one document."""
    tally = tally_of(*k_partials())
    three = Cluster(2 * bits(3), 2, 2, 1, 1)

    assert [Cluster(8 * bits(1), 8, 8, 1, 1), three, three, three, three] == tally.clusters()
    assert (32 - 16, 16, 5, 3) == (tally.tokens, tally.bytes, tally.documents, tally.shards)
    assert 8 * bits(1) + 8 * bits(3) == tally.steps


def test_a_lump_is_a_cluster_of_its_shard_alone() -> None:
    """Lumps of two shards stay apart, and come after all documents."""
    tally = tally_of(
        partial(7, row(None, 30, 3, documents=70)),
        partial(2, row(None, 20, 2, documents=65)),
        partial(9, row(500, 10, 1)),
    )

    assert [Cluster(10, 1, 1, 1, 1), Cluster(20, 2, 2, 1, 65), Cluster(30, 3, 3, 1, 70)] == tally.clusters()
    assert 136 == tally.documents


def test_a_shard_counts_once() -> None:
    """Adding a shard again is refused and changes nothing."""
    tally = tally_of(*k_partials())
    before = tally.digest()

    with pytest.raises(ValueError, match="shard 1 is in the tally already"):
        tally.add(k_partials()[1])
    assert before == tally.digest()


@pytest.mark.parametrize("name", ["steps", "tokens", "bytes", "words"])
def test_rows_that_do_not_add_up_are_refused(name: str) -> None:
    """The message names the sum, and nothing is added."""
    good = k_partials()[0]
    bad = replace(good, **{name: getattr(good, name) + 1})
    tally = Tally()

    with pytest.raises(ValueError, match=f"shard 0: its rows' {name} add up to"):
        tally.add(bad)
    assert Tally() == tally


def test_the_tally_knows_its_shards() -> None:
    """``has`` is true for what was added only."""
    tally = tally_of(k_partials()[1])

    assert [False, True, False] == [tally.has(shard) for shard in range(3)]


def test_a_named_document_is_spoiled_alone() -> None:
    """One token without a finite loss takes its own document out, not its neighbours."""
    poisoned = replace(k_partials()[2], nonfinite=1, places=(NonFinite(4, 1, "nan"),))
    tally = tally_of(*k_partials()[:2], poisoned)

    assert 1 == tally.nonfinite
    assert [NonFinite(4, 1, "nan")] == tally.places
    assert [Cluster(2 * bits(3), 2, 2, 1, 1)] == tally.spoiled
    assert 4 == len(tally.sound)


def test_a_document_spoiled_in_one_shard_is_spoiled_as_a_whole() -> None:
    """D0's part in shard 1 is fine, its part in shard 0 is not."""
    poisoned = replace(k_partials()[0], nonfinite=1, places=(NonFinite(0, 2, "inf"),))
    tally = tally_of(k_partials()[1], poisoned)

    assert [8] == [c.tokens for c in tally.spoiled]


def test_where_not_every_place_is_named_the_whole_shard_is_spoiled() -> None:
    """Two tokens are poisoned, one place is known: either document may hold the other."""
    poisoned = replace(k_partials()[2], nonfinite=2, places=(NonFinite(4, 1, "nan"),))

    assert 2 == len(tally_of(poisoned).spoiled)


def test_a_lump_with_a_poisoned_document_is_spoiled() -> None:
    """A lump cannot be taken apart."""
    tally = tally_of(partial(0, row(None, 9, 3, documents=80), nonfinite=1, places=(NonFinite(33, 0, "nan"),)))

    assert 80 == sum(c.documents for c in tally.spoiled)
    assert [] == tally.sound


def test_places_are_bounded_and_the_first_in_the_data() -> None:
    """However many there are and whatever comes first, the places kept are those of the lowest documents."""
    places = [NonFinite(document, 0, "nan") for document in range(2 * MAX_TALLY_PLACES)]
    shards = [partial(i, row(i, 1, 1), nonfinite=1, places=(place,)) for i, place in enumerate(places)]
    tally = tally_of(*reversed(shards))

    assert places[:MAX_TALLY_PLACES] == tally.places
    assert 2 * MAX_TALLY_PLACES == tally.nonfinite


def test_digests_tell_what_totals_cannot() -> None:
    """Two corpora with equal totals and other documents have other digests, and are not equal."""
    one = tally_of(partial(0, row(0, 5, 2), row(1, 1, 1)))
    other = tally_of(partial(0, row(0, 1, 2), row(1, 5, 1)))

    assert one != other
    assert one.digest() != other.digest()


def test_the_digest_of_a_corpus_does_not_depend_on_its_shards() -> None:
    """Documents are put together again, so how they were cut leaves no trace."""
    whole = tally_of(
        partial(0, row(0, 8 * bits(1), 8), *(row(d, 2 * bits(3), 2) for d in range(1, 5))),
    )

    assert tally_of(*k_partials()).digest() == whole.digest()


def test_a_tally_is_equal_to_nothing_else() -> None:
    """Comparison with another type is false, not an error."""
    assert Tally() != "tally"
