"""Every promise of docs/guarantees.md names tests that exist."""

import re
from functools import cache
from pathlib import Path

from tests.docs.markdown import ROOT, code, tables

PAGE = ROOT / "docs/guarantees.md"
NAMED = re.compile(r"tests/[\w/]+\.py::test_\w+")


@cache
def functions_in(path: Path) -> set[str]:
    """Return the names of the test functions and methods of a file."""
    return set(re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.M))


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert named
    for name in named:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert function in functions_in(ROOT / file), name


def test_every_promise_names_a_mechanism_and_a_test() -> None:
    rows = [row for table in tables(PAGE) for row in table if "promise" in row]
    assert len(rows) > 10
    for row in rows:
        assert all(row.values()), row
        assert any(NAMED.fullmatch(name) for name in code(row["proof"])), row
