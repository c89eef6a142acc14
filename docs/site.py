"""MkDocs hooks of `make site`: the start page begins with README.md, hooks have pages, and summaries their long pages.

Links to files outside the site become text.
"""

import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs import generate
from docs.long_pages import PAGES, full_pages

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs/examples"
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""The site's pages for files outside of docs/."""


@event_priority(100)  # before mkdocstrings looks for the folder
def on_config(config: MkDocsConfig) -> None:
    """Create the links by which the API reference finds the package, as `make types` does."""
    package = ROOT / "build/types/loopscope"
    package.mkdir(parents=True, exist_ok=True)
    folders = [*(ROOT / "framework").iterdir(), *(ROOT / name for name in ("training_hooks", "sinks", "experiments"))]
    for target in folders:
        with suppress(FileExistsError):
            (package / target.name).symlink_to(target)


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the changelog, pages of hooks and examples, and the long pages, of which only summaries are committed."""
    files.append(File.generated(config, OUTSIDE["CHANGELOG.md"], abs_src_path=str(ROOT / "CHANGELOG.md")))
    for name, text in generate.hook_pages().items():
        files.append(File.generated(config, f"hooks/{name}.md", content=text))
    for path in EXAMPLES.glob("*.py"):
        text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    for name, text in full_pages().items():
        files.append(File.generated(config, f"full/{name}.md", content=text))


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Begin the start page with README.md, convert links for the site, and let searches list decisions last."""
    place = page.file.src_uri
    if place.startswith("decisions/"):
        page.meta["search"] = {"boost": 0.1}
    if place == OUTSIDE["CHANGELOG.md"]:
        return convert_links(markdown, "CHANGELOG.md", place)
    if place.removesuffix(".md") in PAGES:
        markdown += f"\n[{PAGES[place.removesuffix('.md')].title}](full/{place})\n"
    text = convert_links(markdown, f"docs/{place.removeprefix('full/')}", place)
    if place != OUTSIDE["README.md"]:
        return text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return convert_links(readme, "README.md", place) + "\n## " + text.partition("\n## ")[2]


def convert_links(text: str, source: str, place: str) -> str:
    """Convert the links of a file to links of the page ``place``; a link to a file outside the site becomes its text.

    A link whose text is the name of a page shows the title of the page instead. Links to a hook in the committed list
    of hooks, and to an example, lead to the page of the hook or the example.

    >>> convert_links("[a](../README.md) [b](../framework/loops.py) [c](loop.md#x)", "docs/own.md", "own.md")
    '[a](index.md) b [c](loop.md#x)'
    >>> convert_links("[sinks.md](../sinks.md#alerts)", "docs/decisions/own.md", "decisions/own.md")
    '[Sinks](../sinks.md#alerts)'
    >>> convert_links("[a](hooks/index.md#norms) [b](hooks/index.md#outputs)", "docs/own.md", "own.md")
    '[a](hooks/norms.md) [b](hooks/index.md#outputs)'
    >>> convert_links("[a](examples/nanogpt.py)", "docs/own.md", "own.md")
    '[a](examples/nanogpt.md)'
    """
    names = {hook.name for hook in generate.shipped_hooks()}

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path not in OUTSIDE and not path.startswith("docs/"):
            return label
        if ROOT / path == generate.PAGE and anchor[1:] in names:
            path, anchor = f"docs/hooks/{anchor[1:]}.md", ""
        if (ROOT / path).parent == EXAMPLES:
            path = path.removesuffix(".py") + ".md"
        if label.endswith(".md") and path.endswith(f"/{label}"):
            label = (ROOT / path).read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0]
        page = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"[{label}]({posixpath.relpath(page, posixpath.dirname(place) or '.')}{anchor})"

    return re.sub(r"\[([^\]]+)\]\((?!https://)([^)#\s]+)([^)\s]*)\)", link, text)
