"""`eval-agent` and `python -m eval_kernel` where something is missing, wrong or full: one line, the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent import cli
from eval_kernel import __main__ as kernel

#: Runs a command line in an interpreter that has only what `pip install fedeval` brings.
BARE = """
import runpy, sys
class Missing:
    names = {
        "torch", "torchao", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "datasets", "numpy",
        "psutil", "pynvml",
    }
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a module's command line without the extra."""
    return subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True, timeout=60, check=False)


def a_job(path: Path) -> str:
    """Return the file of a job whose form is right."""
    file = path / "job.yaml"
    file.write_text("model: hub:a/b\ndataset: hub:c/d\n")
    return str(file)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_agent_s_help_needs_no_extra(option: str) -> None:
    """Help and version work where only the coordinator's needs are installed."""
    done = bare("agent", option)

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout


@pytest.mark.parametrize("name", ["run", "probe", "check"])
def test_the_agent_without_the_extra_is_one_line(tmp_path: Path, name: str) -> None:
    """Each command names what to install, with the worker's exit code, and makes no directory."""
    state = ["--state", str(tmp_path / "s")] if name != "probe" else []
    done = bare("agent", name, *state, "--cache", str(tmp_path / "c"))
    (line,) = done.stderr.splitlines()

    assert (46, "") == (done.returncode, done.stdout)
    assert line.startswith("eval-agent: error: ")
    assert "pip install 'fedeval[agent]'" in line
    assert "pip install '.[agent]'" in line
    assert [] == list(tmp_path.iterdir())


def test_the_kernel_without_the_extra_is_one_line(tmp_path: Path) -> None:
    """The reference evaluator says what to install too."""
    done = bare("eval_kernel", a_job(tmp_path), "--cache", str(tmp_path / "c"))
    (line,) = done.stderr.splitlines()

    assert (46, "") == (done.returncode, done.stdout)
    assert line.startswith("eval_kernel: error: ")
    assert "pip install 'fedeval[agent]'" in line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--nope"], "no such option: --nope"),
        (["run", "--threads", "many"], "invalid value for '--threads'"),
        (["sprint"], "no such command 'sprint'"),
        (["run", "--role", "cook"], "'cook' is not one of"),
        (["run", "--device", "mps"], "allowed: auto, cpu, cuda, cuda:N"),
    ],
)
def test_a_usage_error_of_the_agent_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line is one line and exit code 2."""
    code = cli.run_command(words)
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()

    assert (2, "") == (code, shown.out)
    assert line.startswith("eval-agent: error: ")
    assert text in line


def test_a_fault_of_the_agent_itself_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An exception that nobody foresaw ends in exit code 70 and one line that names it and the file with the rest."""

    async def fail(*arguments: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(cli, "_live", fail)
    code = cli.run_command(["run", "--state", str(tmp_path), "--name", "a"])
    (line,) = capsys.readouterr().err.splitlines()

    assert 70 == code
    assert f"internal error (ZeroDivisionError: two lines); details are in {tmp_path / 'crash.log'}" in line
    assert "Traceback" in (tmp_path / "crash.log").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the following arguments are required: job"),
        (["job.yaml", "--nope"], "unrecognized arguments: --nope"),
        (["job.yaml", "--threads", "many"], "invalid int value: 'many'"),
        (["job.yaml", "--threads", "0"], "--threads is 0; allowed: 1 to 4096"),
        (["job.yaml", "--threads", "4097"], "--threads is 4097; allowed: 1 to 4096"),
        (["job.yaml", "--json", "."], "--json . is a directory; name a file"),
    ],
)
def test_a_usage_error_of_the_kernel_is_one_line(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line is found before any work: one line and exit code 2."""
    try:
        code: object = kernel.main(words)
    except SystemExit as ended:
        code = ended.code
    (line,) = capsys.readouterr().err.splitlines()

    assert 2 == code
    assert line.startswith("eval_kernel: error: ")
    assert text in line


@pytest.mark.parametrize("asked", [False, True])
def test_a_fault_of_the_kernel_itself_is_one_line(
    asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unforeseen exception is named in one line with exit code 70; a traceback comes only when asked for."""

    def fail(options: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(kernel, "_run", fail)
    monkeypatch.delenv(kernel.TRACEBACK_VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(kernel.TRACEBACK_VARIABLE, "1")
    code = kernel.main(["job.yaml"])
    lines = capsys.readouterr().err.splitlines()

    assert 70 == code
    assert "internal error (ZeroDivisionError: two lines)" in lines[-1]
    assert asked == (len(lines) > 1)


@pytest.mark.parametrize(
    ("module", "words"),
    [("agent", ["--help"]), ("eval_kernel", [])],
)
def test_an_output_that_takes_nothing_is_one_line(module: str, words: list[str], tmp_path: Path) -> None:
    """A full disk behind the standard output is said in one line, not in a traceback at exit."""
    code = (
        "import sys, eval_kernel.__main__ as k\n"
        "k._run = lambda options: print('x' * 10) or {'complete': True}\n"
        "sys.exit(k.main(['job.yaml']))"
    )
    command = ["-m", module, *words] if words else ["-c", code]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    (line,) = done.stderr.splitlines()

    assert 45 == done.returncode
    assert "the standard output cannot be written (No space left on device)" in line
