"""The text of a metric's value in a cell of a CSV file, and back.

A cell needs no quoting, so that any reader of CSV may split a file at its commas:

=====================  ============================================================
number, boolean, none  ``0.5``, ``nan``, ``-inf``, ``3``, ``True``, ``None``
dict                   ``key:value;key:value``, an empty one ``:``
list                   ``a;b;c``, of one element ``a;``, an empty one ``;``
nested list or dict    the same in brackets: ``key:[a;b];key:[key:value]``
text                   behind an apostrophe: ``'exact``
=====================  ============================================================

In keys and text the characters ``% , ; : [ ] "`` and control characters are percent-encoded (``%2C`` for a comma).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .record import NUMBERS, number_texts, plain

_SPECIAL = re.compile(r'[%,;:\[\]"\x00-\x1f\x7f]')
_ENCODED = re.compile(r"%([0-9A-F]{2})")
_INTEGER = re.compile(r"-?\d+")
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}


def escape(text: str) -> str:
    """Percent-encode what has a meaning in a cell.

    >>> escape("a,b;c"), unescape("a%2Cb%3Bc")
    ('a%2Cb%3Bc', 'a,b;c')
    """
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


def unescape(text: str) -> str:
    """Decode what :func:`escape` encoded."""
    return _ENCODED.sub(lambda match: chr(int(match[1], 16)), text)


def element(value: Any) -> str:
    """Return the text of a value inside a list or dict; it is never empty."""
    if type(value) in NUMBERS or value is None:
        return repr(value)
    if isinstance(value, str):
        return "'" + escape(value)
    if isinstance(value, (Mapping, list, tuple)):
        return f"[{cell(value)}]"
    return element(plain(value))


def elements(values: Collection[Any]) -> list[str]:
    """Return the texts of many values, quickly where all of them are plain numbers."""
    texts = number_texts(values)
    return list(map(element, values)) if texts is None else texts


def cell(value: Any) -> str:
    """Return the text of a whole cell.

    >>> cell({"a": 0.5, "b": [1, 2]}), cell([0.5, float("nan")]), cell([7]), cell(float("-inf"))
    ('a:0.5;b:[1;2]', '0.5;nan', '7;', '-inf')
    """
    if isinstance(value, Mapping):
        return ";".join(f"{escape(str(key))}:{element(item)}" for key, item in value.items()) or ":"
    if isinstance(value, (list, tuple)):
        return ";".join(elements(value)) if len(value) > 1 else "".join(elements(value)) + ";"
    return element(value)


def split(text: str, separator: str) -> list[str]:
    """Split at the separators that stand outside brackets.

    >>> split("a;[b;c];d", ";")
    ['a', '[b;c]', 'd']
    """
    if "[" not in text:
        return text.split(separator)
    parts, depth, begin = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == separator and not depth:
            parts.append(text[begin:position])
            begin = position + 1
    return [*parts, text[begin:]]


def parse_element(text: str) -> Any:
    """Read what :func:`element` wrote."""
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("'"):
        return unescape(text[1:])
    if text.startswith("["):
        return parse_cell(text[1:-1])
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def parse_pairs(items: Iterable[str]) -> dict[str, str]:
    """Read the keys of ``key:value`` items and leave the values as text."""
    pairs = (item.partition(":") for item in items)
    return {unescape(key): value for key, _, value in pairs}


def parse_cell(text: str) -> Any:
    """Read what :func:`cell` wrote.

    >>> parse_cell("a:0.5;b:[1;2]"), parse_cell("0.5;inf"), parse_cell("7;"), parse_cell("True")
    ({'a': 0.5, 'b': [1, 2]}, [0.5, inf], [7], True)
    """
    if text in (":", ";"):
        return {} if text == ":" else []
    items = split(text, ";")
    if len(split(items[0], ":")) > 1:
        return {key: parse_element(value) for key, value in parse_pairs(items).items()}
    if len(items) > 1:
        return [parse_element(item) for item in items if item]
    return parse_element(text)
