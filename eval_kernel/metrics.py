"""What a tally comes to: nats per token, perplexity, bits per byte and kin. The one place that divides sums.

Every metric is a ratio over the sound clusters. The interval of a perplexity is the exponential of the
interval of its nats, hence asymmetric. Nothing is ever averaged; showing results is left to the report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.intervals import Interval, ratio_interval
from eval_kernel.tally import Cluster, Tally

#: With fewer clusters than this a note says that the interval rests on few.
FEW_CLUSTERS = 30


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its 95 % interval. ``value`` is ``None`` where there is none; ``note`` then says why.

    A perplexity beyond float64 is ``math.inf``; ``log10`` is finite even then.
    """

    name: str
    value: float | None
    se: float | None
    low: float | None
    high: float | None
    unit: str
    clusters: int
    note: str = ""
    log10: float | None = None  # perplexities only: log10 of the value

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; JSON has no infinity, so it is written as the string ``"inf"``."""
        return {name: _finite(getattr(self, name)) for name in self.__slots__}


def metrics(tally: Tally) -> tuple[Metric, ...]:
    """Return nats_per_token, perplexity, bits_per_byte, byte_perplexity, word_perplexity, in this order."""
    per_token, per_byte = _nats(tally, "tokens"), _nats(tally, "bytes")
    return (
        _plain("nats_per_token", per_token, 1.0, "nat/token", "tokens"),
        _exponential("perplexity", per_token, "per token", "tokens"),
        _plain("bits_per_byte", per_byte, 1.0 / math.log(2.0), "bit/byte", "bytes"),
        _exponential("byte_perplexity", per_byte, "per byte", "bytes"),
        _exponential("word_perplexity", _nats(tally, "words"), "per word", "words"),
    )


def divergence(tally: Tally) -> Metric:
    """Return the one metric of a job that measures sensitivities: what a changed group costs, over all its cells."""
    return _plain("divergence_per_token", _nats(tally, "tokens"), 1.0, "nat/token", "tokens")


def bits_per_byte(tally: Tally) -> Metric:
    """Return this one metric: the running estimate of a job in progress."""
    return _plain("bits_per_byte", _nats(tally, "bytes"), 1.0 / math.log(2.0), "bit/byte", "bytes")


def lm_eval_word_perplexity(steps: int, words: int) -> Metric:
    """Return the word perplexity over lm-evaluation-harness' count of words, which is known for the whole data only."""
    nats = Interval(
        steps / STEPS_PER_NAT / words if words else None, reason="words as lm-evaluation-harness counts them"
    )
    return _exponential("lm_eval_word_perplexity", nats, "per word", "words")


def _nats(tally: Tally, per: str) -> Interval:
    """Nats per token, byte or word over the sound clusters that hold a scored token."""
    clusters: list[Cluster] = [c for c in tally.sound if c.tokens > 0]
    return ratio_interval([(c.steps, getattr(c, per)) for c in clusters], STEPS_PER_NAT)


def _plain(name: str, nats: Interval, scale: float, unit: str, per: str) -> Metric:
    value, se, low, high = (None if v is None else v * scale for v in (nats.value, nats.se, nats.low, nats.high))
    return Metric(name, value, se, low, high, unit, nats.clusters, _note(nats, per))


def _exponential(name: str, nats: Interval, unit: str, per: str) -> Metric:
    if nats.value is None:
        return Metric(name, None, None, None, None, unit, nats.clusters, _note(nats, per))
    value, note = _exp(nats.value), _note(nats, per)
    se = None if nats.se is None else value * nats.se
    if math.isinf(value):
        # inf * 0 is no number, and inf * se says no more than inf does.
        se = None
        note = "; ".join(filter(None, ["beyond float64: see its log10 and the finite nats", note]))
    low, high = (None if v is None else _exp(v) for v in (nats.low, nats.high))
    return Metric(name, value, se, low, high, unit, nats.clusters, note, log10=nats.value / math.log(10.0))


def _note(nats: Interval, per: str) -> str:
    if nats.value is None:
        return f"no value: no {per} scored"
    if nats.reason:
        return nats.reason
    if nats.clusters < FEW_CLUSTERS:
        return f"the interval rests on {nats.clusters} clusters only (t, {nats.clusters - 1} degrees of freedom)"
    return ""


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _finite(value: Any) -> Any:
    return "inf" if isinstance(value, float) and math.isinf(value) else value
