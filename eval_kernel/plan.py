"""What a job comes to once its data is indexed: the manifest and the table of shards. Plain data, JSON in and out.

Same input, same plan, same digest, whoever makes it: nothing here depends on a node's memory, speed or clock.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

#: A shard that holds more whole documents than this reports them as one lump: the shard is then the
#: statistical cluster, and document rows stay home.
MAX_ROWS = 64
#: The largest count: what JSON readers everywhere keep exactly, and sums of a few of which fit 64 bits.
MAX_COUNT = 1 << 53
#: Characters of a name or a digest, and of a longer text (a precision plan, a declared join).
MAX_NAME = 200
MAX_TEXT = 1 << 20

#: The values that a manifest's choices may have: those of windows.Policy, windows.Bos and model.DTYPES.
POLICIES = frozenset({"rolling", "strided", "concat", "half"})
#: What stands for a policy in a job that measures sensitivities (``precision.cells``): its documents are cells.
SENSITIVITY = "sensitivity"
BOS_RULES = frozenset({"every_window", "first", "none"})
PREFIX_KINDS = frozenset({"bos", "eos", "none"})
DTYPES = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a job's data *is*, and what it is scored with. Digests are ``sha256:<hex>`` of content, never of paths."""

    # the data
    data_digest: str  # over the documents' bytes and boundaries
    documents: int  # every document, empty ones included
    empty_documents: int  # documents without a token
    bytes: int  # UTF-8 bytes of the source text of all documents
    words: int  # str.split() words of all documents
    lm_eval_words: int  # lm-evaluation-harness' count: pieces of re.split(r"\s+", document), empty ones included
    tokens: int  # tokens of the text; no special token is among them
    # what is scored
    windows: int
    scored_tokens: int
    scored_bytes: int  # bytes of the scored tokens (the whole text where every token is scored)
    scored_words: int
    input_tokens: int  # tokens that go through the model: the cost
    shards: int
    # what it is scored with
    tokenizer_digest: str
    weights_digest: str
    model_type: str
    parameters: int
    vocabulary: int
    max_context: int | None  # the model's own limit, where it states one
    dtype: str  # "float32", "bfloat16" or "float16": what `precision` came to
    policy: str
    context: int
    stride: int | None
    join: str | None  # declared string between documents, None where documents stand alone
    bos: str  # the rule after `auto` was resolved: "every_window", "first" or "none"
    prefix_token: int | None  # the token that rule puts in front; None with "none"
    prefix_kind: str  # "bos", "eos" (the model has no BOS) or "none"
    batch_tokens: int  # 0: each node measures what suits it
    kernel_version: int
    precision_plan: str = ""  # canonical JSON of a precision.plan.PrecisionPlan: the format of every weight

    def __post_init__(self) -> None:
        """Check every field by itself; raises ``ValueError`` naming the first that no manifest can have."""
        for name in _MANIFEST_COUNTS:
            _count(name, getattr(self, name))
        _count("context", self.context, least=1)
        _count("batch_tokens", self.batch_tokens)
        for name, least in (("max_context", 1), ("stride", 1), ("prefix_token", 0)):
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), least=least)
        for name in ("data_digest", "tokenizer_digest", "weights_digest", "model_type"):
            _text(name, getattr(self, name), MAX_NAME)
        _text("precision_plan", self.precision_plan, MAX_TEXT)
        if self.join is not None:
            _text("join", self.join, MAX_TEXT)
        for name, known in _MANIFEST_CHOICES:
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name} is {_shown(value)}, not one of {', '.join(sorted(known))}")
        if self.empty_documents > self.documents:
            raise ValueError(f"empty_documents is {self.empty_documents}, of {self.documents} documents")

    @property
    def digest(self) -> str:
        """Digest over every field: two manifests are the same evaluation exactly when these are equal."""
        return digest_json(asdict(self))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Build from ``to_json``'s dict. Raises ``ValueError``, or ``TypeError`` where fields lack or are unknown."""
        return cls(**data)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A fixed, numbered range of scoring windows and the counts that scoring it must yield.

    ``first_document`` is the first document that has a token scored here, ``end_document`` one past the last.
    ``lump`` tells whether whole documents are reported as one row (see ``MAX_ROWS``).
    """

    index: int
    first_window: int
    windows: int
    tokens: int  # scored
    bytes: int
    words: int
    input_tokens: int
    first_document: int
    end_document: int
    lump: bool
    digest: str  # over the windows and their token ids: the pack's name

    def __post_init__(self) -> None:
        """Check every field by itself; raises ``ValueError`` naming the first that no shard can have."""
        for name in _SHARD_COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                _count(f"shard {_shown(self.index)}: {name}", value)
        if type(self.lump) is not bool:
            raise ValueError(f"shard {self.index}: lump is {_shown(self.lump)}, not true or false")
        _text(f"shard {self.index}: digest", self.digest, MAX_NAME)

    def to_row(self) -> list[Any]:
        """Return the fields in order, as compact JSON."""
        return [getattr(self, f.name) for f in fields(self)]

    @classmethod
    def from_row(cls, row: list[Any]) -> ShardPlan:
        """Build from ``to_row``'s list. Raises ``ValueError``, or ``TypeError`` for another number of fields."""
        return cls(*row)


@dataclass(frozen=True, slots=True)
class Plan:
    """A job's manifest and its shards, numbered 0 .. n-1 in order of their windows."""

    manifest: Manifest
    shards: tuple[ShardPlan, ...]

    def __post_init__(self) -> None:
        """Check that the shards tile the manifest; raises ``ValueError`` naming the first contradiction."""
        m = self.manifest
        if len(self.shards) != m.shards:
            raise ValueError(f"the manifest says {m.shards} shards, the table has {len(self.shards)}")
        window = 0
        for i, s in enumerate(self.shards):
            if s.index != i or s.first_window != window or s.windows <= 0:
                raise ValueError(f"shard {i}: expected to start at window {window}, got {s}")
            window += s.windows
        for name, total in (
            ("windows", m.windows),
            ("tokens", m.scored_tokens),
            ("bytes", m.scored_bytes),
            ("words", m.scored_words),
            ("input_tokens", m.input_tokens),
        ):
            got = sum(getattr(s, name) for s in self.shards)
            if got != total:
                raise ValueError(f"the shards' {name} add up to {got}, the manifest says {total}")

    @property
    def digest(self) -> str:
        """Digest over manifest and shards."""
        return digest_json([self.manifest.digest, [s.digest for s in self.shards]])


def digest_json(value: Any) -> str:
    """Return ``sha256:<hex>`` over the canonical JSON form of ``value`` (sorted keys, no spaces, UTF-8)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


_MANIFEST_COUNTS = (
    "documents",
    "empty_documents",
    "bytes",
    "words",
    "lm_eval_words",
    "tokens",
    "windows",
    "scored_tokens",
    "scored_bytes",
    "scored_words",
    "input_tokens",
    "shards",
    "parameters",
    "vocabulary",
    "kernel_version",
)
_MANIFEST_CHOICES = (
    ("dtype", DTYPES),
    ("policy", POLICIES | {SENSITIVITY}),
    ("bos", BOS_RULES),
    ("prefix_kind", PREFIX_KINDS),
)
_SHARD_COUNTS = (
    "index",
    "first_window",
    "windows",
    "tokens",
    "bytes",
    "words",
    "input_tokens",
    "first_document",
    "end_document",
)


def _count(name: str, value: object, least: int = 0) -> None:
    # Not isinstance: True is no count, and a NumPy integer is nothing that JSON can hold.
    if type(value) is not int:
        raise ValueError(f"{name} is {_shown(value)}, not a whole number")
    if not least <= value <= MAX_COUNT:
        raise ValueError(f"{name} is {_shown(value)}, outside [{least}, 2^53]")


def _text(name: str, value: object, longest: int) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shown(value)}, not a text")
    if len(value) > longest:
        raise ValueError(f"{name} has {len(value)} characters; at most {longest} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, which no UTF-8 text does") from None


def _shown(value: object) -> str:
    """A wrong value for a message: short, ASCII, whatever it is."""
    if type(value) is int and abs(value) > MAX_COUNT:
        return f"a number of {value.bit_length()} bits"  # str() refuses the longest ones
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
