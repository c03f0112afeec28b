"""A tally's content does not depend on the order in which partials arrive."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from eval_kernel.metrics import metrics
from eval_kernel.partial import NonFinite, Partial, RowSums
from tests.support.report_cases import partial, tally_of


@st.composite
def partials(draw: st.DrawFn) -> list[Partial]:
    """Partials of up to twelve shards whose documents overlap, some of them lumps, some poisoned."""
    result = []
    for shard in range(draw(st.integers(0, 12))):
        documents = draw(st.lists(st.integers(0, 9), max_size=4, unique=True)) if draw(st.booleans()) else [None]
        rows = [
            RowSums(
                document,
                1 if document is not None else 70,
                draw(st.integers(0, 2**40)),
                draw(st.integers(1, 2**12)),
                draw(st.integers(0, 2**14)),
                draw(st.integers(0, 2**11)),
            )
            for document in documents
        ]
        made = partial(shard, *rows)
        if rows and draw(st.integers(0, 9)) == 0:
            made = replace(made, nonfinite=1, places=(NonFinite(documents[0] or 0, shard, "nan"),))
        result.append(made)
    return result


@given(partials(), st.integers(0, 2**32))
def test_any_order_gives_the_same_tally_and_the_same_metrics(shards: list[Partial], seed: int) -> None:
    """Equal content, equal digest, and metrics that are equal in every bit."""
    shuffled = shards[:]
    random.Random(seed).shuffle(shuffled)
    one, other = tally_of(*shards), tally_of(*shuffled)

    assert one == other, f"seed {seed}"
    assert one.digest() == other.digest(), f"seed {seed}"
    assert metrics(one) == metrics(other), f"seed {seed}"


@given(partials())
def test_clusters_add_up_to_the_totals(shards: list[Partial]) -> None:
    """No row is lost between partials and clusters."""
    tally = tally_of(*shards)

    for name in ("steps", "tokens", "bytes", "words"):
        assert sum(getattr(p, name) for p in shards) == getattr(tally, name)
        assert getattr(tally, name) == sum(getattr(c, name) for c in tally.clusters())
        assert getattr(tally, name) == sum(getattr(c, name) for c in [*tally.sound, *tally.spoiled])
