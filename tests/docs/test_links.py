"""Links resolve, and no page contains a path of the author's machine."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import PAGES, ROOT, anchors, blocks, links, prose

EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@EVERY
def test_every_link_resolves(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if link.startswith("https://"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@EVERY
def test_no_page_names_a_folder_of_a_machine(page: Path) -> None:
    assert not re.search(r"(?<![\w./])/(home|root|tmp|work|Users)/", page.read_text(encoding="utf-8"))


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            local = [link.partition("#")[0] for link in links(page) if not link.startswith("https://")]
            waiting += [(page.parent / link).resolve() for link in local if link]
    assert set(PAGES) <= reached


def test_the_index_lists_every_decision_by_its_title() -> None:
    index = (ROOT / "docs/decisions/index.md").read_text(encoding="utf-8")
    pages = sorted((ROOT / "docs/decisions").glob("0*.md"))
    assert index.count("\n| ") == len(pages) + 1  # and the heading
    for page in pages:
        number, _, title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert page.name.startswith(f"{int(number):04d}-")
        assert f"| {number} | [{title}]({page.name}) |" in index


@EVERY
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    saved_by_the_reader = {block.file for other in PAGES for block in blocks(other)}
    for name in re.findall(r"`([\w/]+\.py)`", prose(page)):
        places = [ROOT / name, ROOT / "framework" / name]
        assert name in saved_by_the_reader or any(path.is_file() for path in places), name


@EVERY
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for name, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", prose(page)):
        assert f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), test
