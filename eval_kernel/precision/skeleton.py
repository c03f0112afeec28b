"""A model without weights: its modules on the meta device, what each weight is for, and where the checkpoint has it.

Loading is ``loading``'s business, choosing formats ``plan``'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eval_kernel.checkpoint import Checkpoint, TensorInfo
from eval_kernel.conversion import without_reports
from eval_kernel.errors import ModelCorrupt, ModelUnsupported, reason
from eval_kernel.precision.plan import Outline, Weight

#: Words in a module's path that tell its role; the last one that occurs decides.
_ROLE_WORDS = (
    ("attention", ("attn", "attention", "self_attn", "self_attention", "linear_attn", "mixer")),
    ("mlp", ("mlp", "ffn", "feed_forward", "feedforward", "experts", "block_sparse_moe", "moe", "fc1", "fc2")),
)

#: Ends the class names of embeddings that multiply what they look up by their ``embed_scale`` (Gemma and others).
SCALED_EMBEDDING = "ScaledWordEmbedding"


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The modules of a model with parameters on the meta device and buffers in place.

    ``tensors`` tells where each parameter and stored buffer lies in the checkpoint; it is None when transformers has
    to convert the checkpoint (renamed, merged or missing tensors): then only transformers can load it.
    """

    module: Any
    outline: Outline
    tensors: dict[str, TensorInfo] | None


def build(checkpoint: Checkpoint, dtype: torch.dtype) -> Skeleton:
    """Build the modules. Raises ``ModelUnsupported`` and ``ModelCorrupt``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where = f"model {checkpoint.directory}"
    try:
        with without_reports(), _meta_parameters():
            config = AutoConfig.from_pretrained(
                str(checkpoint.directory), local_files_only=True, trust_remote_code=False
            )
            module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ImportError as error:
        raise ModelUnsupported(f"{where}: needs a library that is not installed here ({reason(error)})") from None
    except Exception as error:  # noqa: BLE001 - a value of the configuration that a model class cannot use raises anything
        raise ModelCorrupt(f"{where}: its config.json cannot be used ({reason(error)}); copy it again") from None
    module = module.eval().requires_grad_(False)
    tensors = _locate(module, checkpoint)
    tied = _tie(module, checkpoint, tensors)
    return Skeleton(module, _outline(module, checkpoint, tied), tensors)


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Parameters that are registered go to the meta device; buffers, which are computed, stay real."""
    original = torch.nn.Module.register_parameter

    def register(self: Any, name: str, parameter: Any) -> None:
        original(self, name, parameter)
        if parameter is not None and parameter.device.type != "meta":
            meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            meta.__dict__.update(parameter.__dict__)
            self._parameters[name] = meta

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


def _locate(module: Any, checkpoint: Checkpoint) -> dict[str, TensorInfo] | None:
    """Find each stored parameter and buffer by its name, with or without the base model's prefix; None if one lacks."""
    prefix = f"{module.base_model_prefix}."
    tied = set(getattr(module, "all_tied_weights_keys", None) or {})
    keep = getattr(module, "_keep_in_fp32_modules_strict", None) or getattr(module, "_keep_in_fp32_modules", None)
    if keep:
        return None  # some weights stay float32 in any precision: transformers knows which
    found: dict[str, TensorInfo] = {}
    for name, parameter in module.state_dict(keep_vars=True).items():
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            info = checkpoint.tensors.get(candidate)
            if info is not None and info.shape == tuple(parameter.shape):
                found[name] = info
                break
        else:
            if name not in tied:
                return None
    return found


def _tie(module: Any, checkpoint: Checkpoint, tensors: dict[str, TensorInfo] | None) -> bool:
    """Whether the head is the embedding's table. Where the checkpoint stores two different tables, it is not."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    if head is None or embedding is None or not isinstance(getattr(head, "weight", None), torch.Tensor):
        return False
    if head.weight is not embedding.weight:
        return False
    names = {id(m): n for n, m in module.named_modules()}
    own, table = f"{names[id(head)]}.weight", f"{names[id(embedding)]}.weight"
    if tensors is None or own not in tensors:
        return True
    if table not in tensors:  # stored under the head's name only: one table all the same
        tensors[table] = tensors.pop(own)
        return True
    if tensors[own] == tensors[table] or _same_bytes(tensors[own], tensors[table]):
        del tensors[own]
        return True
    head.weight = torch.nn.Parameter(torch.empty_like(head.weight), requires_grad=False)
    return False


def _same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    step = 1 << 22
    if a.end - a.start != b.end - b.start or a.dtype != b.dtype:
        return False
    with a.file.open("rb") as first, b.file.open("rb") as second:
        first.seek(a.start)
        second.seek(b.start)
        for done in range(0, a.end - a.start, step):
            size = min(step, a.end - a.start - done)
            if first.read(size) != second.read(size):
                return False
    return True


def _outline(module: Any, checkpoint: Checkpoint, tied: bool) -> Outline:
    """Say what each parameter is for. A parameter that two modules share is listed once, under its first name."""
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    names = {id(m): n for n, m in module.named_modules()}
    weights = []
    for name, parameter in module.named_parameters():  # shared ones once
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        kind = _kind(owner, attribute, parameter)
        if owner is embedding:
            role = "embedding"
        elif owner is head:
            role = "head" if kind == "matrix" else "vector"
        elif kind == "vector":
            role = "vector"
        else:
            role = role_of(owner_name)
        rows, columns = _shape(parameter, kind)
        transposed = type(owner).__name__ == "Conv1D"
        if kind == "matrix" and transposed:
            rows, columns = columns, rows
        weights.append(Weight(name, owner_name, role, kind, rows, columns, transposed))
    return Outline(
        tuple(weights),
        checkpoint.dtype,
        names.get(id(embedding), ""),
        names.get(id(head), "") if head is not None else "",
        tied,
    )


def _kind(owner: Any, attribute: str, parameter: Any) -> str:
    if attribute == "weight" and parameter.dim() == 2:
        if type(owner) is torch.nn.Embedding or type(owner).__name__.endswith(SCALED_EMBEDDING):
            return "table"
        if type(owner) is torch.nn.Linear or type(owner).__name__ == "Conv1D":
            return "matrix"
    # Anything else with two dimensions is used in ways that its module alone knows.
    return "vector" if parameter.dim() < 2 else "block"


def _shape(parameter: Any, kind: str) -> tuple[int, int]:
    if kind == "vector":
        return 1, parameter.numel()
    return parameter.numel() // parameter.shape[-1], parameter.shape[-1]


def role_of(module: str) -> str:
    """Return ``attention``, ``mlp`` or ``other``, from the words in a module's path."""
    for part in reversed(module.split(".")):
        for role, words in _ROLE_WORDS:
            if part in words or re.fullmatch(rf".*_({'|'.join(words)})", part):
                return role
    return "other"
