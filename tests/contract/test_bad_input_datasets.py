"""A dataset that cannot be read as declared is refused with one line that names the file and the place in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval_kernel import documents, errors
from eval_kernel.roots import Roots
from eval_kernel.spec import DatasetSpec, JobSpec, parse_spec


def spec(source: Path | str | list[str], **options: Any) -> DatasetSpec:
    """The dataset part of a job."""
    named = [str(source)] if not isinstance(source, list) else source
    return parse_spec({"model": "m", "dataset": {"source": named, **options}}, where="test").dataset


def read(source: Path | str | list[str], roots: Roots = None, **options: Any) -> list[str]:
    """All documents of a dataset."""
    return list(documents.find(spec(source, **options), roots))


def refused(
    source: Path | str | list[str],
    kind: type[errors.FedevalError],
    match: str,
    roots: Roots = None,
    **options: Any,
) -> None:
    """Reading must fail in this way, in one line."""
    with pytest.raises(kind, match=match) as caught:
        read(source, roots, **options)

    assert kind is type(caught.value)
    assert "\n" not in str(caught.value)
    assert 600 > len(str(caught.value))


def written(path: Path, data: bytes) -> Path:
    """Write a file."""
    path.write_bytes(data)
    return path


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    """The path is named, and what may be given instead."""
    refused(
        tmp_path / "nowhere.txt", errors.DatasetNotFound, r"nowhere\.txt: no such file.*hub:owner/name or pydoc:topics"
    )


def test_a_folder_without_texts(tmp_path: Path) -> None:
    """The names that are looked for are listed."""
    written(tmp_path / "image.png", b"")
    refused(tmp_path, errors.DatasetNotFound, r"no file in it ends in \.txt")


def test_a_pattern_without_matches(tmp_path: Path) -> None:
    """It is named as written."""
    refused(f"{tmp_path}/*.txt", errors.DatasetNotFound, r"\*\.txt: no such file, folder or match")


def test_a_long_path_is_a_path(tmp_path: Path) -> None:
    """A deep folder makes a long absolute path; a job with it survives the way to another node and is read there."""
    folder = tmp_path / ("d" * 150) / ("e" * 150)
    folder.mkdir(parents=True)
    file = written(folder / "t.txt", b"deep")
    job = parse_spec({"model": "m", "dataset": str(file)}, where="test")

    assert ["deep"] == list(documents.find(JobSpec.from_canonical(job.canonical()).dataset, None))


def test_a_name_too_long_for_the_system() -> None:
    """What the system says is repeated."""
    refused(
        "/" + "x" * 300, errors.DatasetNotFound, r"cannot be read on this node \(File name too long\); check the path"
    )


def test_a_device_is_no_file() -> None:
    """/dev/zero would never end."""
    refused("/dev/zero", errors.DatasetNotFound, "no such file", format="text")


def test_an_unknown_scheme() -> None:
    """There is one text of the standard library."""
    with pytest.raises(errors.SpecError, match=r"dataset\.source is 'pydoc:other': .* is pydoc:topics"):
        parse_spec({"model": "m", "dataset": "pydoc:other"}, where="test")


def test_a_scheme_among_files(tmp_path: Path) -> None:
    """Ids cannot be mixed with files."""
    file = written(tmp_path / "a.txt", b"a")
    refused([str(file), "pydoc:topics"], errors.DatasetNotFound, "must be the only source")


def test_the_standard_library_is_text() -> None:
    """pydoc:topics are many documents, in a fixed order."""
    topics = read("pydoc:topics")

    assert 50 < len(topics)
    assert topics == read("pydoc:topics")


def test_a_name_without_a_format(tmp_path: Path) -> None:
    """The formats are listed; with one declared it is read."""
    file = written(tmp_path / "data", b"text")
    refused(file, errors.DatasetMalformed, r"write `format: text \| jsonl \| csv \| parquet`")

    assert ["text"] == read(file, format="text")


def test_a_folder_of_several_formats(tmp_path: Path) -> None:
    """A README beside the data would be scored: the formats are named, and the declared one is read."""
    written(tmp_path / "README.md", b"about")
    written(tmp_path / "data.jsonl", b'{"text": "a"}\n')
    refused(tmp_path, errors.DatasetMalformed, r"data\.jsonl \(jsonl\) and README\.md \(text\); write `format:`")

    assert ["a"] == read(tmp_path, format="jsonl")


@pytest.mark.parametrize(
    ("data", "place"),
    [(b"ab\nc\xff\n", r"byte 4 \(line 2, value 0xff\)"), (b"\xc3", r"byte 0 \(line 1, value 0xc3\)")],
)
@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.csv"])
def test_bytes_that_are_not_utf8(tmp_path: Path, name: str, data: bytes, place: str) -> None:
    """Byte, line and value are named; read as what it is, the text comes out."""
    file = written(tmp_path / name, data)
    refused(file, errors.DatasetMalformed, rf"t\.\w+: not utf-8 at {place}; convert the file or write `encoding:`")

    assert [data.decode("latin-1")] == read(file, format="text", encoding="latin-1")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", r"line 7 is not JSON \(.* at column 2\)"),
        ('{"text": "a', r"line 7 is not JSON \(Unterminated string starting at column 10\); correct the line"),
        ("[]", r"line 7 is list, not an object with the key 'text'"),
        ('"text"', r"line 7 is str, not an object"),
        ('{"texts": "x", "b": 1}', r"line 7 has no key 'text' \(it has: texts, b\); set `field:`"),
        ("{}", r"line 7 has no key 'text' \(it has: none\)"),
        ('{"text": 5}', r"line 7, key 'text' is int, not a string"),
        ('{"text": null}', r"line 7, key 'text' is null, not a string"),
        (
            '{"text": "a\\ud800b"}',
            r"line 7, key 'text' holds half of a surrogate pair at character 1, .*; correct or remove it",
        ),
        ('{"text": ' + "9" * 5000 + "}", r"line 7 cannot be read \(ValueError"),
        ('{"text": ' + "[" * 100_000, r"line 7 cannot be read \(RecursionError"),
    ],
    ids=range(11),
)
def test_a_line_that_is_no_document(tmp_path: Path, line: str, match: str) -> None:
    """The seventh line of a jsonl file is wrong: blank lines count as lines, and it is named."""
    good = '{"text": "a"}\n'
    file = written(tmp_path / "d.jsonl", (good * 3 + "\n" + good * 2 + line + "\n" + good).encode())
    refused(file, errors.DatasetMalformed, match)

    assert ["a"] * 4 == read(file, limit=4), "what lies beyond the limit is not looked at"


def test_surrogate_pairs_are_characters(tmp_path: Path) -> None:
    """Both halves together are one character, as JSON writes it."""
    file = written(tmp_path / "d.jsonl", b'{"text": "\\ud834\\udd1e"}\n')

    assert ["\U0001d11e"] == read(file)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", r"has no column 'text' \(it has: none\)"),
        (b"id,body\n1,a\n", r"has no column 'text' \(it has: id, body\)"),
        (b"id,text\n1,a\n2,b,c\n", r"the row at line 3 has 3 cells, the header names 2"),
        (b"id,text\n1\n", r"the row at line 2 has 1 cells"),
        (b'id,text\n1,"a\n', r"the row at line 2 is not csv \(unexpected end of data\)"),
        (b'id,text\n1,"a"b\n', r"the row at line 2 is not csv"),
    ],
)
def test_a_table_that_is_none(tmp_path: Path, data: bytes, match: str) -> None:
    """The line of the row is named; a quote that is never closed is not the end of a text."""
    refused(written(tmp_path / "t.csv", data), errors.DatasetMalformed, match)


def test_a_table_without_rows(tmp_path: Path) -> None:
    """A header alone is no document."""
    refused(written(tmp_path / "t.csv", b"text\n"), errors.DatasetEmpty, "holds no document")


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    """Garbage is refused, and so is a file that is cut off."""
    refused(written(tmp_path / "g.parquet", b"PAR1 garbage"), errors.DatasetMalformed, "cannot be read as parquet")
    refused(written(tmp_path / "e.parquet", b""), errors.DatasetMalformed, "cannot be read as parquet")
    whole = tmp_path / "w.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1000}), whole)
    refused(
        written(tmp_path / "c.parquet", whole.read_bytes()[:-9]), errors.DatasetMalformed, "cannot be read as parquet"
    )


def test_a_damaged_page_of_a_parquet_file(tmp_path: Path) -> None:
    """A damaged data page is not read as text."""
    path = tmp_path / "w.parquet"
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(5000)]}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[2000:2100] = bytes(100)
    refused(written(path, bytes(data)), errors.DatasetMalformed, r"cannot be read as parquet at row \d+ \(.*; copy")


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array(["a", None]), r"row 1, column 'text' is null, not a string"),
        (pa.array([1, 2]), r"row 0, column 'text' is int, not a string"),
        (pa.array([["a"], ["b"]]), r"row 0, column 'text' is list, not a string"),
    ],
)
def test_a_column_that_is_no_text(tmp_path: Path, column: pa.Array, match: str) -> None:
    """Row and column are named."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": column}), path)
    refused(path, errors.DatasetMalformed, match)


def test_a_missing_column(tmp_path: Path) -> None:
    """The columns there are are listed, not all of many."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({f"c{i}": ["a"] for i in range(20)}), path)
    refused(path, errors.DatasetMalformed, r"no column 'text' \(it has: c0, c1, c2, c3, c4, c5, c6, c7, \.\.\.\)")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    """The system's reason is repeated."""
    file = written(tmp_path / "t.txt", b"a")
    file.chmod(0)
    refused(file, errors.DatasetNotFound, "cannot be read.*Permission denied")


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    """It was there when it was found."""
    file = written(tmp_path / "t.txt", b"a")
    source = documents.find(spec(file), None)
    file.unlink()
    with pytest.raises(errors.DatasetNotFound, match="No such file"):
        list(source)


def test_paths_outside_the_roots(tmp_path: Path) -> None:
    """What lies outside is refused in the same words whether it is there or not; links and dots do not help."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
        written(folder / "a.txt", b"a")
    (root / "link.txt").symlink_to(outside / "a.txt")
    (root / "folder").symlink_to(outside)
    message = r"is outside the directories this node may read"
    for path in (
        outside / "a.txt",
        outside / "nowhere.txt",
        outside,
        f"{outside}/*.txt",
        f"{outside}/*.none",
        root / "link.txt",
        root / "folder",
        root / ".." / "outside" / "a.txt",
        f"{root}/l*.txt",
        root,
    ):
        refused(path, errors.PathRefused, message, roots=(root,))
    refused(f"{root}/*/../../outside/a.txt", errors.PathRefused, "'..' after a wildcard", roots=(root,))
    (root / "link.txt").unlink()

    assert ["a"] == read(root, roots=(root,))
    assert ["a"] == read(f"{root}/*.txt", roots=(outside, root))


def test_no_root_means_nothing(tmp_path: Path) -> None:
    """A node that was told of no directory reads none."""
    refused(written(tmp_path / "a.txt", b"a"), errors.PathRefused, r"\(none\); start its agent with --root", roots=())
