"""Model files on disk: found, checked and digested before a single weight is used. Loading is ``model``'s business.

Accepts a directory of safetensors, a GGUF file (converted once to safetensors, in the cache) and ``hub:owner/name``.
Never unpickles and never runs code from a model's repository.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from eval_kernel.cachedir import remembered
from eval_kernel.conversion import from_gguf, from_hub, without_reports
from eval_kernel.errors import ModelCorrupt, ModelNeedsCode, ModelNotFound, ModelUnsupported, reason
from eval_kernel.plan import digest_json
from eval_kernel.roots import Roots, allowed
from eval_kernel.spec import ModelSpec

#: Safetensors names of the float formats a checkpoint may hold, and ours for them.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Bits of one element in safetensors' formats; of an unknown one the length is not checked.
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
#: A header beyond this is no safetensors header (the format's own limit).
MAX_HEADER = 100_000_000
#: config.json keys, by several families' names, of the number of layers and of the widths that some tensor shows.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "vocab_size")
#: config.json keys that say where a model came from or what wrote it, not what it computes.
_INCIDENTAL = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "use_cache",
    "_commit_hash",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: file, byte range in the file, dtype (safetensors' name) and shape."""

    file: Path
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose files are whole: all tensors that the index names are there, in full."""

    directory: Path
    tokenizer: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    vocabulary: int  # token ids the model knows: 0 .. vocabulary-1
    max_context: int | None  # positions the model was made for, where it states them

    @property
    def dtype(self) -> str:
        """The float dtype most of the weights are stored in, by elements ("float32", ...)."""
        sizes: Counter[str] = Counter()
        for info in self.tensors.values():
            if info.dtype in FLOATS:
                sizes[FLOATS[info.dtype]] += prod(info.shape)
        return sizes.most_common(1)[0][0] if sizes else "float32"

    @property
    def num_parameters(self) -> int:
        """Elements of all stored tensors (a tied head is stored, and counted, once)."""
        return sum(prod(info.shape) for info in self.tensors.values())


def find(spec: ModelSpec, roots: Roots, cache: Path, note: Callable[[str], None]) -> Checkpoint:
    """Locate a model and check its files. Raises the ``Model...`` errors, ``PathRefused`` and ``DirectoryUnusable``."""
    directory = _directory(spec.source, spec.revision, roots, cache, note, weights=True)
    tokenizer = directory if spec.tokenizer is None else find_tokenizer(spec, roots, cache, note)
    config = _config(directory)
    tensors = _tensors(directory)
    _check_sizes(directory, tensors, config)
    text = _parsed(directory, config)
    _check_layers(directory, tensors, text)
    return Checkpoint(directory, tokenizer, config, tensors, int(text.vocab_size), _longest(directory, text))


def find_tokenizer(spec: ModelSpec, roots: Roots, cache: Path, note: Callable[[str], None]) -> Path:
    """Locate a model's tokenizer, and check nothing of the model. Raises as ``find``."""
    source, revision = (spec.source, spec.revision) if spec.tokenizer is None else (spec.tokenizer, None)
    return _directory(source, revision, roots, cache, note, weights=False)


def _directory(
    source: str,
    revision: str | None,
    roots: Roots,
    cache: Path,
    note: Callable[[str], None],
    *,
    weights: bool,
) -> Path:
    if source.startswith("hub:"):
        return from_hub(source.removeprefix("hub:"), revision, note, weights=weights)
    path = allowed(Path(source), roots)
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:
        raise ModelNotFound(
            f"model {source}: cannot be read on this node ({error.strerror}); check the path and its permissions"
        ) from None
    if is_file and path.suffix.lower() == ".gguf":
        return from_gguf(path, cache, note)
    if is_directory:
        return path
    if is_file:
        raise ModelUnsupported(
            f"model {source}: a single file must be a .gguf; for safetensors give the directory that holds config.json"
        )
    raise ModelNotFound(
        f"model {source}: no such file or directory on this node; give a path that exists here, or hub:owner/name"
    )


# ---------------------------------------------------------------- config and safetensors


def _config(directory: Path) -> dict[str, Any]:
    """Return config.json as it stands, of a kind of model that can be scored."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(
            f"model {directory}: no config.json in it; give the directory of a transformers model"
        ) from None
    except OSError as error:
        raise ModelNotFound(
            f"model {path}: cannot be read on this node ({error.strerror}); check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ModelCorrupt(f"model {path}: cannot be read as JSON ({reason(error)}); copy it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelCorrupt(f"model {path}: has no model_type; give the directory of a transformers model")
    from transformers import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise ModelNeedsCode(
                f"model {directory}: model_type {config['model_type']!r} needs Python code from its repository "
                "(auto_map), which is never run; use a model that transformers knows"
            )
        raise ModelUnsupported(
            f"model {directory}: model_type {config['model_type']!r} is unknown to the installed transformers "
            f"({version('transformers')}); install a newer one or use another model"
        )
    if "quantization_config" in config:
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        raise ModelUnsupported(
            f"model {directory}: its weights are quantised ({method}); give the unquantised model, or a GGUF file"
        )
    return config


def _parsed(directory: Path, config: dict[str, Any]) -> Any:
    """Return what transformers makes of the part of config.json that describes the language model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    path = directory / "config.json"
    try:
        with without_reports():
            parsed = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        text = parsed.get_text_config()
        vocabulary = int(text.vocab_size)
    except Exception as error:  # noqa: BLE001 - a wrong type or value anywhere in the file gives an error of its own type
        raise ModelCorrupt(f"model {path}: transformers refuses it ({reason(error)}); copy it again") from None
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING or vocabulary < 1:
        raise ModelUnsupported(
            f"model {directory}: a {config['model_type']} is no causal language model: it cannot predict the next token"
        )
    return text


def _longest(directory: Path, config: Any) -> int | None:
    """The positions a model was made for, where its configuration has them."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    if type(limit) is not int or limit < 1:
        raise ModelCorrupt(
            f"model {directory / 'config.json'}: max_position_embeddings is {str(limit)[:24]}, not a number of tokens; "
            "copy it again"
        )
    return limit


def _tensors(directory: Path) -> dict[str, TensorInfo]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            files = sorted(set(weight_map.values()))
            if not all(isinstance(name, str) for name in files):
                raise TypeError("a file's name is not a string")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(
                f"model {index}: cannot be read as an index of shards ({reason(error)}); copy it again"
            ) from None
    else:
        weight_map = {}
        files = ["model.safetensors"] if (directory / "model.safetensors").exists() else []
    if not files:
        pickles = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
        if pickles:
            raise ModelUnsupported(
                f"model {directory}: its weights are pickles ({pickles[0]}), which are never loaded; "
                "convert them to safetensors"
            )
        if (directory / "model.safetensors").is_symlink():
            raise ModelNotFound(
                f"model {directory}: model.safetensors is a link that leads to no file; put the file itself there"
            )
        raise ModelNotFound(
            f"model {directory}: no model.safetensors and no model.safetensors.index.json in it; "
            "put the weights beside config.json"
        )
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        if Path(name).name != name:
            raise ModelCorrupt(f"model {index}: {name!r} is not the name of a file beside it; copy it again")
        if not (directory / name).exists():
            raise ModelCorrupt(f"model {directory}: the index names {name}, which is missing; copy it again")
        tensors.update(read_header(directory / name))
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise ModelCorrupt(
            f"model {directory}: the index names the tensor {lost[0]}, which no file holds ({len(lost)} such); "
            "copy the model again"
        )
    return tensors


def _check_sizes(directory: Path, tensors: dict[str, TensorInfo], config: dict[str, Any]) -> None:
    """Refuse sizes that no model with these tensors can have, before anything is made in those sizes.

    Every layer has a tensor of its own, and every width is a side of one.
    """
    side = max((max(info.shape, default=0) for info in tensors.values()), default=0)
    limits = (
        (_LAYERS, len(tensors), f"the weights are {len(tensors)} tensors"),
        (_WIDTHS, side, f"no side of a tensor is longer than {side}"),
    )
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for keys, limit, fact in limits:
            for key in keys:
                value = part.get(key)
                if isinstance(value, (int, float)) and value > limit:
                    raise ModelCorrupt(
                        f"model {directory}: config.json says {key} {str(value)[:24]}, but {fact}; "
                        "put the config.json that belongs to them beside them"
                    )


def _check_layers(directory: Path, tensors: dict[str, TensorInfo], config: Any) -> None:
    """Refuse a checkpoint with more layers than its configuration says: the rest would be left out without a word."""
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    # Layers that draft several tokens ahead come after the others and take no part in scoring.
    drafting = getattr(config, "num_nextn_predict_layers", None) or 0
    for name in sorted(tensors):
        found = re.match(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.", name)
        if found and int(found[1]) >= layers + drafting:
            raise ModelCorrupt(
                f"model {directory}: config.json says {layers} layers, but the weights have {name}; "
                "put the config.json that belongs to them beside them"
            )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file. Raises ``ModelCorrupt`` when header and file length disagree.

    Format: 8 bytes little-endian header length, JSON header, tensor data (https://github.com/huggingface/safetensors).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
                raise ModelCorrupt(
                    f"model {path}: no safetensors file, or cut off in its header ({size} bytes); copy the file again"
                )
            raw = file.read(length)
    except OSError as error:
        raise ModelNotFound(
            f"model {path}: cannot be read on this node ({error.strerror}); check the path and its permissions"
        ) from None
    base = 8 + length
    try:
        tensors = {name: _tensor(path, base, e) for name, e in json.loads(raw).items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelCorrupt(
            f"model {path}: its safetensors header is damaged ({reason(error)}); copy the file again"
        ) from None
    expected = max((t.end for t in tensors.values()), default=base)
    if expected != size:
        verb = "cut off" if size < expected else "too long"
        raise ModelCorrupt(f"model {path}: {verb}: {size} bytes, its header says {expected}; copy the file again")
    return tensors


def _tensor(path: Path, base: int, entry: dict[str, Any]) -> TensorInfo:
    start, end = (int(x) for x in entry["data_offsets"])
    shape = tuple(int(x) for x in entry["shape"])
    bits = BITS.get(entry["dtype"])
    if min(start, end - start, *shape, 0) < 0 or (bits is not None and prod(shape) * bits != (end - start) * 8):
        raise ValueError(f"{entry['dtype']} of shape {list(shape)} in bytes {start} to {end}")
    return TensorInfo(path, base + start, base + end, entry["dtype"], shape)


# ---------------------------------------------------------------- digests


def weights_digest(checkpoint: Checkpoint, cache: Path) -> str:
    """Digest of what the model computes with: every tensor's name, dtype, shape and bytes, and the configuration.

    Independent of how the tensors are spread over files. Remembered by path, size and time of change.
    """
    try:
        content = remembered(
            cache, sorted({t.file for t in checkpoint.tensors.values()}), lambda: _content_digest(checkpoint)
        )
    except OSError as error:
        raise ModelNotFound(
            f"model {checkpoint.directory}: cannot be read on this node ({error.strerror}); "
            "check the path and its permissions"
        ) from None
    config = {k: v for k, v in checkpoint.config.items() if k not in _INCIDENTAL}
    return digest_json([content, config])


def _content_digest(checkpoint: Checkpoint) -> str:
    total = hashlib.sha256()
    maps: dict[Path, mmap.mmap] = {}
    try:
        for name, info in sorted(checkpoint.tensors.items()):
            if info.file not in maps:
                with info.file.open("rb") as file:
                    maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with memoryview(maps[info.file]) as view, view[info.start : info.end] as data:
                total.update(json.dumps([name, info.dtype, info.shape]).encode() + hashlib.sha256(data).digest())
    finally:
        for mapped in maps.values():
            mapped.close()
    return "sha256:" + total.hexdigest()
