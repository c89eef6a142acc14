"""The commands ``loopscope hooks``, all hooks or one with its metrics and options, and ``loopscope list``."""

import inspect
import io
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console, RenderableType

from ..console import documented, experiment_list, first_line, hook_list, hook_page, make_console, points_text
from ..hooks import ExperimentRegistry, HookRegistry, TrainingHook, hook_options
from ..hooks.selection import hook_kind
from ..runs import allowed_words
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
        content = {"names": [hook.name for hook in every_hook], "hooks": [_entry(hook) for hook in every_hook]}
        page, cut = hook_list(every_hook), {"hooks": "first", "names": "first"}
    else:
        hook = HookRegistry.get(given["NAME"].replace("-", "_"))
        content = _content(hook)
        page, cut = hook_page(hook), {"about": "first", "metrics": "first", "options": "first"}
    if output.is_json or output.most is not None:
        output.write(content, cut, partial(_lines, page))
    else:
        make_console().print(page)


def _lines(page: RenderableType) -> list[str]:
    """Return the lines of a page without styles."""
    text = io.StringIO()
    Console(file=text, width=make_console().width, highlight=False, markup=False, emoji=False).print(page)
    return text.getvalue().splitlines()


def _entry(hook: type[TrainingHook]) -> dict[str, Any]:
    return {"name": hook.name, "kind": hook_kind(hook), "about": first_line(hook)}


def _content(hook: type[TrainingHook]) -> dict[str, Any]:
    """Return the description, the options and the metrics of a hook."""
    paragraphs, texts = documented(hook)
    options = [
        {
            "name": option.name,
            "type": " | ".join(allowed_words(option.annotation)) or inspect.formatannotation(option.annotation),
            "default": option.default,
            "about": texts.get(option.name, ""),
        }
        for option in hook_options(hook).values()
    ]
    metrics = [
        {"name": f"{hook.name}/{info.name}", "formula": info.formula, "range": info.range, "reading": info.reading}
        for info in hook().describe_metrics()
    ]
    points = points_text(hook).split(", ")
    return {**_entry(hook), "points": points, "about": paragraphs, "options": options, "metrics": metrics}


def list_parser() -> CommandParser:
    """Build the parser of ``loopscope list``."""
    return CommandParser("list", "Show the experiments, their strategies and presets.")


def list_experiments(words: Sequence[str]) -> None:
    """List the experiments."""
    list_parser().parse(words)
    make_console().print(experiment_list(ExperimentRegistry))
