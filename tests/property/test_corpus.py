"""Whatever a tokenizer does to a text, the bytes and words of its tokens add up to the text's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from eval_kernel.corpus import attribute

TEXTS = st.text(st.sampled_from("ab cé€𝄞\u00a0\u2028\u3000\n\r\t\x1c") | st.characters(codec="utf-8"), max_size=40)


@dataclass
class Encoding:
    """What a tokenizer answers."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@lru_cache
def tokenizers() -> dict[str, Tokenizer]:
    """Byte-level, word-level that drops blanks, and one that normalises."""
    bytelevel = Tokenizer(models.BPE())
    bytelevel.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bytelevel.train_from_iterator(["ab ab cab a b c"], trainer)
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    folded = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    folded.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()])
    folded.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return {"bytelevel": bytelevel, "words": words, "folded": folded}


@given(st.sampled_from(["bytelevel", "words", "folded"]), TEXTS)
def test_real_tokenizers_lose_no_byte_and_no_word(name: str, text: str) -> None:
    """Where there is a token at all: characters split over tokens, dropped blanks and normal forms included."""
    encoding = tokenizers()[name].encode(text, add_special_tokens=False)
    ids, size, words, own = attribute(text, encoding)
    total = len(text.encode()) if encoding.ids else 0

    assert encoding.ids == ids.tolist()
    assert total == int(size.sum())
    assert (len(text.split()) if encoding.ids else 0) == int(words.sum())
    assert bool((size >= 0).all())
    assert bool((words >= 0).all())
    assert bool((np.diff(own) >= 0).all())
    assert len(ids) == 0 or own[-1] <= total


@given(st.data(), TEXTS)
def test_even_absurd_offsets_lose_nothing(data: st.DataObject, text: str) -> None:
    """Offsets that overlap, go back or leave gaps: sums are the text's."""
    places = st.integers(0, len(text))
    offsets = data.draw(st.lists(st.tuples(places, places), min_size=1, max_size=20))
    _, size, words, _ = attribute(text, Encoding([0] * len(offsets), offsets))

    assert len(text.encode()) == int(size.sum())
    assert len(text.split()) == int(words.sum())
    assert bool((size >= 0).all())
