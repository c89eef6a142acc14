"""Language check: refuses phrases of phrases.toml in source, messages, tests and documentation."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = ROOT / "phrases.toml"
SUFFIXES = ("*.py", "*.md", "*.toml", "*.yml", "*.txt", "*.js", "*.html", "*.css", "Makefile")
EXCLUDED = ("phrases.toml", "constraints.txt")


class Finding(NamedTuple):
    """A phrase in a line of a file, with what to write instead."""

    line: int
    phrase: str
    instead: str


def patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the compiled phrases, each with its replacement."""
    phrases = tomllib.loads(LIST.read_text(encoding="utf-8"))["phrases"]
    broken = {phrase.replace(" ", r"\s"): instead for phrase, instead in phrases.items()}
    return [(re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), instead) for phrase, instead in broken.items()]


def findings(text: str, phrases: list[tuple[re.Pattern[str], str]]) -> Iterator[Finding]:
    """Yield the phrases in a text, also across line breaks; names are read as words."""
    words = re.sub(r"\n[ \t]*(?:[#>*]+ )?", "\n", text).replace("_", " ")
    for pattern, instead in phrases:
        for match in pattern.finditer(words):
            yield Finding(words.count("\n", 0, match.start()) + 1, " ".join(match.group().split()), instead)


def checked_files() -> list[Path]:
    """Return the files that git tracks or would add, without the excluded ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SUFFIXES]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [ROOT / name for name in sorted(set(names)) if name and name not in EXCLUDED and (ROOT / name).is_file()]


def main() -> int:
    """Print every finding, and return 1 if there is any."""
    phrases, count = patterns(), 0
    for path in checked_files():
        for item in sorted(findings(path.read_text(encoding="utf-8"), phrases)):
            count += 1
            sys.stdout.write(f"{path.relative_to(ROOT)}:{item.line}: {item.phrase!r}: write {item.instead}\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
