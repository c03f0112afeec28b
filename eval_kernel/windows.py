"""Window policies: which tokens go through the model together, and which of them are scored. Pure arithmetic.

A *stream* is a run of tokens scored on its own: one document, or all documents joined. The rules here know
lengths only, so the same functions serve planning, packing and the tests' tables.

Conventions reproduced (each is part of the metric's name; they are never mixed):

- ``rolling``: lm-evaluation-harness `loglikelihood_rolling` with a context of one token.
- ``strided``: the Hugging Face guide "Perplexity of fixed-length models", every label counted once.
- ``concat``: the GPTQ papers' disjoint windows; the first token of each window is context only.
- ``half``: llama.cpp `perplexity` (second half scored); with a stride, its `--ppl-stride` mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """How a stream is cut into windows."""

    ROLLING = "rolling"
    STRIDED = "strided"
    CONCAT = "concat"
    HALF = "half"


class Bos(Enum):
    """Where the prefix token (BOS) goes, once ``auto`` is resolved."""

    EVERY_WINDOW = "every_window"
    FIRST = "first"
    NONE = "none"


class Prefix(Enum):
    """What the prefix token does in one window."""

    ABSENT = 0
    PREPENDED = 1  #: stands before the window's tokens
    OVERWRITES = 2  #: takes the place of the window's first token (llama.cpp)


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``start .. end-1`` of a stream, of which ``scored .. end-1`` are scored.

    The model sees tokens ``start .. end-2`` (the last one is a target only), after the prefix token if there is one.
    """

    start: int
    end: int
    scored: int
    prefix: Prefix

    @property
    def num_scored(self) -> int:
        """Scored tokens."""
        return self.end - self.scored

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model."""
        return self.end - 1 - self.start + (self.prefix is Prefix.PREPENDED)


@dataclass(frozen=True, slots=True)
class WindowRule:
    """A policy with its parameters; ``context`` is the most tokens the model sees at once (prefix included).

    Raises ``ValueError`` for combinations that have no meaning.
    """

    policy: Policy
    context: int
    bos: Bos
    stride: int | None = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        """Check the parameters against the policy."""
        if self.context < 2:
            raise ValueError(f"context is {self.context}: it must be at least 2 tokens")
        if self.stride is not None:
            if self.policy not in (Policy.STRIDED, Policy.HALF):
                raise ValueError(f"stride has no meaning for the policy {self.policy.value}: remove it")
            if not 1 <= self.stride <= self.context:
                raise ValueError(f"stride is {self.stride}: it must be between 1 and context ({self.context})")
            if self.bos is Bos.EVERY_WINDOW and self.policy is Policy.STRIDED and self.stride == self.context:
                raise ValueError(
                    f"stride is {self.stride}: bos every_window would skip tokens; use at most {self.context - 1}"
                )
        elif self.policy is Policy.STRIDED:
            raise ValueError("stride is missing: the policy strided needs one, between 1 and context")
        if self.drop_remainder and self.policy is not Policy.CONCAT:
            raise ValueError(f"drop_remainder has no meaning for the policy {self.policy.value}: remove it")
        if self.policy is Policy.HALF and self.stride is None and self.context < 3:
            raise ValueError(f"context is {self.context}: the policy half scores nothing below 3 tokens")
        if self.policy is Policy.HALF and self.bos is Bos.FIRST:
            raise ValueError("bos is first: the policy half takes every_window or none, for its windows stand alone")

    def windows(self, length: int) -> Iterator[Window]:
        """Yield the windows of a stream of ``length`` tokens, in order; none where nothing can be scored."""
        match self.policy:
            case Policy.ROLLING:
                return self._rolling(length)
            case Policy.STRIDED:
                return self._strided(length)
            case Policy.CONCAT:
                return self._concat(length)
            case Policy.HALF:
                return self._half(length)

    def _rolling(self, length: int) -> Iterator[Window]:
        """Every token once; the last window is filled up with earlier tokens as context."""
        n = self.context
        if self.bos is Bos.EVERY_WINDOW:
            for scored in range(0, length, n):
                end = min(scored + n, length)
                yield Window(max(0, end - n), end, scored, Prefix.PREPENDED)
            return
        scored = 0
        if self.bos is Bos.FIRST:
            if length == 0:
                return
            scored = min(n, length)
            yield Window(0, scored, 0, Prefix.PREPENDED)
        else:
            # Nothing stands before the first token, so it is context only.
            if length < 2:
                return
            scored = min(n + 1, length)
            yield Window(0, scored, 1, Prefix.ABSENT)
        while scored < length:
            end = min(scored + n, length)
            # n inputs end at token end-2: full context also for the last few tokens.
            yield Window(max(0, end - n - 1), end, scored, Prefix.ABSENT)
            scored = end

    def _strided(self, length: int) -> Iterator[Window]:
        """Windows of ``context`` every ``stride``; each scores what no earlier one held, if it can see before it.

        With ``first`` the prefix is token 0 of the stream that is cut, as in the recipe when the tokenizer adds BOS.
        """
        assert self.stride is not None
        n, previous = self.context, 0
        shift = int(self.bos is Bos.FIRST)
        room = n - (self.bos is Bos.EVERY_WINDOW)
        for begin in range(0, length + shift, self.stride):
            prefix = self._prefix(begin // self.stride)
            start, end = max(0, begin - shift), min(begin + room, length + shift) - shift
            scored = max(previous, start + (prefix is Prefix.ABSENT))
            if scored < end:
                yield Window(start, end, scored, prefix)
            previous = max(previous, end)
            if end == length:
                return

    def _concat(self, length: int) -> Iterator[Window]:
        """Disjoint windows; without a prefix the first token of each is context only."""
        begin, k = 0, 0
        while begin < length:
            prefix = self._prefix(k)
            full = self.context - (prefix is Prefix.PREPENDED)
            end = min(begin + full, length)
            if end - begin < full and self.drop_remainder:
                return
            scored = begin + (prefix is Prefix.ABSENT)
            if scored < end:
                yield Window(begin, end, scored, prefix)
            begin, k = end, k + 1

    def _half(self, length: int) -> Iterator[Window]:
        """Full windows only. Plain: disjoint, tokens n/2+1 .. n-1 scored. Strided: the last ``stride`` tokens scored.

        Nothing at all for less than two windows of text, which llama.cpp refuses too.
        """
        n = self.context
        if length < 2 * n:
            return
        prefix = Prefix.OVERWRITES if self.bos is Bos.EVERY_WINDOW else Prefix.ABSENT
        step = n if self.stride is None else self.stride
        skip = n // 2 + 1 if self.stride is None else max(1, n - self.stride)
        for begin in range(0, length - n + 1, step):
            yield Window(begin, begin + n, begin + skip, prefix)

    def _prefix(self, k: int) -> Prefix:
        """The prefix of the k-th window under the BOS rule."""
        if self.bos is Bos.EVERY_WINDOW or (self.bos is Bos.FIRST and k == 0):
            return Prefix.PREPENDED
        return Prefix.ABSENT
