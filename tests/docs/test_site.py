"""`make site` builds a site with every page that fetches nothing from the network."""

import doctest
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs import site
from tests.docs.markdown import PAGES, ROOT
from tests.support.processes import own_process

FETCHED = re.compile(r"""<(?!a\b)\w+[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site like `make site`: warnings about links and anchors are errors."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))
    return folder


@own_process
def test_every_page_renders_lists_and_tables(built: Path) -> None:
    """No paragraph of a built page contains the source of a Markdown list or table."""
    for page in PAGES:
        place = page.relative_to(ROOT / "docs") if page.parent != ROOT else Path(site.OUTSIDE[page.name])
        shown = (built / place.with_suffix(".html")).read_text(encoding="utf-8")
        assert not re.search(r"<p>(?:(?!</p>).)*\n(- |\| )", shown, re.S), page


def test_no_page_fetches_anything_from_the_network(built: Path) -> None:
    assert FETCHED.search('<script src="https://unpkg.com/x"></script>')
    for page in built.rglob("*.html"):
        assert not FETCHED.search(page.read_text(encoding="utf-8")), page
    assert "http" not in "".join(
        re.findall(r"(?:url\(|@import)[^;)]*", "".join(path.read_text() for path in built.rglob("*.css")))
    )


def test_links_out_of_the_docs_are_text() -> None:
    assert doctest.testmod(site) == (0, 1)
