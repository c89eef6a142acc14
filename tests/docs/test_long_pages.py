"""The committed summaries of long pages are those of the data, and the site's pages have every row."""

import doctest

import pytest
from loopscope.doctor import all_detectors

from docs import findings, long_pages
from tests.docs.markdown import ROOT


@pytest.mark.process
@pytest.mark.parametrize("name", long_pages.PAGES)
def test_summary_is_that_of_the_data(name: str) -> None:
    committed = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert committed == long_pages.summary(name), (
        "stale: run python -c 'from docs import long_pages; long_pages.write()'"
    )


@pytest.mark.parametrize("name", long_pages.PAGES)
def test_summary_is_read_in_two_minutes(name: str) -> None:
    lines = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 100


@pytest.mark.parametrize("name", ["benchmarks", "zoo", "trainer-matrix", "real-models"])
def test_full_page_has_every_measured_row(name: str) -> None:
    rows = long_pages.rows(long_pages.measured(name))
    assert long_pages.rows(long_pages.PAGES[name].full()) == rows
    assert len(rows) > 40


def test_every_detector_has_a_section() -> None:
    text, summary = findings.page(), (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    assert [item.name for item in all_detectors() if f"### `{item.name}`" not in text] == []
    assert [item.name for item in all_detectors() if f"`{item.name}`" not in summary] == []


def test_every_main_figure_is_measured() -> None:
    measured = {row.get("Figure") for row in long_pages.rows(long_pages.measured("benchmarks"))}
    assert set(long_pages.MAIN_FIGURES) <= measured


def test_examples_of_the_module_are_right() -> None:
    assert doctest.testmod(long_pages).failed == 0


def test_whole_commands_have_one_line_each() -> None:
    """The measures of a command, which are rows of the benchmarks, are columns of the page."""
    rows = "".join(
        f"| watch, {name} | an MLP alone, 3.2 s | {value} |\n"
        for name, value in (("time of the command", 1), ("CPU time", 2), ("peak memory", 3), ("files", 4))
    )
    text = f"## {long_pages.WHOLE}\n\n| Figure | Against | Measured |\n| --- | --- | --- |\n{rows}\n## The loop\n"
    assert long_pages.whole_commands(text)[-2] == "| an MLP alone, 3.2 s | `watch` | 1 | 2 | 3 | 4 |"
    assert not long_pages.whole_commands("## The loop\n")
