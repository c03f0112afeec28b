"""The command line in this process: exit codes, one line of error, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import structlog

from coordinator import cli
from coordinator.commands import jobs, nodes
from coordinator.commands.common import Answers
from coordinator.commands.serve import configure_log
from coordinator.status import Failure, JobState, JobStatus, NodeProgress, NodeState, NodeStatus
from eval_kernel import __version__, errors


def every_error(root: type[errors.FedevalError] = errors.FedevalError) -> list[type[errors.FedevalError]]:
    """Return every class of the tree."""
    return [root, *(found for child in root.__subclasses__() for found in every_error(child))]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_each_error_is_one_line_and_its_own_exit_code(
    kind: type[errors.FedevalError], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever error a command meets, its text is on one line of standard error and its class gives the code."""

    def fail(*_: object, **__: object) -> None:
        raise kind("what is\nwrong")

    monkeypatch.setattr(jobs, "call", fail)
    code = cli.run(["jobs"])
    written = capsys.readouterr()

    assert kind.exit_code == code != 0
    assert "eval-coordinator: error: what is wrong\n" == written.err
    assert "" == written.out


def test_a_fault_of_the_program_is_one_line_without_escapes_and_code_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in an error's text steers the terminal."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("odd \x1b[31mred\nthing")

    monkeypatch.setattr(jobs, "call", fail)

    assert 70 == cli.run(["jobs"])
    written = capsys.readouterr().err
    assert "RuntimeError: odd ?[31mred thing; please report it\n" in written
    assert 1 == written.count("\n")


def test_no_help_shows_a_function_for_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults that are computed are told in words."""
    for command in ("serve", "check"):
        assert 0 == cli.run([command, "--help"])
        written = capsys.readouterr().out

        assert "<function" not in written
        assert "$XDG_DATA_HOME" in written


def test_a_coordinator_that_stops_to_answer_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each silence is told once, however many tries it lasts."""
    answers = Answers("127.0.0.1:1")
    silent = [answers.silent]
    silence = errors.Unreachable("nobody")
    for heard in (None, silence, silence, None, silence):
        answers(heard)
        silent.append(answers.silent)

    assert [True, False, True, True, False, True] == silent
    assert 2 * "eval-coordinator: the coordinator at 127.0.0.1:1 does not answer; trying again\n" == (
        capsys.readouterr().err
    )


def test_nothing_in_the_log_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Reasons that agents give are shown without what a terminal would obey."""
    try:
        configure_log(as_json=False)
        structlog.get_logger("test").info("job failed", reason="odd \x1b[31mred")
    finally:
        structlog.reset_defaults()
    written = capsys.readouterr().err

    assert "odd ?[31mred" in written
    assert "\x1b" not in written


def test_an_interrupt_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C gives the shell's own code."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "call", interrupt)

    assert cli.INTERRUPTED == cli.run(["jobs"])
    assert "" == capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """--version needs no command."""
    assert 0 == cli.run(["--version"])
    assert f"eval-coordinator {__version__}\n" == capsys.readouterr().out


def test_without_a_command_the_help_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten commands, and the code of a wrong command line."""
    assert 2 == cli.run([])
    written = capsys.readouterr().out
    for command in ("serve", "submit", "watch", "wait", "jobs", "nodes", "report", "cancel", "check", "demo"):
        assert f"\n  {command} " in written


def test_a_job_explains_itself() -> None:
    """The failure where there is one, the reasons where it waits, and a word where all goes well."""
    base: dict[str, object] = dict.fromkeys(JobStatus.__slots__)
    running = JobStatus(**{**base, "state": JobState.RUNNING, "waiting": ()})  # type: ignore[arg-type]
    waiting = JobStatus(**{**base, "state": JobState.RUNNING, "waiting": ("a", "b")})  # type: ignore[arg-type]
    failure = Failure("CODE", "why")
    failed = JobStatus(**{**base, "state": JobState.FAILED, "waiting": (), "failure": failure})  # type: ignore[arg-type]
    done = JobStatus(**{**base, "state": JobState.SUCCEEDED, "waiting": ()})  # type: ignore[arg-type]

    assert ["nothing is in its way"] == jobs.explanation(running)
    assert ["a", "b"] == jobs.explanation(waiting)
    assert ["CODE: why"] == jobs.explanation(failed)
    assert ["why"] == jobs.explanation(replace(failed, failure=Failure("CANCELLED", "why")))
    assert [] == jobs.explanation(done)


def test_explain_says_how_a_model_lies_on_several_ranks() -> None:
    """One line for each node that has a layout, none for the others."""
    group = NodeProgress("group", NodeState.ACTIVE, 1, 10, 5.0, 1, "scoring", "2 replicas: they fit")
    nodes = (group, replace(group, node="plain", layout=""))
    base: dict[str, object] = dict.fromkeys(JobStatus.__slots__)

    assert ["agent group: 2 replicas: they fit"] == jobs.layouts(JobStatus(**{**base, "nodes": nodes}))  # type: ignore[arg-type]


def test_the_coordinator_needs_nothing_of_the_agents() -> None:
    """Every module of the coordinator can be imported where torch and its kin are missing."""
    code = """
import importlib, pkgutil, sys
class Missing:
    names = {"torch", "torchao", "transformers", "tokenizers", "safetensors", "gguf", "datasets", "numpy", "psutil"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import coordinator
for module in pkgutil.walk_packages(coordinator.__path__, "coordinator."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert (0, "") == (result.returncode, result.stderr)


def test_a_node_whose_devices_cannot_be_seen_is_degraded_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """NVML failed: the node is no plain CPU node."""
    base: dict[str, object] = dict.fromkeys(NodeStatus.__slots__, "")
    base.update(silence_seconds=0.0, shards_done=0, tokens_per_second=0.0, held=(), state=NodeState.ACTIVE)
    reason = "NVML fails (driver/library version mismatch): run nvidia-smi"
    sick = NodeStatus(**{**base, "node": "sick", "capabilities_json": json.dumps({"degraded": [reason]})})  # type: ignore[arg-type]
    well = NodeStatus(**{**base, "node": "well", "capabilities_json": '{"degraded": []}'})  # type: ignore[arg-type]
    monkeypatch.setattr(nodes, "call", lambda *_: [sick, well])

    assert 0 == cli.run(["nodes"])
    out = capsys.readouterr().out
    assert f"sick is degraded: {reason}" in " ".join(out.split())
    assert 1 == out.count("DEGRADED")
    assert 1 == out.count(NodeState.ACTIVE.value)
    assert [reason] == sick.to_json()["degraded"]
