"""What `make site` does beyond mkdocs.yml: README.md opens the start page, and links to what is no page become text."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""The pages of the site that pages outside of docs/ become."""


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the changelog."""
    files.append(File.generated(config, OUTSIDE["CHANGELOG.md"], abs_src_path=str(ROOT / "CHANGELOG.md")))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Open the start page with README.md, and give links the form that they have on the site."""
    place = page.file.src_uri
    if place == OUTSIDE["CHANGELOG.md"]:
        return placed(markdown, "CHANGELOG.md", place)
    text = placed(markdown, f"docs/{place}", place)
    if place != OUTSIDE["README.md"]:
        return text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return placed(readme, "README.md", place) + "\n## " + text.partition("\n## ")[2]


def placed(text: str, source: str, place: str) -> str:
    """Turn the links of a file into those of the page ``place``; a link to what is no page becomes its text.

    >>> placed("[a](../README.md) [b](../framework/loops.py) [c](loop.md#x)", "docs/own.md", "own.md")
    '[a](index.md) b [c](loop.md#x)'
    """

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in OUTSIDE and not path.startswith("docs/"):
            return label
        page = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"[{label}]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{anchor})"

    return re.sub(r"\[([^\]]+)\]\((?!https://)([^)#\s]+)([^)\s]*)\)", link, text)
