"""A model that cannot be scored rightly is refused with one line that says what is wrong; none is half converted."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

from eval_kernel import documents, errors
from eval_kernel.conversion import from_gguf
from eval_kernel.spec import parse_spec
from tests.support import models
from tests.support.evaluations import Evaluator

pytestmark = pytest.mark.torch


@pytest.fixture
def evaluator(tmp_path: Path) -> Evaluator:
    """A fresh engine with a fresh cache."""
    return Evaluator(tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model that is in order, for the test to break."""
    return models.write_char_tokenizer(models.write_random_llama(tmp_path / "llama"))


def refused(evaluator: Evaluator, model: Path | dict[str, Any], kind: type[errors.FedevalError], match: str) -> None:
    """Planning and opening a job must fail in this way, in one line, and leave no partial result in the cache."""
    source = model if isinstance(model, dict) else {"source": str(model)}
    with pytest.raises(kind, match=match) as caught:
        evaluator.run(Path("unused"), "some text", model=source)

    assert kind is type(caught.value)
    assert "\n" not in str(caught.value)
    assert 600 > len(str(caught.value))
    assert [] == list(evaluator.cache.rglob(".new-*"))


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change a model's tensors."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_path_that_does_not_exist(evaluator: Evaluator, tmp_path: Path) -> None:
    """The path is named."""
    refused(evaluator, tmp_path / "nowhere", errors.ModelNotFound, r"nowhere: no such file or directory on this node")


def test_a_directory_without_a_configuration(evaluator: Evaluator, tmp_path: Path) -> None:
    """It holds no transformers model."""
    (tmp_path / "empty").mkdir()
    refused(evaluator, tmp_path / "empty", errors.ModelNotFound, r"no config\.json in it")


def test_a_single_weights_file(evaluator: Evaluator, llama: Path) -> None:
    """The directory around it is asked for."""
    refused(
        evaluator, llama / "model.safetensors", errors.ModelUnsupported, r"give the directory that holds config\.json"
    )


@pytest.mark.parametrize("keep", [0, 5, 100, 5000])
def test_weights_that_are_cut_off(evaluator: Evaluator, llama: Path, keep: int) -> None:
    """Empty, cut off in the length, in the header or in the data: the file and its size are named."""
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(evaluator, llama, errors.ModelCorrupt, rf"model\.safetensors: .*cut off.*{keep} bytes")


def test_weights_with_something_behind_them(evaluator: Evaluator, llama: Path) -> None:
    """A file longer than its header says is not what was written."""
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    refused(evaluator, llama, errors.ModelCorrupt, r"too long")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"w": 1}',
        b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"w": {"dtype": "F32", "shape": "ab", "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_header(evaluator: Evaluator, llama: Path, header: bytes) -> None:
    """Whatever is wrong with it, it is the header that is blamed."""
    data = struct.pack("<Q", len(header)) + header + b"\0" * 4
    (llama / "model.safetensors").write_bytes(data)
    refused(evaluator, llama, errors.ModelCorrupt, r"its safetensors header is damaged")


def shard_weights(llama: Path) -> Path:
    """Split the weights over two files with an index."""
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, llama / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_weights_in_several_files_are_the_same_model(evaluator: Evaluator, llama: Path) -> None:
    """How tensors are spread over files changes neither the digest nor a bit of the result."""
    whole = evaluator.run(llama, "some text")
    shard_weights(llama)
    spread = evaluator.run(llama, "some text")

    assert whole.plan.manifest.weights_digest == spread.plan.manifest.weights_digest
    assert whole.partials == spread.partials


def test_a_weights_file_that_is_missing(evaluator: Evaluator, llama: Path) -> None:
    """The index names it, and so does the message."""
    shard_weights(llama)
    (llama / "model-00002-of-00002.safetensors").unlink()
    refused(
        evaluator, llama, errors.ModelCorrupt, r"the index names model-00002-of-00002\.safetensors, which is missing"
    )


def test_a_tensor_that_only_the_index_knows(evaluator: Evaluator, llama: Path) -> None:
    """It is named."""
    index = shard_weights(llama)
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    refused(evaluator, llama, errors.ModelCorrupt, r"the index names the tensor model\.ghost")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}'])
def test_an_index_that_is_none(evaluator: Evaluator, llama: Path, content: str) -> None:
    """A damaged index is not a model without weights."""
    shard_weights(llama).write_text(content)
    kind = errors.ModelNotFound if content.endswith("{}}") else errors.ModelCorrupt
    refused(evaluator, llama, kind, r"index.*; (copy it again|put the weights beside config\.json)")


def test_an_index_that_leaves_the_directory(evaluator: Evaluator, llama: Path) -> None:
    """Weights are read beside their index only."""
    index = shard_weights(llama)
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    refused(evaluator, llama, errors.ModelCorrupt, r"'\.\./other\.safetensors' is not the name of a file beside it")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number(evaluator: Evaluator, llama: Path, value: float) -> None:
    """Its tensor and its place are named."""

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value

    edit_weights(llama, poison)
    refused(
        evaluator,
        llama,
        errors.ModelNotFinite,
        rf"model\.layers\.1\.mlp\.up_proj\.weight\[5, 7\] is {value} in float32",
    )


def test_a_weight_too_large_for_the_precision(evaluator: Evaluator, llama: Path) -> None:
    """3.4e38 is finite in float32 and not in bfloat16: the message speaks of the precision."""
    edit_weights(llama, lambda tensors: tensors["lm_head.weight"].__setitem__((0, 0), 3.4e38))
    with pytest.raises(errors.ModelNotFinite, match=r"inf in bfloat16; .*wider precision"):
        evaluator.run(llama, "text", precision="bf16")


def test_weights_that_are_missing(evaluator: Evaluator, llama: Path) -> None:
    """transformers would fill them with random numbers; here they are counted, and the first is named."""
    edit_weights(llama, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    refused(evaluator, llama, errors.ModelCorrupt, r"1 weights are missing, model\.layers\.0\.mlp\.up_proj\.weight")


def test_a_layer_that_is_missing(evaluator: Evaluator, llama: Path) -> None:
    """A configuration with more layers than there are weights for."""
    edit_config(llama, num_hidden_layers=3)
    refused(evaluator, llama, errors.ModelCorrupt, r"9 weights are missing, model\.layers\.2")


def test_a_layer_too_many(evaluator: Evaluator, llama: Path) -> None:
    """A configuration with fewer layers would silently leave the rest out."""
    edit_config(llama, num_hidden_layers=1)
    refused(
        evaluator, llama, errors.ModelCorrupt, r"config\.json says 1 layers, but the weights have model\.layers\.1\."
    )


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("num_hidden_layers", 100_000, "the weights are 21 tensors"),
        ("num_hidden_layers", 10**300, "the weights are 21 tensors"),
        ("n_layer", 1e300, "the weights are 21 tensors"),
        ("hidden_size", 10**12, "no side of a tensor is longer than"),
        ("vocab_size", 10**12, "no side of a tensor is longer than"),
    ],
)
def test_sizes_that_the_weights_cannot_have(
    evaluator: Evaluator, llama: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: float, fact: str
) -> None:
    """They are refused before transformers makes anything in that size."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    edit_config(llama, **{key: value})
    refused(evaluator, llama, errors.ModelCorrupt, rf"config\.json says {key} 1.*, but {fact}")


@pytest.mark.parametrize("value", [-5, 0])
def test_a_maximum_of_positions_that_is_none(evaluator: Evaluator, llama: Path, value: int) -> None:
    """It is not taken for a model without a maximum."""
    edit_config(llama, max_position_embeddings=value)
    refused(evaluator, llama, errors.ModelCorrupt, rf"max_position_embeddings is {value}, not a number of tokens; copy")


def test_weights_that_are_a_link_to_nowhere(evaluator: Evaluator, llama: Path) -> None:
    """A link to itself is one."""
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to("model.safetensors")
    refused(evaluator, llama, errors.ModelNotFound, r"model\.safetensors is a link that leads to no file; put")


def test_a_small_vocabulary_is_told_in_one_line(
    evaluator: Evaluator, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers' own warnings about it are not shown before."""
    edit_config(llama, vocab_size=10)
    refused(evaluator, llama, errors.ModelUnsupported, r"the tokenizer yields token \d+, the model knows 10")

    assert "" == capfd.readouterr().err


def test_weights_of_another_shape(evaluator: Evaluator, llama: Path) -> None:
    """Both shapes are named."""
    edit_config(llama, intermediate_size=96)
    refused(evaluator, llama, errors.ModelCorrupt, r"not of the shape config\.json asks for: .* is \[.*\], not \[.*\]")


def test_pickled_weights(evaluator: Evaluator, llama: Path) -> None:
    """They are never loaded."""
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    refused(evaluator, llama, errors.ModelUnsupported, r"its weights are pickles \(pytorch_model\.bin\)")


def test_no_weights_at_all(evaluator: Evaluator, llama: Path) -> None:
    """Configuration and tokenizer alone are no model."""
    (llama / "model.safetensors").unlink()
    refused(evaluator, llama, errors.ModelNotFound, r"no model\.safetensors")


def test_a_model_that_brings_its_own_code(evaluator: Evaluator, llama: Path) -> None:
    """Its code is not run; a file that would tell shows that."""
    flag = llama / "ran"
    (llama / "modeling_mine.py").write_text(f"open({str(flag)!r}, 'w').close()\n")
    edit_config(llama, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    refused(evaluator, llama, errors.ModelNeedsCode, r"needs Python code from its repository")

    assert not flag.exists()


def test_a_tokenizer_that_brings_its_own_code(evaluator: Evaluator, llama: Path) -> None:
    """The same holds for tokenizers."""
    flag = llama / "ran"
    (llama / "mine.py").write_text(f"open({str(flag)!r}, 'w').close()\n")
    path = llama / "tokenizer_config.json"
    config = {
        **json.loads(path.read_text()),
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    path.write_text(json.dumps(config))
    refused(evaluator, llama, errors.ModelNeedsCode, r"tokenizer .*needs Python code")

    assert not flag.exists()


def test_an_unknown_model_type(evaluator: Evaluator, llama: Path) -> None:
    """The version of transformers that does not know it is named."""
    edit_config(llama, model_type="nevermodel")
    refused(evaluator, llama, errors.ModelUnsupported, r"'nevermodel' is unknown to the installed transformers \(5\.")


@pytest.mark.parametrize("content", ["{", "", "[]", "{}", '{"model_type": 3}', "\xff", "[" * 100_000])
def test_a_broken_configuration(evaluator: Evaluator, llama: Path, content: str) -> None:
    """Not JSON, not an object, or without a type of model."""
    (llama / "config.json").write_bytes(content.encode("latin-1"))
    refused(evaluator, llama, errors.ModelCorrupt, r"config\.json: (cannot be read as JSON|has no model_type)")


def test_a_configuration_with_a_wrong_type(evaluator: Evaluator, llama: Path) -> None:
    """What transformers objects to is repeated, in one line."""
    edit_config(llama, hidden_size="many")
    refused(evaluator, llama, errors.ModelCorrupt, r"transformers refuses it \(.*hidden_size")


def test_quantised_weights(evaluator: Evaluator, llama: Path) -> None:
    """They would need another loader; the method is named."""
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(evaluator, llama, errors.ModelUnsupported, r"quantised \(gptq\)")


def test_a_model_that_sees_later_tokens(evaluator: Evaluator, tmp_path: Path) -> None:
    """A masked language model would cheat: it is found out by trying."""
    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        is_decoder=False,
    )
    model = BertLMHeadModel(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    models.write_char_tokenizer(tmp_path / "bert")
    model.save_pretrained(tmp_path / "bert")
    refused(evaluator, tmp_path / "bert", errors.ModelUnsupported, r"depends on later tokens")


def test_a_model_of_another_kind(evaluator: Evaluator, tmp_path: Path) -> None:
    """An encoder-decoder is no causal language model."""
    config = T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    refused(evaluator, tmp_path / "t5", errors.ModelUnsupported, r"a t5 is no causal language model")


def test_a_model_without_a_tokenizer(evaluator: Evaluator, tmp_path: Path) -> None:
    """transformers would make up one for GPT-2; here it is missed."""
    model = models.write_position_model(tmp_path / "bare", models.position_table())
    refused(evaluator, model, errors.ModelUnsupported, r"tokenizer .*bare: no tokenizer file in it")


def test_a_broken_tokenizer(evaluator: Evaluator, llama: Path) -> None:
    """The reason is repeated, in one line."""
    (llama / "tokenizer.json").write_text("{")
    refused(evaluator, llama, errors.ModelUnsupported, r"tokenizer .*: cannot be loaded \(")


def test_a_tokenizer_of_another_model(evaluator: Evaluator, llama: Path, tmp_path: Path) -> None:
    """Its ids are beyond the model's vocabulary."""
    other = models.write_bpe_tokenizer(tmp_path / "other", ["some text"], size=384)
    refused(
        evaluator,
        {"source": str(llama), "tokenizer": str(other)},
        errors.ModelUnsupported,
        r"the tokenizer yields token \d+, the model knows 64",
    )


def test_a_context_beyond_the_model(evaluator: Evaluator, llama: Path) -> None:
    """The model's own maximum is named."""
    with pytest.raises(errors.ContextTooLong, match=r"window\.context is 513, .* at most 512 tokens"):
        evaluator.run(llama, "some text", window={"context": 513})


@pytest.mark.parametrize("context", [-1, 0, 1])
def test_a_context_that_is_none(evaluator: Evaluator, llama: Path, context: int) -> None:
    """It is refused before any file is looked at."""
    with pytest.raises(errors.SpecError, match="at least 2 tokens"):
        evaluator.spec(llama, "some text", window={"context": context})


def test_half_precision_on_a_cpu(evaluator: Evaluator, llama: Path) -> None:
    """It is refused, with what to write instead, and another node may still take it."""
    with pytest.raises(errors.PrecisionUnsupported, match=r"write precision: bf16 or fp32") as caught:
        evaluator.run(llama, "some text", precision="fp16")

    assert errors.Blame.NODE is caught.value.blame


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "nonsense", "meta"])
def test_a_device_that_is_not_there(tmp_path: Path, device: str) -> None:
    """The devices that are allowed are listed."""
    from eval_kernel.engine import Engine, EngineConfig

    with pytest.raises(errors.PrecisionUnsupported, match=f"device '{device}' is not usable here.*allowed: auto, cpu"):
        Engine(EngineConfig(tmp_path, device=device))


@pytest.mark.parametrize("data", [b"", b"GG", b"not a model", b"GGUF", b"GGUF" + bytes(range(256)) * 4])
def test_a_gguf_file_that_is_none(evaluator: Evaluator, tmp_path: Path, data: bytes) -> None:
    """Garbage is refused whether or not it begins with the right letters, and leaves nothing in the cache."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    refused(evaluator, path, errors.ModelCorrupt, r"model\.gguf: (not a GGUF file|cannot be read as GGUF \().*; \w+")


def test_a_message_of_the_gguf_reader_names_no_file_of_ours(evaluator: Evaluator, tmp_path: Path) -> None:
    """A version that the reader refuses: the user's file is named once, the link in the cache is not."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 4)
    refused(evaluator, path, errors.ModelCorrupt, r"model\.gguf: cannot be read as GGUF \(ValueError: it is GGUF v")


def test_a_model_outside_the_roots(tmp_path: Path, llama: Path) -> None:
    """A path outside is refused whether it exists or not, and so is a link inside that leads out."""
    from eval_kernel.engine import Engine, EngineConfig

    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(llama)
    evaluator = Evaluator(tmp_path)
    evaluator.engine = Engine(EngineConfig(evaluator.cache, roots=(root,), device="cpu"))
    for path in (llama, tmp_path / "nowhere", root / "link", root / ".." / "llama"):
        refused(evaluator, path, errors.PathRefused, r"is outside the directories this node may read")


@pytest.mark.parametrize("keep", [100, 5_000, 20_000, 200_000, -100])
def test_a_gguf_file_that_is_cut_off(evaluator: Evaluator, tmp_path: Path, keep: int) -> None:
    """In its header, its vocabulary or its tensors."""
    path = models.write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    refused(evaluator, path, errors.ModelCorrupt, r"model\.gguf: cannot be read as GGUF \(")


def test_a_gguf_file_is_read_apart_from_its_neighbours(evaluator: Evaluator, tmp_path: Path) -> None:
    """A configuration and a tokenizer of another family beside it change nothing."""
    (tmp_path / "alone").mkdir()
    alone = models.write_gguf(tmp_path / "alone" / "model.gguf")
    expected = evaluator.run(alone, "then the hat")
    crowd = models.write_char_tokenizer(models.write_position_model(tmp_path / "crowd", models.position_table()))
    other = Evaluator(tmp_path / "other")
    other.directory.mkdir()
    result = other.run(models.write_gguf(crowd / "model.gguf"), "then the hat")

    assert "llama" == result.plan.manifest.model_type
    assert expected.plan == result.plan
    assert expected.partials == result.partials


def test_a_gguf_file_is_converted_once(evaluator: Evaluator, tmp_path: Path) -> None:
    """Also when two jobs ask for it at the same time."""
    path = models.write_gguf(tmp_path / "model.gguf")
    notes: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: from_gguf(path, evaluator.cache, notes.append), range(2)))

    assert found[0] == found[1]
    assert ["converting the GGUF file to safetensors (once)"] == notes
    assert (found[0] / "model.safetensors").exists()


def test_a_hub_that_cannot_be_reached(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, tokenizer and dataset alike: what the library says is cut to one line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(
        evaluator, {"source": "hub:nobody/nothing"}, errors.ModelNotFound, r"model hub:nobody/nothing: cannot be loaded"
    )
    spec = parse_spec({"model": "m", "dataset": "hub:nobody/nothing"}, where="test")
    with pytest.raises(
        errors.DatasetNotFound, match=r"dataset hub:nobody/nothing: cannot be loaded on this node"
    ) as caught:
        documents.find(spec.dataset, None)

    assert "\n" not in str(caught.value)


ASK = """
import sys, time
from pathlib import Path
import datasets, transformers
from eval_kernel import conversion, documents, errors
from eval_kernel.spec import DatasetSpec
start = time.monotonic()
for what in (
    lambda: conversion.from_hub("nobody/nothing", None, str, weights=True),
    lambda: documents.find(DatasetSpec(source=("hub:nobody/nothing",)), None),
):
    try:
        what()
    except (errors.ModelNotFound, errors.DatasetNotFound) as error:
        print(error)
print(time.monotonic() - start)
"""


def test_a_hub_that_does_not_answer_is_not_asked_again(tmp_path: Path) -> None:
    """Nothing listens at the address: one line each, none of it from the libraries, long before their last retry."""
    closed = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env={**os.environ, **closed}, capture_output=True, text=True, timeout=300
    )
    model, dataset, seconds = done.stdout.splitlines()

    assert "" == done.stderr
    assert model.startswith("model hub:nobody/nothing: cannot be loaded on this node (")
    assert dataset.startswith("dataset hub:nobody/nothing: cannot be loaded on this node (")
    assert 15 > float(seconds)
