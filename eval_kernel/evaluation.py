"""One job that is open on this node: its shards scored one at a time, and their losses summed by document.

What the job's ingredients are is ``engine``'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from eval_kernel import checkpoint, corpus, documents, lanes, layout, model, scoring, tokenizer
from eval_kernel.budget import Budget
from eval_kernel.errors import DataChanged, LossOutOfBounds, OutOfMemory, ShardError, reason
from eval_kernel.execution import execution
from eval_kernel.gridsum import MAX_EXACT_NATS, STEPS_PER_NAT
from eval_kernel.pack import Pack
from eval_kernel.partial import MAX_PLACES, NonFinite, Partial, RowSums, ScoredShard
from eval_kernel.plan import Manifest, ShardPlan
from eval_kernel.spec import JobSpec
from eval_kernel.windows import Prefix


@dataclass(frozen=True, slots=True)
class Inputs:
    """A job's ingredients, found, digested and cut; everything but the loaded weights."""

    checkpoint: checkpoint.Checkpoint
    tokenizer: tokenizer.Tokenizer
    source: documents.Source | None  # None: the text is with other nodes, which make packs of it
    corpus: corpus.Corpus
    layout: layout.Layout
    prefix_token: int | None
    manifest_facts: dict[str, Any]
    calibration: torch.Tensor | None  # token ids [rows, length] that the quantiser may look at


class Evaluation:
    """A job that is open on this node: scores its shards one at a time."""

    def __init__(
        self,
        inputs: Inputs,
        manifest: Manifest,
        loaded: model.Model,
        used: dict[str, str],
        budget: Budget,
        cache: Path,
        spec: JobSpec,
    ) -> None:
        self._inputs, self._manifest, self._cache, self._spec = inputs, manifest, cache, spec
        self._model, self._used, self._budget = loaded, used, budget

    def score(self, shard: ShardPlan, beat: Callable[[], None], pack: Pack | None = None) -> ScoredShard:
        """Score one shard, of ``pack`` if another node has made it, else of this node's corpus.

        ``beat`` is called after every batch. Raises ``ShardError``s and ``DataChanged``.
        """
        if pack is None:
            pack = Pack.of(self._inputs.layout, shard)
            if pack.digest != shard.digest:
                self._drop_corpus(shard)
        extra = scoring.Extra() if "calibration" in self._spec.metrics else None
        started = time.perf_counter()
        try:
            rows = [self._row(pack, w) for w in pack.windows]
            losses = scoring.score(self._model, rows, self._budget, beat, extra)
        except (RuntimeError, MemoryError) as error:
            if lanes.is_memory(error):
                raise self._no_memory(shard, error) from None
            raise ShardError(f"shard {shard.index}: scoring failed on {self._model.device} ({reason(error)})") from None
        partial = self._sum(shard, pack, losses)
        if extra is not None:
            partial = replace(partial, extra=tuple(sorted(extra.items())))
        if (partial.tokens, partial.bytes, partial.words) != (shard.tokens, shard.bytes, shard.words):
            self._drop_corpus(shard)
        seconds = time.perf_counter() - started
        ready = self._model
        kernel = ready.kernel if ready.rows is not None else f"{ready.kernel}, {self._budget.tokens} tokens at once"
        return ScoredShard(partial, execution(ready.device, ready.dtype, seconds, kernel, self._used))

    def logits(self, shard: ShardPlan, piece: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield float32 logits [positions, vocabulary] of a shard's scored tokens, and these; ``piece`` at a time."""
        ready = self._model
        pack = Pack.of(self._inputs.layout, shard)
        for window in pack.windows:
            row = self._row(pack, window)
            ids = torch.from_numpy(row.inputs.astype(np.int64)).to(ready.device).unsqueeze(0)
            targets = torch.from_numpy(row.targets.astype(np.int64)).to(ready.device)
            # A generator that yields inside of a mode would leave its caller in it.
            with torch.inference_mode():
                found = ready.hidden(ids)[0, -len(targets) :] if ready.split else ready.whole(ids, len(targets))[0]
            for start in range(0, len(targets), piece):
                part = found[start : start + piece]
                with torch.inference_mode():
                    logits = (ready.logits(part) if ready.split else part).float()
                yield logits, targets[start : start + piece]

    def close(self) -> None:
        """End the evaluation. The corpus is unmapped with this object; the engine keeps the model for the next job."""

    def _drop_corpus(self, shard: ShardPlan) -> NoReturn:
        """The tokens that are mapped are not the plan's. The next ``open`` makes them anew."""
        inputs = self._inputs
        if inputs.source is not None:
            corpus.forget(inputs.source, inputs.tokenizer.digest, self._spec.window.join, self._cache)
        raise DataChanged(
            f"shard {shard.index}: its tokens on this node are not those it was planned with; "
            "the token cache was dropped"
        )

    def _no_memory(self, shard: ShardPlan, error: BaseException) -> OutOfMemory:
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        return OutOfMemory(
            f"shard {shard.index}: a single window does not fit into memory ({reason(error)}); lower window.context "
            f"(now {self._manifest.context}) or the model's precision"
        )

    def _row(self, pack: Pack, window: layout.Placed) -> scoring.Row:
        inputs = np.array(pack.tokens[pack.run(window.start, window.end - 1)])
        if window.prefix is Prefix.PREPENDED:
            inputs = np.concatenate([np.array([self._inputs.prefix_token], dtype=np.int32), inputs])
        elif window.prefix is Prefix.OVERWRITES:
            assert self._inputs.prefix_token is not None
            inputs[0] = self._inputs.prefix_token
        return scoring.Row(inputs, np.array(pack.tokens[pack.run(window.scored, window.end)]))

    def _sum(self, shard: ShardPlan, pack: Pack, losses: list[scoring.Losses]) -> Partial:
        sums: dict[int, list[int]] = {}
        nonfinite, places = 0, list[NonFinite]()
        for window, loss in zip(pack.windows, losses, strict=True):
            for document, start, end in pack.parts(window):
                part = slice(start - window.scored, end - window.scored)
                total = sums.setdefault(document, [0, 0, 0, 0])
                total[0] += int(loss.steps[part].sum())
                total[1] += end - start
                total[2] += int(pack.sizes[pack.run(start, end)].sum())
                total[3] += int(pack.words[pack.run(start, end)].sum())
                bad = np.flatnonzero(~loss.finite[part])
                nonfinite += len(bad)
                for k in bad[: MAX_PLACES - len(places)]:
                    token = pack.within(document, start + int(k))
                    places.append(NonFinite(document, token, "nan" if loss.nan[part][k] else "inf"))
        lump = pack.whole
        rows = []
        if lump:
            rows.append(RowSums(None, len(lump), *(sum(sums[d][k] for d in lump) for k in range(4))))
        rows += [RowSums(d, 1, *values) for d, values in sorted(sums.items()) if d not in lump]
        for row in rows:
            if row.steps >= MAX_EXACT_NATS * STEPS_PER_NAT:
                raise LossOutOfBounds(
                    f"shard {shard.index}: the losses of document {row.document} add up to "
                    f"{row.steps / STEPS_PER_NAT:.6g} nats, beyond the 2^23 that stay exact; lower shard.tokens"
                )
        return Partial(
            shard=shard.index,
            steps=sum(r.steps for r in rows),
            tokens=sum(r.tokens for r in rows),
            bytes=sum(r.bytes for r in rows),
            words=sum(r.words for r in rows),
            rows=tuple(rows),
            nonfinite=nonfinite,
            places=tuple(places),
        )
