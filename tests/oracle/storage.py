"""Stored record: one file per part for content shared by all environments, and digests by environment."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle.compare import DIGESTS, FACTS, HELP
from tests.oracle.digests import digest

FOLDER = Path("tests/oracle/stored")
"""Folder of the stored record, relative to a tree."""
REFERENCE = FOLDER / "reference.json"
"""A file that only updates change: the last commit that changed it is the reference to record."""


@dataclass(frozen=True)
class Storage:
    """The stored record of a tree."""

    tree: Path

    def facts(self, part: str) -> dict[str, Any] | None:
        """Return the content shared by all environments: facts by case, or the help texts; ``None`` if missing."""
        return read(self.tree / FOLDER / f"{part}.json")

    def digests(self, part: str, environment: str) -> dict[str, Any] | None:
        """Return the digests by case; ``None`` if this environment has none for the stored reference."""
        stored = self._of_environment(part, environment)
        return None if stored is None else stored[DIGESTS]

    def record(self, part: str, environment: str) -> dict[str, Any]:
        """Return the stored record of a part, with the digests of an environment if they exist."""
        facts = self.facts(part) or {}
        if part == HELP:
            return facts
        here = self._of_environment(part, environment) or {FACTS: {}, DIGESTS: {}}
        return {case: {FACTS: here[FACTS].get(case, facts[case]), DIGESTS: here[DIGESTS].get(case)} for case in facts}

    def reference(self) -> str | None:
        """Return the digest of the record of the latest update."""
        stored = read(self.tree / REFERENCE)
        return None if stored is None else str(stored["digest"])

    def update(self, record: Mapping[str, Any], environments: Mapping[str, str]) -> bool:
        """Store the record of some parts as the new reference; return whether that changes anything.

        Digests of other environments, which belong to the reference before, are removed.
        """
        present = {part: self.record(part, environments[part]) for part in record}
        if present == dict(record):
            return False
        others = [part for part in environments if part not in record and part != HELP]
        kept = {
            part: self.record(part, environments[part]) for part in others if self.digests(part, environments[part])
        }
        for part, cases in record.items():
            facts = cases if part == HELP else {case: cases[case][FACTS] for case in cases}
            write(self.tree / FOLDER / f"{part}.json", facts)
        everything = {file.name: read(file) for file in sorted((self.tree / FOLDER).glob("*.json"))}
        everything.pop(REFERENCE.name, None)
        write(self.tree / REFERENCE, {"digest": digest([everything, dict(record)])})
        for file in (self.tree / FOLDER).glob("*/*.json"):
            file.unlink()
            if not [*file.parent.iterdir()]:
                file.parent.rmdir()
        self.add_environment(dict(record) | kept, environments)
        return True

    def add_environment(self, record: Mapping[str, Any], environments: Mapping[str, str]) -> None:
        """Store a record of the reference in one more environment: its digests, and the facts that differ there.

        The alerts, for example, depend on values, which depend on the environment.
        """
        for part, cases in record.items():
            if part == HELP:
                continue
            facts = self.facts(part) or {}
            others = {case: cases[case][FACTS] for case in cases if facts.get(case) != cases[case][FACTS]}
            digests = {case: cases[case][DIGESTS] for case in cases}
            content = {"reference": self.reference(), FACTS: others, DIGESTS: digests}
            write(self._file_of_environment(part, environments[part]), content)

    def _of_environment(self, part: str, environment: str) -> dict[str, Any] | None:
        stored = read(self._file_of_environment(part, environment))
        return None if stored is None or stored["reference"] != self.reference() else stored

    def _file_of_environment(self, part: str, environment: str) -> Path:
        return self.tree / FOLDER / environment / f"{part}.json"


def read(file: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or ``None`` if it does not exist."""
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with readable diffs: values other than objects and lists of texts are on one line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(lines_of(content) + "\n", "utf-8")


def lines_of(value: Any) -> str:
    """Return a value as JSON, objects and lists of texts with a line for each entry.

    >>> print(lines_of({"b": {"norms/total": [2, 1, 8]}, "a": 1}))
    {
    "a": 1,
    "b": {
    "norms/total": [2, 1, 8]
    }
    }
    """
    if isinstance(value, Mapping) and value:
        entries = (f"{json.dumps(key, ensure_ascii=False)}: {lines_of(value[key])}" for key in sorted(value))
        return "{\n" + ",\n".join(entries) + "\n}"
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n]"
    return json.dumps(value, ensure_ascii=False)
