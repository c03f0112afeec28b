"""What every test starts from: a state home of its own, nobody's token; and servers started once, if a test asks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fedeval.wire.credentials import TOKEN_VARIABLE

if TYPE_CHECKING:
    from tests.support.postgres import PostgresServer


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


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL server that tests share: each has a journal of its own in it."""
    from tests.support.postgres import server_of_its_own  # only here: most runs of single files need no driver

    with server_of_its_own() as server:
        yield server
