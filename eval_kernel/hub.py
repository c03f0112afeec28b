"""The Hub, asked briefly: where it does not answer within seconds, only what was fetched earlier is looked at.

Keeps its libraries from telling of their retries: what failed is the caller's to say, in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

#: Seconds that the Hub has to answer the first question.
PATIENCE = 5.0
#: Libraries that write a line for each of their retries.
_TALKERS = ("huggingface_hub", "datasets")


@contextmanager
def briefly(name: str, kind: Literal["model", "dataset"], revision: str | None) -> Iterator[None]:
    """Within the block the Hub's libraries are silent, and do not try the network unless the Hub has just answered.

    They would try a Hub that cannot be reached for a minute; in their offline mode, both look into their caches only.
    Their switches are the process', so one thread at a time.
    """
    from huggingface_hub import constants

    switches: list[Any] = [constants]
    if kind == "dataset":
        import datasets

        switches.append(datasets.config)
    loggers = [logging.getLogger(talker) for talker in _TALKERS]
    levels, states = [logger.level for logger in loggers], [switch.HF_HUB_OFFLINE for switch in switches]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        if not _answers(name, kind, revision):
            for switch in switches:
                switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, state in zip(switches, states, strict=True):
            switch.HF_HUB_OFFLINE = state
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _answers(name: str, kind: str, revision: str | None) -> bool:
    """Whether the Hub says anything, be it no: then the libraries' own errors are to the point."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PATIENCE)
    except HfHubHTTPError:
        return True
    except Exception:  # noqa: BLE001 - no network, no name, no route: whatever it is, the call that follows tells it
        return False
    return True
