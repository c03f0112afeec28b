"""Planning by measurement, from the job file to the plan file and on to a job that uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from eval_kernel.errors import SpecError
from eval_kernel.precision.__main__ import main
from eval_kernel.precision.groups import read_sensitivity
from eval_kernel.precision.plan import PrecisionPlan, bytes_by_class
from eval_kernel.spec import load_spec
from tests.support.evaluations import Evaluator
from tests.support.models import ALPHABET
from tests.support.precision import llama, write

pytestmark = pytest.mark.torch

#: Windows are short and few, so that measuring and proving take seconds.
OPTIONS = ["--rows", "2", "--context", "48", "--proof", "6", "--threads", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return write(tmp_path_factory.mktemp("model") / "m", llama())


class Desk:
    """A directory with a job in it."""

    def __init__(self, directory: Path, model: Path, **changes: Any) -> None:
        self.directory = directory
        draws = np.random.default_rng(5).integers(0, 54, 6000)
        (directory / "text.txt").write_text("".join(ALPHABET[i] for i in draws))
        job = {
            "model": str(model),
            "dataset": "text.txt",
            "window": {"policy": "concat", "context": 64},
            **changes,
        }
        self.job = directory / "job.yaml"
        self.job.write_text(yaml.safe_dump(job))

    def plan(self, *options: str) -> int:
        """Run the command."""
        return main(["plan", str(self.job), *OPTIONS, "--cache", str(self.directory / "cache"), *options])

    def path(self, name: str) -> Path:
        """A file beside the job."""
        return self.directory / name


def test_a_budget_is_kept_and_the_plan_works_in_a_job(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan file goes under ``precision`` of a later job, which then has the bytes and the loss that were shown."""
    desk = Desk(tmp_path, model)
    assert 0 == desk.plan(
        "--budget", "30%", "--out", str(desk.path("plan.yaml")), "--sensitivity", str(desk.path("s.json"))
    )
    shown = capsys.readouterr().out
    text = desk.path("plan.yaml").read_text()
    job = yaml.safe_load(desk.job.read_text())
    desk.path("later.yaml").write_text(yaml.safe_dump({**job, "precision": yaml.safe_load(text)}))
    spec = load_spec(desk.path("later.yaml"))
    spec = spec.model_copy(update={"window": spec.window.model_copy(update={"max_windows": 6})})
    result = Evaluator(tmp_path / "later").score(spec)
    plan = PrecisionPlan.from_canonical(result.plan.manifest.precision_plan)
    total = bytes_by_class(plan)["total"]

    assert text in shown
    assert "auto, budget 30%" in shown
    assert f"{total['bytes']:,} bytes" in text
    assert total["bytes"] <= 0.3 * total["checkpoint"]
    perplexity = re.search(r"perplexity [\d.]+ -> ([\d.]+)", text)
    assert perplexity is not None
    assert f"{np.exp(result.nats_per_token):.4f}" == perplexity[1]


def test_sensitivities_are_measured_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any later budget reuses them; another format adds to them; half of them are completed."""
    desk = Desk(tmp_path, model)
    file = desk.path("s.json")
    assert 0 == desk.plan("--budget", "30%", "--sensitivity", str(file))
    first = read_sensitivity(file)
    capsys.readouterr()
    assert 0 == desk.plan("--budget", "50%", "--sensitivity", str(file))
    assert "measuring" not in capsys.readouterr().err
    data = json.loads(file.read_text())
    data["cells"].pop("layers.1.down")
    file.write_text(json.dumps(data))
    assert 0 == desk.plan("--budget", "50%", "--sensitivity", str(file))

    assert first == read_sensitivity(file)
    assert 0 == desk.plan("--budget", "50%", "--formats", "int8,int4-g32", "--sensitivity", str(file))
    assert {"bf16", "int8", "int4-g64", "int4-g32"} == set(read_sensitivity(file).cells["layers.0.o"])


def test_a_limit_is_proved_on_text_kept_apart(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The upper end of the measured interval stays below the limit; a wider limit needs no more bytes."""
    desk = Desk(tmp_path, model)
    sizes = []
    for limit in ("0.5%", "20%"):
        out = desk.path(f"{limit}.yaml")
        assert 0 == desk.plan("--max-ppl-increase", limit, "--out", str(out), "--sensitivity", str(desk.path("s.json")))
        text = out.read_text()
        high = re.search(r"\[[-+.\d]+, ([-+.\d]+)\] nats", text)
        size = re.search(r"# ([\d,]+) bytes", text)
        assert high is not None
        assert size is not None
        assert np.expm1(float(high[1])) <= float(limit.rstrip("%")) / 100
        sizes.append(int(size[1].replace(",", "")))

    assert sizes[1] <= sizes[0]
    assert "round 1" in capsys.readouterr().err


def test_plans_can_be_calibrated(model: Path, tmp_path: Path) -> None:
    """The plan then says so, and carries the calibration text."""
    draws = np.random.default_rng(77).integers(0, 54, 4000)
    (tmp_path / "other.txt").write_text("".join(ALPHABET[i] for i in draws))
    precision = {
        "budget": "25%",
        "quantiser": "gptq",
        "calibration": {"source": "other.txt", "context": 48, "windows": 8},
    }
    desk = Desk(tmp_path, model, precision=precision)
    assert 0 == desk.plan("--out", str(desk.path("plan.yaml")))
    mapping = yaml.safe_load(desk.path("plan.yaml").read_text())

    assert "gptq" == mapping["quantiser"]
    assert [str(tmp_path / "other.txt")] == list(mapping["calibration"]["source"])


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        ([], 2, ["give one of --budget and --max-ppl-increase"]),
        (["--budget", "40%", "--max-ppl-increase", "1%"], 2, ["give one of"]),
        (["--budget", "lots"], 2, ["--budget is 'lots'", "40%"]),
        (["--budget", "5%"], 19, ["a budget of 5.0%", "smallest plan", "raise the budget"]),
        (["--budget", "40%", "--formats", "int8,int5"], 2, ["no format 'int5'", "did you mean 'int8'"]),
        (["--budget", "40%", "--formats", "int8-dynamic"], 2, ["--formats", "formats of weights alone"]),
        (["--budget", "95%", "--formats", "int4-g128"], 0, []),
        (["--budget", "40%", "--context", "5000"], 21, ["less than one window of 5000"]),
        (["--budget", "40%", "--proof", "94"], 11, ["rows are text that this job evaluates"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    options: list[str],
    code: int,
    parts: list[str],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an exit code that says whose fault it is."""
    got = Desk(tmp_path, model).plan("--quiet", *options)
    error = capsys.readouterr().err

    assert code == got, error
    assert (code != 0) == error.count("\n")
    assert [] == [part for part in parts if part not in error], error


def test_sensitivities_of_another_model_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the digest of its weights."""
    desk = Desk(tmp_path, model)
    file = desk.path("s.json")
    assert 0 == desk.plan("--quiet", "--budget", "50%", "--sensitivity", str(file))
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "weights_digest": "sha256:other"}))

    assert 11 == desk.plan("--quiet", "--budget", "50%", "--sensitivity", str(file))
    assert "its weights_digest is sha256:other" in capsys.readouterr().err


def test_a_job_that_is_still_to_be_planned_says_how(model: Path, tmp_path: Path) -> None:
    """Formats are not guessed at submission."""
    desk = Desk(tmp_path, model, precision={"budget": "40%"})
    with pytest.raises(SpecError, match=r"python -m eval_kernel\.precision plan"):
        Evaluator(tmp_path / "e").score(load_spec(desk.job))
