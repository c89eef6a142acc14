"""The options of `loopscope run`, from the parser that prints its help."""

import re
from argparse import Action
from collections.abc import Iterable, Iterator
from typing import Any

from loopscope import experiments, sinks  # noqa: F401 (registers the sinks, which have options)
from loopscope.cli.parser import HelpFormatter
from loopscope.cli.run_parser import run_parser
from loopscope.hooks import ExperimentRegistry

from docs.generate import table

SHARED = ("Experiment and hooks", "Output and display", "Checkpoints", "Devices and processes", "Rare options")
"""The groups that are equal for all experiments, apart from the names of presets and strategies."""


def page() -> str:
    """Return the tables of all options."""
    lines = []
    for heading, actions in all_groups():
        title, _, defaults = heading.partition("; ")
        lines += [f"## {title}", "", *([f"{defaults.capitalize()}.", ""] if defaults else [])]
        lines += [*option_table(actions), ""]
    return "\n".join(lines)


def names() -> list[str]:
    """Return the lines of a table with the names of all options."""
    rows = [
        (heading.partition("; ")[0], ", ".join(f"`{max(action.option_strings, key=len)}`" for action in actions))
        for heading, actions in all_groups()
    ]
    return table(("group", "options"), rows)


def all_groups() -> Iterator[tuple[str, list[Action]]]:
    """Yield the shared groups once, then those of each experiment, each with its options."""
    runners = [runner for runner in ExperimentRegistry if runner.__module__.startswith(f"{experiments.__name__}.")]
    yield from ((heading, actions) for heading, actions in groups(runners[0]) if heading in SHARED)
    for runner in runners:
        yield from ((heading, actions) for heading, actions in groups(runner) if heading not in SHARED)


def groups(runner: Any) -> Iterator[tuple[str, list[Action]]]:
    """Yield the headings of the help for an experiment, each with its options."""
    for group in run_parser(runner, None)._action_groups:
        if group._group_actions and group.title != "options":
            yield " ".join(str(group.title).split()), group._group_actions


def option_table(actions: Iterable[Action]) -> list[str]:
    """Return the lines of a table of options."""
    formatter = HelpFormatter("loopscope")
    rows = [(f"`{formatter._format_action_invocation(action)}`", meaning(action)) for action in actions]
    return table(("option", "meaning"), rows)


def meaning(action: Action) -> str:
    """Return the help of an option, without the names of one experiment."""
    if action.dest in ("preset", "strategy"):
        names = {"preset": "a named set of options", "strategy": "the strategies to train; by default all"}
        return f"{names[action.dest]}; `loopscope list` shows the names"
    text = (action.help or "").replace("%%", "%").replace(" (default: )", "")
    if action.dest == "seed":
        text = text.partition(" (default")[0]
    return re.sub(r"(--[a-z][a-z-]+)(?![\w.])", r"`\1`", text[:1].lower() + text[1:] if text[1:2].islower() else text)
