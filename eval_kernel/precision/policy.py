"""The key ``precision`` of a job, as a user writes it: one name, or a mapping by role and module. Checks itself.

Which format each weight of a given model gets is ``plan``'s to say. Pure: no torch.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from eval_kernel.precision.formats import FORMATS, Kind, suggestion

#: The format that means: as the checkpoint has it.
AUTO = "auto"
#: Feed-forward weights in int8, attention as the checkpoint has it, the rest in int4.
BRIEF = "brief"
ROLES = ("attention", "mlp", "embedding", "head", "other")


def _hint(value: Any, known: list[str]) -> str:
    """What may have been meant, if anything is near, and all that is allowed."""
    hint, listed = suggestion(str(value), known), f"allowed: {', '.join(known)}"
    return hint if hint == listed else f"{hint} {listed}"


def _format_name(value: Any) -> Any:
    known = [AUTO, *FORMATS]
    if not isinstance(value, str) or value not in known:
        raise PydanticCustomError("format_name", "{hint}", {"hint": _hint(value, known)})
    return value


def _precision_name(value: Any) -> Any:
    known = [AUTO, *FORMATS, BRIEF]
    if not isinstance(value, str) or value not in known:
        raise PydanticCustomError("format_name", "{hint}, or a mapping", {"hint": _hint(value, known)})
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise PydanticCustomError(
            "pattern",
            "not a regular expression ({reason}); write one that matches whole module names",
            {"reason": str(error)},
        ) from None
    return value


def _share(value: Any) -> Any:
    """``0.5%`` or ``0.005``, as a fraction."""
    if isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)):
        return float(found[1]) / 100
    return value


FormatName = Annotated[str, BeforeValidator(_format_name)]
Share = Annotated[float, BeforeValidator(_share)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class CalibrationSpec(_Part):
    """Text that shows the quantiser what the model's activations are like; never text that is evaluated."""

    source: Annotated[tuple[str, ...], BeforeValidator(_one_or_more)] = Field(
        min_length=1, description="File, folder, glob, hub:owner/name, as under dataset"
    )
    format: Literal["auto", "text", "jsonl", "csv", "parquet"] = "auto"
    field: str = "text"
    split: str = Field("train", description="Split of a Hub dataset")
    documents: str = Field("file", description="As under dataset")
    context: int = Field(512, ge=8, le=1 << 16, description="Tokens per window")
    windows: int = Field(32, ge=1, le=1 << 14, description="Windows, taken evenly from the whole text")
    skip: Share = Field(0.0, ge=0, lt=1, description="Share of the text, from its start, that is left alone")
    allow_overlap: bool = Field(False, description="Calibrate even on text that is evaluated; recorded in the result")


class MeasureSpec(_Part):
    """What a job measures that evaluates nothing: how much each group of weights suffers from each format."""

    formats: Annotated[tuple[FormatName, ...], BeforeValidator(_one_or_more)] = Field(
        ("bf16", "int8", "int4-g64"), min_length=1, description="Weight-only formats to choose from"
    )
    rows: int = Field(4, ge=1, le=1024, description="Rows of tokens that are measured on")
    context: int = Field(256, ge=8, le=1 << 14, description="Tokens of a row")

    @model_validator(mode="after")
    def _check(self) -> MeasureSpec:
        for name in self.formats:
            if name == AUTO or FORMATS[name].dynamic:
                raise ValueError(f"formats has {name!r}: only formats of weights alone are planned for")
        if len(set(self.formats)) != len(self.formats):
            raise ValueError("formats names one twice")
        return self


class PrecisionSpec(_Part):
    """Formats by role and by module. A format named nearer to a module wins: modules, then role, then default."""

    default: FormatName = Field(
        AUTO, description="Linear layers without a format of their own; a float format is also that of everything else"
    )
    attention: FormatName | None = None
    mlp: FormatName | None = None
    embedding: FormatName | None = None
    head: FormatName | None = Field(None, description="Output layer; where it is tied to the embedding: untied")
    other: FormatName | None = None
    modules: dict[Annotated[str, AfterValidator(_pattern)], FormatName] = Field(
        {}, description="Regular expressions that match whole module names"
    )
    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="Activations and products; auto: the default's, if it is a float format, or the checkpoint's",
    )
    quantiser: Literal["rtn", "mse", "gptq"] = Field(
        "mse", description="How scales and values are chosen: rounding, least squares, or with calibration data"
    )
    kernels: Literal["auto", "reference", "packed"] = Field(
        "auto", description="Products: the fastest that pass their proof, the definition itself, or packed weights"
    )
    calibration: CalibrationSpec | None = None
    measure: MeasureSpec | None = Field(None, description="Measure sensitivities for a plan, instead of evaluating")
    budget: Share | None = Field(
        None, gt=0, le=1, description="Plan: weights in at most this share of the checkpoint's"
    )
    max_ppl_increase: Share | None = Field(None, gt=0, le=10, description="Plan: perplexity may rise by this share")

    @model_validator(mode="after")
    def _check(self) -> PrecisionSpec:
        if self.quantiser == "gptq" and self.calibration is None:
            raise ValueError("quantiser gptq needs text to calibrate on: add calibration: {source: ...}")
        if self.budget is not None and self.max_ppl_increase is not None:
            raise ValueError("budget and max_ppl_increase exclude each other; give one")
        if self.measure is not None and self.to_be_planned:
            raise ValueError("measure and a limit exclude each other: a plan is made from what was measured")
        return self

    @property
    def to_be_planned(self) -> bool:
        """Whether formats are still to be chosen by measurement."""
        return self.budget is not None or self.max_ppl_increase is not None


def _which(value: Any) -> str:
    return "[mapping]" if isinstance(value, (dict, PrecisionSpec)) else "[name]"


#: What stands under ``precision:``. The tags are in brackets so that messages leave them out.
Precision = Annotated[
    Annotated[Annotated[str, BeforeValidator(_precision_name)], Tag("[name]")]
    | Annotated[PrecisionSpec, Tag("[mapping]")],
    Discriminator(_which),
]


def as_spec(precision: str | PrecisionSpec) -> PrecisionSpec:
    """Return what a name stands for."""
    if isinstance(precision, PrecisionSpec):
        return precision
    if precision == BRIEF:
        return PrecisionSpec(attention=AUTO, mlp="int8", embedding="int4-g64", head="int4-g64", other="int4-g64")
    return PrecisionSpec(default=precision)


def label_of(precision: str | PrecisionSpec) -> str:
    """Return a short word for a job's precision, for lists and messages."""
    return precision if isinstance(precision, str) else "mixed"


def is_float(name: str) -> bool:
    """Whether a format name is a float format (``auto`` is: checkpoints hold floats)."""
    return name == AUTO or FORMATS[name].kind is Kind.FLOAT
