"""``--hook-config hook.option=value``: parsed by the annotations of the hook's constructor."""

from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from ..errors import UsageError, unknown
from ..hooks import HookRegistry, hook_options
from .errors import wrong_value


def parse_hook_options(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options by hook, as values of the annotated types; raises :class:`UsageError`.

    Names may be spelled with dashes; of several values for one option the last counts.
    """
    options: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        name, dot, option = target.replace("-", "_").partition(".")
        if not (equals and dot and name and option):
            raise UsageError(f"--hook-config takes hook.option=value, but got {assignment!r}.")
        options.setdefault(name, {})[option] = _parsed(name, option, value)
    return options


def _parsed(name: str, option: str, value: str) -> Any:
    known = hook_options(HookRegistry.get(name))
    if option not in known:
        raise unknown(f"option of hook {name!r}:", option, known)
    annotation = known[option].annotation
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{option}", type=annotation)
    try:
        return parser.parse_args([f"--{option}={value}"])[option]
    except ArgumentError as error:
        raise wrong_value(f"--hook-config {name}.{option}", value, annotation) from error
