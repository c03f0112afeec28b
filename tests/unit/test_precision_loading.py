"""Models in a plan's precision: streamed from files, equal to what transformers loads, packs shared and mended."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eval_kernel import checkpoint
from eval_kernel.errors import ModelNotFinite
from eval_kernel.precision import canonical, loading, packs, search, skeleton
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.modules import QuantisedEmbedding, QuantisedLinear
from eval_kernel.precision.plan import PrecisionPlan, resolve
from eval_kernel.precision.policy import as_spec, label_of
from eval_kernel.spec import ModelSpec, parse_spec
from tests.support.precision import gemma, gpt2, llama, logits, mixtral, write

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def opened(directory: Path, precision: Any, cache: Path) -> tuple[checkpoint.Checkpoint, PrecisionPlan, str]:
    """A checkpoint, the plan of a precision for it, and the digest of its weights."""
    found = checkpoint.find(ModelSpec(source=str(directory)), None, cache, lambda text: None)
    spec = parse_spec({"model": "m", "dataset": "d", "precision": precision}, where="job")
    outline = skeleton.build(found, torch.float32).outline
    made = resolve(as_spec(spec.precision), outline, label_of(spec.precision))
    return found, made, checkpoint.weights_digest(found, cache)


def loaded(directory: Path, precision: Any, cache: Path, notes: list[str] | None = None) -> loading.Loaded:
    """Load a model in a precision."""
    found, made, digest = opened(directory, precision, cache)
    return loading.load(found, digest, made, CPU, cache, [].append if notes is None else notes.append)


@pytest.mark.parametrize("make", [llama, gpt2, gemma, mixtral])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_floats_are_those_of_transformers(make: Any, name: str, tmp_path: Path) -> None:
    """Same logits, bit for bit, and the module is on no meta device any more."""
    directory = write(tmp_path / "m", make())
    module = loaded(directory, {"float32": "fp32", "bfloat16": "bf16"}[name], tmp_path).module
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, name)).eval()

    assert torch.equal(logits(expected), logits(module))
    assert {"cpu"} == {t.device.type for t in [*module.parameters(), *module.buffers()]}


@pytest.mark.parametrize("make", [llama, gpt2, gemma, mixtral])
@pytest.mark.parametrize(
    "precision",
    [
        "int8",
        "int4-g32",
        {"default": "int8-g32", "embedding": "int8"},
        {"default": "fp32", "head": "int8-g64"},
        "brief",
    ],
)
def test_quantised_layers_equal_a_float_model_with_the_dequantised_weights(
    make: Any, precision: Any, tmp_path: Path
) -> None:
    """Every architecture, streamed or not, tied or untied: what is quantised is what the plan says and nothing else."""
    directory = write(tmp_path / "m", make())
    found, plan, digest = opened(directory, precision, tmp_path)
    module = loading.load(found, digest, plan, CPU, tmp_path, lambda text: None).module
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    pack = packs.read(packs.pack_path(tmp_path, digest, plan), plan)
    if plan.untied:
        head = expected.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for name, weight in pack.weights.items():
        values = canonical.dequantised(weight)
        place = expected.get_parameter(name)
        with torch.no_grad():
            place.copy_(values.t() if place.shape != values.shape or _is_conv(expected, name) else values)

    assert {t.name for t in plan.tensors if t.quantised} == set(pack.weights)
    layers = [t for t in plan.tensors if t.kind == "matrix" and t.role in ("attention", "mlp")]
    assert 4 <= len(layers)
    if precision in ("int8", "int4-g32"):
        assert {precision} == {t.format for t in layers}
    assert torch.allclose(logits(expected), logits(module), atol=2e-5)


def _is_conv(module: Any, name: str) -> bool:
    return type(module.get_submodule(name.rpartition(".")[0])).__name__ == "Conv1D"


def test_a_tied_table_is_one_tensor_in_memory(tmp_path: Path) -> None:
    """Embedding and head share the quantised values."""
    module = loaded(write(tmp_path / "m", llama()), {"default": "fp32", "embedding": "int8"}, tmp_path).module
    table, head = module.get_input_embeddings(), module.get_output_embeddings()

    assert isinstance(table, QuantisedEmbedding)
    assert isinstance(head, QuantisedLinear)
    assert table.quantised.values.data_ptr() == head.quantised.values.data_ptr()


def test_two_different_tables_are_not_tied_whatever_the_configuration_says(tmp_path: Path) -> None:
    """As transformers does; an equal copy under the head's name is the same table."""
    directory = write(tmp_path / "m", llama(tied=False))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    module = loaded(directory, "fp32", tmp_path).module
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    assert torch.equal(logits(expected), logits(module))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert opened(directory, "fp32", tmp_path)[1].tied


def test_mixed_floats_compute_in_the_wider(tmp_path: Path) -> None:
    """bf16 weights in a float32 model give the logits of the weights rounded to bf16."""
    directory = write(tmp_path / "m", llama())
    module = loaded(directory, {"default": "bf16", "compute": "fp32"}, tmp_path).module
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in expected.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())

    assert torch.allclose(logits(expected), logits(module), atol=1e-6)
    used = loading.used(module, opened(directory, {"default": "bf16", "compute": "fp32"}, tmp_path)[1], {})
    assert "8 x bfloat16 weights, float32 products" == used["attention"]


def test_what_is_used_is_read_off_the_modules(tmp_path: Path) -> None:
    """Formats with their counts, by class."""
    directory = write(tmp_path / "m", llama())
    precision = {"default": "int8", "mlp": "int4-g32", "embedding": "int8"}
    module = loaded(directory, precision, tmp_path).module
    used = loading.used(module, opened(directory, precision, tmp_path)[1], {})

    assert {
        "attention": "8 x int8 weights, float32 products (dequantised)",
        "mlp": "6 x int4-g32 weights, float32 products (dequantised)",
        "embedding": "1 x int8 table",
    } == used


# ---------------------------------------------------------------- packs


def test_a_pack_does_not_depend_on_how_the_weights_were_read(tmp_path: Path) -> None:
    """Files in one piece or in two, streamed or through transformers: one digest."""
    directory = write(tmp_path / "one", llama())
    first = loaded(directory, "int4-g64", tmp_path / "c1").digest
    weights = load_file(directory / "model.safetensors")
    split = write(tmp_path / "two", llama())
    (split / "model.safetensors").unlink()
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({n: weights[n] for n in members}, split / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {n: file for file, members in halves.items() for n in members}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    second = loaded(split, "int4-g64", tmp_path / "c2")

    assert second.streamed
    assert first == second.digest


def test_a_pack_is_made_once(tmp_path: Path) -> None:
    """The second load reads it; another plan has its own."""
    directory, notes = write(tmp_path / "m", llama()), list[str]()
    digests = {loaded(directory, "int8", tmp_path, notes).digest for _ in range(2)}

    assert 1 == len(digests)
    assert ["quantising the weights (once)"] == notes
    assert digests.isdisjoint({loaded(directory, "int8-g32", tmp_path).digest})
    assert 2 == len(list((tmp_path / "precision").glob("*.safetensors")))


@pytest.mark.parametrize("damage", ["byte", "cut", "header", "empty", "digest"])
def test_a_damaged_pack_is_made_again(damage: str, tmp_path: Path) -> None:
    """Any byte counts, and the note says what was wrong."""
    directory, notes = write(tmp_path / "m", llama()), list[str]()
    digest = loaded(directory, "int8", tmp_path).digest
    (path,) = (tmp_path / "precision").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "byte":
        data[-9] ^= 1
    elif damage == "digest":
        at = data.index(digest.encode())
        data[at + 8] = ord("0") if data[at + 8] != ord("0") else ord("1")
    elif damage == "header":
        data[9:40] = b"\xff" * 31
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b""}.get(damage, data))

    assert digest == loaded(directory, "int8", tmp_path, notes).digest
    assert [True, True] == ["it is made again" in notes[0], notes[1] == "quantising the weights (once)"]
    assert digest == loaded(directory, "int8", tmp_path).digest


def _load_in_child(directory: str, cache: str, answers: Any) -> None:
    notes: list[str] = []
    answers.put((loaded(Path(directory), "int4-g32", Path(cache), notes).digest, len(notes)))


def test_processes_share_a_pack(tmp_path: Path) -> None:
    """Two that start together: one makes it, both read the same."""
    directory = write(tmp_path / "m", llama())
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    children = [
        context.Process(target=_load_in_child, args=(str(directory), str(tmp_path / "c"), answers)) for _ in range(2)
    ]
    try:
        for child in children:
            child.start()
        got = [answers.get(timeout=120) for _ in children]
    finally:
        for child in children:
            child.join(60)
            child.kill()

    assert 1 == len({digest for digest, _ in got})
    assert [0, 1] == sorted(count for _, count in got)


def test_a_weight_that_is_not_finite_is_found_while_it_is_quantised(tmp_path: Path) -> None:
    """Named with its place, whatever its format; no pack is left behind."""
    directory = write(tmp_path / "m", llama())
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][70, 5] = math.inf
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    for precision in ("int8", "fp32", "bf16"):
        with pytest.raises(ModelNotFinite, match=r"model.layers.1.mlp.up_proj.weight\[70, 5\] is inf"):
            loaded(directory, precision, tmp_path)
    assert [] == list((tmp_path / "precision").glob("*safetensors"))


def test_quantised_bytes_are_those_of_the_definition(tmp_path: Path) -> None:
    """What is in the pack is what ``search.quantise`` makes of the checkpoint's tensor."""
    directory = write(tmp_path / "m", llama(), torch.bfloat16)
    _, plan, digest = opened(directory, "int4-g64", tmp_path)
    loaded(directory, "int4-g64", tmp_path)
    pack = packs.read(packs.pack_path(tmp_path, digest, plan), plan)
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = search.quantise(weights[name].float(), FORMATS["int4-g64"], "mse")

    assert expected.digest() == pack.weights[name].digest()
