"""Dispatch of the command line."""

import sys
from collections.abc import Container, Sequence
from importlib import import_module
from types import ModuleType

from ..checkpoints import StoppedError
from ..console import Label, printable, show_warnings
from ..errors import LoopscopeError, UsageError, unknown
from ..interruption import raise_at_ctrl_c
from ..names import as_names
from ..option_words import command_line_messages
from ..training import is_main_process
from .output import ReportedError, write_error
from .parser import ONE_OF_SEVERAL
from .user_errors import user_errors

COMMANDS = {
    **dict.fromkeys(("run", "resume", "replay"), "training_commands"),
    **dict.fromkeys(("ls", "show"), "listing"),
    **dict.fromkeys(("hooks", "list"), "hook_pages"),
    **{name: name for name in ("agents", "alerts", "completion", "doctor", "diff", "new", "plot", "compare")},
    **{name: name for name in ("report", "rewind", "verify")},
}
"""The module of each command; only that of the given command is imported."""
READERS = frozenset({"ls", "show", "doctor", "alerts", "compare", "report"})
"""Commands that only read runs: their modules do not import torch, which takes over a second, nor hooks."""


def run_command(words: Sequence[str], packages: str | Sequence[str]) -> int:
    """Import the packages, run a command and return its exit status; see :func:`loopscope.cli.main.main`."""
    warned: list[str] = []

    def warn(label: Label, sentence: str) -> None:
        warned.append(sentence)
        _print_warning(label, sentence)

    with command_line_messages(), show_warnings(warn):
        try:
            reads_only = words[0] in READERS and "--test" not in words
            for package in as_names(packages):
                if not (reads_only and package.startswith("loopscope.")):
                    import_module(package)
            if not reads_only:
                _discover_plug_ins()
            raise_at_ctrl_c()
            _dispatch(*words)
        except StoppedError as error:
            _print_message(str(error))
            return error.status
        except LoopscopeError as error:
            if "--json" in words and not isinstance(error, ReportedError) and is_main_process():
                write_error(error)
            return refused(error, unless=warned)
        except KeyboardInterrupt:
            _print_message("interrupted.")
            return 130
        except SystemExit as end:  # a parser's --help
            return int(end.code or 0)
    return 0


def refused(error: LoopscopeError, *, unless: Container[str] = ()) -> int:
    """Print the error as one line on standard error, and return the exit status: 2 for bad input, otherwise 1."""
    sentence = " ".join(str(error).split())
    if sentence not in unless:  # a warning has already printed it
        _print_message(sentence)
    return 2 if isinstance(error, UsageError) else 1


def _discover_plug_ins() -> None:
    from ..doctor import DetectorRegistry
    from ..hooks import ExperimentRegistry, HookRegistry, SinkRegistry

    for registry in (ExperimentRegistry, HookRegistry, SinkRegistry, DetectorRegistry):
        registry.discover()


def _dispatch(command: str, *words: str) -> None:
    if command == ONE_OF_SEVERAL:
        from .jobs import train_one_of_several

        with show_warnings(_print_warning, alerts=False), user_errors(full_traceback="--traceback" in sys.argv):
            train_one_of_several(words)
        return
    if command.startswith("-"):
        raise UsageError(f"Unknown option {command!r}; put the options of a run after loopscope run EXPERIMENT.")
    if command not in COMMANDS:
        raise unknown("command", command, COMMANDS)
    function = "list_experiments" if command == "list" else command
    getattr(module_of(command), function)(words)


def module_of(command: str) -> ModuleType:
    """Import the module of a command."""
    return import_module(f".{COMMANDS[command]}", __package__)


def _print_warning(label: Label, sentence: str) -> None:
    _print_message(f"{label}: {sentence}")


def _print_message(text: str) -> None:
    if is_main_process():
        print(f"loopscope: {printable(text)}", file=sys.stderr)  # noqa: T201
