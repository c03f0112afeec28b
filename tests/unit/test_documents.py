"""What a document is, in every format: each exactly once, in order, not a byte changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval_kernel import documents
from eval_kernel.errors import DatasetEmpty
from eval_kernel.spec import DatasetSpec


def read(data: bytes, path: Path, **options: Any) -> list[str]:
    """The documents of one file."""
    path.write_bytes(data)
    return list(documents.find(DatasetSpec(source=(str(path),), **options), None))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("file", ["a\r\n\r\n \n\nb\u2028c\x0cd\n"]),
        ("line", ["a", "", " ", "", "b\u2028c\x0cd"]),
        ("paragraph", ["a", "b\u2028c\x0cd"]),
    ],
)
def test_text_is_cut_as_declared(tmp_path: Path, rule: str, expected: list[str]) -> None:
    """Only LF and CRLF end a line; line ends belong to a document where the whole file is one."""
    data = "a\r\n\r\n \n\nb\u2028c\x0cd\n".encode()

    assert expected == read(data, tmp_path / "t.txt", documents=rule)


def test_text_is_cut_before_lines_that_match(tmp_path: Path) -> None:
    """The WikiText rule: a title begins an article, a subtitle does not; only blanks before the first are lost."""
    data = b" \n = One = \n text \n = = Sub = = \n more \n = Two = \n end"
    articles = read(data, tmp_path / "t.txt", documents=r"regex:^ = [^=]")

    assert [" = One = \n text \n = = Sub = = \n more \n", " = Two = \n end"] == articles


def test_text_before_the_first_match_is_a_document(tmp_path: Path) -> None:
    """Unless it is blank."""
    assert ["intro\n", "# A\nx\n"] == read(b"intro\n# A\nx\n", tmp_path / "t.md", documents="regex:^# ")


def test_a_line_end_at_the_end_makes_no_line(tmp_path: Path) -> None:
    """A file with and one without it have the same lines; a blank line in the middle is an empty document."""
    assert ["a", "", "b"] == read(b"a\n\nb\n", tmp_path / "t.txt", documents="line")
    assert ["a", "", "b"] == read(b"a\n\nb", tmp_path / "t.txt", documents="line")


def test_an_empty_file_is_an_empty_document(tmp_path: Path) -> None:
    """As lines it is none at all, which is an error."""
    assert [""] == read(b"", tmp_path / "t.txt")
    with pytest.raises(DatasetEmpty, match="holds no document"):
        read(b"", tmp_path / "t.txt", documents="line")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-16"])
def test_encodings_are_declared(tmp_path: Path, encoding: str) -> None:
    """What is read is the text, whatever bytes it had."""
    assert ["naïve\r\n"] == read("naïve\r\n".encode(encoding), tmp_path / "t.txt", encoding=encoding)


def test_a_byte_order_mark_is_text_in_a_text_file_only(tmp_path: Path) -> None:
    """In jsonl and csv it belongs to the file."""
    mark = b"\xef\xbb\xbf"

    assert ["\ufeffa"] == read(mark + b"a", tmp_path / "t.txt")
    assert ["a"] == read(mark + b'{"text": "a"}', tmp_path / "t.jsonl")
    assert ["a"] == read(mark + b"text\na\n", tmp_path / "t.csv")


def test_jsonl_is_cut_at_line_feeds_only(tmp_path: Path) -> None:
    """Other separators may stand inside a JSON string; blank lines are no documents, empty texts are."""
    data = '{"text": "a\u2028\u0085b"}\r\n\n{"text": ""}\n{"text": "a", "id": 1}'.encode()

    assert ["a\u2028\u0085b", "", "a"] == read(data, tmp_path / "t.jsonl")
    assert ["x"] == read(b'{"body": "x"}', tmp_path / "t.jsonl", field="body")


def test_cells_are_texts_as_they_stand(tmp_path: Path) -> None:
    """Empty cells are empty texts, NA is a word, numbers are texts, quotes may hold line ends and long texts."""
    long = "x" * 300_000
    data = f'id,text\n1,\n2,NA\n3,007\n4,"a\r\n""b"", c"\n\n5, d \n6,{long}\n'.encode()

    assert ["", "NA", "007", 'a\r\n"b", c', " d ", long] == read(data, tmp_path / "t.csv")
    assert ["a,b"] == read(b"id\ttext\n1\ta,b\n", tmp_path / "t.tsv")


def test_parquet_rows_are_texts_as_they_stand(tmp_path: Path) -> None:
    """Over several row groups, whatever string type the column has."""
    texts = [f"text {i}\r\n" for i in range(2500)]
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(texts).cast(kind)}), tmp_path / "t.parquet", row_group_size=700)

        assert texts == list(documents.find(DatasetSpec(source=(str(tmp_path / "t.parquet"),)), None))


def test_several_sources_follow_each_other(tmp_path: Path) -> None:
    """In the order they are named; the same file twice is twice the documents."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "c.jsonl").write_text('{"text": "c"}\n')
    named = [str(tmp_path / name) for name in ("b.txt", "c.jsonl", "a.txt", "b.txt")]

    assert ["b", "c", "a", "b"] == list(documents.find(DatasetSpec(source=tuple(named)), None))
    assert ["b", "c"] == list(documents.find(DatasetSpec(source=tuple(named), limit=2), None))


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    """A file of another length, or changed at another time, is another source; the same one is the same."""
    path = tmp_path / "t.txt"
    path.write_text("a")
    spec = DatasetSpec(source=(str(path),))
    first = documents.find(spec, None).fingerprint
    again = documents.find(spec, None).fingerprint
    path.write_text("ab")

    assert first == again
    assert first != documents.find(spec, None).fingerprint
