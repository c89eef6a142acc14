"""The YAML file of ``--config``: a mapping of options, their names spelled with dashes or underscores."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from yaml import YAMLError

from ..errors import UsageError


def read_config(path: Path) -> dict[Any, Any]:
    """Return the options in a file, as YAML has them; raises :class:`UsageError` for a file that is no mapping.

    ``hook_config`` may be a list of ``hook.option=value``, or a mapping from ``hook.option`` to a value, or from hooks
    to mappings of their options; mappings come back as lists.
    """
    try:
        content = get_loader("yaml")(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The config file {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (YAMLError, RecursionError) as error:  # the second for lists in lists in lists
        raise UsageError(f"The config file {path} is not YAML: {error}.") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"The config file {path} holds {type(content).__name__} {content!r}; it must be a mapping.")
    options = content or {}
    for key in {"hook_config", "hook-config"} & options.keys():
        if isinstance(options[key], Mapping):
            options[key] = list(_assignments(options[key]))
    return options


def _assignments(options: Mapping[Any, Any]) -> Iterable[str]:
    """Yield ``hook.option=value`` for every option of a mapping, whatever its form."""
    for target, content in options.items():
        if isinstance(content, Mapping) and "." not in str(target):
            yield from _assignments({f"{target}.{option}": value for option, value in content.items()})
        else:
            yield f"{target}={content if isinstance(content, str) else json.dumps(content)}"
