"""The YAML file of ``--config``: a mapping of options, their names spelled with dashes or underscores."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from yaml import YAMLError

from ..errors import UsageError, nearest

LISTS = ("strategy", "hooks")


def read_config(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """Return the options in a file by name; raises :class:`UsageError` for a file or a key that is none.

    ``strategy`` and ``hooks`` may be one name or a list. ``hook_config`` may be a list of ``hook.option=value``, or a
    mapping from ``hook.option`` to a value, or from hooks to mappings of their options; it comes back as a list.
    """
    options: dict[str, Any] = {}
    choices = set(known)
    for key, value in _mapping_in(path).items():
        name = str(key).replace("-", "_")
        if name not in choices:
            raise UsageError(
                f"Unknown key {str(key)!r} in the config file {path}.{nearest(name, sorted(choices))} "
                "Its keys are the options that --help lists."
            )
        options[name] = value
    for name in LISTS:
        if name in options:
            options[name] = _names(path, name, options[name])
    if "hook_config" in options:
        options["hook_config"] = list(_assignments(path, options["hook_config"]))
    return options


def _mapping_in(path: Path) -> dict[Any, Any]:
    try:
        content = get_loader("yaml")(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"The config file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"The config file {path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except YAMLError as error:
        raise UsageError(f"The config file {path} is not YAML: {' '.join(str(error).split())}.") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"The config file {path} holds {type(content).__name__} {content!r}; it must be a mapping.")
    return content or {}


def _names(path: Path, key: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value or []
    if not (isinstance(items, list) and all(isinstance(item, str) for item in items)):
        raise UsageError(f"{key} in the config file {path} is {value!r}; it must be a name or a list of names.")
    return items


def _assignments(path: Path, value: Any) -> Iterable[str]:
    """Yield ``hook.option=value`` for everything in any of the forms."""
    if isinstance(value, Mapping):
        for target, content in value.items():
            if isinstance(content, Mapping) and "." not in str(target):
                yield from _assignments(path, {f"{target}.{option}": item for option, item in content.items()})
            else:
                yield f"{target}={content if isinstance(content, str) else json.dumps(content)}"
    else:
        yield from _names(path, "hook_config", value)
