"""Scripts with which shells complete the command line, made by shtab from the parsers of the commands."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import shtab

from ..errors import require, unknown
from ..hooks import ExperimentRegistry, HookRegistry
from ..runs import allowed_words, union_members
from .check import check_parser
from .command import COMMANDS, module_of
from .equal import equal_parser
from .parser import CommandParser
from .run_parser import Experiment, run_parser
from .watch import watch_parser

SHELLS = tuple(shtab.SUPPORTED_SHELLS)
FOLDERS, FILES = ("RUN", "FOLDER"), ("config", "out")  # arguments that are paths without a declared type


def completion_parser() -> CommandParser:
    """Build the parser of ``loopscope completion``."""
    parser = CommandParser(
        "completion SHELL",
        "Print a script with which a shell completes commands, experiments, options and their values. It contains the "
        "experiments and hooks of this installation, so repeat the command after installing others.",
    )
    parser.add_argument("SHELL", nargs="*", help=" or ".join(SHELLS))
    return parser


def completion(words: Sequence[str]) -> None:
    """Print the script of a shell that completes commands, experiments and options."""
    shells = completion_parser().parse(words)["SHELL"]
    require(len(shells) == 1, f"loopscope completion takes one shell: {', '.join(SHELLS)}.")
    if shells[0] not in SHELLS:
        raise unknown("shell", shells[0], SHELLS)
    parsers = [getattr(module_of(name), f"{name}_parser")() for name in COMMANDS if name != "run"]
    sys.stdout.write(completion_script(shells[0], parsers))


def completion_script(shell: str, parsers: Iterable[CommandParser]) -> str:
    """Return the script for a shell; ``parsers`` are those of all commands except ``run``."""
    tree = argparse.ArgumentParser(prog="loopscope")
    commands = tree.add_subparsers()
    for parser in parsers:
        _declare_values(parser)
        _add(commands, parser.command, parser)
    commands.add_parser("check", parents=[check_parser()], add_help=False, help="Check the laws of a training.")
    commands.add_parser("equal", parents=[equal_parser()], add_help=False, help="Judge an edit of a training.")
    commands.add_parser("watch", parents=[watch_parser()], add_help=False, help="Run a training script unchanged.")
    experiments = commands.add_parser("run", help="Train an experiment.").add_subparsers()
    for experiment in ExperimentRegistry:
        parser = run_parser(experiment, None)
        _declare_values(parser, experiment)
        _add(experiments, experiment.name, parser)
    return f"{shtab.complete(tree, shell)}\n"


def _add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, parser: CommandParser) -> None:
    """Add the arguments of a parser as a command."""
    commands.add_parser(name, parents=[parser], add_help=False, conflict_handler="resolve", help=parser.description)


def _declare_values(parser: CommandParser, experiment: Experiment | None = None) -> None:
    """Declare the values that each argument accepts; only for the script, since argparse would refuse others itself."""
    names = {"hooks": HookRegistry.names()}
    if experiment is not None:
        names |= {"strategy": [*experiment.strategies, "all"], "preset": [*experiment.presets]}
    for action in parser.arguments:
        annotation = parser.types.get(action.dest)
        if choices := names.get(action.dest) or allowed_words(annotation):
            action.choices = choices
        elif action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY
        elif action.dest in FILES or Path in union_members(annotation):
            action.complete = shtab.FILE
