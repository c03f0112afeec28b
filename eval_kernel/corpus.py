"""A dataset as tokens, on disk and memory-mapped: built once per node, shared by its processes, named by its content.

Every byte and every word of the text belongs to exactly one token (the one that ends it, or starts it), so counts
for any range of tokens add up to those of the text. What lies in the cache is trusted only as far as its checksums
hold. Windows and scoring are other modules' business.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eval_kernel.cachedir import locked, unusable
from eval_kernel.documents import Source
from eval_kernel.errors import DatasetEmpty, DirectoryUnusable

#: Raised when the layout or the counting rules change: older packs are then built anew.
FORMAT = 2
#: Documents tokenised in one call.
BATCH = 256

_SPACES = np.array([c for c in range(0x3001) if chr(c).isspace()], dtype=np.uint32)

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]

#: The files of a corpus.
ARRAYS: dict[str, type[Any]] = {"tokens": np.int32, "bytes": np.int32, "words": np.int32, "offsets": np.int64}


@dataclass(frozen=True, slots=True)
class Corpus:
    """The tokens of all documents, in order.

    ``tokens``, ``bytes`` and ``words`` have one entry per token; ``offsets`` has one per document and one more: the
    tokens of document d are ``offsets[d] .. offsets[d+1]-1``. ``joined`` says whether they were tokenised as one text.
    """

    tokens: Int32
    bytes: Int32
    words: Int32
    offsets: Int64
    joined: bool
    data_digest: str
    source_bytes: int
    source_words: int
    lm_eval_words: int

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.offsets) - 1

    @property
    def num_streams(self) -> int:
        """Runs of tokens that are cut into windows by themselves."""
        return 1 if self.joined else self.num_documents

    def stream(self, index: int) -> tuple[int, int]:
        """First token and one past the last of a stream."""
        if self.joined:
            return 0, len(self.tokens)
        return int(self.offsets[index]), int(self.offsets[index + 1])


def load(
    source: Source,
    tokenizer: Any,
    tokenizer_digest: str,
    join: str | None,
    cache: Path,
    note: Callable[[str], None],
) -> Corpus:
    """Return the corpus of a dataset, from the cache where it is there; one that fails its checksums is built anew.

    Raises the errors of ``documents`` and ``DirectoryUnusable``.
    """
    path = _path(source, tokenizer_digest, join, cache)
    try:
        with locked(path):
            found = _open(path) if path.exists() else None
            if found is None:
                note("tokenising the dataset")
                _build(path, source, tokenizer, join)
                found = _open(path)
    except OSError as error:
        raise unusable(cache, error) from None
    if found is None:
        raise DirectoryUnusable(
            f"the cache directory {cache} does not give back what was written to it; choose another"
        )
    return found


def forget(source: Source, tokenizer_digest: str, join: str | None, cache: Path) -> None:
    """Remove a corpus from the cache (it turned out to be damaged); the next ``load`` builds it anew."""
    path = _path(source, tokenizer_digest, join, cache)
    try:
        with locked(path):
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise unusable(cache, error) from None


def _path(source: Source, tokenizer_digest: str, join: str | None, cache: Path) -> Path:
    parts = [
        FORMAT,
        version("tokenizers"),
        source.spec.model_dump(mode="json"),
        source.fingerprint,
        tokenizer_digest,
        join,
    ]
    return cache / "corpora" / hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _open(path: Path) -> Corpus | None:
    """Map a corpus that was built earlier; None where it is damaged."""
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        arrays: dict[str, Any] = {}
        for name, dtype in ARRAYS.items():
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != meta["checksums"][name]:
                    return None
                empty = file.tell() == 0
            arrays[name] = np.zeros(0, dtype) if empty else np.memmap(path / name, dtype=dtype, mode="r")
        return Corpus(**arrays, **meta["facts"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _build(target: Path, source: Source, tokenizer: Any, join: str | None) -> None:
    # Under the lock: what an earlier try left behind when it was killed is nobody's.
    temp = target.with_name(f".new-{target.name}")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir()
    try:
        digest, nbytes, nwords, lm_eval_words, lengths = hashlib.sha256(), 0, 0, 0, []
        with (
            (temp / "tokens").open("wb") as tokens,
            (temp / "bytes").open("wb") as sizes,
            (temp / "words").open("wb") as words,
        ):

            def counted() -> Iterator[str]:
                nonlocal nbytes, nwords, lm_eval_words
                for text in source:
                    data = text.encode("utf-8")
                    digest.update(len(data).to_bytes(8, "little"))
                    digest.update(data)
                    nbytes += len(data)
                    nwords += len(text.split())
                    lm_eval_words += len(re.split(r"\s+", text))
                    yield text

            if join is None:
                documents = counted()
                while batch := list(islice(documents, BATCH)):
                    for text, encoding in zip(
                        batch, tokenizer.encode_batch(batch, add_special_tokens=False), strict=True
                    ):
                        ids, size, word, _ = attribute(text, encoding)
                        tokens.write(ids.tobytes())
                        sizes.write(size.tobytes())
                        words.write(word.tobytes())
                        lengths.append(len(ids))
            else:
                texts = list(counted())
                text = join.join(texts)
                ids, size, word, own = attribute(text, tokenizer.encode(text, add_special_tokens=False))
                tokens.write(ids.tobytes())
                sizes.write(size.tobytes())
                words.write(word.tobytes())
                # A token belongs to the document its last byte lies in (many tokens begin with the blank before a
                # word); the joining string to the document before it.
                gap = len(join.encode("utf-8"))
                borders = np.cumsum([len(t.encode("utf-8")) + gap for t in texts])
                owner = np.searchsorted(borders, np.maximum(own - 1, 0), side="right")
                lengths = np.bincount(owner, minlength=len(texts)).tolist()
        if not any(lengths):
            raise DatasetEmpty(
                f"{', '.join(source.spec.source)}: none of its {len(lengths)} documents holds a token to score; "
                "name a dataset with text in it"
            )
        (temp / "offsets").write_bytes(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64).tobytes())
        facts = {
            "joined": join is not None,
            "data_digest": "sha256:" + digest.hexdigest(),
            "source_bytes": nbytes,
            "source_words": nwords,
            "lm_eval_words": lm_eval_words,
        }
        checksums = {}
        for name in ARRAYS:
            with (temp / name).open("rb") as file:
                checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
        (temp / "meta.json").write_text(json.dumps({"facts": facts, "checksums": checksums}))
        shutil.rmtree(target, ignore_errors=True)
        temp.replace(target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def attribute(text: str, encoding: Any) -> tuple[Int32, Int32, Int32, Int64]:
    """Return token ids, and per token its bytes, its words and the byte its own text ends before.

    Token k gets the bytes between the end of token k-1 and its own end, the last one all that remain; a word
    belongs to the token that holds its first byte. Both therefore add up to the text's, whatever the tokenizer drops.
    """
    ids = np.array(encoding.ids, dtype=np.int32)
    if len(ids) == 0:
        return ids, ids, ids, ids.astype(np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    width = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    position = np.concatenate([[0], np.cumsum(width)])
    own = np.maximum.accumulate(position[np.array([end for _, end in encoding.offsets], dtype=np.int64)])
    ends = own.copy()
    ends[-1] = position[-1]
    starts = np.concatenate([[0], ends[:-1]])
    blank = np.isin(points, _SPACES)
    first = ~blank & np.concatenate([[True], blank[:-1]])
    owner = np.searchsorted(ends, position[:-1][first], side="right")
    words = np.bincount(owner, minlength=len(ids))
    return ids, (ends - starts).astype(np.int32), words.astype(np.int32), own
