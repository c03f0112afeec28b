"""What is known of a model before a weight is loaded: its tensors, sizes, limits and digest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval_kernel import checkpoint
from eval_kernel.spec import ModelSpec
from tests.support import models

pytestmark = pytest.mark.torch


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A random Llama."""
    return models.write_random_llama(tmp_path / "llama")


def found(directory: Path, tmp_path: Path) -> checkpoint.Checkpoint:
    """The checkpoint of a directory."""
    return checkpoint.find(ModelSpec(source=str(directory)), None, tmp_path / "cache", lambda _: None)


def digest(directory: Path, tmp_path: Path) -> str:
    """The weights digest of a directory."""
    return checkpoint.weights_digest(found(directory, tmp_path), tmp_path / "cache")


def test_the_header_is_what_safetensors_wrote(llama: Path, tmp_path: Path) -> None:
    """Names, shapes, types and places of all tensors."""
    model = found(llama, tmp_path)
    expected = load_file(llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    info = model.tensors[name]
    data = info.file.read_bytes()[info.start : info.end]

    assert {key: tuple(value.shape) for key, value in expected.items()} == {
        key: value.shape for key, value in model.tensors.items()
    }
    assert expected[name].flatten().tolist() == torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()
    assert sum(t.numel() for t in expected.values()) == model.num_parameters
    assert ("float32", 64, 512) == (model.dtype, model.vocabulary, model.max_context)


def test_the_dtype_is_that_of_most_weights(llama: Path, tmp_path: Path) -> None:
    """Norms kept in float32 do not make a bfloat16 model a float32 one."""
    tensors = {
        name: tensor if "norm" in name else tensor.bfloat16()
        for name, tensor in load_file(llama / "model.safetensors").items()
    }
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})

    assert "bfloat16" == found(llama, tmp_path).dtype


def test_the_digest_is_of_the_weights_and_what_shapes_them(llama: Path, tmp_path: Path) -> None:
    """Who wrote the configuration does not matter; what it says, and every weight, does."""
    first = digest(llama, tmp_path)
    path = llama / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "transformers_version": "0.0", "_name_or_path": "x"}, indent=7))
    renamed = digest(llama, tmp_path)
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    other_config = digest(llama, tmp_path)
    path.write_text(json.dumps(config))
    tensors = load_file(llama / "model.safetensors")
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})

    assert first == renamed
    assert 3 == len({first, other_config, digest(llama, tmp_path)})


def test_the_digest_is_remembered_by_size_and_time(llama: Path, tmp_path: Path) -> None:
    """A file that has not changed is not read again; one that was touched is."""
    first = digest(llama, tmp_path)
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    os.utime(llama / "model.safetensors", ns=(1, 1))

    assert first == digest(llama, tmp_path)
    assert 2 == len(list(memo.parent.iterdir()))


def test_a_limit_that_is_not_stated_is_none(llama: Path, tmp_path: Path) -> None:
    """Families without positions have no limit."""
    config = {"model_type": "bloom", "vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 2}
    (llama / "config.json").write_text(json.dumps(config))

    assert found(llama, tmp_path).max_context is None
