"""Grids of settings, such as ``lr=1e-3,3e-4 seed=0-4``, and their points."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product

from ..errors import require
from .ranges import MOST_NUMBERS, numbers_of


def points_of(words: Sequence[str]) -> list[dict[str, str]]:
    """Return the points of a grid, each with the values of all settings.

    >>> points_of(["lr=1e-3,3e-4", "seed=0-1"])[1]
    {'lr': '1e-3', 'seed': '1'}

    Raises:
        UsageError: for a word that is not ``NAME=VALUE,VALUE``, and for a repeated name or value.
    """
    values: dict[str, list[str]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        given = [item for part in text.split(",") for item in numbers_of(part)]
        is_setting = bool(equals and re.fullmatch(r"[A-Za-z][\w.-]*", name) and all(given))
        require(is_setting, f"--grid takes NAME=VALUE,VALUE or a range as in seed=0-4, but got {word!r}.")
        require(name not in values, f"--grid has {name} twice; give all its values in one word: {name}=VALUE,VALUE.")
        require(len(set(given)) == len(given), f"--grid {word} has a value twice; remove one of them.")
        folders = {point_name({name: value}) for value in given}
        problem = "has values that differ only in / and _, whose records would share a folder; rename one of them."
        require(len(folders) == len(given), f"--grid {word} {problem}")
        values[name] = given
    count = math.prod(map(len, values.values()))
    require(count <= MOST_NUMBERS, f"--grid has {count:,} points; it must have at most {MOST_NUMBERS:,}.")
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def point_name(point: Mapping[str, str]) -> str:
    """Return the name of the folder of a point.

    >>> point_name({"lr": "1e-3", "data": "a/b", "seed": "0"})
    'lr=1e-3,data=a_b,seed=0'
    """
    return ",".join(f"{name}={value.replace('/', '_')}" for name, value in point.items())


def words_of(point: Mapping[str, str]) -> list[str]:
    """Return the words that a command gets at a point.

    >>> words_of({"lr": "1e-3", "seed": "0"})
    ['--lr', '1e-3', '--seed', '0']
    """
    return [word for name, value in point.items() for word in (f"--{name}", value)]
