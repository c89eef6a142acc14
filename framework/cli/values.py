"""What flags and YAML files may hold: plain values of bounded depth and size; everything else is refused."""

from typing import Any

import yaml
from jsonargparse import get_loader

from ..durable_files import MOST_LEVELS
from ..errors import UsageError

MOST_VALUES = 100_000
"""Aliases let a short file stand for billions of values."""
LARGEST = 2**63
BRACKETS = "[{-?:"
"""With which the levels of YAML begin."""


def read_yaml(text: str, source: str) -> Any:
    """Return what YAML holds; raises :class:`UsageError`, beginning with its ``source``, for what no option takes."""
    refuse_deep(text, source)
    try:
        content = get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}.") from error
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError, RecursionError) as error:
        # A tag, as in !!int x, sends the text to a constructor of PyYAML that does not check it.
        raise UsageError(f"{source} holds a value that cannot be read ({type(error).__name__}: {error}).") from error
    refuse_odd(content, source)
    return content


def refuse_deep(text: str, source: str) -> None:
    """Raise :class:`UsageError` for YAML that is nested too deep: libyaml would overflow the stack of the process."""
    if sum(map(text.count, BRACKETS)) <= MOST_LEVELS:
        return
    level = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS:
                raise UsageError(f"{source} is not YAML that can be read: it has more than {MOST_LEVELS} levels.")
    except yaml.YAMLError:
        return  # who reads it says so


def refuse_odd(content: Any, source: str) -> None:
    """Raise :class:`UsageError` for content that refers to itself, is huge, or is more than text, numbers and lists."""
    weights: dict[int, int] = {}

    def weigh(value: Any, above: tuple[int, ...] = ()) -> int:
        if not isinstance(value, (dict, list)):
            _refuse_odd_leaf(value, source)
            return 1
        if id(value) in above or len(above) > MOST_LEVELS:
            raise UsageError(f"{source} holds a list or mapping that contains itself, or is nested too deep.")
        if id(value) not in weights:  # each is gone through once, however often it is referred to
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            weights[id(value)] = 1 + sum(weigh(item, (*above, id(value))) for item in inner)
        return weights[id(value)]

    if weigh(content) > MOST_VALUES:
        raise UsageError(f"{source} stands for more than {MOST_VALUES:,} values.")


def _refuse_odd_leaf(value: Any, source: str) -> None:
    if value is not None and not isinstance(value, (str, int, float)):
        kind = type(value).__name__
        raise UsageError(f"{source} holds a value of the type {kind}; options are text, numbers, lists and mappings.")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{source} holds a zero byte, which no name and no text of an option has.")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise UsageError(f"{source} holds an integer of {value.bit_length():,} bits; options take at most 63.")
