"""Every code block of the pages runs."""

import json
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, blocks
from tests.docs.running import LANGUAGES, run_page
from tests.support.cases import slow_unless
from tests.support.processes import own_process

TESTED_ELSEWHERE = "writing-an-experiment.md"  # tests/experiments/test_writing_an_experiment.py
WITH_BLOCKS = [page for page in PAGES if blocks(page) and page.name != TESTED_ELSEWHERE]
SLOW_PAGES = (
    "CONTRIBUTING.md",
    "check.md",
    "first-run.md",
    "many-processes.md",
    "comparing.md",
    "compiled-models.md",
    "command-line.md",
    "low-precision-run.md",
    "low-precision.md",
    "report.md",
    "rewind.md",
    "sinks.md",
    "studies.md",
    "sweeps.md",
    "tutorial.md",
)
"""Pages that together take more than three minutes; smaller versions of their commands run in other tests."""


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=slow_unless(page.name not in SLOW_PAGES)) for page in WITH_BLOCKS]
)
@own_process
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_page(page, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_names_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * len(blocks(page))


def test_documented_json_lines_match_sink_output() -> None:
    """Every JSON example on the page of file formats begins with the keys epoch, step and hook_point."""
    examples = [block.text for block in blocks(ROOT / "docs/file-formats.md") if block.language == "json"]
    assert len(examples) == 2
    for example in examples:
        assert list(json.loads(example))[:3] == ["epoch", "step", "hook_point"]
