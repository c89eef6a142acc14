"""Validation of values from flags and YAML files: plain values of bounded depth and size."""

from collections import Counter
from contextlib import suppress
from itertools import chain
from typing import Any

import yaml
from jsonargparse import get_loader

from ..durable_files import MAX_JSON_DEPTH
from ..errors import UsageError, require, shortened

MOST_VALUES = 100_000  # aliases let a short file expand to billions of values
LARGEST = 2**63
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
BRACKETS = "[{-?:"  # characters that start a level in YAML


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        UsageError: starting with ``source``, for content that no option accepts.
    """
    refuse_deep(text, source)
    try:
        content = get_loader("yaml")(text)
        _refuse_repeated(text, source)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}.") from error
    except (ValueError, TypeError, OverflowError, AttributeError, LookupError, RecursionError) as error:
        # A tag, such as !!int x, passes the text to a constructor of PyYAML that does not check it.
        raise UsageError(f"{source} contains a value that cannot be read ({type(error).__name__}: {error}).") from error
    refuse_odd(content, source)
    return content


def _refuse_repeated(text: str, source: str) -> None:
    """Raise :class:`UsageError` for a repeated key: YAML readers silently keep the last value."""
    pending, seen = [yaml.compose(text, Loader=LOADER)], set[int]()
    while pending:
        node = pending.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # a node with aliases occurs several times
        if isinstance(node, yaml.MappingNode):
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key in (key for key, times in keys.items() if times > 1):
                raise UsageError(f"{source} has the key {shortened(key)!r} {keys[key]} times; keep one of them.")
        pending += chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value


def refuse_deep(text: str, source: str) -> None:
    """Raise :class:`UsageError` for YAML that is nested too deep: libyaml would overflow the C stack."""
    if sum(map(text.count, BRACKETS)) <= MAX_JSON_DEPTH:
        return
    level = 0
    with suppress(yaml.YAMLError):  # read_yaml reports it
        for event in yaml.parse(text, Loader=LOADER):
            level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if level > MAX_JSON_DEPTH:
                raise UsageError(f"{source} is not YAML that can be read: it has more than {MAX_JSON_DEPTH} levels.")


def refuse_odd(content: Any, source: str) -> None:
    """Raise :class:`UsageError` for content that contains itself, is huge, or has values of other types."""
    weights: dict[int, int] = {}

    def weigh(value: Any, above: tuple[int, ...] = ()) -> int:
        if not isinstance(value, (dict, list)):
            _refuse_odd_leaf(value, source)
            return 1
        if id(value) in above or len(above) > MAX_JSON_DEPTH:
            raise UsageError(f"{source} has a list or mapping that contains itself, or is nested too deep.")
        if id(value) not in weights:  # each container is visited once, however many aliases it has
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            weights[id(value)] = 1 + sum(weigh(item, (*above, id(value))) for item in inner)
        return weights[id(value)]

    require(weigh(content) <= MOST_VALUES, f"{source} expands to more than {MOST_VALUES:,} values.")


def _refuse_odd_leaf(value: Any, source: str) -> None:
    if value is not None and not isinstance(value, (str, int, float)):
        kind = type(value).__name__
        raise UsageError(f"{source} contains a value of type {kind}; options are text, numbers, lists and mappings.")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{source} contains a zero byte; remove it.")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise UsageError(f"{source} contains an integer that is too large; the largest is 9,223,372,036,854,775,807.")
