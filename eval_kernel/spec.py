"""The job as a user writes it: a ``JobSpec`` that checks itself. Knows nothing of where the job will run.

Files are YAML; every message names the key, the value and what is allowed. See ``examples/`` for an annotated job.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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
from eval_kernel.parallel.dims import NOT_OFFERED
from eval_kernel.precision.policy import CalibrationSpec, Precision, PrecisionSpec
from eval_kernel.windows import Bos, Policy, WindowRule
from eval_kernel.yamlfile import read_yaml

#: Beyond this not every reader of JSON tells one integer from the next.
MAX_COUNT = 1 << 53
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
#: A path or id; as long as a path may be, since a job's paths are made absolute.
Location = Annotated[str, StringConstraints(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f]+$")]


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

    source: Location = Field(
        description="Directory with config.json and *.safetensors, a .gguf file, or hub:owner/name"
    )
    revision: Name | None = Field(None, description="Branch, tag or commit of a Hub model")
    tokenizer: Location | None = Field(
        None, description="Directory or hub:owner/name of the tokenizer; default: the model's own"
    )


class DatasetSpec(_Section):
    """Which documents: files, folders or globs, ``hub:owner/name``, or ``pydoc:topics``."""

    source: Annotated[tuple[Location, ...], BeforeValidator(_listed)] = Field(
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
    limit: int | None = Field(None, ge=1, le=MAX_COUNT, description="Only the first so many documents")

    @model_validator(mode="after")
    def _check(self) -> DatasetSpec:
        unknown = [s for s in self.source if s.startswith("pydoc:") and s != "pydoc:topics"]
        if unknown:
            raise ValueError(f"source is {_short(unknown[0])}: the one text of this kind is pydoc:topics")
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
    context: Annotated[int, Field(le=MAX_COUNT)] | Literal["model"] = Field(
        "model", description="Tokens the model sees at once; `model` is its own maximum, at most 2048"
    )
    stride: int | None = Field(None, ge=1, le=MAX_COUNT)
    join: str | None = Field(
        None, description="String between documents (strided: join them; concat, half: default two newlines)"
    )
    drop_remainder: bool = False
    bos: Literal["auto", "every_window", "first", "none"] = "auto"
    max_windows: int | None = Field(None, ge=1, le=MAX_COUNT, description="Only the first so many windows")

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
        # What only the model can tell is checked again at planning; a context beyond any stride stands in for it.
        context = max(self.stride or 0, 3) + 1 if self.context == "model" else self.context
        self.rule(context, Bos.NONE if self.bos == "auto" else Bos(self.bos))
        return self

    def rule(self, context: int, bos: Bos) -> WindowRule:
        """Return the arithmetic of this policy for a context and a BOS rule that are now known."""
        return WindowRule(Policy(self.policy), context, bos, self.stride, self.drop_remainder)


class BatchSpec(_Section):
    """How windows go through the model together; part of the plan, so a node's memory never changes a value."""

    tokens: Annotated[int, Field(ge=1, le=1 << 22)] | Literal["auto"] = Field(
        4096,
        description="Tokens per forward pass; one window goes even if it is longer. `auto`: each node measures which "
        "size is fastest and fits (on GPUs the last bits may depend on it)",
    )

    @property
    def planned(self) -> int:
        """What a manifest says: the number, or 0 for one that each node measures."""
        return 0 if self.tokens == "auto" else self.tokens


class ShardSpec(_Section):
    """How large the unit of assignment is."""

    tokens: int = Field(16384, ge=1, le=MAX_SHARD_TOKENS // 2, description="Tokens that go through the model per shard")


class ParallelSpec(_Section):
    """Degrees of parallelism on nodes that score with several ranks, and how much of a model is streamed."""

    dp_replicate: int = Field(1, ge=-1, description="Ranks with the whole model; -1: what the others leave")
    dp_shard: int = Field(1, ge=-1, description="Ranks that keep a share of each layer and gather the rest")
    tp: int = Field(1, ge=-1, description="Ranks that compute each layer together")
    cp: int = Field(1, ge=-1, description="Not offered; use tp or a shorter context")
    pp: int = Field(1, ge=-1, description="Not offered; use dp_shard")
    streaming_fraction: float | None = Field(
        None, ge=0.0, le=1.0, description="Share of the layers fetched from the files at each visit; default: what fits"
    )

    @model_validator(mode="after")
    def _offered(self) -> ParallelSpec:
        degrees = self.degrees()
        for axis, degree in degrees.items():
            if degree == 0:
                raise ValueError(f"{axis}: write 1 or more, or -1 for what the others leave")
        if list(degrees.values()).count(-1) > 1:
            raise ValueError("only one degree can be -1, which means what the others leave")
        for axis, why in NOT_OFFERED.items():
            if degrees[axis] != 1:
                raise ValueError(f"{axis}: not offered: {why}")
        return self

    def degrees(self) -> dict[str, int]:
        """The degree of each axis."""
        return self.model_dump(exclude={"streaming_fraction"})

    @property
    def automatic(self) -> bool:
        """Whether the degrees are the node's to choose."""
        return set(self.degrees().values()) == {1}


def calibration_data(calibration: CalibrationSpec) -> DatasetSpec:
    """Return the dataset that a job's calibration text is. Raises pydantic's ``ValidationError``."""
    return DatasetSpec(**calibration.model_dump(include={"source", "format", "field", "split", "documents"}))


def _shorthand(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


def _sources_shorthand(value: Any) -> Any:
    return {"source": value} if isinstance(value, (str, list)) else value


def _policy_shorthand(value: Any) -> Any:
    return {"policy": value} if isinstance(value, str) else value


class JobSpec(_Section):
    """A whole job, as submitted."""

    name: Name | None = Field(None, description="A label for people")
    model: Annotated[ModelSpec, BeforeValidator(_shorthand)]
    dataset: Annotated[DatasetSpec, BeforeValidator(_sources_shorthand)]
    window: Annotated[WindowSpec, BeforeValidator(_policy_shorthand)] = WindowSpec()
    precision: Precision = Field(
        "auto",
        description="A format, `brief`, or a mapping by role and module; auto is the checkpoint's own (GGUF: fp32)",
    )
    metrics: Annotated[tuple[Literal["calibration"], ...], BeforeValidator(_listed)] = Field(
        (), description="Beside perplexity: calibration (temperature fit and ECE; scoring takes about twice as long)"
    )
    batch: BatchSpec = BatchSpec()
    shard: ShardSpec = ShardSpec()
    parallel: Literal["auto"] | ParallelSpec = Field(
        "auto", description="auto, or a mapping of degrees for nodes that score with several ranks"
    )

    @model_validator(mode="after")
    def _check(self) -> JobSpec:
        calibration = self.precision.calibration if isinstance(self.precision, PrecisionSpec) else None
        if calibration is not None:
            try:
                calibration_data(calibration)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                key = "".join(f"{part}: " for part in first["loc"][:1])
                raise ValueError("precision.calibration." + key + first["msg"].removeprefix("Value error, ")) from None
        return self

    def canonical(self) -> str:
        """The one JSON text of this spec: equal specs, equal text. What travels and what is journaled."""
        data = self.model_dump(mode="json")
        if self.parallel == "auto":
            del data["parallel"]  # jobs from before there was a choice keep their text
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_canonical(cls, text: str) -> JobSpec:
        """Parse ``canonical``'s text; raises ``SpecError``."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"the job specification is not JSON: {error}") from None
        return parse_spec(data, where="job")


def parse_spec(data: Any, where: str) -> JobSpec:
    """Validate a mapping as a job; ``where`` (a file name) begins each message. Raises ``SpecError``."""
    if not isinstance(data, dict):
        raise SpecError(
            f"{where}: expected a mapping with the keys {', '.join(JobSpec.model_fields)}; got {_kind(data)}"
        )
    try:
        text = json.dumps(data, ensure_ascii=False, default=_refuse)
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecError(f"{where}: a value holds {error.object[error.start]!r}, which is no character") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"{where}: {error}; a job is made of mappings, lists, strings, numbers and booleans") from None
    try:
        # JSON mode: strict about types, but lists may stand for tuples.
        return JobSpec.model_validate_json(text)
    except ValidationError as error:
        found = [_explain(e) for e in _unique(error)]
        more = [f"and {len(found) - MAX_FAULTS} more"] if len(found) > MAX_FAULTS else []
        raise SpecError(f"{where}: " + "; ".join(found[:MAX_FAULTS] + more)) from None


def load_spec(path: Path) -> JobSpec:
    """Read a YAML job file. Relative local paths in it are taken relative to the file. Raises ``SpecError``."""
    data = read_yaml(path, "job file", SpecError)
    return absolute(parse_spec(data, where=str(path)), path.resolve().parent)


def absolute(spec: JobSpec, base: Path) -> JobSpec:
    """Return ``spec`` with its local paths made absolute relative to ``base``; ids and schemes stay.

    Raises ``SpecError`` for a home directory that does not exist.
    """

    def fix(source: str) -> str:
        if is_remote(source):
            return source
        try:
            return str((base / Path(source).expanduser()).absolute())
        except RuntimeError:
            raise SpecError(f"{source!r}: no such user's home directory; write the path in full") from None

    model = spec.model.model_copy(
        update={
            "source": fix(spec.model.source),
            "tokenizer": fix(spec.model.tokenizer) if spec.model.tokenizer else None,
        }
    )
    dataset = spec.dataset.model_copy(update={"source": tuple(fix(s) for s in spec.dataset.source)})
    precision = spec.precision
    if isinstance(precision, PrecisionSpec) and precision.calibration is not None:
        calibration = precision.calibration
        moved = calibration.model_copy(update={"source": tuple(fix(s) for s in calibration.source)})
        precision = precision.model_copy(update={"calibration": moved})
    return spec.model_copy(update={"model": model, "dataset": dataset, "precision": precision})


def is_remote(source: str) -> bool:
    """Whether a source is an id (``hub:``, ``pydoc:``) rather than a local path."""
    return source.startswith(("hub:", "pydoc:"))


# ---------------------------------------------------------------- messages

#: Faults of a job that one message names.
MAX_FAULTS = 5


def _refuse(value: Any) -> Any:
    raise TypeError(f"{_short(value)} ({type(value).__name__}) cannot stand in a job")


def _unique(error: ValidationError) -> list[dict[str, Any]]:
    """One entry per key: a union reports every branch that failed, which are put together here."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for e in error.errors(include_url=False):
        loc = tuple(p for p in e["loc"] if not (isinstance(p, str) and ("[" in p or p in ("int", "constrained-int"))))
        if loc in seen:
            seen[loc]["msg"] += " or " + e["msg"].removeprefix("Input should be ")
        else:
            seen[loc] = {**e, "loc": loc}
    # A list without the elements that are refused may be too short, which is no fault of its own.
    refused = {loc[:-1] for loc in seen if loc}
    return [e for loc, e in seen.items() if e["type"] != "too_short" or loc not in refused]


def _explain(e: dict[str, Any]) -> str:
    """One failure as a line that names the key, the value, and what is allowed."""
    key = ".".join(str(p) for p in e["loc"]) or "job"
    if e["type"] == "extra_forbidden":
        known = _keys_at(e["loc"][:-1])
        close = difflib.get_close_matches(str(e["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(known)}"
        return f"unknown key {_short(key)}; {hint}"
    if e["type"] == "missing":
        return f"the key {key!r} is required"
    message: str = e["msg"].removeprefix("Value error, ")
    if e["type"] == "value_error" and not e["loc"]:
        return message
    if e["type"] == "value_error":
        # A section's own check begins with the name of the key it is about.
        return (
            f"{key}.{message}"
            if message.split(maxsplit=1)[0].rstrip(":") in _keys_at(e["loc"])
            else f"{key}: {message}"
        )
    if e["type"] == "model_type":
        short = {"model": "its source or ", "dataset": "its source or ", "window": "a policy or "}.get(key, "")
        allowed = f"write {short}a mapping with the keys {', '.join(_keys_at(e['loc']))}"
    elif e["type"] == "string_pattern_mismatch":
        allowed = "it must be one line without control characters"
    elif e["type"] == "too_short":
        return f"{key} is empty: give at least one"
    else:
        allowed = message[:1].lower() + message[1:]
    return f"{key} is {_short(e['input'])}: {allowed}"


def _keys_at(loc: tuple[Any, ...]) -> list[str]:
    node: Any = JobSpec
    for part in loc:
        field = node.model_fields.get(part)
        node = _model_of(field.annotation) if field else JobSpec
    return list(node.model_fields)


def _model_of(annotation: Any) -> Any:
    """The section in a field's type, which may be one of several alternatives."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [model for part in get_args(annotation) if (model := _model_of(part)) is not JobSpec]
    return found[0] if found else JobSpec


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    return {type(None): "nothing (the file is empty)", list: "a list", str: "a string"}.get(
        type(value), type(value).__name__
    )
