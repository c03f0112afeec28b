"""The job file: what is accepted, and the one line that says what is wrong with what is not."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from eval_kernel.errors import SpecError
from eval_kernel.precision.formats import FORMATS
from eval_kernel.precision.policy import PrecisionSpec
from eval_kernel.spec import JobSpec, absolute, load_spec, parse_spec
from eval_kernel.windows import Bos

JOB: dict[str, Any] = {"model": "m", "dataset": "d"}


def refusal(changes: dict[str, Any]) -> str:
    """The message with which a job with these changes is refused."""
    with pytest.raises(SpecError) as caught:
        parse_spec({**JOB, **changes}, where="job.yaml")
    return str(caught.value)


def test_an_element_that_is_refused_is_one_fault() -> None:
    """The list that then has no element left is not called empty as well."""
    assert "job.yaml: dataset.source.0 is 'a\\x00b': it must be one line without control characters" == refusal(
        {"dataset": ["a\0b"]}
    )


def test_a_message_names_the_first_faults_and_counts_the_rest() -> None:
    """However many keys are unknown, and however long they are."""
    message = refusal({f"{number}" + "x" * 1000: 1 for number in range(9)})

    assert message.endswith("; and 4 more")
    assert 1000 > len(message)


def test_what_the_yaml_reader_says_is_cut(tmp_path: Path) -> None:
    """An alias of a thousand letters is repeated in part."""
    path = tmp_path / "job.yaml"
    path.write_text(f"model: *{'x' * 1000}\n")
    with pytest.raises(SpecError, match=r"line 1: not valid YAML \(found undefined alias 'x+\.\.\.\)$") as caught:
        load_spec(path)

    assert 300 > len(str(caught.value)) - len(str(path))


def test_the_smallest_job_has_a_model_and_a_dataset() -> None:
    """Everything else has a default, and strings stand for sections."""
    spec = parse_spec(JOB, where="job.yaml")

    assert ("m", ("d",)) == (spec.model.source, spec.dataset.source)
    assert ("rolling", "model", "auto", "auto") == (
        spec.window.policy,
        spec.window.context,
        spec.window.bos,
        spec.precision,
    )


def test_shorthands_equal_what_they_stand_for() -> None:
    """A source, a list of sources and a policy may be written without their mapping."""
    short = parse_spec({"model": "m", "dataset": ["a", "b"], "window": "concat"}, where="job.yaml")
    long = parse_spec(
        {
            "model": {"source": "m"},
            "dataset": {"source": ["a", "b"]},
            "window": {"policy": "concat", "join": "\n\n"},
        },
        where="job.yaml",
    )

    assert long == short


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"modle": "x"}, ["unknown key 'modle'", "did you mean 'model'?"]),
        ({"window": {"polcy": "half"}}, ["unknown key 'window.polcy'", "did you mean 'policy'?"]),
        ({"dataset": {"source": "d", "fromat": "csv"}}, ["unknown key 'dataset.fromat'", "did you mean 'format'?"]),
        ({"zzz": 1}, ["unknown key 'zzz'", "allowed: name, model, dataset, window, precision, metrics, batch, shard"]),
        ({"model": {}}, ["the key 'model.source' is required"]),
        ({"model": 3}, ["model is 3", "write its source or a mapping with the keys source, revision"]),
        ({"window": None}, ["window is None", "write a policy or a mapping"]),
        ({"batch": 5}, ["batch is 5", "write a mapping with the keys tokens"]),
        ({"dataset": {"source": []}}, ["dataset.source is empty", "at least one"]),
        ({"dataset": {"source": ["a", 3]}}, ["dataset.source.1 is 3", "valid string"]),
        ({"dataset": {"source": "d", "encoding": "utf8"}}, ["dataset.encoding is 'utf8'", "'utf-8', 'latin-1'"]),
        ({"dataset": {"source": "d", "documents": "linne"}}, ["dataset.documents is 'linne'", "file, line, paragraph"]),
        ({"dataset": {"source": "d", "documents": "regex:("}}, ["dataset.documents: '('", "not a regular expression"]),
        (
            {"precision": {"calibration": {"source": "pydoc:x"}}},
            ["job.yaml: precision.calibration.source is 'pydoc:x'", "is pydoc:topics"],
        ),
        (
            {"precision": {"calibration": {"source": "c", "documents": "x"}}},
            ["job.yaml: precision.calibration.documents is 'x'", "allowed: file, line"],
        ),
        ({"dataset": {"source": "d", "limit": 0}}, ["dataset.limit is 0", "greater than or equal to 1"]),
        ({"dataset": {"source": "d", "limit": "5"}}, ["dataset.limit is '5'", "valid integer"]),
        ({"dataset": {"source": "d", "limit": 10**30}}, ["dataset.limit is 1000", "or equal to 9007199254740992"]),
        (
            {"dataset": "pydoc:nothing"},
            ["dataset.source is 'pydoc:nothing'", "the one text of this kind is pydoc:topics"],
        ),
        ({"precision": "int4"}, ["precision is 'int4'", "did you mean 'int4-g32' or 'int4-g64' or 'int4-g128'?"]),
        ({"precision": 16}, ["precision is 16", "did you mean 'fp16'?"]),
        ({"name": ""}, ["name is ''", "at least 1 character"]),
        ({"name": "a\nb"}, ["name is 'a\\nb'", "without control characters"]),
        ({"name": "\ud800"}, ["'\\ud800'", "no character"]),
        ({"name": datetime.date(2020, 1, 1)}, ["datetime.date(2020, 1, 1)", "strings, numbers"]),
        ({"batch": {"tokens": 0}}, ["batch.tokens is 0", "greater than or equal to 1"]),
        ({"batch": {"tokens": True}}, ["batch.tokens is True", "valid integer"]),
        ({"shard": {"tokens": 10**9}}, ["shard.tokens is 1000000000", "less than or equal to 65536"]),
        ({"window": {"policy": "roling"}}, ["window.policy is 'roling'", "'rolling', 'strided', 'concat' or 'half'"]),
        ({"window": "roling"}, ["window.policy is 'roling'", "'rolling', 'strided', 'concat' or 'half'"]),
        ({"window": {"context": -1}}, ["window.context is -1", "at least 2 tokens"]),
        ({"window": {"context": 10**40}}, ["window.context is 1000", "or equal to 9007199254740992 or 'model'"]),
        (
            {"window": {"policy": "strided", "stride": 10**40}},
            ["window.stride is 1000", "or equal to 9007199254740992"],
        ),
        ({"window": {"max_windows": 10**40}}, ["window.max_windows is 1000", "or equal to 9007199254740992"]),
        ({"window": {"context": 1.5}}, ["window.context is 1.5", "valid integer or 'model'"]),
        ({"window": {"context": "modle"}}, ["window.context is 'modle'", "valid integer or 'model'"]),
        ({"window": {"bos": "sometimes"}}, ["window.bos is 'sometimes'", "'auto', 'every_window', 'first' or 'none'"]),
        ({"window": {"stride": 4}}, ["window.stride has no meaning for the policy rolling"]),
        ({"window": {"join": "x"}}, ["window.join has no meaning for the policy rolling"]),
        ({"window": {"drop_remainder": True}}, ["window.drop_remainder has no meaning for the policy rolling"]),
        ({"window": {"drop_remainder": "yes"}}, ["window.drop_remainder is 'yes'", "valid boolean"]),
        ({"window": "strided"}, ["window.stride is missing", "between 1 and context"]),
        (
            {"window": {"policy": "strided", "context": 8, "stride": 9}},
            ["window.stride is 9", "between 1 and context (8)"],
        ),
        (
            {"window": {"policy": "strided", "context": 8, "stride": 8, "bos": "every_window"}},
            ["window.stride is 8", "at most 7"],
        ),
        ({"window": {"policy": "half", "bos": "first"}}, ["window.bos is first", "every_window or none"]),
        ({"window": {"max_windows": 0}}, ["window.max_windows is 0", "greater than or equal to 1"]),
    ],
)
def test_a_bad_job_gives_one_line_with_key_value_and_what_is_allowed(changes: dict[str, Any], parts: list[str]) -> None:
    """The line begins with the file's name and holds no line break."""
    message = refusal(changes)

    assert message.startswith("job.yaml: ")
    assert "\n" not in message
    assert [] == [part for part in parts if part not in message], message


def test_every_fault_is_named_in_the_one_line() -> None:
    """Two faults are not found one after the other."""
    message = refusal({"windo": "half", "precision": "int4"})

    assert "unknown key 'windo'; did you mean 'window'?" in message
    assert "precision is 'int4'" in message


def test_a_missing_dataset_is_named() -> None:
    """A required key that is absent is called by its name."""
    with pytest.raises(SpecError, match=r"job\.yaml: the key 'dataset' is required"):
        parse_spec({"model": "m"}, where="job.yaml")


@pytest.mark.parametrize(("data", "got"), [(None, "the file is empty"), ([], "a list"), ("x", "a string"), (3, "int")])
def test_a_job_that_is_no_mapping_is_refused(data: Any, got: str) -> None:
    """The message says what it should be and what it is."""
    with pytest.raises(SpecError, match=rf"expected a mapping with the keys name, model.*got .*{got}"):
        parse_spec(data, where="job.yaml")


def test_long_values_are_cut_in_messages() -> None:
    """A pasted document does not fill the screen."""
    assert len(refusal({"name": "x" * 5000})) < 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got nothing"),
        (b"model: [", "line 1: not valid YAML"),
        (b"model: m\ndataset: d\nname: \xff", "not UTF-8 at byte 26"),
        (b"model: m\nmodel: n\ndataset: d\n", "line 2: .*the key 'model' stands here for the second time"),
        (b"model: m\ndataset: d\nwindow: {context: 8, context: 9}\n", "line 3: .*the key 'context' stands"),
        (b"a: 1\n---\nb: 2\n", "line 2: not valid YAML"),
        (b"model: !!python/object:os.system x\n", "line 1: not valid YAML"),
        (b"model: m\ndataset: &a [*a]\n", "Circular reference"),
        (b"[" * 5000, "nested too deeply"),
        (b"model: ~no-such-user-here/m\ndataset: d\n", "no such user's home"),
    ],
)
def test_a_bad_file_gives_one_line_that_names_the_place(tmp_path: Path, content: bytes, message: str) -> None:
    """File, line or byte, and what is wrong there."""
    path = tmp_path / "job.yaml"
    path.write_bytes(content)

    with pytest.raises(SpecError, match=message) as caught:
        load_spec(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_absent_or_a_directory_is_named(tmp_path: Path) -> None:
    """The message holds the path and the system's reason."""
    with pytest.raises(SpecError, match=re.escape(f"{tmp_path}: cannot read the job file (Is a directory)")):
        load_spec(tmp_path)
    with pytest.raises(SpecError, match="No such file or directory"):
        load_spec(tmp_path / "absent.yaml")


def test_relative_paths_are_taken_from_the_file(tmp_path: Path) -> None:
    """Ids with a scheme stay as they are."""
    path = tmp_path / "job.yaml"
    path.write_text("model: models/tiny\ndataset: ['text/*.txt', 'hub:owner/name', /data/x.txt, pydoc:topics]\n")
    spec = load_spec(path)

    assert str(tmp_path / "models/tiny") == spec.model.source
    assert (str(tmp_path / "text/*.txt"), "hub:owner/name", "/data/x.txt", "pydoc:topics") == spec.dataset.source


def test_a_name_that_looks_like_a_date_is_text(tmp_path: Path) -> None:
    """YAML's implicit dates are switched off."""
    path = tmp_path / "job.yaml"
    path.write_text("model: m\ndataset: d\nname: 2020-01-01\n")

    assert "2020-01-01" == load_spec(path).name


@pytest.mark.parametrize("text", ["{", "[]", "", '{"model":"m"}', "[" * 100_000, '{"model":"m","dataset":"d","x":1}'])
def test_a_canonical_text_that_is_no_job_is_refused(text: str) -> None:
    """What arrives over the wire is checked like a file."""
    with pytest.raises(SpecError):
        JobSpec.from_canonical(text)


def test_absolute_paths_stay(tmp_path: Path) -> None:
    """Making a spec absolute twice changes nothing."""
    once = absolute(parse_spec({**JOB, "model": {"source": "m", "tokenizer": "t"}}, where="job"), tmp_path)

    assert once == absolute(once, Path("/elsewhere"))


WINDOWS = st.one_of(
    st.just({"policy": "rolling"}),
    st.builds(
        lambda stride, join: {"policy": "strided", "stride": stride, "join": join, "context": 64},
        st.integers(1, 63),
        st.none() | st.text(max_size=3),
    ),
    st.builds(
        lambda join, drop, bos: {"policy": "concat", "join": join, "drop_remainder": drop, "bos": bos},
        st.text(max_size=3),
        st.booleans(),
        st.sampled_from([b.value for b in Bos]),
    ),
    st.builds(lambda context: {"policy": "half", "context": context}, st.integers(3, 4096)),
)
NAMES = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs"]), min_size=1, max_size=40)


@given(
    st.fixed_dictionaries(
        {"model": NAMES, "dataset": st.lists(NAMES, min_size=1, max_size=3), "window": WINDOWS},
        optional={"name": st.none() | NAMES, "precision": st.sampled_from(["fp32", "bf16"])},
    )
)
def test_the_canonical_text_reads_back_as_the_same_job(data: dict[str, Any]) -> None:
    """Equal specs have equal text, and the text gives the spec."""
    spec = parse_spec(data, where="job")
    again = JobSpec.from_canonical(spec.canonical())

    assert spec == again
    assert spec.canonical() == again.canonical()


EXAMPLE = Path(__file__).parents[2] / "examples" / "job.yaml"


def keys_of(model: type[BaseModel]) -> set[str]:
    """The keys of a section and of those in it."""
    found = set(model.model_fields)
    for field in model.model_fields.values():
        todo: list[Any] = [field.annotation]
        while todo:
            part = todo.pop()
            if isinstance(part, type) and issubclass(part, BaseModel):
                found |= keys_of(part)
            todo += get_args(part)
    return found


def test_the_example_has_every_key_and_every_format() -> None:
    """What can be written in a job is in the annotated one, commented out or not."""
    text = EXAMPLE.read_text()
    keys = set(re.findall(r"^[# ]*(\w+):", text, re.MULTILINE))

    assert {"default", "allow_overlap", "max_windows"} <= keys_of(JobSpec)
    assert set() == keys_of(JobSpec) - keys
    assert [] == [name for name in FORMATS if name.replace("-g32-asym", "").replace("-g128-asym", "") not in text]


def test_the_example_is_a_job_as_it_stands_and_with_its_mapping() -> None:
    """Its lines on precision are valid without the hash."""
    text = EXAMPLE.read_text()
    mapping = "".join(line[2:] for line in text.splitlines(keepends=True) if line.startswith(("# precision:", "#   ")))
    mapping = mapping[mapping.index("precision:") :]
    plain = parse_spec(yaml.safe_load(text), where="example")
    mapped = parse_spec({**yaml.safe_load(text), **yaml.safe_load(mapping)}, where="example")

    assert "auto" == plain.precision
    assert isinstance(mapped.precision, PrecisionSpec)
    assert mapped.precision.calibration is not None
    assert ("int4-g64", 0.1) == (mapped.precision.mlp, mapped.precision.calibration.skip)
    assert {r"model\.layers\.0\..*": "bf16"} == mapped.precision.modules
