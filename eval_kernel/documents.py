"""Documents of a dataset, in order, each exactly once: text files, jsonl, csv, parquet, the Hub, the standard library.

Text and jsonl are read here, byte for byte and with the line or byte of every fault; tables and the Hub come
through ``datasets``. Nothing here tokenises, and nothing is normalised: line ends and blanks are part of the text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval_kernel.errors import DatasetEmpty, DatasetMalformed, DatasetNotFound, reason
from eval_kernel.roots import Roots, expand
from eval_kernel.spec import DatasetSpec

SUFFIXES = {
    "text": (".txt", ".text", ".md", ".raw", ".tokens"),
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset that was found: how to read it, and a fingerprint that changes when its content may have."""

    spec: DatasetSpec
    files: tuple[tuple[str, Path], ...]  # (format, path); empty for the Hub and pydoc
    fingerprint: str
    table: Any = None  # a datasets.Dataset, for the Hub

    def __iter__(self) -> Iterator[str]:
        """Yield the documents' texts; raises ``DatasetMalformed``, ``DatasetEmpty``."""
        count = 0
        for text in self._all():
            if self.spec.limit is not None and count >= self.spec.limit:
                return
            count += 1
            yield text
        if count == 0:
            raise DatasetEmpty(f"{', '.join(self.spec.source)} holds no document; name a dataset with at least one")

    def _all(self) -> Iterator[str]:
        if self.spec.source == ("pydoc:topics",):
            from pydoc_data.topics import topics

            yield from (topics[key] for key in sorted(topics))
            return
        if self.table is not None:
            yield from _column(self.table, self.spec.field, ", ".join(self.spec.source))
            return
        for kind, path in self.files:
            match kind:
                case "text":
                    yield from _text_documents(path, self.spec)
                case "jsonl":
                    yield from _jsonl_documents(path, self.spec)
                case _:
                    yield from _column(_load_table(kind, path), self.spec.field, str(path))


def find(spec: DatasetSpec, roots: Roots) -> Source:
    """Locate a dataset without reading it. Raises ``DatasetNotFound``, ``DatasetMalformed``, ``PathRefused``."""
    schemes = [s for s in spec.source if s.startswith(("hub:", "pydoc:"))]
    if not schemes:
        return _find_files(spec, roots)
    if len(spec.source) > 1:
        raise DatasetNotFound(
            f"{schemes[0]} must be the only source of a dataset; put other sources into jobs of their own"
        )
    source = spec.source[0]
    if source == "pydoc:topics":
        from pydoc_data import topics

        return Source(spec, (), hashlib.sha256(Path(topics.__file__).read_bytes()).hexdigest())
    if source.startswith("pydoc:"):
        raise DatasetNotFound(f"{source} does not exist; the one text of this kind is pydoc:topics")
    return _find_hub(spec, source.removeprefix("hub:"))


def _find_files(spec: DatasetSpec, roots: Roots) -> Source:
    files: list[tuple[str, Path]] = []
    wanted = SUFFIXES[spec.format] if spec.format != "auto" else tuple(s for group in SUFFIXES.values() for s in group)
    for source in spec.source:
        paths = expand(source, roots, wanted)
        if not paths:
            what = (
                "no file in it ends in " + " ".join(wanted)
                if Path(source).is_dir()
                else "no such file, folder or match"
            )
            raise DatasetNotFound(
                f"dataset {source}: {what}; give a path that exists on this node, hub:owner/name or pydoc:topics"
            )
        files += [(_format_of(path, spec), path) for path in paths]
    state = []
    for kind, path in files:
        stat = path.stat()
        state.append([kind, str(path), stat.st_size, stat.st_mtime_ns])
    return Source(spec, tuple(files), hashlib.sha256(json.dumps(state).encode()).hexdigest())


def _format_of(path: Path, spec: DatasetSpec) -> str:
    if spec.format != "auto":
        return spec.format
    for kind, suffixes in SUFFIXES.items():
        if path.suffix.lower() in suffixes:
            return kind
    raise DatasetMalformed(
        f"dataset {path}: cannot tell the format from the name; write `format: text | jsonl | csv | parquet`"
    )


# ---------------------------------------------------------------- text and jsonl


def _read(path: Path, encoding: str) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetNotFound(f"dataset {path}: cannot be read ({error.strerror})") from None
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DatasetMalformed(
            f"dataset {path}: not {encoding} at byte {error.start} (line {line}, value 0x{data[error.start]:02x}); "
            "convert the file or write `encoding:` with the one it has"
        ) from None


def _text_documents(path: Path, spec: DatasetSpec) -> Iterator[str]:
    text = _read(path, spec.encoding)
    match spec.documents:
        case "file":
            yield text
        case "line":
            # Line ends belong to no document here; only "\n" and "\r\n" end a line.
            yield from (line.removesuffix("\r") for line in _strip_last(text.split("\n")))
        case "paragraph":
            yield from (p for p in re.split(r"(?:\r?\n[ \t]*){2,}", text) if p.strip())
        case rule:
            yield from _by_first_line(text, re.compile(rule.removeprefix("regex:")))


def _strip_last(lines: list[str]) -> list[str]:
    return lines[:-1] if lines and lines[-1] == "" else lines


def _by_first_line(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Cut before each line that the pattern matches; what stands before the first match is a document unless blank."""
    current: list[str] = []
    for line in text.splitlines(keepends=True):
        if pattern.search(line.rstrip("\r\n")) and current:
            document = "".join(current)
            if document.strip():
                yield document
            current = []
        current.append(line)
    if current and (document := "".join(current)).strip():
        yield document


def _jsonl_documents(path: Path, spec: DatasetSpec) -> Iterator[str]:
    # Split on "\n" alone: JSON strings may hold U+2028 and other characters that str.splitlines would split at.
    for number, line in enumerate(_read(path, spec.encoding).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetMalformed(
                f"dataset {path}: line {number} is not JSON ({error.msg} at column {error.colno})"
            ) from None
        except RecursionError:
            raise DatasetMalformed(f"dataset {path}: line {number} is nested too deeply") from None
        if not isinstance(row, dict) or spec.field not in row:
            have = ", ".join(list(row)[:8]) if isinstance(row, dict) else type(row).__name__
            raise DatasetMalformed(
                f"dataset {path}: line {number} has no key {spec.field!r} (it has: {have}); set `field:`"
            )
        yield _checked(row[spec.field], f"dataset {path}: line {number}, key {spec.field!r}")


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DatasetMalformed(f"{where} is {type(value).__name__}, not a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DatasetMalformed(
            f"{where} holds half of a surrogate pair at character {error.start}, which is no text"
        ) from None
    return value


# ---------------------------------------------------------------- tables and the Hub


def _load_table(kind: str, path: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if kind == "parquet":
            return datasets.Dataset.from_parquet(str(path), keep_in_memory=False)
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        # An empty cell is an empty text and "NA" is a word: neither is a missing value.
        return datasets.Dataset.from_csv(str(path), sep=separator, keep_default_na=False, dtype=str)
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        cause = error.__cause__ or error
        raise DatasetMalformed(f"dataset {path}: cannot be read as {kind} ({reason(cause)})") from None


def _column(table: Any, field: str, where: str) -> Iterator[str]:
    if field not in table.column_names:
        have = ", ".join(table.column_names[:12])
        raise DatasetMalformed(f"dataset {where}: no column {field!r} (it has: {have}); set `field:`")
    column = table.select_columns([field])
    for start in range(0, len(column), 1000):
        for offset, value in enumerate(column[start : start + 1000][field]):
            yield _checked(value, f"dataset {where}: row {start + offset}, column {field!r}")


def _find_hub(spec: DatasetSpec, name: str) -> Source:
    import datasets

    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(name, spec.config, split=spec.split, revision=spec.revision)
    except Exception as error:  # noqa: BLE001 - a dozen unrelated types, all of which mean: not to be had here
        raise DatasetNotFound(
            f"dataset hub:{name}: cannot be loaded on this node ({reason(error)}); "
            "check name, config, split and network"
        ) from None
    return Source(spec, (), str(table._fingerprint), table)
