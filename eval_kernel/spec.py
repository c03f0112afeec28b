"""The job as a user writes it: a ``JobSpec`` that checks itself. Knows nothing of where the job will run.

Files are YAML; every message names the key, the value and what is allowed. See ``examples/`` for an annotated job.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from eval_kernel.errors import SpecError
from eval_kernel.gridsum import MAX_SHARD_TOKENS
from eval_kernel.windows import Bos, Policy, WindowRule

Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]


def _listed(value: Any) -> Any:
    """One source or a list of them; strict validation wants a tuple, which neither YAML nor JSON has."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


class _Section(BaseModel):
    """A part of the job file: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelSpec(_Section):
    """Which model: a local directory (safetensors), a GGUF file, or ``hub:owner/name``."""

    source: Name = Field(description="Directory with config.json and *.safetensors, a .gguf file, or hub:owner/name")
    revision: Name | None = Field(None, description="Branch, tag or commit of a Hub model")
    tokenizer: Name | None = Field(
        None, description="Directory or hub:owner/name of the tokenizer; default: the model's own"
    )


class DatasetSpec(_Section):
    """Which documents: files, folders or globs, ``hub:owner/name``, or ``pydoc:topics``."""

    source: Annotated[tuple[Name, ...], BeforeValidator(_listed)] = Field(
        min_length=1, description="File, folder, glob (or a list of them), hub:owner/name, pydoc:topics"
    )
    format: Literal["auto", "text", "jsonl", "csv", "parquet"] = "auto"
    field: Name = Field("text", description="Column or key that holds the text (jsonl, csv, parquet, Hub)")
    config: Name | None = Field(None, description="Configuration of a Hub dataset")
    split: Name = Field("test", description="Split of a Hub dataset")
    revision: Name | None = Field(None, description="Branch, tag or commit of a Hub dataset")
    documents: Name = Field(
        "file",
        description="Text files: file | line | paragraph | regex:PATTERN (matches a document's first line)",
    )
    encoding: Literal["utf-8", "latin-1", "cp1252", "utf-16"] = "utf-8"
    limit: int | None = Field(None, ge=1, description="Only the first so many documents")

    @model_validator(mode="after")
    def _check(self) -> DatasetSpec:
        kind, _, pattern = self.documents.partition(":")
        if kind == "regex" and pattern:
            import re

            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"documents: {pattern!r} is not a regular expression ({error})") from None
        elif self.documents not in ("file", "line", "paragraph"):
            raise ValueError(f"documents is {self.documents!r}; allowed: file, line, paragraph, regex:PATTERN")
        return self


class WindowSpec(_Section):
    """How text is cut into windows; part of the metric's name (see ``eval_kernel.windows``)."""

    policy: Literal["rolling", "strided", "concat", "half"] = "rolling"
    context: int | Literal["model"] = Field(
        "model", description="Tokens the model sees at once; `model` is its own maximum, at most 2048"
    )
    stride: int | None = Field(None, ge=1)
    join: str | None = Field(
        None, description="String between documents (strided: join them; concat, half: default two newlines)"
    )
    drop_remainder: bool = False
    bos: Literal["auto", "every_window", "first", "none"] = "auto"
    max_windows: int | None = Field(None, ge=1, description="Only the first so many windows")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("policy") in ("concat", "half") and data.get("join") is None:
            return {**data, "join": "\n\n"}
        return data

    @model_validator(mode="after")
    def _check(self) -> WindowSpec:
        if self.policy == "rolling" and self.join is not None:
            raise ValueError("join has no meaning for the policy rolling: it scores each document by itself")
        if self.context != "model":
            if self.context < 2:
                raise ValueError(f"context is {self.context}; it must be at least 2 tokens")
            self.rule(self.context, Bos.NONE if self.bos == "auto" else Bos(self.bos))
        return self

    def rule(self, context: int, bos: Bos) -> WindowRule:
        """Return the arithmetic of this policy for a context and a BOS rule that are now known."""
        return WindowRule(Policy(self.policy), context, bos, self.stride, self.drop_remainder)


class BatchSpec(_Section):
    """How windows go through the model together; part of the plan, so a node's memory never changes a value."""

    tokens: int = Field(
        4096, ge=1, le=1 << 22, description="Tokens per forward pass; one window goes even if it is longer"
    )


class ShardSpec(_Section):
    """How large the unit of assignment is."""

    tokens: int = Field(16384, ge=1, le=MAX_SHARD_TOKENS // 2, description="Tokens that go through the model per shard")


def _shorthand(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _policy_shorthand(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


class JobSpec(_Section):
    """A whole job, as submitted."""

    name: Name | None = Field(None, description="A label for people")
    model: Annotated[ModelSpec, BeforeValidator(_shorthand)]
    dataset: Annotated[DatasetSpec, BeforeValidator(_shorthand)]
    window: Annotated[WindowSpec, BeforeValidator(_policy_shorthand)] = WindowSpec()
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="Weights and compute; auto is the checkpoint's own (GGUF: fp32)"
    )
    batch: BatchSpec = BatchSpec()
    shard: ShardSpec = ShardSpec()

    def canonical(self) -> str:
        """The one JSON text of this spec: equal specs, equal text. What travels and what is journaled."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_canonical(cls, text: str) -> JobSpec:
        """Parse ``canonical``'s text; raises ``SpecError``."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SpecError(f"the job specification is not JSON: {error}") from None
        return parse_spec(data, where="job")


def parse_spec(data: Any, where: str) -> JobSpec:
    """Validate a mapping as a job; ``where`` (a file name) begins each message. Raises ``SpecError``."""
    if not isinstance(data, dict):
        raise SpecError(
            f"{where}: expected a mapping with the keys {', '.join(JobSpec.model_fields)}; got {_kind(data)}"
        )
    try:
        # JSON mode: strict about types, but lists may stand for tuples.
        return JobSpec.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise SpecError(f"{where}: " + "; ".join(_explain(e) for e in _unique(error))) from None
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {error}") from None


def load_spec(path: Path) -> JobSpec:
    """Read a YAML job file. Relative local paths in it are taken relative to the file. Raises ``SpecError``."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise SpecError(f"{path}: cannot read the job file ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: the job file is not UTF-8 at byte {error.start}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise SpecError(f"{path}: {line}not valid YAML ({getattr(error, 'problem', error)})") from None
    return absolute(parse_spec(data, where=str(path)), path.resolve().parent)


def absolute(spec: JobSpec, base: Path) -> JobSpec:
    """Return ``spec`` with its local paths made absolute relative to ``base``; ids and schemes stay as they are."""

    def fix(source: str) -> str:
        if is_remote(source):
            return source
        return str((base / Path(source).expanduser()).absolute())

    model = spec.model.model_copy(
        update={
            "source": fix(spec.model.source),
            "tokenizer": fix(spec.model.tokenizer) if spec.model.tokenizer else None,
        }
    )
    dataset = spec.dataset.model_copy(update={"source": tuple(fix(s) for s in spec.dataset.source)})
    return spec.model_copy(update={"model": model, "dataset": dataset})


def is_remote(source: str) -> bool:
    """Whether a source is an id (``hub:``, ``pydoc:``) rather than a local path."""
    return source.startswith(("hub:", "pydoc:"))


# ---------------------------------------------------------------- messages


def _unique(error: ValidationError) -> list[Any]:
    """One entry per key: a union reports every branch that failed, which says nothing to a user."""
    seen: dict[tuple[Any, ...], Any] = {}
    for e in error.errors(include_url=False):
        loc = tuple(p for p in e["loc"] if not (isinstance(p, str) and ("[" in p or p in ("int", "constrained-str"))))
        seen.setdefault(loc, {**e, "loc": loc})
    return list(seen.values())


def _explain(e: dict[str, Any]) -> str:
    key = ".".join(str(p) for p in e["loc"]) or "job"
    if e["type"] == "extra_forbidden":
        known = _keys_at(e["loc"][:-1])
        close = difflib.get_close_matches(str(e["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if e["type"] == "missing":
        return f"the key {key!r} is required"
    message = (
        e["msg"].removeprefix("Value error, ").replace("valid dictionary", "mapping").replace("an object", "a mapping")
    )
    if e["type"] == "value_error":
        return f"{key}: {message}"
    return f"{key} is {_short(e['input'])}: {message[:1].lower()}{message[1:]}"


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    node: Any = JobSpec
    for part in loc:
        field = node.model_fields.get(part)
        node = field.annotation if field else JobSpec
    return list(node.model_fields)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {type(None): "nothing (the file is empty)", list: "a list", str: "a string"}.get(
        type(value), type(value).__name__
    )
