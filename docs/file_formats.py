"""The fields of every JSON file of a run, from the schemas in docs/schemas."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docs.generate import table

SCHEMAS = Path(__file__).with_name("schemas")


def page() -> str:
    """Return the tables of all fields."""
    lines = []
    for schema in schemas():
        lines += [f"## `{schema['title']}`", "", schema["description"], ""]
        rows = [(f"`{name}`", kind_of(field), field["description"]) for name, field in schema["properties"].items()]
        if isinstance(rest := schema["additionalProperties"], Mapping):
            rows.append(("every other name", "", rest["description"]))
        lines += [*table(("field", "type", "content"), rows), ""]
    return "\n".join(lines)


def names() -> list[str]:
    """Return the lines of a table with the names of all fields."""
    rows = [(f"`{schema['title']}`", ", ".join(f"`{name}`" for name in schema["properties"])) for schema in schemas()]
    return table(("file", "fields"), rows)


def schemas() -> Iterator[dict[str, Any]]:
    """Yield the schemas, in the order of the page."""
    for name in ("experiment_config", "summary", "files", "metrics", "alert", "digest", "rows", "manifest"):
        yield json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))


def kind_of(field: Mapping[str, Any]) -> str:
    """Return the type of a field in words.

    >>> kind_of({"anyOf": [{"type": "number"}, {"type": "null"}]}), kind_of({"enum": ["raise", "skip"]})
    ('number or null', '`raise` or `skip`')
    """
    if "anyOf" in field:
        return " or ".join(map(kind_of, field["anyOf"]))
    if "enum" in field:
        return " or ".join(f"`{word}`" for word in field["enum"])
    return str(field["type"])
