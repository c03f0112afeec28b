"""Keeps libraries from printing what no user can act on; each line says what is silenced and why."""

from __future__ import annotations

import logging


def quiet() -> None:
    """Silence known chatter of torch and torchao at import; warnings about the user's own model and data stay."""
    # torchao tries its CUDA-only extensions on every machine and reports each that does not load.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    # torch 2.13 complains of torchao's way to register constants.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
