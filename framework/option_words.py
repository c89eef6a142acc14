"""Options in messages, as the reader writes them: words of the command line, or arguments in Python."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike

NUMBERS = ("N", "STEPS")
"""Placeholders of numbers; all others stand for texts."""
_of_command_line = False


@contextmanager
def command_line_messages() -> Iterator[None]:
    """Write options as words of the command line in the messages of the body."""
    # Not a context variable: threads that the body starts write messages for the same reader.
    global _of_command_line
    earlier, _of_command_line = _of_command_line, True
    try:
        yield
    finally:
        _of_command_line = earlier


def is_command_line() -> bool:
    """Return whether messages are for a user of the command line."""
    return _of_command_line


def option_text(name: str, value: object = None) -> str:
    """Return an option, with its value if one is given.

    >>> option_text("output_dir"), option_text("overwrite", True), option_text("hooks", ["norms"])
    ('output_dir', 'overwrite=True', "hooks=['norms']")
    >>> with command_line_messages():
    ...     option_text("output_dir"), option_text("overwrite", True), option_text("hooks", ["norms"])
    ('--output-dir', '--overwrite', '--hooks norms')
    """
    if not _of_command_line:
        return name if value is None else f"{name}={_literal(value)}"
    word = f"--{name.replace('_', '-')}"
    if value is None or value is True:
        return word
    values = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    return " ".join([word, *map(str, values)])


def hook_option_text(hook: str, **values: object) -> str:
    """Return the way to set options of a hook.

    >>> hook_option_text("gradient_flow", pattern="GLOB")
    "hook_options={'gradient_flow': {'pattern': 'GLOB'}}"
    >>> with command_line_messages():
    ...     hook_option_text("gradient_flow", pattern="GLOB")
    '--hook-config gradient_flow.pattern=GLOB'
    """
    if _of_command_line:
        return " ".join(["--hook-config", *(f"{hook}.{name}={value}" for name, value in values.items())])
    entries = ", ".join(f"{name!r}: {_literal(value)}" for name, value in values.items())
    return f"hook_options={{{hook!r}: {{{entries}}}}}"


def _literal(value: object) -> str:
    if value in NUMBERS:
        return str(value)
    return repr(str(value) if isinstance(value, PathLike) else value)
