"""Documents of a dataset, in order, each exactly once: text files, jsonl, csv, parquet, the Hub, the standard library.

Files are read here, byte for byte and with the line, row or byte of every fault, and no copy of them is made; the
Hub comes through ``datasets``. Nothing here tokenises or normalises: line ends and blanks are part of the text.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eval_kernel import hub
from eval_kernel.errors import DatasetEmpty, DatasetMalformed, DatasetNotFound, reason
from eval_kernel.roots import Roots, expand
from eval_kernel.spec import DatasetSpec

SUFFIXES = {
    "text": (".txt", ".text", ".md", ".raw", ".tokens"),
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "parquet": (".parquet",),
}
#: Some programs begin UTF-8 files with it; in jsonl and csv it is no part of any text.
BOM = "\ufeff"


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
        for text in islice(self._all(), self.spec.limit):
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
            yield from _hub_documents(self.table, self.spec.field, f"dataset {self.spec.source[0]}")
            return
        for kind, path in self.files:
            match kind:
                case "text":
                    yield from _text_documents(path, self.spec)
                case "jsonl":
                    yield from _jsonl_documents(path, self.spec)
                case "csv":
                    yield from _csv_documents(path, self.spec)
                case _:
                    yield from _parquet_documents(path, self.spec.field)


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
    return _find_hub(spec, source.removeprefix("hub:"))


def _find_files(spec: DatasetSpec, roots: Roots) -> Source:
    files: list[tuple[str, Path]] = []
    wanted = SUFFIXES[spec.format] if spec.format != "auto" else tuple(s for group in SUFFIXES.values() for s in group)
    for source in spec.source:
        try:
            paths = expand(source, roots, wanted)
        except OSError as error:
            raise DatasetNotFound(
                f"dataset {source}: cannot be read on this node ({error.strerror}); check the path and its permissions"
            ) from None
        if not paths:
            what = (
                "no file in it ends in " + " ".join(wanted)
                if Path(source).is_dir()
                else "no such file, folder or match"
            )
            raise DatasetNotFound(
                f"dataset {source}: {what}; give a path that exists on this node, hub:owner/name or pydoc:topics"
            )
        found = [(_format_of(path, spec), path) for path in paths]
        kinds = dict(reversed(found))
        if len(kinds) > 1:
            named = " and ".join(f"{path.name} ({kind})" for kind, path in sorted(kinds.items())[:2])
            raise DatasetMalformed(
                f"dataset {source}: files of several formats, {named}; write `format:` with the one that holds the text"
            )
        files += found
    state = []
    for kind, path in files:
        try:
            stat = path.stat()
        except OSError as error:
            raise DatasetNotFound(f"dataset {path}: cannot be read ({error.strerror}); is it still there?") from None
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
        raise DatasetNotFound(f"dataset {path}: cannot be read ({error.strerror}); check its permissions") from None
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
            yield from (line.rstrip("\n").removesuffix("\r") for line in _lines(text))
        case "paragraph":
            # Nor do they here, before, between or after paragraphs.
            yield from (p.strip("\r\n") for p in re.split(r"\r?\n(?:[ \t]*\r?\n)+", text) if p.strip())
        case rule:
            yield from _by_first_line(text, re.compile(rule.removeprefix("regex:")))


def _lines(text: str) -> Iterator[str]:
    """Lines with their ends. ``str.splitlines`` would also cut at U+2028, form feeds and the like, which are text."""
    return (match[0] for match in re.finditer(r"[^\n]*\n|[^\n]+", text))


def _by_first_line(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Cut before each line that the pattern matches; what stands before the first match is a document unless blank."""
    current: list[str] = []
    for line in _lines(text):
        if pattern.search(line.rstrip("\r\n")) and current:
            document = "".join(current)
            if document.strip():
                yield document
            current = []
        current.append(line)
    if current and (document := "".join(current)).strip():
        yield document


def _jsonl_documents(path: Path, spec: DatasetSpec) -> Iterator[str]:
    for number, line in enumerate(_lines(_read(path, spec.encoding).removeprefix(BOM)), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))  # so that a column is one of this line
        except json.JSONDecodeError as error:
            raise DatasetMalformed(
                f"dataset {path}: line {number} is not JSON ({error.msg.removesuffix(' at')} at column {error.colno}); "
                "correct the line"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists a thousand deep
            raise DatasetMalformed(
                f"dataset {path}: line {number} cannot be read ({reason(error)}); correct the line"
            ) from None
        if not isinstance(row, dict):
            raise DatasetMalformed(
                f"dataset {path}: line {number} is {type(row).__name__}, not an object with the key {spec.field!r}; "
                "correct the line, or write `format:` with the one that the file has"
            )
        if spec.field not in row:
            raise DatasetMalformed(_lacks(f"dataset {path}: line {number}", "key", spec.field, list(row)))
        yield _checked(row[spec.field], f"dataset {path}: line {number}, key {spec.field!r}")


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DatasetMalformed(
            f"{where} is {'null' if value is None else type(value).__name__}, not a string; correct or remove it"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DatasetMalformed(
            f"{where} holds half of a surrogate pair at character {error.start}, which is no text; correct or remove it"
        ) from None
    return value


# ---------------------------------------------------------------- tables and the Hub


def _csv_documents(path: Path, spec: DatasetSpec) -> Iterator[str]:
    """Every cell of a column: an empty cell is an empty text and "NA" is a word, neither is a missing value."""
    text = _read(path, spec.encoding).removeprefix(BOM)
    # The module's limit on a cell (128 KiB) is arbitrary, and only to be had for the whole process.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    begin = 1
    try:
        names = next(rows, [])
        if spec.field not in names:
            raise DatasetMalformed(_lacks(f"dataset {path}", "column", spec.field, names))
        column = names.index(spec.field)
        begin = rows.line_num + 1
        for row in rows:
            if row and len(row) != len(names):
                raise DatasetMalformed(
                    f"dataset {path}: the row at line {begin} has {len(row)} cells, the header names {len(names)}; "
                    "is a quote or a comma missing?"
                )
            begin = rows.line_num + 1
            if row:
                yield row[column]
    except csv.Error as error:
        raise DatasetMalformed(
            f"dataset {path}: the row at line {begin} is not csv ({error}); check its quotes"
        ) from None


def _parquet_documents(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise DatasetMalformed(_lacks(f"dataset {path}", "column", field, names))
            for batch in file.iter_batches(batch_size=1000, columns=[field]):
                for value in batch.column(0):
                    yield _checked(value.as_py(), f"dataset {path}: row {row}, column {field!r}")
                    row += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetMalformed(
            f"dataset {path}: cannot be read as parquet at row {row} ({reason(error)}); "
            "copy the file again, or write `format:` with the one it has"
        ) from None


def _hub_documents(table: Any, field: str, where: str) -> Iterator[str]:
    if field not in table.column_names:
        raise DatasetMalformed(_lacks(where, "column", field, table.column_names))
    column = table.select_columns([field])
    for start in range(0, len(column), 1000):
        for offset, value in enumerate(column[start : start + 1000][field]):
            yield _checked(value, f"{where}: row {start + offset}, column {field!r}")


def _lacks(where: str, what: str, name: str, have: list[str]) -> str:
    listed = ", ".join(have[:8]) + ", ..." * (len(have) > 8) if have else "none"
    return f"{where} has no {what} {name!r} (it has: {listed}); set `field:`"


def _find_hub(spec: DatasetSpec, name: str) -> Source:
    import datasets

    datasets.disable_progress_bars()
    try:
        with hub.briefly(name, "dataset", spec.revision):
            table = datasets.load_dataset(name, spec.config, split=spec.split, revision=spec.revision)
    except Exception as error:  # noqa: BLE001 - a dozen unrelated types, all of which mean: not to be had here
        raise DatasetNotFound(
            f"dataset hub:{name}: cannot be loaded on this node ({reason(error)}); "
            "check name, config, split and network"
        ) from None
    return Source(spec, (), str(table._fingerprint), table)
