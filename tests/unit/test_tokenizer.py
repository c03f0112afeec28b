"""What is learnt of a tokenizer: its special tokens, whether it adds BOS by itself, and a digest of all it does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval_kernel import tokenizer
from eval_kernel.errors import ModelUnsupported
from tests.support import models

pytestmark = pytest.mark.torch


def test_special_tokens_are_found(tmp_path: Path) -> None:
    """Those that are declared; whether BOS is added is found out by trying."""
    plain = tokenizer.load(models.write_char_tokenizer(tmp_path / "plain"))
    adding = tokenizer.load(models.write_char_tokenizer(tmp_path / "adding", adds_bos=True, adds_eos=True))
    bare = tokenizer.load(models.write_char_tokenizer(tmp_path / "bare", specials=False))

    assert (models.BOS, models.EOS, False) == (plain.bos, plain.eos, plain.adds_bos)
    assert (models.BOS, models.EOS, True) == (adding.bos, adding.eos, adding.adds_bos)
    assert (None, None, False) == (bare.bos, bare.eos, bare.adds_bos)


def test_only_the_text_becomes_tokens(tmp_path: Path) -> None:
    """What a tokenizer adds by itself is not among them, and nothing is cut off or filled up."""
    directory = models.write_char_tokenizer(tmp_path, adds_bos=True, adds_eos=True)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    path.write_text(json.dumps(content))
    found = tokenizer.load(directory)

    assert [0, 1, 2, 3] == found.backend.encode("abcd", add_special_tokens=False).ids


def test_the_digest_is_of_what_it_does(tmp_path: Path) -> None:
    """Two copies are equal; another rule, another special token or another vocabulary is another tokenizer."""
    written = {
        "a": models.write_char_tokenizer(tmp_path / "a"),
        "b": models.write_char_tokenizer(tmp_path / "b"),
        "fold": models.write_char_tokenizer(tmp_path / "fold", fold=True),
        "bare": models.write_char_tokenizer(tmp_path / "bare", specials=False),
        "adds": models.write_char_tokenizer(tmp_path / "adds", adds_bos=True),
        "words": models.write_word_tokenizer(tmp_path / "words", ["a", "b"]),
    }
    digests = {name: tokenizer.load(directory).digest for name, directory in written.items()}

    assert digests["a"] == digests["b"]
    assert 5 == len(set(digests.values()))


def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """A configuration alone does not make a tokenizer."""
    (models.write_char_tokenizer(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match="no tokenizer file in it"):
        tokenizer.load(tmp_path)
