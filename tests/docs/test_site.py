"""`make site` builds a site with every page and the API reference, which fetches nothing from the network."""

import doctest
import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import loopscope
import loopscope.sinks
import pytest
from loopscope import hooks
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs import generate, roles, site
from docs.long_pages import PAGES as PAGES_IN_FULL
from tests.docs.markdown import PAGES, ROOT
from tests.support.processes import own_process

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FETCHED = re.compile(r"""<(?!a\b)\w+[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


pytestmark = [pytest.mark.process, pytest.mark.slow]  # the site is built in a process


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
        if page.parent == ROOT and page.name not in site.OUTSIDE:
            continue  # a page for contributors
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


def test_site_has_long_pages_with_their_tables(built: Path) -> None:
    """The table of contents leads to them, and their summaries link to them."""
    for name, page in PAGES_IN_FULL.items():
        shown = (built / f"full/{name}.html").read_text(encoding="utf-8")
        assert page.title in shown
        assert not re.search(r"<p>(?:(?!</p>).)*\n(- |\| )", shown, re.S), name
        assert f'href="full/{name}.html"' in (built / f"{name}.html").read_text(encoding="utf-8")


def test_site_has_a_page_of_every_hook(built: Path) -> None:
    """Pages of the site link to it where the committed pages link to the list of hooks."""
    for name in generate.hook_pages():
        shown = (built / f"hooks/{name}.html").read_text(encoding="utf-8")
        assert f"<code>{name}/" in shown
        assert not re.search(r"<p>(?:(?!</p>).)*\n(- |\| )", shown, re.S), name
        assert f'href="{name}.html"' in (built / "hooks/index.html").read_text(encoding="utf-8")
    assert 'href="hooks/sharpness.html"' in (built / "troubleshooting.html").read_text(encoding="utf-8")


def test_site_has_a_page_of_every_example(built: Path) -> None:
    for path in site.EXAMPLES.glob("*.py"):
        assert "loopscope" in (built / f"examples/{path.stem}.html").read_text(encoding="utf-8")
    assert 'href="examples/nanogpt.html"' in (built / "custom-loop.html").read_text(encoding="utf-8")


def test_links_out_of_the_docs_are_text() -> None:
    assert doctest.testmod(site) == (0, 4)


def test_links_of_the_package_precede_the_reference() -> None:
    """In a fresh clone, mkdocstrings finds the package only if its links exist before mkdocstrings starts."""
    config = load_config(str(ROOT / "mkdocs.yml"))
    assert config.plugins.events["config"][0].__module__ == "docs/site.py"


OF_THE_ENGINE = {
    "ALERTS",
    "ALWAYS",
    "ENDLESS",
    "LARGEST_STEP",
    "ObserverServices",
    "SET_AT",
    "Severity",
    "TapOwner",
    "alert_fields",
    "as_float",
    "hook_options",
    "treatments",
    "windows_for",
}
"""Names of ``loopscope.hooks`` that hooks do not need: other packages and the generators of pages use them."""


def names_on(page: Path) -> list[str]:
    """Return the last parts of the names whose docstrings a page shows."""
    return [name for _, name in roles.DIRECTIVE.findall(page.read_text(encoding="utf-8"))]


def test_every_public_name_is_on_one_reference_page() -> None:
    names = [name for page in roles.REFERENCE for name in names_on(page)]
    assert len(names) == len(set(names))
    packages = loopscope.__all__, hooks.__all__, loopscope.sinks.__all__
    assert {name for package in packages for name in package} - OF_THE_ENGINE <= set(names)
    assert not OF_THE_ENGINE & set(names)
    assert set(hooks.__all__) >= OF_THE_ENGINE


@pytest.mark.parametrize("page", roles.REFERENCE, ids=lambda page: page.stem)
def test_reference_page_shows_docstrings_without_markup(built: Path, page: Path) -> None:
    text = (built / page.with_suffix(".html").name).read_text(encoding="utf-8")
    for name in names_on(page):
        assert re.search(rf"doc-object-name[^>]*>{name}<", text), name
    assert not re.search(r":\w+:`|:(class|meth|func|attr|mod|data):|^:::|<p>::</p>|<autoref", text, re.M)


def test_reference_shows_arguments_and_links_names(built: Path) -> None:
    """Signatures contain types and no private arguments; names in docstrings are links."""
    text = {page.stem: (built / f"{page.stem}.html").read_text(encoding="utf-8") for page in roles.REFERENCE}
    signature = re.sub(r"<[^>]+>", "", text["reference-hooks"].partition(">GradientTap</span>")[2])
    assert "target: str," in signature.partition("Args")[0]
    assert 'href="#loopscope.Scope' in text["reference"]
    assert 'href="reference.html#loopscope.LoopscopeError' in text["reference-hooks"]
    assert "_signals" not in text["reference"]


def test_markup_of_docstrings_is_converted() -> None:
    assert doctest.testmod(roles) == (0, 3)
    assert roles.fenced_examples(">>> 1 + 1\n2\n\nMore.") == "```pycon\n>>> 1 + 1\n2\n```\n\nMore."


@pytest.fixture(scope="module")
def served(built: Path) -> Iterator[str]:
    """Serve the site, since browsers allow its search only over HTTP, and yield its address."""
    handler = partial(QuietHandler, directory=str(built))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """A handler without log lines."""

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium with chromedriver to open the site in")
def test_search_finds_pages_and_no_page_scrolls_sideways(built: Path, served: str) -> None:
    files = sorted(str(path.relative_to(built)) for path in built.rglob("*.html") if path.parent.name != "decisions")
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = selenium.ChromeOptions()
    options.binary_location = BROWSER
    for word in ("--headless=new", "--no-sandbox"):
        options.add_argument(word)
    chrome = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    try:
        chrome.implicitly_wait(10)
        for width, pages in ((400, files), (1440, ["index.html", "hooks/index.html", "reference-hooks.html"])):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            for page in pages:
                chrome.get(f"{served}/{page}")
                assert chrome.execute_script("return document.documentElement.scrollWidth <= innerWidth"), page
        for scheme in ("dark", "light"):  # follows a change of the system's colours
            colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", colours)
            chrome.refresh()
            name = "slate" if scheme == "dark" else "default"
            assert chrome.find_elements("css selector", f"body[data-md-color-scheme={name}]")
        box = chrome.find_element("css selector", "input.md-search__input")
        chrome.execute_script("arguments[0].click(); arguments[0].focus()", box)
        box.send_keys("tripwire")
        titles = chrome.find_elements("css selector", ".md-search-result__item h1")
        assert "Guarantees" in [title.text for title in titles]
    finally:
        chrome.quit()
