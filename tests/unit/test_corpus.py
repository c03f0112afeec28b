"""Texts become tokens; each knows its bytes, its words and its document."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from eval_kernel import corpus, documents
from eval_kernel.spec import DatasetSpec
from tests.support.corpora import write_jsonl


@dataclass
class Encoding:
    """What a tokenizer answers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def attributed(text: str, offsets: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Bytes and words per token."""
    ids, size, words, _ = corpus.attribute(text, Encoding(list(range(len(offsets))), offsets))
    assert len(offsets) == len(ids)
    return size.tolist(), words.tolist()


@pytest.mark.parametrize(
    ("text", "offsets", "size", "words"),
    [
        ("ab cd", [(0, 2), (2, 5)], [2, 3], [1, 1]),
        ("ab cd", [(0, 2), (3, 5)], [2, 3], [1, 1]),  # the blank belongs to nobody: the next token has it
        ("ab cd ", [(0, 2), (3, 5)], [2, 4], [1, 1]),  # what remains belongs to the last token
        (" ab", [(1, 2), (2, 3)], [2, 1], [1, 0]),
        ("é𝄞", [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2)], [2, 0, 4, 0, 0], [1, 0, 0, 0, 0]),
        ("a\u3000b", [(0, 3)], [5], [2]),
        ("ab", [(0, 0), (0, 2)], [0, 2], [0, 1]),  # a token without text of its own
        ("ab", [(0, 2), (0, 1)], [2, 0], [1, 0]),  # one that goes back
        (" ", [(0, 1)], [1], [0]),
    ],
)
def test_bytes_and_words_belong_to_one_token_each(
    text: str, offsets: list[tuple[int, int]], size: list[int], words: list[int]
) -> None:
    """A byte to the token that ends it, a word to the token that holds its first byte."""
    assert (size, words) == attributed(text, offsets)


def test_the_blanks_are_those_of_str_split() -> None:
    """Every character that ``str.split`` cuts at separates words, no other."""
    for point in [*range(0x3100), 0xFEFF, 0x1F600]:
        if 0xD800 <= point < 0xE000:
            continue
        text = f"a{chr(point)}b"

        assert len(text.split()) == sum(attributed(text, [(0, 3)])[1]), f"U+{point:04X}"


def characters() -> Tokenizer:
    """One token per character; capitals are small letters to it."""
    backend = Tokenizer(models.WordLevel({chr(i): i for i in range(128)} | {"?": 128}, unk_token="?"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return backend


def words() -> Tokenizer:
    """One token per word; blanks are dropped."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def build(tmp_path: Path, tokenizer: Tokenizer, texts: list[str], join: str | None = None) -> corpus.Corpus:
    """A corpus of these documents."""
    source = documents.find(DatasetSpec(source=(str(write_jsonl(tmp_path / "t.jsonl", texts)),)), None)
    return corpus.load(source, tokenizer, "digest", join, tmp_path / "cache", lambda _: None)


def test_documents_keep_their_numbers(tmp_path: Path) -> None:
    """Empty ones too: the tokens of document d lie between two offsets."""
    found = build(tmp_path, words(), ["", "a b", " ", "a"])

    assert [0, 0, 2, 2, 3] == found.offsets.tolist()
    assert [(0, 0), (0, 2), (2, 2), (2, 3)] == [found.stream(d) for d in range(found.num_streams)]
    assert (5, 3) == (found.source_bytes, found.source_words)


@pytest.mark.parametrize("join", ["\n\n", " ", ""])
def test_a_joined_token_belongs_to_the_document_it_ends_in(tmp_path: Path, join: str) -> None:
    """Also where the tokenizer drops the blanks between documents; joined they are one stream."""
    texts = ["a b", "b", "", "a "]
    found = build(tmp_path, words(), texts if join else ["a b ", "b ", "", "a "], join)

    assert [0, 2, 3, 3, 4] == found.offsets.tolist()
    assert (1, (0, 4)) == (found.num_streams, found.stream(0))
    assert len(join.join(texts).encode()) + (2 if not join else 0) == int(found.bytes.sum())


def test_a_token_that_begins_with_the_blank_before_a_word_is_the_next_documents(tmp_path: Path) -> None:
    """Byte-level tokenizers write ' b' as one token; joined by a blank it is the second document's."""
    backend = Tokenizer(models.WordLevel({"a": 0, " b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    found = build(tmp_path, backend, ["a", "b"], " ")

    assert [0, 1, 2] == found.offsets.tolist()


def test_counts_are_those_of_the_text_not_of_its_tokens(tmp_path: Path) -> None:
    """A tokenizer that rewrites the text changes no byte and no word."""
    texts = ["Hello Wörld\r\n", "ÀÉ  x"]
    found = build(tmp_path, characters(), texts)

    assert sum(len(t.encode()) for t in texts) == int(found.bytes.sum()) == found.source_bytes
    assert 4 == int(found.words.sum()) == found.source_words


def test_words_are_counted_as_lm_eval_counts_them_too(tmp_path: Path) -> None:
    """Its count includes the empty pieces at the ends of a document."""
    texts = [" \n = Title = \n ", "", "one two"]
    found = build(tmp_path, characters(), texts)

    assert sum(len(re.split(r"\s+", t)) for t in texts) == 5 + 1 + 2 == found.lm_eval_words


def test_the_digest_is_of_documents_and_their_borders(tmp_path: Path) -> None:
    """The same text cut otherwise is other data; how it is tokenised or joined is not its business."""

    def digest(name: str, tokenizer: Tokenizer, texts: list[str], join: str | None = None) -> str:
        (tmp_path / name).mkdir()
        return build(tmp_path / name, tokenizer, texts, join).data_digest

    first = digest("first", characters(), ["ab", "c"])

    assert first == digest("joined", characters(), ["ab", "c"], " ")
    assert first == digest("other tokenizer", words(), ["ab", "c"])
    assert first != digest("other border", characters(), ["a", "bc"])


def test_arrays_are_mapped_not_loaded(tmp_path: Path) -> None:
    """A corpus larger than memory can be scored."""
    found = build(tmp_path, characters(), ["ab"])

    assert isinstance(found.tokens, np.memmap)
    assert not found.tokens.flags.writeable
