"""Makes packs: a worker's engine that knows texts and tokenizers, and neither torch nor the model's weights.

It keeps the corpora of the last jobs mapped. Who asks for packs, and when, is the agent's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eval_kernel import cachedir, checkpoint, corpus, documents, tokenizer
from eval_kernel.errors import DataChanged, SpecError
from eval_kernel.layout import Layout
from eval_kernel.pack import Pack, name_of
from eval_kernel.plan import Manifest, ShardPlan
from eval_kernel.precision.policy import as_spec
from eval_kernel.roots import Roots
from eval_kernel.spec import JobSpec
from eval_kernel.windows import Bos

#: Jobs whose corpora stay mapped.
JOBS = 4

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a node lends to its packer; ``device`` and ``threads`` are what every worker's engine is told."""

    cache: Path
    roots: Roots = None
    device: str = "auto"
    threads: int | None = None


class Packer:
    """Makes the packs of planned jobs on one node."""

    def __init__(self, config: EngineConfig) -> None:
        """Load what reads tokenizers: it takes seconds, which the first pack would have to wait for."""
        tokenizer.warm()
        self.config = config
        self._layouts: OrderedDict[str, Layout] = OrderedDict()

    def pack(
        self, spec: JobSpec, manifest: Manifest, shard: ShardPlan, ahead: int, directory: Path, note: Note
    ) -> Iterator[tuple[ShardPlan, str, int]]:
        """Write the packs of a shard, and of up to ``ahead`` that follow it, into a directory.

        Yield each with its name and its bytes. Raises the errors of the job's ingredients, and ``DataChanged``.
        """
        layout = self._layout(spec, manifest, note)
        for found in islice(layout.shards(spec.shard.tokens, shard.index, shard.first_window), ahead + 1):
            if found.index == shard.index and found != shard:
                raise DataChanged(
                    f"shard {shard.index}: its tokens on this node are not those it was planned with; "
                    "make the files equal everywhere"
                )
            data = Pack.of(layout, found).encode()
            name = name_of(data)
            temp = directory / f".{name}"
            try:
                temp.write_bytes(data)
                temp.replace(directory / name)
            except OSError as error:
                raise cachedir.unusable(directory, error) from None
            yield found, name, len(data)

    def _layout(self, spec: JobSpec, manifest: Manifest, note: Note) -> Layout:
        key = manifest.digest + spec.canonical()
        if key not in self._layouts:
            self._layouts[key] = self._open(spec, manifest, note)
            while len(self._layouts) > JOBS:
                self._layouts.popitem(last=False)
        self._layouts.move_to_end(key)
        return self._layouts[key]

    def _open(self, spec: JobSpec, manifest: Manifest, note: Note) -> Layout:
        if not packable(spec):
            raise SpecError("this job needs its text as a whole: it has no packs")
        cache, roots = self.config.cache, self.config.roots
        tok = tokenizer.load(checkpoint.find_tokenizer(spec.model, roots, cache, note))
        data = corpus.load(documents.find(spec.dataset, roots), tok.backend, tok.digest, spec.window.join, cache, note)
        for name, here, planned in (
            ("data_digest", data.data_digest, manifest.data_digest),
            ("tokenizer_digest", tok.digest, manifest.tokenizer_digest),
        ):
            if here != planned:
                raise DataChanged(
                    f"{name} is {here} on this node, the job was planned with {planned}; make the files equal "
                    "everywhere"
                )
        return Layout(data, spec.window.rule(manifest.context, Bos(manifest.bos)), spec.window.max_windows)


def packable(spec: JobSpec) -> bool:
    """Whether a job's shards can be scored without its whole text: neither measured nor calibrated on it."""
    policy: Any = as_spec(spec.precision)
    return policy.measure is None and policy.calibration is None
