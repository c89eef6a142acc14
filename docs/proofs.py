"""The tests behind each promise of docs/guarantees.md, from their markers."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from docs.generate import table
from docs.roles import markdown

DOCS = Path(__file__).parent
GUARANTEES = DOCS / "guarantees.md"
TESTS = DOCS.parent / "tests"
SLOW = {"slow", "statistical"}
NOT_QUICK = {"process", "ranks", "compile", "browser", "trainer", "gpu", "xla", "fake_device", "longer"}
"""Markers of tests that take longer or start more than a function; ``make fast`` leaves them out."""
MARKING = {"own_process": "process", "on_fake_device": "process"}
"""Decorators of the tests that add a marker, each with the marker."""


@dataclass(frozen=True)
class Proof:
    """A test with a marker ``guarantee``, its file below tests/, and the first sentence of its docstring."""

    file: str
    name: str
    promises: tuple[str, ...]
    sentence: str
    tier: str


def promises(page: Path = GUARANTEES) -> dict[str, str]:
    """Return the text of each promise by its name, in the order of the page; the name is the anchor of its title."""
    rows = re.findall(r"^\| (\*\*(.+?)\.\*\*.*?) \|", page.read_text(encoding="utf-8"), re.M)
    return {title.lower().replace(" ", "-"): text for text, title in rows}


@cache
def proofs(folder: Path = TESTS) -> list[Proof]:
    """Return all tests with a marker ``guarantee``, by file and position."""
    marked = [path for path in sorted(folder.rglob("test_*.py")) if "mark.guarantee(" in path.read_text("utf-8")]
    return [proof for path in marked for proof in proofs_in(path.read_text("utf-8"), str(path.relative_to(folder)))]


def proofs_in(source: str, file: str) -> Iterator[Proof]:
    """Yield the marked tests of a file.

    >>> text = '''
    ... @pytest.mark.slow
    ... @pytest.mark.guarantee("a", "b")
    ... def test_it():
    ...     "It works. Always."
    ... '''
    >>> list(proofs_in(text, "test_x.py"))
    [Proof(file='test_x.py', name='test_it', promises=('a', 'b'), sentence='It works.', tier='slow')]
    """
    tree = ast.parse(source)
    shared = [
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        marks = dict(marker(mark) for mark in [*shared, *node.decorator_list])
        if "guarantee" in marks:
            yield Proof(file, node.name, marks["guarantee"], first_sentence(node), tier(set(marks)))


def marker(decorator: ast.expr) -> tuple[str, tuple[str, ...]]:
    """Return the name of a decorator's marker, and its texts as arguments."""
    call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
    name = ast.unparse(call.func).removeprefix("pytest.mark.")
    texts = [str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)]
    return MARKING.get(name, name), tuple(texts)


def tier(marks: set[str]) -> str:
    """Return the tier of a test with these markers.

    >>> tier({"slow", "ranks"}), tier({"ranks"}), tier({"parametrize"})
    ('slow', 'test', 'quick')
    """
    return "slow" if marks & SLOW else "test" if marks & NOT_QUICK else "quick"


def first_sentence(node: ast.FunctionDef) -> str:
    """Return the first sentence of a docstring, as Markdown, or an empty string."""
    text = " ".join((ast.get_docstring(node) or "").split())
    return markdown(re.split(r"(?<=[.:]) (?=[A-Z`])", text, maxsplit=1)[0])


def page(guarantees: Path = GUARANTEES, folder: Path = TESTS) -> str:
    """Return the text of the page without its title.

    Raises:
        ValueError: if a promise has no test, or a test names no promise.
    """
    texts, tests = promises(guarantees), proofs(folder)
    unknown = {name for proof in tests for name in proof.promises} - texts.keys()
    if unknown:
        raise ValueError(f"No promise in docs/guarantees.md is called {', '.join(sorted(unknown))}.")
    lines: list[str] = []
    for name, text in texts.items():
        rows = [row(proof) for proof in tests if name in proof.promises]
        if not rows:
            raise ValueError(f"No test has the marker guarantee({name!r}), which docs/guarantees.md promises.")
        lines += [f"## {name}", "", text, "", *table(("test", "what it shows", "tier"), rows), ""]
    return "\n".join(lines)


def row(proof: Proof) -> tuple[str, str, str]:
    """Return the row of a test; the link leads to its file."""
    return f"[`{proof.name}`](../tests/{proof.file})", proof.sentence, proof.tier
