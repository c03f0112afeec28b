"""The report as HTML, Markdown and JSON files: self-contained, escaped, whole or absent."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coordinator.report import render_html, render_markdown, write_reports
from eval_kernel.errors import DirectoryUnusable
from eval_kernel.gridsum import STEPS_PER_NAT
from eval_kernel.partial import NonFinite
from eval_kernel.report import Accounting, MissingShard
from eval_kernel.tally import Tally
from tests.support.report_cases import k_partials, k_report, k_spec, k_work, partial, row, tally_of

EVIL = '<script>alert("x")</script> | `a` **b**'


class Outline(HTMLParser):
    """Checks that every element is closed in order, and collects tags, attributes and text."""

    VOID = frozenset({"meta", "br", "line", "rect", "ellipse"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data


def incomplete() -> dict[str, object]:
    """A failed job with a missing shard, a poisoned document and a divergent partial."""
    poisoned = replace(k_partials()[2], nonfinite=1, places=(NonFinite(3, 1, "nan"),))
    return k_report(
        state="FAILED",
        failure=("SHARD_FAILED", "shard 1 failed 3 times"),
        tally=tally_of(k_partials()[0], poisoned),
        missing=[MissingShard(1, 0, 3, 7, "out of memory")],
        accounting=Accounting(2, 0, ({"shard": 0, "node": "beta", "difference_nats": 1.25e-6},), 1, 3),
    )


def overflowing() -> dict[str, object]:
    """A job whose perplexity is beyond float64."""
    return k_report(tally=tally_of(partial(0, row(0, 800 * STEPS_PER_NAT, 1)), partial(1, row(1, STEPS_PER_NAT, 0))))


@pytest.mark.parametrize(
    "report",
    [k_report(), incomplete(), overflowing(), k_report(tally=Tally(), work=[], name="")],
    ids=["complete", "incomplete", "overflowing", "empty"],
)
def test_html_is_well_formed_and_needs_nothing_else(report: dict[str, object]) -> None:
    """Every element is closed; there is no script, no link, no address, no source."""
    html = render_html(report)
    outline = Outline(html)

    assert [] == outline.open
    assert set() == {"script", "link", "img", "iframe"} & set(outline.tags)
    assert set() == {"src", "href", "onload", "onclick"} & outline.attributes
    assert "http" not in html
    assert "prefers-color-scheme: dark" in html
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert "svg" == ElementTree.fromstring(svg).tag


def test_html_shows_the_figures() -> None:
    """Metric name, perplexity, interval, exact sum and digests are on the page."""
    text = Outline(render_html(k_report())).text

    for part in (
        "perplexity[rolling,context=1024,bos=first(bos),precision=float32]",
        "1.201404 .. 13.31775",
        "22.180709779262542724609375 nats",
        "sha256:91",
        "torch 2.13.0",
    ):
        assert part in text
    assert "What is missing" not in text


def test_html_of_an_incomplete_job_puts_what_is_missing_first() -> None:
    """The gap stands above the first metric, and the metrics are called partial."""
    text = Outline(render_html(incomplete())).text

    assert text.index("What is missing") < text.index("Perplexity (partial)") < text.index("Partial metrics")
    for part in ("1 of 3 shards are missing", "shard 1: documents 0 to 2, 7 tokens: out of memory", "loss is nan"):
        assert part in text


def test_an_infinite_perplexity_is_shown_with_its_logarithm() -> None:
    """``inf`` alone says too little."""
    assert "log10 =" in Outline(render_html(overflowing())).text


def test_html_escapes_what_people_wrote() -> None:
    """Names, paths and reasons come out as text."""
    report = k_report(
        name=EVIL,
        work=[replace(k_work()[0], node=EVIL)],
        spec=k_spec(model=EVIL),
        missing=[MissingShard(0, 0, 1, 1, EVIL)],
        state="RUNNING",
    )
    html = render_html(report)

    assert "script" not in Outline(html).tags
    assert 4 <= html.count("&lt;script&gt;")


def test_markdown_escapes_what_people_wrote() -> None:
    """A name neither ends its table cell nor becomes an element."""
    text = render_markdown(k_report(name=EVIL, work=[replace(k_work()[0], node=EVIL)]))

    assert "<script>" not in text.replace(r"\<script\>", "")
    node = next(line for line in text.splitlines() if "script" in line and line.startswith("|"))
    assert 7 == len(re.findall(r"(?<!\\)\|", node))


def test_markdown_of_an_incomplete_job_begins_with_what_is_missing() -> None:
    """The list of gaps stands before the table of numbers."""
    text = render_markdown(incomplete())

    assert text.index("**Incomplete") < text.index("- 1 of 3 shards") < text.index("| metric |")


def test_every_table_of_the_markdown_has_equal_columns() -> None:
    """Each row of a table has as many cells as its head."""
    for report in (k_report(), incomplete()):
        for block in re.findall(r"(?:^\|.*\n)+", render_markdown(report), re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert 1 == len(widths), block


def test_three_files_are_written_whole(tmp_path: Path) -> None:
    """The directory is made, the JSON reads back as the report, and no temporary file stays."""
    report = k_report()
    paths = write_reports(report, tmp_path / "a" / "b", "job-1")

    assert report == json.loads(paths.json.read_text(encoding="utf-8"))
    assert render_html(report) == paths.html.read_text(encoding="utf-8")
    assert render_markdown(report) == paths.markdown.read_text(encoding="utf-8")
    assert ["job-1.html", "job-1.json", "job-1.md"] == sorted(p.name for p in (tmp_path / "a" / "b").iterdir())


def test_files_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    """The second report of a job takes the place of the first."""
    write_reports(incomplete(), tmp_path, "job-1")
    paths = write_reports(k_report(), tmp_path, "job-1")

    assert json.loads(paths.json.read_text())["complete"] is True
    assert 3 == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize(("stem", "name"), [("../../etc/x y", "etc-x-y"), ("...", "report"), ("é/ü", "report")])
def test_a_stem_cannot_leave_the_directory(tmp_path: Path, stem: str, name: str) -> None:
    """What does not belong in a file name becomes a dash."""
    paths = write_reports(k_report(), tmp_path, stem)

    assert tmp_path / f"{name}.json" == paths.json


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file stands where the directory should be: the message names it and says what to do."""
    blocked = tmp_path / "file"
    blocked.write_text("x")

    with pytest.raises(DirectoryUnusable, match=r"cannot write the report to .*file.*; name a directory"):
        write_reports(k_report(), blocked, "job-1")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    """A directory has the JSON file's name: no temporary file stays."""
    (tmp_path / "job-1.json").mkdir()

    with pytest.raises(DirectoryUnusable):
        write_reports(k_report(), tmp_path, "job-1")
    assert ["job-1.json"] == [p.name for p in tmp_path.iterdir()]


@pytest.mark.parametrize(("state", "said"), [("FAILED", "There is no result:"), ("RUNNING", "There is no result yet:")])
def test_a_settled_job_without_a_result_is_not_promised_one(state: str, said: str) -> None:
    """Only a job that goes on may have a result later."""
    page = render_html({**incomplete(), "state": state})

    assert said in page
