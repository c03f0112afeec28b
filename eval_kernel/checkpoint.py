"""Model files on disk: found, checked and digested before a single weight is used. Loading is ``model``'s business.

Accepts a directory of safetensors, a GGUF file (converted once to safetensors, in the cache) and ``hub:owner/name``.
Never unpickles and never runs code from a model's repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from eval_kernel.errors import (
    DirectoryUnusable,
    ModelCorrupt,
    ModelNeedsCode,
    ModelNotFound,
    ModelUnsupported,
    reason,
)
from eval_kernel.plan import digest_json
from eval_kernel.roots import Roots, allowed
from eval_kernel.spec import ModelSpec

#: Safetensors names of the float formats a checkpoint may hold, and ours for them.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: A header beyond this is no safetensors header (the format's own limit).
MAX_HEADER = 100_000_000
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
#: Raised when the conversion of GGUF files changes.
GGUF_FORMAT = 1


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

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model."""
        nested = self.config.get("text_config")
        return {**self.config, **nested} if isinstance(nested, dict) else self.config


def find(spec: ModelSpec, roots: Roots, cache: Path, note: Callable[[str], None]) -> Checkpoint:
    """Locate a model and check its files. Raises the ``Model...`` errors, ``PathRefused`` and ``DirectoryUnusable``."""
    directory = _directory(spec.source, spec.revision, roots, cache, note, weights=True)
    tokenizer = directory
    if spec.tokenizer is not None:
        tokenizer = _directory(spec.tokenizer, None, roots, cache, note, weights=False)
    config = _config(directory)
    return Checkpoint(directory, tokenizer, config, _tensors(directory))


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
        return _from_hub(source.removeprefix("hub:"), revision, note, weights=weights)
    path = allowed(Path(source), roots)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _from_gguf(path, cache, note)
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelUnsupported(
            f"model {source}: a single file must be a .gguf; for safetensors give the directory that holds config.json"
        )
    raise ModelNotFound(
        f"model {source}: no such file or directory on this node; give a path that exists here, or hub:owner/name"
    )


# ---------------------------------------------------------------- config and safetensors


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(
            f"model {directory}: no config.json in it; give the directory of a transformers model"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelCorrupt(f"model {path}: cannot be read as JSON ({reason(error)})") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelCorrupt(f"model {path}: has no model_type")
    from transformers import CONFIG_MAPPING

    if config["model_type"] not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise ModelNeedsCode(
                f"model {directory}: model_type {config['model_type']!r} needs Python code from its repository "
                "(auto_map), which is never run; use a model that transformers knows"
            )
        raise ModelUnsupported(
            f"model {directory}: model_type {config['model_type']!r} is unknown to the installed transformers"
        )
    return config


def _tensors(directory: Path) -> dict[str, TensorInfo]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(f"model {index}: cannot be read as an index of shards ({reason(error)})") from None
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
        raise ModelNotFound(f"model {directory}: no model.safetensors and no model.safetensors.index.json in it")
    tensors: dict[str, TensorInfo] = {}
    for name in files:
        if Path(name).name != name:
            raise ModelCorrupt(f"model {index}: {name!r} is not the name of a file beside it")
        if not (directory / name).exists():
            raise ModelCorrupt(f"model {directory}: the index names {name}, which is missing; copy it again")
        tensors.update(read_header(directory / name))
    lost = sorted(set(weight_map) - set(tensors))
    if lost:
        raise ModelCorrupt(
            f"model {directory}: the index names the tensor {lost[0]}, which no file holds ({len(lost)} such)"
        )
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file. Raises ``ModelCorrupt`` when header and file length disagree.

    Format: 8 bytes little-endian header length, JSON header, tensor data (https://github.com/huggingface/safetensors).
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
            raise ModelCorrupt(f"model {path}: not a safetensors file, or cut off in its header ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            entries = {k: v for k, v in header.items() if k != "__metadata__"}
            base = 8 + length
            tensors = {
                name: TensorInfo(
                    path,
                    base + e["data_offsets"][0],
                    base + e["data_offsets"][1],
                    e["dtype"],
                    tuple(e["shape"]),
                )
                for name, e in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise ModelCorrupt(f"model {path}: its safetensors header is damaged ({reason(error)})") from None
    expected = max((t.end for t in tensors.values()), default=base)
    if expected != size:
        verb = "cut off" if size < expected else "too long"
        raise ModelCorrupt(f"model {path}: {verb}: {size} bytes, its header says {expected}; copy the file again")
    return tensors


# ---------------------------------------------------------------- digests


def weights_digest(checkpoint: Checkpoint, cache: Path) -> str:
    """Digest of what the model computes with: every tensor's name, dtype, shape and bytes, and the configuration.

    Independent of how the tensors are spread over files. Remembered by path, size and time of change.
    """
    state = [
        [str(p), s.st_size, s.st_mtime_ns, s.st_ino]
        for p in sorted({t.file for t in checkpoint.tensors.values()})
        for s in [p.stat()]
    ]
    memo = cache / "digests" / hashlib.sha256(json.dumps([GGUF_FORMAT, state]).encode()).hexdigest()
    try:
        content = memo.read_text()
    except OSError:
        content = _content_digest(checkpoint)
        try:
            memo.parent.mkdir(parents=True, exist_ok=True)
            temp = memo.with_name(f"{memo.name}.{os.getpid()}")
            temp.write_text(content)
            temp.replace(memo)
        except OSError as error:
            raise DirectoryUnusable(
                f"the cache directory {cache} cannot be written ({error.strerror}): free space or choose another"
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


# ---------------------------------------------------------------- Hub and GGUF


def _from_hub(name: str, revision: str | None, note: Callable[[str], None], *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    note(f"fetching {name} from the Hub")
    patterns = ["*.json", "tokenizer*", "*.model", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - a dozen unrelated types, all of which mean: not to be had here
        raise ModelNotFound(
            f"model hub:{name}: cannot be loaded on this node ({reason(error)}); "
            "check name, revision, token and network"
        ) from None


def _from_gguf(path: Path, cache: Path, note: Callable[[str], None]) -> Path:
    """Convert a GGUF file to a float32 safetensors directory in the cache, once, and return the directory."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelCorrupt(f"model {path}: not a GGUF file (it does not begin with the letters GGUF)")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    home = cache / "gguf"
    target = home / f"{digest}-{GGUF_FORMAT}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                note("converting the GGUF file to safetensors (once)")
                temp = Path(tempfile.mkdtemp(prefix=".new-", dir=home))
                try:
                    _convert_gguf(path, temp)
                    temp.replace(target)
                finally:
                    shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        raise DirectoryUnusable(
            f"the cache directory {cache} cannot be used ({error.strerror}): free space or choose another"
        ) from None
    return target


def _convert_gguf(path: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - numpy's, struct's and missing keys' errors; all mean: damaged or unknown
        raise ModelCorrupt(
            f"model {path}: cannot be read as GGUF ({reason(error)}); copy or convert it again"
        ) from None
    # transformers refuses to save what came from GGUF; a plain model with the same weights it saves.
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(target, safe_serialization=True)
    tokenizer.save_pretrained(target)
