"""From what users write to values of the annotated types, and the sentences that refuse what does not fit."""

from collections.abc import Iterable
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from ..errors import UsageError, unknown
from ..hooks import HookRegistry, hook_options
from ..runs import choices, in_words

NAMES = list[str]
"""The type of options that take one name or several."""


def dashed(name: str) -> str:
    """Spell an option as the help does.

    >>> dashed("train_size")
    '--train-size'
    """
    return "--" + name.replace("_", "-")


def typed(option: str, value: Any, annotation: Any) -> Any:
    """Return a value from a flag or a file as one of the annotated type.

    Raises :class:`UsageError` that names the option, the value and what it takes.

    >>> typed("--ratio", "1e-3", float | None), typed("--ratio", "null", float | None), typed("--hooks", "norms", NAMES)
    (0.001, None, ['norms'])
    """
    if annotation == NAMES:
        value = [value] if isinstance(value, str) else value or []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=annotation)
    try:
        return parser.parse_object({"value": value})["value"]
    except ArgumentError as error:
        known = choices(annotation)
        if known:
            raise unknown(f"value of {option}:", str(value), known) from error
        wanted = "a name or a list of names" if annotation == NAMES else in_words(annotation)
        raise UsageError(f"{option} is {str(value)!r}; it must be {wanted}.") from error


def parse_hook_options(assignments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the options of ``--hook-config hook.option=value`` by hook, typed by the hook's constructor.

    Names may be spelled with dashes; of several values for one option the last counts. Raises :class:`UsageError` for
    an unknown hook or option, and for a value of another type.
    """
    options: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        name, _, option = target.replace("-", "_").partition(".")
        if not (equals and name and option):
            raise UsageError(f"--hook-config takes hook.option=value, but got {assignment!r}.")
        known = hook_options(HookRegistry.get(name))
        if option not in known:
            raise unknown(f"option of hook {name!r}:", option, known)
        options.setdefault(name, {})[option] = typed(f"--hook-config {name}.{option}", value, known[option].annotation)
    return options
