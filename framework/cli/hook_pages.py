"""The commands ``loopscope hooks``, all hooks or one with its metrics and options, and ``loopscope list``."""

import inspect
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..console import make_console
from ..hooks import ALWAYS, ExperimentRegistry, HookRegistry, TrainingHook, hook_options
from ..hooks.selection import hook_kind
from ..runs import ExperimentRunner, allowed_words
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


def first_line(item: type[Any]) -> str:
    """Return the first line of a class's docstring, or an empty text."""
    return (inspect.getdoc(item) or "").partition("\n")[0].replace("``", "")


def hook_list(hooks: Sequence[type[TrainingHook]]) -> Group:
    """List hooks with their kind, their hook points and one line."""
    width = max((len(hook.name) for hook in hooks), default=0)
    parts: list[RenderableType] = []
    for hook in hooks:
        title = Table.grid(padding=(0, 2, 0, 0))
        title.add_column(min_width=width, style="bold", no_wrap=True)
        title.add_column(min_width=len("intervention"), no_wrap=True)
        title.add_row(Text(hook.name), hook_kind(hook), points_text(hook))
        parts += [title, _indented(Text(first_line(hook)))]
    return Group(*parts)


def _indented(shown: RenderableType) -> Padding:
    return Padding(shown, (0, 0, 0, 4), expand=False)


def points_text(hook: type[TrainingHook]) -> str:
    """Return the hook points of a hook in the order of their calls, by loop and with epochs if it restricts them."""
    if hook.loop_points is None:
        return ", ".join(point.name for point in sorted(hook.hook_points))
    loops = []
    for loop, entry in hook.loop_points.items():
        windows = entry if isinstance(entry, Mapping) else dict.fromkeys(entry, ALWAYS)
        loops.append(f"{loop} loop: " + ", ".join(point.name + _epochs(*windows[point]) for point in sorted(windows)))
    return "; ".join(loops)


def _epochs(first: int | None, last: int | None) -> str:
    if first is None:
        return "" if last is None else f" to epoch {last}"
    return f" from epoch {first}" + ("" if last is None else f" to {last}")


def hook_entry(hook: type[TrainingHook]) -> dict[str, Any]:
    """Return the name, the kind and one line of a hook."""
    return {"name": hook.name, "kind": hook_kind(hook), "about": first_line(hook)}


def hook_content(hook: type[TrainingHook]) -> dict[str, Any]:
    """Return the description, the options and the metrics of a hook as plain values, but for the defaults."""
    paragraphs, texts = _documented(hook)
    options = [
        {
            "name": option.name,
            "type": " | ".join(allowed_words(option.annotation)) or inspect.formatannotation(option.annotation),
            "default": option.default,
            "about": texts.get(option.name, ""),
        }
        for option in hook_options(hook).values()
    ]
    metrics = [{**vars(info), "name": f"{hook.name}/{info.name}"} for info in hook().describe_metrics()]
    points = points_text(hook).split(", ")
    return {**hook_entry(hook), "points": points, "about": paragraphs, "options": options, "metrics": metrics}


def hook_page(content: Mapping[str, Any]) -> Group:
    """Show every metric of a hook with formula, range and reading, and its options."""
    return Group(
        Text.assemble((content["name"], "bold"), f"  {content['kind']}, {', '.join(content['points'])}"),
        *(Text(f"{paragraph}\n") for paragraph in content["about"]),
        Text("Metrics", style="bold"),
        *map(_metric, content["metrics"]),
        Text("\nOptions, for --hook-config", style="bold"),
        *([_option(content["name"], option) for option in content["options"]] or [Text("  none")]),
    )


def _documented(hook: type[TrainingHook]) -> tuple[list[str], dict[str, str]]:
    """Split a hook's docstring into paragraphs, each on one line, and descriptions of its options by name."""
    text = (inspect.getdoc(hook) or "").replace("``", "")
    description, _, arguments = text.partition("\nArgs:\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in description.split("\n\n") if paragraph.strip()]
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.M)
    return paragraphs, {name: " ".join(words.split()) for name, words in entries}


def _metric(metric: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label in ("formula", "range", "reading"):
        table.add_row(label, Text(metric[label]))
    return Group(Text(f"  {metric['name']}", style="cyan"), _indented(table))


def _option(hook: str, option: Mapping[str, Any]) -> RenderableType:
    title = Text.assemble((f"  {hook}.{option['name']}", "cyan"), f"  ({option['type']}, default {option['default']})")
    return Group(title, _indented(Text(option["about"]))) if option["about"] else title


def experiment_list(experiments: Iterable[type[ExperimentRunner[Any]]]) -> Group:
    """List experiments with one line, their strategies and presets."""
    parts: list[RenderableType] = []
    for item in experiments:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_row("strategies", Text(", ".join(item.strategies)))
        table.add_row("presets", Text(", ".join(item.presets) or "none"))
        parts += [Text(item.name, style="bold"), _indented(Group(Text(first_line(item)), table))]
    return Group(*parts)
