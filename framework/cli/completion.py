"""Scripts with which shells complete the command line, made by shtab from the parsers of the commands."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import shtab

from ..hooks import ExperimentRegistry, HookRegistry
from ..runs import allowed_words, union_members
from .check import check_parser
from .parser import CommandParser
from .run_parser import Experiment, run_parser
from .watch import watch_parser

SHELLS = tuple(shtab.SUPPORTED_SHELLS)
FOLDERS, FILES = ("RUN", "FOLDER"), ("config", "out")  # arguments that are paths without a declared type


def completion_script(shell: str, parsers: Iterable[CommandParser]) -> str:
    """Return the script for a shell; ``parsers`` are those of all commands except ``run``."""
    tree = argparse.ArgumentParser(prog="loopscope")
    commands = tree.add_subparsers()
    for parser in parsers:
        _declare_values(parser)
        _add(commands, parser.command, parser)
    commands.add_parser("check", parents=[check_parser()], add_help=False, help="Check the laws of a training.")
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
