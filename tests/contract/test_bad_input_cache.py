"""The cache is never trusted blindly nor left half written: damage is found and repaired, a full disk is named."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from eval_kernel import cachedir, errors
from tests.support import models
from tests.support.evaluations import Evaluator, Result, silent

pytestmark = pytest.mark.torch

TEXT = ["some text of ours", "", "another one\n"] * 5


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    """A fresh engine with a fresh cache."""
    return Evaluator(tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model that is in order."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path / "llama"))


def corpus_of(evaluator: Evaluator) -> Path:
    """The directory of the one corpus in the cache."""
    (found,) = [p for p in (evaluator.cache / "corpora").iterdir() if p.is_dir()]
    return found


def flip(path: Path, place: int = 5) -> None:
    """Change one byte of a file in place, as a failing disk would."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def empty(path: Path) -> None:
    """Cut a file off."""
    path.write_bytes(b"")


@pytest.mark.parametrize("name", ["tokens", "bytes", "words", "offsets", "meta.json"])
@pytest.mark.parametrize("damage", [flip, empty, Path.unlink])
def test_a_damaged_corpus_is_built_anew(
    evaluator: Evaluator, llama: Path, name: str, damage: Callable[[Path], None]
) -> None:
    """A changed byte, an empty or a missing file is found at the next opening, and the result is the same."""
    spec = evaluator.spec(llama, TEXT)
    before = evaluator.score(spec)
    damage(corpus_of(evaluator) / name)
    notes: list[str] = []
    evaluator.engine.plan(spec, notes.append)

    assert "tokenising the dataset" in notes
    assert before == evaluator.score(spec)


@pytest.mark.parametrize("name", ["tokens", "bytes", "words"])
def test_damage_under_an_open_job_is_found_by_the_shard(evaluator: Evaluator, llama: Path, name: str) -> None:
    """Tokens are compared with the plan's digest and counts with the plan's counts; the next opening is sound again."""
    spec = evaluator.spec(llama, TEXT)
    expected = evaluator.score(spec)
    plan = evaluator.engine.plan(spec, silent)
    evaluation = evaluator.engine.open(spec, plan.manifest, silent)
    flip(corpus_of(evaluator) / name, 4)
    with pytest.raises(errors.DataChanged, match="shard 0: its tokens on this node are not those it was planned with"):
        evaluation.score(plan.shards[0], lambda: None)
    again = evaluator.engine.open(spec, plan.manifest, silent)

    assert expected.partials == tuple(again.score(shard, lambda: None).partial for shard in plan.shards)


def test_data_that_differs_from_the_plan_is_refused(evaluator: Evaluator, llama: Path, tmp_path: Path) -> None:
    """A node whose file has changed since the planning says what differs, and scores nothing."""
    file = tmp_path / "t.txt"
    file.write_text("first text")
    spec = evaluator.spec(llama, file)
    plan = evaluator.engine.plan(spec, silent)
    file.write_text("other text!")
    with pytest.raises(errors.DataChanged, match=r"data_digest is sha256:\w+ on this node, the job was planned with"):
        evaluator.engine.open(spec, plan.manifest, silent)


def test_weights_that_differ_from_the_plan_are_refused(evaluator: Evaluator, llama: Path) -> None:
    """The same path with other weights is another model."""
    spec = evaluator.spec(llama, TEXT)
    plan = evaluator.engine.plan(spec, silent)
    models.write_random_llama(llama, seed=1)
    with pytest.raises(errors.DataChanged, match="weights_digest is"):
        evaluator.engine.open(spec, plan.manifest, silent)


def test_two_models_on_one_cache_keep_apart(evaluator: Evaluator, llama: Path, tmp_path: Path) -> None:
    """Model B after model A gives what B gives by itself."""
    other = models.write_char_tokenizer(models.write_random_llama(tmp_path / "other", seed=1), adds_bos=True)
    evaluator.run(llama, TEXT)
    second = evaluator.run(other, TEXT)
    alone = Evaluator(tmp_path / "alone")
    alone.directory.mkdir()

    assert alone.run(other, TEXT).partials == second.partials


def test_a_damaged_digest_is_computed_anew(tmp_path: Path) -> None:
    """A memo that is no digest is not believed."""
    file = tmp_path / "f"
    file.write_bytes(b"x")
    first = cachedir.remembered(tmp_path, [file], lambda: "sha256:" + "a" * 64)
    (memo,) = (tmp_path / "digests").iterdir()
    memo.write_text("sha256:aa")

    assert "sha256:" + "b" * 64 == cachedir.remembered(tmp_path, [file], lambda: "sha256:" + "b" * 64)
    assert "sha256:" + "a" * 64 == first


def test_a_digest_may_be_computed_by_two_threads_at_once(tmp_path: Path) -> None:
    """Neither takes the other's file away before it is in place, however long the first one waits."""
    file = tmp_path / "f"
    file.write_bytes(b"x")
    both = Barrier(2, timeout=60)
    write_text = Path.write_text

    def compute() -> str:
        both.wait()
        return "sha256:" + "a" * 64

    def wait_for_the_other(path: Path, text: str) -> int:
        written = write_text(path, text)
        both.wait()
        return written

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(2) as pool:
        patched.setattr(Path, "write_text", wait_for_the_other)
        found = list(pool.map(lambda _: cachedir.remembered(tmp_path, [file], compute), range(2)))

    assert ["sha256:" + "a" * 64] * 2 == found


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: writing fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_half_written(evaluator: Evaluator, llama: Path) -> None:
    """The directory is named, nothing is left in it, and with space again the job runs."""
    spec = evaluator.spec(llama, TEXT * 30)
    with (
        largest_file(1024),
        pytest.raises(errors.DirectoryUnusable, match=r"cache cannot be used \(File too large\)"),
    ):
        evaluator.engine.plan(spec, silent)

    assert [] == [p for p in (evaluator.cache / "corpora").iterdir() if p.is_dir()]
    assert 0 < evaluator.score(spec).tokens


def test_a_full_disk_leaves_no_half_converted_model(evaluator: Evaluator, tmp_path: Path) -> None:
    """The same for a GGUF file."""
    spec = evaluator.spec(models.write_gguf(tmp_path / "model.gguf"), TEXT)
    with largest_file(20_000), pytest.raises(errors.DirectoryUnusable, match=r"the cache directory .*cannot be used"):
        evaluator.engine.plan(spec, silent)

    assert [] == [p for p in (evaluator.cache / "gguf").iterdir() if p.is_dir()]
    assert 0 < evaluator.score(spec).tokens


def test_a_cache_that_cannot_be_made_is_named(evaluator: Evaluator, llama: Path) -> None:
    """A file stands where the directory should be."""
    evaluator.cache.write_bytes(b"")
    with pytest.raises(errors.DirectoryUnusable, match=r"cache cannot be used \((Not a directory|File exists)\)"):
        evaluator.run(llama, TEXT)


def test_a_cache_that_may_not_be_written_is_named(
    evaluator: Evaluator, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a read-only file system answers is repeated."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(errors.DirectoryUnusable, match=r"cannot be used \(Read-only file system\)"):
        evaluator.run(llama, TEXT)


def test_a_model_stays_loaded_for_the_next_job(evaluator: Evaluator, llama: Path) -> None:
    """Opening a second job on the same model loads nothing; the first one's numbers are as before."""
    first = evaluator.run(llama, TEXT)
    spec = evaluator.spec(llama, TEXT[:2])
    plan, notes = evaluator.engine.plan(spec, silent), list[str]()
    evaluator.engine.open(spec, plan.manifest, notes.append)

    assert "loading the model" not in notes
    assert first.partials == evaluator.run(llama, TEXT).partials


BUILD = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer
from eval_kernel import corpus, documents
from eval_kernel.spec import DatasetSpec
notes = []
source = documents.find(DatasetSpec(source=(sys.argv[1],)), None)
tokenizer = Tokenizer.from_file(sys.argv[2])
found = corpus.load(source, tokenizer, "t", None, Path(sys.argv[3]), notes.append)
print(json.dumps([len(found.tokens), found.data_digest, notes]))
"""


def test_processes_that_start_together_build_a_corpus_once(llama: Path, tmp_path: Path) -> None:
    """One tokenises, the others wait for its lock and read what it wrote."""
    text = tmp_path / "t.txt"
    text.write_text("some text " * 20_000)
    command = [sys.executable, "-c", BUILD, str(text), str(llama / "tokenizer.json"), str(tmp_path / "shared")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        answers = [json.loads(p.communicate(timeout=120)[0]) for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    assert 1 == len({(tokens, digest) for tokens, digest, _ in answers})
    assert [[], [], ["tokenising the dataset"]] == sorted(notes for _, _, notes in answers)


def test_what_a_killed_process_left_behind_is_cleared(evaluator: Evaluator, llama: Path) -> None:
    """A half-built corpus of an earlier life is neither used nor kept."""
    spec = evaluator.spec(llama, TEXT)
    expected: Result = evaluator.score(spec)
    whole = corpus_of(evaluator)
    whole.rename(whole.with_name(f".new-{whole.name}"))
    (whole.with_name(f".new-{whole.name}") / "tokens").write_bytes(b"half")

    assert expected == evaluator.score(spec)
    assert [] == list((evaluator.cache / "corpora").glob(".new-*"))
