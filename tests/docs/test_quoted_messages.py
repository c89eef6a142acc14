"""Messages that the pages quote are those of the source code."""

import ast
import re
from functools import cache

import pytest

from tests.docs.markdown import ROOT

PAGES = ("guarantees", "custom-loop", "trainers", "faq", "checkpoints", "rewind")
FOLDERS = ("framework", "training_hooks", "sinks", "experiments")
SHORTEST = 7
"""Characters of the shortest piece of a message that counts."""
SHARE = 0.6
"""The least share of a quoted message that the pieces must cover; the rest are names and numbers."""


@cache
def pieces() -> list[str]:
    """Return the texts of the source code between placeholders, docstrings included."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return [text.strip() for text in texts if len(text.strip()) >= SHORTEST]


def covered(message: str) -> float:
    """Return the share of a message that pieces of the source code cover; an ellipsis stands for any text."""
    marks = bytearray(len(message))
    everything = "\0".join(pieces())
    for part in re.finditer(r"(?:(?!…|\.\.\.).)+", message):
        text = part.group().strip(" .,:;")
        known = [text] if len(text) >= SHORTEST and text in everything else [p for p in pieces() if p in part.group()]
        for piece in known:
            begin = message.index(piece, part.start())
            marks[begin : begin + len(piece)] = b"\1" * len(piece)
    shown = [mark for mark, letter in zip(marks, message, strict=True) if letter not in " .,:;…"]
    return sum(shown) / max(1, len(shown))


def quotes(page: str) -> list[str]:
    """Return the sentences in quotation marks on a page, outside of code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / f"docs/{page}.md").read_text("utf-8"), flags=re.DOTALL)
    found = re.findall(r'"([^"]*)"', re.sub(r"\s+", " ", text))
    return [quote for quote in found if len(quote) >= 30 and quote.count(" ") > 3]


@pytest.mark.longer
@pytest.mark.parametrize("page", PAGES)
def test_quoted_messages_are_in_the_source(page: str) -> None:
    shares = {quote: covered(quote) for quote in quotes(page)}
    assert {quote for quote, share in shares.items() if share < SHARE} == set()


@pytest.mark.slow
def test_an_invented_message_is_noticed() -> None:
    assert covered("Hook 'norms' may never be used together with a red model; paint it blue first.") < SHARE
