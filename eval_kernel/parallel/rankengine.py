"""The engine of one rank: opens its part of a model in the group's layout, and scores its share of each shard.

Every rank is given the whole shard. The losses of all ranks are added up, float64 on the grid, each token's once and
zero elsewhere: so every rank ends with all of them, exactly, and rank 0 reports what a single process would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from eval_kernel import model, scoring
from eval_kernel.budget import Budget
from eval_kernel.engine import Engine, EngineConfig, Note
from eval_kernel.evaluation import Inputs
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.head import Shape
from eval_kernel.parallel import choose, memory, opening
from eval_kernel.parallel.layers import sizes
from eval_kernel.parallel.ranks import Axes, Ranks
from eval_kernel.parallel.sharded import ShardedLayers, ShardedScoring
from eval_kernel.parallel.tensor import TensorParallel
from eval_kernel.plan import Manifest
from eval_kernel.precision import loading, section
from eval_kernel.precision.plan import PrecisionPlan
from eval_kernel.spec import JobSpec

#: Tokens that go through a model at once where ranks must cut the same batches and the job leaves the number open.
BATCH_TOKENS = 4096
FINITE, NAN, INFINITE = 1, 2, 4


class RankEngine(Engine):
    """An engine whose models lie on, or are replicated over, the ranks of a group."""

    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        super().__init__(config)
        self._ranks = ranks

    def _load(
        self, inputs: Inputs, manifest: Manifest, precision: PrecisionPlan, spec: JobSpec, note: Note
    ) -> tuple[model.Model, dict[str, str]]:
        ranks = self._ranks
        free = memory.for_weights(memory.free_bytes(self.device))
        # Ranks on a CPU share its memory, and all must choose the same: by the rank that has least.
        room = -ranks.largest([-(free // ranks.world if self.device.type == "cpu" else free)])[0]
        chosen = choose.choose(sizes(precision), spec.parallel, ranks.world, room)
        note(f"loading the model on {ranks.world} ranks, {chosen}")
        axes = ranks.axes(chosen.dims)
        found = loading.ingredients(
            inputs.checkpoint, manifest.weights_digest, precision, self.config.cache, note, inputs.calibration
        )
        where = f"model {inputs.checkpoint.directory}"
        with loading.memory(inputs.checkpoint, self.device):
            inner, used = self._part(found, axes, chosen.streaming_fraction, where, inputs, manifest)
        if found.pack.digest:
            used = {**used, section.DIGEST: found.pack.digest}
        used = {**used, section.LAYOUT: str(chosen)}
        spread = Spread(ranks, axes, inner)
        return replace(inner, scorer=spread.score, rows=None, kernel=f"{inner.kernel}; {chosen.dims.label}"), used

    def _part(
        self,
        found: loading.Ingredients,
        axes: Axes,
        fraction: float,
        where: str,
        inputs: Inputs,
        manifest: Manifest,
    ) -> tuple[model.Model, dict[str, str]]:
        """This rank's part of the model."""
        compute = model.DTYPES[found.plan.compute]
        dims = axes.dims
        if dims.tp > 1:
            part = TensorParallel(found, self.device, axes.tp_rank, dims.tp, axes.tp, shape_of(found.source.module))
            heads = "" if part.by_heads else ", attention whole on every rank"
            return part.as_model(f"tensor parallel{heads}"), loading.used(part.module, found.plan, part.refused)
        if dims.dp_shard > 1:
            place = axes.row_rank % dims.dp_shard
            layers = ShardedLayers(
                found, self.device, opening.packer(self.device, compute), place, dims.dp_shard, axes.dp_shard
            )
            prepared = model.prepare(layers.module, self.device, compute, where)
            sharded = ShardedScoring(layers, replace(prepared, rows=None), shape_of(layers.module))
            sharded.bind(self._ranks)
            share = f"; {layers.share_bytes >> 20} MiB of layers on each of {dims.dp_shard} ranks"
            return replace(sharded.as_model(), kernel=sharded.kernel + share), layers.used()
        if fraction:
            return opening.open_streamed(found, self.device, fraction, where)
        loaded = loading.load(
            inputs.checkpoint,
            manifest.weights_digest,
            found.plan,
            self.device,
            self.config.cache,
            _silent,
            inputs.calibration,
        )
        return model.prepare(loaded.module, self.device, compute, where), loaded.used

    def _budget(self, spec: JobSpec, manifest: Manifest, key: tuple[str, ...]) -> Budget:
        """One number on all ranks: what each of them might measure would differ."""
        return Budget(manifest.batch_tokens or BATCH_TOKENS)


class Spread:
    """Spreads a shard's rows over the ranks, and adds up what they come to."""

    def __init__(self, ranks: Ranks, axes: Axes, inner: model.Model) -> None:
        self._ranks, self._axes, self._inner = ranks, axes, inner

    def score(
        self, rows: list[scoring.Row], budget: Budget, beat: Callable[[], None], extra: scoring.Extra | None
    ) -> list[scoring.Losses]:
        """As ``scoring.score``, on every rank with the same rows."""
        mine = shares(rows, self._axes.dims.row_ranks)[self._axes.row_rank]
        own = None if extra is None else scoring.Extra()
        # Out of step with the others nothing may be halved: what does not fit ends the shard on all ranks.
        found = scoring.score(self._inner, [rows[i] for i in mine], budget, beat, own)
        ends = np.cumsum([len(row.targets) for row in rows])
        nats, flags = np.zeros(ends[-1]), np.zeros(ends[-1], np.int64)
        if self._axes.tp_rank == 0:  # the others of a tensor-parallel group have the same losses
            for index, losses in zip(mine, found, strict=True):
                part = slice(ends[index] - len(losses.steps), ends[index])
                nats[part] = losses.steps / STEPS_PER_NAT
                flags[part] = np.where(losses.finite, FINITE, np.where(losses.nan, NAN, INFINITE))
        nats, flags = self._ranks.sums(nats, flags)
        beat()
        if extra is not None:
            assert own is not None
            for sums in self._ranks.every(own):
                extra.take(sums)
        steps = np.rint(nats * STEPS_PER_NAT).astype(np.int64)
        results = []
        for row, end in zip(rows, ends, strict=True):
            part = slice(end - len(row.targets), end)
            results.append(scoring.Losses(steps[part], flags[part] == FINITE, flags[part] == NAN))
        return results


def shares(rows: list[scoring.Row], ranks: int) -> list[list[int]]:
    """Give each rank rows, the longest first to whoever has least; the same on every rank."""
    loads, found = [0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(rows)), key=lambda i: (-len(rows[i].inputs), i)):
        rank = loads.index(min(loads))
        loads[rank] += len(rows[index].inputs)
        found[rank].append(index)
    return [sorted(mine) for mine in found]


def shape_of(module: Any) -> Shape:
    """What a model does to its logits."""
    config = module.config.get_text_config()
    multiplier, divisor = getattr(config, "logit_scale", None) or 1.0, getattr(config, "logits_scaling", None) or 1.0
    return Shape(multiplier / divisor, getattr(config, "final_logit_softcapping", None))


def _silent(_: str) -> None:
    """Nobody reads what a second look at the same files says."""
