"""`eval-agent check --group` with real ranks: good here, and each failure is a line with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.cluster import MARK, ROOT, marked

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]


def check(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command; nothing that it started may be left."""
    mark = f"groupcheck-{os.getpid()}"
    command = [sys.executable, "-m", "agent", "check", "--group", "--device", "cpu", "--threads", "4", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: mark, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert {} == marked(mark)
    return done


def test_ranks_on_this_machine_agree_and_add_up_exactly() -> None:
    """Three ranks meet, sum exactly in every dtype, and both links have a speed and a delay."""
    done = check("--ranks", "3", "--json")
    found = json.loads(done.stdout)

    assert 0 == done.returncode, done.stdout + done.stderr
    names = ["environment", "drivers", "ranks", "versions", "all_reduce", "link, float64", "link, bfloat16", "shard"]
    assert names == [finding["name"] for finding in found["findings"]]
    assert "3 over gloo" in found["findings"][2]["detail"]


def test_a_group_that_cannot_form_fails_with_a_remedy() -> None:
    """An interface that is not there is named by the environment's line, and by the ranks'."""
    done = check(GLOO_SOCKET_IFNAME="nowhere0")

    assert 1 == done.returncode
    assert "FAIL  environment      GLOO_SOCKET_IFNAME=nowhere0: this machine has no such" in done.stdout
    assert "remedy: unset GLOO_SOCKET_IFNAME" in done.stdout
    assert "FAIL  ranks" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_more_ranks_than_threads_are_refused() -> None:
    """The line says how many there may be."""
    done = check("--ranks", "5")

    assert 1 == done.returncode
    assert "5 ranks need a thread each, and there are 4" in done.stdout
