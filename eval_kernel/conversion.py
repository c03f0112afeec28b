"""Models that are not yet a directory of safetensors: fetched from the Hub, or converted from GGUF into the cache.

What is in the directory is ``checkpoint``'s to judge.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from eval_kernel import hub
from eval_kernel.cachedir import locked, remembered, unusable
from eval_kernel.errors import ModelCorrupt, ModelNotFound, reason

#: Raised when the conversion of GGUF files changes.
GGUF_FORMAT = 1


def from_hub(name: str, revision: str | None, note: Callable[[str], None], *, weights: bool) -> Path:
    """Return the directory of a Hub model (without ``weights``: of its tokenizer). Raises ``ModelNotFound``."""
    from huggingface_hub import snapshot_download

    note(f"fetching {name} from the Hub")
    patterns = ["*.json", "tokenizer*", "*.model", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        with hub.briefly(name, "model", revision), without_reports():
            return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - a dozen unrelated types, all of which mean: not to be had here
        raise ModelNotFound(
            f"model hub:{name}: cannot be loaded on this node ({reason(error)}); "
            "check name, revision, token and network"
        ) from None


def from_gguf(path: Path, cache: Path, note: Callable[[str], None]) -> Path:
    """Convert a GGUF file to a float32 safetensors directory in the cache, once, and return the directory.

    Raises ``ModelCorrupt``, ``ModelNotFound`` and ``DirectoryUnusable``.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelCorrupt(
                    f"model {path}: not a GGUF file (it does not begin with the letters GGUF); "
                    "give a .gguf file, or the directory of a safetensors model"
                )
        digest = remembered(cache, [path], lambda: _file_digest(path)).removeprefix("sha256:")
    except OSError as error:
        raise ModelNotFound(
            f"model {path}: cannot be read on this node ({error.strerror}); check the path and its permissions"
        ) from None
    target = cache / "gguf" / f"{digest}-{GGUF_FORMAT}"
    try:
        with locked(target):
            if not target.exists():
                note("converting the GGUF file to safetensors (once)")
                # Under the lock: what an earlier try left behind when it was killed is nobody's.
                temp = target.with_name(f".new-{target.name}")
                shutil.rmtree(temp, ignore_errors=True)
                temp.mkdir()
                try:
                    _convert_gguf(path, temp)
                    temp.replace(target)
                finally:
                    shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        raise unusable(cache, error) from None
    return target


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def _convert_gguf(path: Path, target: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # In a directory of its own: transformers would mix in a config.json or tokenizer that lies beside the file.
    alone = target / "source"
    alone.mkdir()
    (alone / "model.gguf").symlink_to(path.absolute())
    try:
        # The GGUF reader draws a progress bar of its own, which nothing else turns off.
        with without_reports(), redirect_stderr(io.StringIO()):
            model, info = AutoModelForCausalLM.from_pretrained(
                str(alone),
                gguf_file="model.gguf",
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(alone), gguf_file="model.gguf", local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # noqa: BLE001 - errors of numpy, struct, missing keys: all mean damaged or unknown
        # Readers name the link that they were given, which is gone when the message is read.
        why = reason(error, str(alone / "model.gguf"), "it")
        raise ModelCorrupt(f"model {path}: cannot be read as GGUF ({why}); copy or convert it again") from None
    finally:
        shutil.rmtree(alone)
    if missing := sorted(info["missing_keys"]):
        raise ModelCorrupt(
            f"model {path}: lacks {len(missing)} weights, {missing[0]} among them; copy or convert it again"
        )
    # transformers refuses to save what came from GGUF; a plain model with the same weights it saves.
    config = type(model.config).from_dict(
        {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    )
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    try:
        with without_reports():
            plain.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except SafetensorError as error:  # how the library says that the disk is full
        raise OSError(f"{error}") from None


@contextmanager
def without_reports() -> Iterator[None]:
    """Keep transformers from printing bars and reports: what matters in them is checked here and told in one line."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
