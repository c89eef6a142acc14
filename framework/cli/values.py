"""What flags and YAML files may hold: plain values of bounded depth and size; everything else is refused."""

from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import Any

import yaml
from jsonargparse import get_loader

from ..durable_files import MOST_LEVELS
from ..errors import UsageError, require, shortened

MOST_VALUES = 100_000  # aliases let a short file stand for billions of values
LARGEST = 2**63
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BRACKETS = "[{-?:"  # with which the levels of YAML begin


def read_yaml(text: str, source: str) -> Any:
    """Return what YAML holds; raises :class:`UsageError`, beginning with its ``source``, for what no option takes."""
    refuse_deep(text, source)
    try:
        content = get_loader("yaml")(text)
        _refuse_repeated(text, source)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}.") from error
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError, RecursionError) as error:
        # A tag, as in !!int x, sends the text to a constructor of PyYAML that does not check it.
        raise UsageError(f"{source} holds a value that cannot be read ({type(error).__name__}: {error}).") from error
    refuse_odd(content, source)
    return content


def _refuse_repeated(text: str, source: str) -> None:
    """Raise :class:`UsageError` for a key that a mapping has twice: YAML readers keep the last without a word."""
    waiting, seen = [yaml.compose(text, Loader=LOADER)], set[int]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # where aliases refer to it, it stands again
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key in (key for key, times in keys.items() if times > 1):
                raise UsageError(f"{source} has the key {shortened(key)!r} {keys[key]} times; keep one of them.")
        waiting += chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value


def refuse_deep(text: str, source: str) -> None:
    """Raise :class:`UsageError` for YAML that is nested too deep: libyaml would overflow the stack of the process."""
    if sum(map(text.count, BRACKETS)) <= MOST_LEVELS:
        return
    level = 0
    with suppress(yaml.YAMLError):  # who reads it says so
        for event in yaml.parse(text, Loader=LOADER):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MOST_LEVELS:
                raise UsageError(f"{source} is not YAML that can be read: it has more than {MOST_LEVELS} levels.")


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

    require(weigh(content) <= MOST_VALUES, f"{source} stands for more than {MOST_VALUES:,} values.")


def _refuse_odd_leaf(value: Any, source: str) -> None:
    if value is not None and not isinstance(value, (str, int, float)):
        kind = type(value).__name__
        raise UsageError(f"{source} holds a value of the type {kind}; options are text, numbers, lists and mappings.")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{source} holds a zero byte, which no name and no text of an option has.")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise UsageError(f"{source} holds an integer of {value.bit_length():,} bits; options take at most 63.")
