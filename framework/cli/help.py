"""The look of ``--help``: dashes, short placeholders, no empty defaults, at most as wide as the terminal."""

import argparse
import re
import textwrap
from argparse import Action
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from ..runs import alternatives

PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
NAMED = {
    "with_hooks": "GROUP",
    "device": "DEVICE",
    "guardian_device": "DEVICE",
    "reference": "PATH",
    "output_dir": "DIR",
}


class HelpFormatter(DefaultHelpFormatter):
    """A formatter that shows what a reader needs to fill in, and nothing of Python."""

    def start_section(self, heading: str | None) -> None:
        """Begin a group of options, its heading folded to the width."""
        plain = (heading or "").replace("``", "")
        super().start_section(textwrap.fill(plain, self._width, subsequent_indent="  "))

    def _get_help_string(self, action: Action) -> str:
        text = (action.help or "").rstrip(".")
        shown = action.default not in (None, [], False, "==SUPPRESS==")
        return f"{text} (default: %(default)s)" if shown else text

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        by_type = next((PLACEHOLDERS[kind] for kind in _kinds(action) if kind in PLACEHOLDERS), "VALUE")
        return NAMED.get(action.dest, by_type)

    def _format_args(self, action: Action, default_metavar: str) -> str:
        return "" if is_switch(action) else super()._format_args(action, default_metavar)


class HelpfulParser(ArgumentParser):
    """An argument parser that spells options with dashes in its help, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            exit_on_error=False, allow_abbrev=False, print_config=None, formatter_class=HelpFormatter, **settings
        )

    def add_options(self, options: type[Any]) -> None:
        """Add an option for every field of a dataclass; booleans may do without a value."""
        self.add_class_arguments(options, as_group=True)
        for action in self._actions:
            if bool in _kinds(action):
                action.nargs, action.const = "?", True

    def let_do_without_value(self, option: str, meant: Any) -> None:
        """Let an option stand alone, which then means the value ``meant``."""
        for action in self._actions:
            if action.dest == option:
                action.nargs, action.const = "?", meant

    def format_help(self, formatter: argparse.HelpFormatter | None = None) -> str:
        """Return the help text."""
        return re.sub(r"--[a-z][a-z_]*", lambda match: match[0].replace("_", "-"), super().format_help(formatter))


def is_switch(action: Action) -> bool:
    """Tell whether an option may do without a value."""
    return action.nargs == 0 or (action.nargs == "?" and action.const is True)


def _kinds(action: Action) -> tuple[Any, ...]:
    """Return the types that an option takes."""
    return alternatives(vars(action).get("_typehint"))
