"""Programs that draw the pictures of hooks' pages: a module for each hook, whose docstring is the caption."""

import ast
from pathlib import Path

DOCS = Path(__file__).parents[1]
PICTURES = DOCS / "pictures/hooks"
PROGRAMS = Path(__file__).parent


def caption(hook: str) -> str:
    """Return the caption of a hook's picture, or an empty string without a program that draws it."""
    program = PROGRAMS / f"{hook}.py"
    # Read without an import, since the programs import matplotlib and train models.
    docstring = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) if program.exists() else ""
    return " ".join((docstring or "").split())
