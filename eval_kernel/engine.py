"""The engine of a node: plans jobs and scores shards with torch. The worker and the reference evaluator drive it.

It holds at most one model at a time. It knows nothing of leases, networks or other nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eval_kernel import KERNEL_VERSION, checkpoint, corpus, documents, layout, model, pace, packed, tokenizer
from eval_kernel.budget import Budget, Measured
from eval_kernel.errors import (
    ContextTooLong,
    DataChanged,
    DatasetEmpty,
    ModelUnsupported,
    PrecisionUnsupported,
    SpecError,
)
from eval_kernel.evaluation import Evaluation, Inputs
from eval_kernel.execution import device_name, software
from eval_kernel.packer import packable
from eval_kernel.parallel import choose, memory, opening
from eval_kernel.plan import Manifest, Plan
from eval_kernel.precision import calibration, cells, loading, section, skeleton
from eval_kernel.precision.plan import Outline, PrecisionPlan, resolve
from eval_kernel.precision.policy import MeasureSpec, as_spec, label_of
from eval_kernel.quiet import quiet
from eval_kernel.roots import Roots
from eval_kernel.spec import JobSpec
from eval_kernel.windows import Bos, Policy

#: What `context: model` is limited to: a million-token default would be a surprise.
DEFAULT_CONTEXT = 2048

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a node lends to its engine. ``roots`` None means any path; ``threads`` None means all cores."""

    cache: Path
    roots: Roots = None
    device: str = "auto"
    threads: int | None = None


class Engine:
    """Plans and opens jobs on one node."""

    def __init__(self, config: EngineConfig) -> None:
        quiet()
        self.config = config
        self.device = model.choose_device(config.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._loaded: tuple[tuple[str, ...], model.Model, dict[str, str]] | None = None
        self._outline: tuple[str, Outline] | None = None

    def probe(self) -> dict[str, Any]:
        """Return what torch can do here: versions, device, threads, and the dtypes that really multiply."""
        works = []
        for name, dtype in model.DTYPES.items():
            try:
                model.check_precision(name, self.device)
                x = torch.ones(8, 8, dtype=dtype, device=self.device)
                if float((x @ x)[0, 0]) == 8.0:
                    works.append(name)
            except (RuntimeError, PrecisionUnsupported):
                continue  # that it does not work here is the finding
        return {
            "device": device_name(self.device),
            "dtypes": works,
            "threads": torch.get_num_threads(),
            "software": software(),
            "packs": True,  # it scores what another node has packed
        }

    def plan(self, spec: JobSpec, note: Note) -> Plan:
        """Index a job: its manifest and its shards. Raises the errors of the job's ingredients."""
        if (measure := as_spec(spec.precision).measure) is not None:
            prepared = cells.prepare(spec, measure, self.config.roots, self.config.cache, note)
            return cells.plan(prepared, measure, spec.batch.planned)
        inputs = self._prepare(spec, note)
        note("cutting windows and shards")
        shards = tuple(inputs.layout.shards(spec.shard.tokens))
        if not shards:
            need = " (the policy half needs two windows of text)" if spec.window.policy == "half" else ""
            raise DatasetEmpty(
                f"{', '.join(spec.dataset.source)}: {len(inputs.corpus.tokens)} tokens, of which the window policy "
                f"{spec.window.policy} with context {inputs.layout.rule.context} scores none{need}"
            )
        manifest = Manifest(
            windows=inputs.layout.num_windows,
            scored_tokens=sum(s.tokens for s in shards),
            scored_bytes=sum(s.bytes for s in shards),
            scored_words=sum(s.words for s in shards),
            input_tokens=sum(s.input_tokens for s in shards),
            shards=len(shards),
            **inputs.manifest_facts,
        )
        return Plan(manifest, shards)

    def open(
        self, spec: JobSpec, manifest: Manifest, note: Note, *, packs: bool = False
    ) -> Evaluation | cells.Measuring:
        """Get ready to score a planned job, ``packs`` of it, if so, that other nodes make.

        Raises ``DataChanged`` when this node's ingredients are not the plan's.
        """
        if (measure := as_spec(spec.precision).measure) is not None:
            return self._measuring(spec, measure, manifest, note)
        given = spec, manifest, self.config.roots, self.config.cache, note
        inputs = packed.inputs(*given) if packs and packable(spec) else self._prepare(spec, note)
        _check_unchanged(inputs.manifest_facts, manifest)
        precision = PrecisionPlan.from_canonical(manifest.precision_plan)
        model.check_precision(precision.compute, self.device)
        key = (manifest.weights_digest, precision.digest, precision.kernels, str(spec.parallel))
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # free the old weights before the new ones come
            note("loading the model")
            self._loaded = (key, *self._load(inputs, manifest, precision, spec, note))
        budget = self._budget(spec, manifest, key)
        return Evaluation(inputs, manifest, self._loaded[1], self._loaded[2], budget, self.config.cache, spec)

    def _load(
        self, inputs: Inputs, manifest: Manifest, precision: PrecisionPlan, spec: JobSpec, note: Note
    ) -> tuple[model.Model, dict[str, str]]:
        """Make a model ready, whole or streamed; return it, and what each class of weights is held in."""
        where = f"model {inputs.checkpoint.directory}"
        dtype = model.DTYPES[precision.compute]
        given = inputs.checkpoint, manifest.weights_digest, precision
        chosen = choose.alone(precision, spec.parallel, memory.for_weights(memory.free_bytes(self.device)))
        if chosen.streaming_fraction:
            found = loading.ingredients(*given, self.config.cache, note, inputs.calibration)
            with loading.memory(inputs.checkpoint, self.device):
                ready, used = opening.open_streamed(found, self.device, chosen.streaming_fraction, where)
            return ready, {**used, section.LAYOUT: str(chosen)}
        loaded = loading.load(*given, self.device, self.config.cache, note, inputs.calibration)
        used = {**loaded.used, section.DIGEST: loaded.digest} if loaded.digest else loaded.used
        ready = model.prepare(loaded.module, self.device, dtype, where)
        if not (precision.uniform and dtype == torch.float32):
            rows = ready.rows is not None
            used = {**used, **pace.finding(loaded.module, self.device, dtype, rows, self.config.cache)}
        return ready, used

    def _budget(self, spec: JobSpec, manifest: Manifest, key: tuple[str, ...]) -> Budget:
        """What the job asks for, or what this node knows or finds out."""
        if manifest.batch_tokens:
            return Budget(manifest.batch_tokens)
        calibration = "calibration" in spec.metrics
        return Measured(self.device, self.config.cache, *key, manifest.context, calibration)

    def _measuring(self, spec: JobSpec, measure: MeasureSpec, manifest: Manifest, note: Note) -> cells.Measuring:
        """Get ready to measure sensitivities."""
        prepared = cells.prepare(spec, measure, self.config.roots, self.config.cache, note)
        _check_unchanged(cells.plan(prepared, measure, spec.batch.planned).manifest.to_json(), manifest)
        model.check_precision(prepared.plain.compute, self.device)
        self._loaded = None  # a second model would not fit beside it
        return cells.Measuring(
            prepared, measure, cells.meter(prepared, self.device, self.config.cache, note), self.device
        )

    def evaluated(self, spec: JobSpec, note: Note) -> list[npt.NDArray[np.int32]]:
        """Return the tokens that a job scores, run by run. Raises the errors of the job's ingredients."""
        inputs = self._prepare(spec, note)
        tokens, cut = inputs.corpus.tokens, inputs.layout
        return [np.array(tokens[w.scored : w.end]) for w in cut.windows(0, cut.num_windows)]

    def _precision(
        self,
        spec: JobSpec,
        found: checkpoint.Checkpoint,
        weights_digest: str,
        tok: tokenizer.Tokenizer,
        cut: layout.Layout,
        note: Note,
    ) -> tuple[PrecisionPlan, torch.Tensor | None]:
        """Give every weight its format, and find the text to calibrate on, if any.

        Raises ``SpecError``, ``PrecisionUnsupported`` and the errors of the calibration text.
        """
        policy = as_spec(spec.precision)
        if policy.to_be_planned:
            raise SpecError(
                "precision: budget and max_ppl_increase are reached by measurement first: run "
                "`python -m eval_kernel.precision plan` on this job, and put the plan it writes under precision"
            )
        if self._outline is None or self._outline[0] != weights_digest:
            self._outline = (weights_digest, skeleton.build(found, torch.float32).outline)
        plan = resolve(policy, self._outline[1], label_of(spec.precision))
        if policy.calibration is None or policy.quantiser != "gptq" or not plan.quantised:
            return plan, None
        note("reading the calibration text")
        text = calibration.load(policy.calibration, tok, self.config.roots, self.config.cache, note)
        tokens = cut.corpus.tokens
        evaluated = (tokens[w.scored : w.end] for w in cut.windows(0, cut.num_windows))
        overlaps = calibration.check(text, evaluated, policy.calibration.allow_overlap)
        ids = torch.from_numpy(text.ids.astype(np.int64))
        return replace(plan, calibration=text.digest, calibration_overlaps=overlaps), ids

    def _prepare(self, spec: JobSpec, note: Note) -> Inputs:
        cache, roots = self.config.cache, self.config.roots
        note("reading the model's files")
        found = checkpoint.find(spec.model, roots, cache, note)
        tok = tokenizer.load(found.tokenizer)
        limit = found.max_context
        wanted = spec.window.context
        if isinstance(wanted, int):
            context = wanted
            if limit is not None and context > limit:
                raise ContextTooLong(
                    f"window.context is {context}, but the model was made for at most {limit} tokens; "
                    f"write {limit} or less"
                )
        else:
            context = DEFAULT_CONTEXT if limit is None else min(limit, DEFAULT_CONTEXT)
        bos, prefix_token, prefix_kind = _resolve_bos(spec, tok)
        try:
            rule = spec.window.rule(context, bos)
        except ValueError as error:
            raise SpecError(f"window: {error}") from None
        note("finding the dataset")
        source = documents.find(spec.dataset, roots)
        data = corpus.load(source, tok.backend, tok.digest, spec.window.join, cache, note)
        highest = max(int(data.tokens.max()), prefix_token or 0)
        if highest >= found.vocabulary:
            raise ModelUnsupported(
                f"model {spec.model.source}: the tokenizer yields token {highest}, the model knows {found.vocabulary}: "
                "they do not belong together; set model.tokenizer"
            )
        weights_digest = checkpoint.weights_digest(found, cache)
        cut = layout.Layout(data, rule, spec.window.max_windows)
        precision, rows = self._precision(spec, found, weights_digest, tok, cut, note)
        facts = {
            "data_digest": data.data_digest,
            "documents": data.num_documents,
            "empty_documents": int((np.diff(data.offsets) == 0).sum()),
            "bytes": data.source_bytes,
            "words": data.source_words,
            "lm_eval_words": data.lm_eval_words,
            "tokens": len(data.tokens),
            "tokenizer_digest": tok.digest,
            "weights_digest": weights_digest,
            "model_type": str(found.config["model_type"]),
            "parameters": found.num_parameters,
            "vocabulary": found.vocabulary,
            "max_context": limit,
            "dtype": precision.compute,
            "policy": spec.window.policy,
            "context": context,
            "stride": spec.window.stride,
            "join": spec.window.join,
            "bos": bos.value,
            "prefix_token": prefix_token,
            "prefix_kind": prefix_kind,
            "batch_tokens": spec.batch.planned,
            "kernel_version": KERNEL_VERSION,
            "precision_plan": precision.canonical(),
        }
        return Inputs(found, tok, source, data, cut, prefix_token, facts, rows)


def _check_unchanged(here: dict[str, Any], manifest: Manifest) -> None:
    """Raise ``DataChanged`` where this node's ingredients are not those of the plan."""
    for name, value in here.items():
        planned = getattr(manifest, name)
        if planned != value:
            raise DataChanged(
                f"{name} is {value} on this node, the job was planned with {planned}; make the files equal everywhere"
            )


def _resolve_bos(spec: JobSpec, tok: tokenizer.Tokenizer) -> tuple[Bos, int | None, str]:
    """Turn ``auto`` into a rule, and find the token that it puts in front: BOS, else EOS (as lm-evaluation-harness)."""
    policy = Policy(spec.window.policy)
    if tok.bos is not None:
        token, kind = tok.bos, "bos"
    elif tok.eos is not None:
        token, kind = tok.eos, "eos"
    else:
        token, kind = None, "none"
    if spec.window.bos != "auto":
        rule = Bos(spec.window.bos)
        if rule is not Bos.NONE and token is None:
            raise ModelUnsupported(f"window.bos is {rule.value}, but the tokenizer has neither BOS nor EOS; write none")
    elif policy is Policy.ROLLING:
        rule = Bos.FIRST if token is not None else Bos.NONE
    elif not tok.adds_bos:
        rule = Bos.NONE
    else:
        rule = Bos.EVERY_WINDOW if policy is Policy.HALF else Bos.FIRST
    if rule is Bos.NONE:
        return rule, None, "none"
    return rule, token, kind
