"""Tables and lines for people: hooks, metrics, experiments, what a strategy is and how it ended."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from framework.contexts import MetricInfo, RunInfo
from framework.hooks import TrainingHook
from framework.number_text import duration_text, number_text
from framework.registry import hook_kind, hook_options
from framework.runner import ExperimentRunner
from framework.train_step import TrainingTask

INDENT = 4
NUMERIC = r"[-+]?([\d.,:]+(e[-+]\d+)?|nan|inf)|"


def first_line(documented: type[Any]) -> str:
    """Return the first line of a class's docstring, or nothing."""
    return (inspect.getdoc(documented) or "").partition("\n")[0]


def strategy_header(run: RunInfo, task: TrainingTask, hooks: Sequence[str]) -> Text:
    """Say what is about to be trained: model, data, hooks, treatments, folder."""
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    unit = "epochs" if run.loop == "epoch" else "steps"
    header = Text.assemble(
        (f"{run.experiment} {run.strategy}", "bold"),
        f": {parameters:,} parameters, {len(task.loader):,} batches per epoch, at most {task.length:,} {unit}",
        f"\n  hooks: {', '.join(hooks) or 'none'}",
    )
    if run.treatments:
        treatments = ", ".join(f"{name} ({', '.join(parts)})" for name, parts in run.treatments.items())
        header.append(f"\n  treatments: {treatments}", "bold yellow")
    return header.append(f"\n  output: {run.output_dir}")


def outcome(summary: Mapping[str, Any]) -> str:
    """Say in a few words how a strategy ended."""
    if summary["status"] != "completed":
        return str(summary["status"])
    reached = summary["target_reached"]
    return f"target reached at epoch {reached['epoch']}" if reached else "ran to the cap"


def final_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the last training loss and the final accuracies; the whole evaluation where it has no accuracy."""
    final: Mapping[str, float] = summary["final"]
    accuracies = {name: value for name, value in final.items() if name.endswith("_acc")}
    loss = {} if summary["training_loss"] is None else {"loss": summary["training_loss"]}
    return {**loss, **(accuracies or final)}


def result_line(summary: Mapping[str, Any]) -> Text:
    """Say how one strategy ended."""
    numbers = "".join(f", {name} {number_text(value)}" for name, value in final_numbers(summary).items())
    return Text.assemble(
        (f"{summary['strategy']}", "bold"),
        f": {outcome(summary)} after {summary['epochs']:,} epochs, {summary['steps']:,} steps, ",
        f"{duration_text(summary['seconds']['training'])}{numbers}",
    )


def comparison_rows(summaries: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return one row of the comparison for each strategy: text by column."""
    any_reached = any(summary["target_reached"] for summary in summaries)
    return [
        {
            "strategy": summary["strategy"],
            "status": "" if summary["status"] == "completed" else str(summary["status"]),
            "target": _target(summary["target_reached"]) if any_reached else "",
            "epochs": f"{summary['epochs']:,}",
            **{name: number_text(value) for name, value in final_numbers(summary).items()},
            "time": duration_text(summary["seconds"]["training"]),
            "treatments": ", ".join(summary["treatments"]),
            "failed hooks": ", ".join(dict.fromkeys(error["hook"] for error in summary["hook_errors"])),
        }
        for summary in summaries
    ]


def _target(reached: Mapping[str, int] | None) -> str:
    return f"epoch {reached['epoch']}" if reached else "not reached"


def comparison_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Lay rows out under the union of their columns; columns without any text are left out."""
    columns = dict.fromkeys(column for row in rows for column in row)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    shown = [column for column in columns if any(row.get(column) for row in rows)]
    for column in shown:
        numeric = all(re.fullmatch(NUMERIC, row.get(column, "")) for row in rows)
        wraps = column in ("treatments", "failed hooks")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=not wraps, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(column, "")) for column in shown))
    return table


def results_line(summaries: Iterable[Mapping[str, Any]]) -> Text:
    """Say where the results lie."""
    folders = [Path(summary["output_dir"]) for summary in summaries]
    parents = {folder.parent for folder in folders}
    if len(folders) > 1 and len(parents) == 1:
        return Text(f"Results: {parents.pop()}/ with {', '.join(folder.name for folder in folders)}")
    return Text(f"Results: {', '.join(map(str, folders))}")


def hook_table(hooks: Iterable[type[TrainingHook]]) -> Table:
    """List hooks with their kind, points and one line."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("hook", style="bold", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("points", no_wrap=True)
    table.add_column("what it does")
    for hook in hooks:
        table.add_row(hook.name, hook_kind(hook), "\n".join(hook_points(hook)), Text(first_line(hook)))
    return table


def hook_points(hook: type[TrainingHook]) -> list[str]:
    """Name the points at which a hook fires, in firing order, with the loop where that matters."""
    if hook.loop_points is None:
        return [point.name for point in sorted(hook.hook_points)]
    loops: dict[Any, list[str]] = {}
    for loop, entry in hook.loop_points.items():
        for point in entry:
            loops.setdefault(point, []).append(loop)
    both = len(hook.loop_points)
    return [
        point.name if len(loops[point]) == both and both > 1 else f"{point.name} ({', '.join(loops[point])})"
        for point in sorted(loops)
    ]


def hook_page(hook: type[TrainingHook]) -> RenderableType:
    """Show every metric of a hook with formula, range and reading, and its options."""
    document = (inspect.getdoc(hook) or "").partition("\n")
    parts: list[RenderableType] = [
        Text.assemble((hook.name, "bold"), f"  ({hook_kind(hook)}, {', '.join(hook_points(hook))})"),
        Text(document[0]),
    ]
    if document[2].strip():
        parts += [Text(), Text(document[2].strip())]
    parts.append(Text("\nMetrics", style="bold"))
    parts += [_metric(hook.name, info) for info in hook().describe_metrics()]
    parts.append(Text("\nOptions, for --hook-config", style="bold"))
    parts.append(_options(hook))
    return Group(*parts)


def _metric(hook: str, info: MetricInfo) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in (("formula", info.formula), ("range", info.range), ("reading", info.reading)):
        table.add_row(label, Text(text))
    return Group(Text(f"  {hook}/{info.name}", style="cyan"), Padding(table, (0, 0, 0, INDENT)))


def _options(hook: type[TrainingHook]) -> RenderableType:
    options = hook_options(hook)
    if not options:
        return Text("  none")
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, option in options.items():
        kind = inspect.formatannotation(option.annotation)
        table.add_row(Text(f"  {hook.name}.{name}", style="cyan"), Text(kind), Text(f"default {option.default!r}"))
    return table


def experiment_table(experiments: Iterable[type[ExperimentRunner[Any]]]) -> Table:
    """List experiments with their strategies and presets."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment", style="bold", no_wrap=True)
    table.add_column("what it trains")
    table.add_column("strategies")
    table.add_column("presets", no_wrap=True)
    for item in experiments:
        names = (", ".join(item.strategies), ", ".join(item.presets) or "none")
        table.add_row(item.name, Text(first_line(item)), *names)
    return table
