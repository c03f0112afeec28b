"""Messages to data classes and back. What cannot be a valid data class is refused here, before anything is stored."""

from __future__ import annotations

import json

from eval_kernel.errors import Blame, FedevalError, PartialRefused, by_code
from eval_kernel.gridsum import to_nats, to_steps
from eval_kernel.partial import MAX_PLACES, Execution, NonFinite, Partial, RowSums, ScoredShard
from eval_kernel.plan import Manifest, ShardPlan
from fedeval.v1 import agents_pb2, evaluation_pb2

#: Rows a partial may carry: MAX_ROWS whole documents, the lump and two split documents at its ends leave room to spare.
MAX_PARTIAL_ROWS = 4096


def partial_to_message(partial: Partial) -> evaluation_pb2.Partial:
    """Return the message of a partial; its sums become doubles, which is exact below 2^23 nats."""
    return evaluation_pb2.Partial(
        shard=partial.shard,
        nll=to_nats(partial.steps),
        tokens=partial.tokens,
        bytes=partial.bytes,
        words=partial.words,
        rows=[
            evaluation_pb2.RowSums(
                document=row.document,
                documents=row.documents,
                nll=to_nats(row.steps),
                tokens=row.tokens,
                bytes=row.bytes,
                words=row.words,
            )
            for row in partial.rows
        ],
        nonfinite=partial.nonfinite,
        places=[evaluation_pb2.NonFinite(document=p.document, token=p.token, value=p.value) for p in partial.places],
        extra=dict(partial.extra),
    )


def partial_from_message(message: evaluation_pb2.Partial) -> Partial:
    """Return the partial of a message. Raises ``PartialRefused`` for sums off the grid or out of bounds."""
    if len(message.rows) > MAX_PARTIAL_ROWS or len(message.places) > MAX_PLACES:
        raise PartialRefused(
            f"shard {message.shard}: {len(message.rows)} rows and {len(message.places)} places are too many"
        )
    try:
        return Partial(
            shard=message.shard,
            steps=to_steps(message.nll),
            tokens=message.tokens,
            bytes=message.bytes,
            words=message.words,
            rows=tuple(
                RowSums(
                    document=row.document if row.HasField("document") else None,
                    documents=row.documents,
                    steps=to_steps(row.nll),
                    tokens=row.tokens,
                    bytes=row.bytes,
                    words=row.words,
                )
                for row in message.rows
            ),
            nonfinite=message.nonfinite,
            places=tuple(NonFinite(p.document, p.token, p.value) for p in message.places),
            extra=tuple(sorted(message.extra.items())),
        )
    except ValueError as error:
        raise PartialRefused(f"shard {message.shard}: {error}") from None


def scored_to_message(scored: ScoredShard) -> agents_pb2.ScoredShard:
    """Return the message of a scored shard."""
    e = scored.execution
    return agents_pb2.ScoredShard(
        partial=partial_to_message(scored.partial),
        execution=evaluation_pb2.Execution(
            seconds=e.seconds,
            device=e.device,
            dtype=e.dtype,
            threads=e.threads,
            peak_bytes=e.peak_bytes,
            software=e.software,
            precision=e.precision,
        ),
    )


def scored_from_message(message: agents_pb2.ScoredShard) -> ScoredShard:
    """Return the scored shard of a message; raises ``PartialRefused``."""
    e = message.execution
    execution = Execution(e.seconds, e.device, e.dtype, e.threads, e.peak_bytes, dict(e.software), dict(e.precision))
    return ScoredShard(partial_from_message(message.partial), execution)


def shard_to_message(shard: ShardPlan) -> evaluation_pb2.Shard:
    """Return the message of a shard's plan: the fields have the same names."""
    return evaluation_pb2.Shard(**{name: getattr(shard, name) for name in ShardPlan.__slots__})


def shard_from_message(message: evaluation_pb2.Shard) -> ShardPlan:
    """Return the shard plan of a message; raises ``ValueError`` where a field is out of range."""
    return ShardPlan(**{name: getattr(message, name) for name in ShardPlan.__slots__})


def manifest_to_json(manifest: Manifest) -> str:
    """Return the JSON text of a manifest, as it travels."""
    return json.dumps(manifest.to_json(), sort_keys=True, separators=(",", ":"))


def manifest_from_json(text: str) -> Manifest:
    """Return the manifest of a JSON text; raises ``ValueError`` where it is none."""
    try:
        return Manifest.from_json(json.loads(text))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error}") from None


def failure_to_message(error: FedevalError) -> evaluation_pb2.Failure:
    """Return the message of an error: its code and its line."""
    return evaluation_pb2.Failure(code=error.code, message=str(error))


def failure_from_message(message: evaluation_pb2.Failure) -> FedevalError:
    """Return the error a message stands for (``FedevalError`` itself for a code this version lacks)."""
    return by_code(message.code)(message.message)


def blame_of(code: str) -> Blame:
    """Whose fault a failure code names."""
    return by_code(code).blame
