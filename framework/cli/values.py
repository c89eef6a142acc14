"""Reading of YAML files without repeated keys."""

from collections import Counter
from typing import Any

import yaml
from jsonargparse import get_loader

from ..errors import UsageError, shortened


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML.

    Raises:
        UsageError: starting with ``source``, for text that is not YAML, and for a repeated key.
    """
    try:
        content = get_loader("yaml")(text)
        _refuse_repeated(yaml.compose(text, Loader=yaml.SafeLoader), source)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}.") from error
    return content


def _refuse_repeated(node: Any, source: str) -> None:
    """Raise :class:`UsageError` for a repeated key: YAML readers silently keep the last value."""
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key in (key for key, times in keys.items() if times > 1):
            raise UsageError(f"{source} has the key {shortened(key)!r} {keys[key]} times; keep one of them.")
        inner = [value for _, value in node.value]
    for value in inner:
        _refuse_repeated(value, source)
