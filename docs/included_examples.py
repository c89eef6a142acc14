"""Copies of the scripts in docs/examples in the pages that show them, made by `make docs`."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^(<!-- shown: (docs/examples/\w+\.py) -->\n```python\n).*?^```$", re.M | re.S)


def included(text: str) -> str:
    """Return the text of a page with the current text of each script that it shows."""
    return SHOWN.sub(lambda match: match[1] + (ROOT / match[2]).read_text(encoding="utf-8") + "```", text)


def write() -> list[str]:
    """Update the pages, and return the names of those that changed."""
    changed = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (current := included(text)) != text:
            page.write_text(current, encoding="utf-8")
            changed.append(page.name)
    return changed
