"""Parser of Markdown pages: code blocks, tables and links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")
PAGES = sorted([*(ROOT / name for name in ROOT_PAGES), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?:<!-- (?P<use>file|shown): (?P<file>\S+) -->\n+)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``file`` is the file to save it to, ``shown`` a file with the same text, written by a command."""

    language: str
    text: str
    file: str | None
    shown: str | None

    def commands(self) -> list[str]:
        """Return the commands of a console block, with continued lines joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    matches = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [
        Block(
            match["language"],
            match["text"],
            match["file"] if match["use"] == "file" else None,
            match["file"] if match["use"] == "shown" else None,
        )
        for match in matches
    ]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def tables(page: Path) -> list[list[dict[str, str]]]:
    """Return the tables of a page, each a list of rows by heading."""
    return [_table(lines) for lines in _runs(prose(page))]


def table_with(page: Path, *headings: str) -> list[dict[str, str]]:
    """Return the only table of a page that has these headings."""
    (found,) = [table for table in tables(page) if table and set(headings) <= table[0].keys()]
    return found


def links(page: Path) -> list[str]:
    """Return the targets of a page's links."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, and ``<a id="name"></a>``."""
    text = prose(page)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    titles = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return titles | set(re.findall(r'<a id="([^"]+)"></a>', text))


def code(cell: str) -> list[str]:
    """Return the texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def _runs(text: str) -> Iterator[list[str]]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            yield lines
            lines = []


def _table(lines: list[str]) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
