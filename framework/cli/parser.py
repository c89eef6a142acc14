"""Parser of a command's words: typed options, short help, and one-sentence errors."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from docstring_parser import parse as parse_docstring
from jsonargparse import ArgumentError, ArgumentParser

from ..console import make_console, printable
from ..errors import UsageError, nearest, require, shortened, unknown
from ..runs import allowed_words, describe_type, union_members

NAMES = list[str]  # the type of options that take one name or several
PLACEHOLDERS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
NEGATIVE_NUMBER = r"-(\d|\.\d|inf|nan)"
FEW = 10  # an error about an unknown option lists the options of a command that has at most this many
ONE_OF_SEVERAL = "one-of-several"
"""The command of a worker process: it reads its task from standard input, and stops when that is closed."""
UNBOUNDED = 10_000  # columns of output that is not a terminal, so that programs can read full names


def dashed(name: str) -> str:
    """Return the flag of an option.

    >>> dashed("train_size")
    '--train-size'
    """
    return "--" + name.replace("_", "-")


def write_lines(*lines: str) -> None:
    """Write lines on standard output, with the control characters of plug-ins and files escaped."""
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")


def line_width() -> int:
    """Return the columns of the terminal, or a practically unlimited number for other output."""
    console = make_console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else UNBOUNDED


def typed(option: str, value: Any, annotation: Any) -> Any:
    """Convert a value from a flag or a file to the annotated type.

    Raises:
        UsageError: with the option, the value and the accepted values.

    >>> typed("--ratio", "1e-3", float | None), typed("--ratio", "null", float | None), typed("--hooks", "norms", NAMES)
    (0.001, None, ['norms'])
    """
    if annotation == NAMES:
        value = [value] if isinstance(value, str) else value or []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=annotation)
    try:
        return parser.parse_object({"value": value})["value"]
    except (ArgumentError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # jsonargparse also passes on exceptions that the constructors of PyYAML raise for a tag.
        choices, text = allowed_words(annotation), shortened(str(value))
        if choices:
            raise unknown(f"value of {option}:", text, choices) from error
        wanted = "a name or a list of names" if annotation == NAMES else describe_type(annotation)
        raise UsageError(f"{option} is {text!r}; it must be {wanted}.") from error


class HelpFormatter(argparse.HelpFormatter):
    """A formatter that shows switches without their optional value."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return "" if action.const is True else super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return super()._format_action_invocation(action).rstrip()


@dataclass(frozen=True)
class Option:
    """An option with its type, its text in the help, and further keyword arguments of :meth:`CommandParser.add`."""

    name: str
    annotation: Any
    text: str
    default: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def field_options(
    options: type[Any], defaults: Mapping[str, Any], settings: Mapping[str, Mapping[str, Any]]
) -> Iterator[Option]:
    """Yield an option for each field of a dataclass, with help from its docstring.

    ``defaults`` override those of the fields; ``settings`` are arguments of :meth:`CommandParser.add`, by field.
    """
    documented = [parse_docstring(base.__doc__ or "") for base in reversed(options.__mro__)]
    texts = {param.arg_name: param.description or "" for docstring in documented for param in docstring.params}
    types = get_type_hints(options)
    for item in fields(options):
        text = " ".join(texts.get(item.name, "").split()).rstrip(".")
        field_default = item.default if item.default_factory is MISSING else item.default_factory()
        default = defaults.get(item.name, field_default)
        yield Option(item.name, types[item.name], text, default, settings.get(item.name, {}))


def heading_of(options: type[Any]) -> str:
    """Return the first paragraph of the docstring of a dataclass as a heading of its options."""
    return " ".join((options.__doc__ or "").partition("\n\n")[0].replace("``", "").split()).rstrip(".")


class CommandParser(argparse.ArgumentParser):
    """The options of a command with their types, defaults and help; dashes and underscores are equivalent."""

    def __init__(self, usage: str, description: str, **settings: Any) -> None:
        settings |= {"usage": f"loopscope {usage}", "formatter_class": HelpFormatter, "exit_on_error": False}
        # With abbreviations, a new option could change the meaning of an old command.
        super().__init__(description=description, allow_abbrev=False, **settings)
        self.command = usage.split()[0]
        # argparse takes -1 and -0.5 as values, but -1e-3 (before Python 3.14) and -inf as options.
        self._negative_number_matcher = re.compile(NEGATIVE_NUMBER)
        self.types: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.several: set[str] = set()  # options that take one value of their type or several

    @property
    def arguments(self) -> list[Any]:
        """All options and positional arguments, as actions of argparse."""
        return list(self._actions)

    def format_help(self) -> str:
        """Return the help with control characters escaped, since it contains texts of plug-ins."""
        return "\n".join(map(printable, super().format_help().split("\n")))

    def add(
        self,
        name: str,
        annotation: Any,
        text: str,
        *,
        default: Any = None,
        group: argparse._ArgumentGroup | None = None,
        **settings: Any,
    ) -> None:
        """Add an option; a ``bool`` needs no value, and an option with the default ``MISSING`` is required."""
        self.types[name] = annotation
        if default is not MISSING:
            self.defaults[name] = default
        if default is not False and default not in (None, [], MISSING):
            text += f" (default: {'on' if default is True else default})"
        words = allowed_words(annotation)
        kinds = [PLACEHOLDERS[kind] for kind in union_members(annotation) if kind in PLACEHOLDERS]
        settings.setdefault("metavar", f"{{{','.join(words)}}}" if words else (*kinds, "VALUE")[0])
        if annotation == NAMES:
            settings |= {"nargs": "+", "action": "extend"}
        elif settings.get("nargs") == "+":
            self.several.add(name)
        elif annotation is bool:
            settings |= {"nargs": "?", "const": True}
        flag, text = dashed(name), text.replace("%", "%%")
        if flag in self._option_string_actions:
            command = (self.usage or "").removesuffix(" [options]")
            raise UsageError(f"{command} already has an option {flag}; rename {name!r} in the config class.")
        (group or self).add_argument(flag, default=argparse.SUPPRESS, help=text, **settings)

    def add_negation(self, name: str, group: argparse._ArgumentGroup) -> None:
        """Add ``--no-NAME``, which switches an option off."""
        text = f"switch {dashed(name)} off"
        flag = dashed(f"no_{name}")
        group.add_argument(flag, dest=name, action="store_false", default=argparse.SUPPRESS, help=text)

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the given values by name, converted to their types; raises :class:`UsageError` for invalid words."""
        dashes = [re.sub(r"^--\w[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]
        try:
            namespace, rest = self.parse_known_intermixed_args(dashes)
        except argparse.ArgumentError as error:
            switches = ["/".join(action.option_strings) for action in self._actions if action.nargs == 0]
            takes = "takes no" if error.argument_name in switches else "needs a"
            raise UsageError(f"{error.argument_name} {takes} value.") from error
        if rest and not rest[0].startswith("--"):
            raise UsageError(f"Unexpected word {rest[0]!r}; options start with two dashes, and --help lists them.")
        if rest:
            flag = rest[0].partition("=")[0]
            flags = [word for action in self._actions for word in action.option_strings if word.startswith("--")]
            if len(flags) <= FEW:
                raise unknown("option", flag, flags)
            raise UsageError(f"Unknown option {flag!r}.{nearest(flag, flags)} --help lists all options.")
        given = vars(namespace)
        given |= self.typed({name: given[name] for name in self.types if name in given})
        single = {name: given[name][0] for name in self.several if len(given.get(name, ())) == 1}
        return given | single

    def complete(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the given values, and the defaults of the other options, by name."""
        return self.defaults | self.parse(words)

    def typed(self, values: Mapping[Any, Any], source: str = "") -> dict[str, Any]:
        """Return values by option, converted to their types; names may contain dashes.

        Raises:
            UsageError: mentioning ``source``, for an unknown name and for a value of another type.
        """
        converted: dict[str, Any] = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name not in self.types:
                hint = nearest(name, sorted(self.types))
                shown = f"{shortened(str(key))!r}{source}"
                raise UsageError(f"Unknown key {shown}.{hint} The keys are the options in --help.")
            if name in converted:
                raise UsageError(f"{key!r}{source} occurs twice, with dashes and with underscores; keep one of them.")
            option, annotation = f"{dashed(name)}{source}", self.types[name]
            if name in self.several and isinstance(value, list):
                kind = describe_type(annotation)
                require(value != [], f"{option} is an empty list; it must be {kind}, or a list of these.")
                converted[name] = list(dict.fromkeys(typed(option, item, annotation) for item in value))
            else:
                converted[name] = typed(option, value, annotation)
        return converted


def given_run(given: Mapping[str, Any], command: str) -> Path:
    """Return the folder that a command was given; raises :class:`UsageError` unless it is one."""
    folders = given["RUN"]
    remedy = "" if folders else f": loopscope {command} FOLDER, with one of those that loopscope ls lists"
    require(len(folders) == 1, f"loopscope {command} takes the folder of one run, but got {len(folders)}{remedy}.")
    return Path(folders[0])
