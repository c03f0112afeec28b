"""What every test starts from: a state home of its own, and nobody's token in the environment."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from fedeval.wire.credentials import TOKEN_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def _own_state_home() -> Iterator[None]:
    """Coordinators publish their tokens there, also for the processes that tests start."""
    before = {name: os.environ.get(name) for name in ("XDG_STATE_HOME", TOKEN_VARIABLE)}
    os.environ.pop(TOKEN_VARIABLE, None)
    home = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fedeval-state-")
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    shutil.rmtree(home)
