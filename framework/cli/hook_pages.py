"""The commands ``loopscope hooks``, all hooks or one with its metrics and options, and ``loopscope list``."""

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console, RenderableType

from ..console import experiment_list, hook_content, hook_entry, hook_list, hook_page, make_console
from ..hooks import ExperimentRegistry, HookRegistry
from .output import Kept, Output, with_output_options
from .parser import CommandParser


def hooks_parser() -> CommandParser:
    """Build the parser of ``loopscope hooks``."""
    parser = CommandParser("hooks [NAME]", "List all hooks, or show every metric and option of one hook.")
    parser.add_argument("NAME", nargs="?", help="the name of a hook")
    return with_output_options(parser)


def hooks(words: Sequence[str]) -> None:
    """List all hooks, or show one."""
    given = hooks_parser().complete(words)
    output = Output.of("hooks", words, given)
    every_hook = list(HookRegistry)
    content: dict[str, Any]
    cut: dict[str, Kept]
    if given["NAME"] is None:
        content = {"names": [hook.name for hook in every_hook], "hooks": [*map(hook_entry, every_hook)]}
        page, cut = hook_list(every_hook), {"hooks": "first", "names": "first"}
    else:
        content = hook_content(HookRegistry.get(given["NAME"].replace("-", "_")))
        page, cut = hook_page(content), {"about": "first", "metrics": "first", "options": "first"}
    if output.is_json or output.most is not None:
        output.write(content, cut, partial(_lines, page))
    else:
        make_console().print(page)


def _lines(page: RenderableType) -> list[str]:
    """Return the lines of a page without styles."""
    text = io.StringIO()
    Console(file=text, width=make_console().width, highlight=False, markup=False, emoji=False).print(page)
    return text.getvalue().splitlines()


def list_parser() -> CommandParser:
    """Build the parser of ``loopscope list``."""
    return CommandParser("list", "Show the experiments, their strategies and presets.")


def list_experiments(words: Sequence[str]) -> None:
    """List the experiments."""
    list_parser().parse(words)
    make_console().print(experiment_list(ExperimentRegistry))
