"""Tables and lines of the console: metrics, and the headers and results of strategies."""

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..doctor import Diagnosis, brief_lines
from ..errors import counted, listed, short_path
from ..hooks import ALERTS, ENDLESS, SinkRegistry
from ..runs import ATTACHED, TRAINED, read_alerts
from ..runs import run_name as name_of_run
from .board import LABEL_STYLES
from .text import duration_text, number_text, printable

if TYPE_CHECKING:
    from ..hooks import RunInfo
    from ..training import TrainingTask

Summary = Mapping[str, Any]
REMARKS = ("treatments", "failed hooks")
NUMERIC = r"[-+]?([\d.,:]+(e[-+]\d+)?|nan|inf)|"


def strategy_header(
    run: "RunInfo", task: "TrainingTask", hooks: str, shown: Mapping[str, Sequence[str]], width: int = 80
) -> Text:
    """Return the header of a strategy: model, data, hooks, treatments, folder, and the progress metrics ``shown``.

    A part without a text, such as ``hooks``, is omitted.
    """
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    treatments = ", ".join(f"{name} ({', '.join(parts)})" for name, parts in run.treatments.items())
    unit = "step" if run.experiment == ATTACHED else "batch"
    sizes = [f"{counted(len(task.loader), unit, unit + ('s' if unit == 'step' else 'es'))} per epoch"]
    sizes = sizes * (len(task.loader) < ENDLESS) + [f"at most {counted(task.length, run.loop)}"] * (not run.is_endless)
    kind = f"{type(task.model).__name__} of {counted(parameters, 'parameter')}"
    lines = {
        "": f"{run.experiment} {name_of_run(run.output_dir, run.strategy)}: {', '.join([kind, *sizes])}",
        "  hooks: ": hooks,
        "  treatments: ": treatments,
        **{f"  {label} a/b: ": " / ".join(names) for label, names in shown.items() if len(names) > 1},
        "  output: ": short_path(run.output_dir),
    }
    styles = {"": "bold", "  treatments: ": "bold yellow"}
    fill = textwrap.TextWrapper(max(width, 40), subsequent_indent="    ", break_on_hyphens=False).fill
    filled = {label: fill(printable(label + text)) for label, text in lines.items() if text}
    return Text("\n").join(Text(text, styles.get(label, "")) for label, text in filled.items())


def brief_header(run: "RunInfo", task: "TrainingTask") -> Text:
    """Return the line at the start of an attached training: what is observed, and where the record is."""
    parameters = counted(sum(parameter.numel() for parameter in task.model.parameters()), "parameter")
    kind = printable(type(task.model).__name__)
    return Text(f"loopscope: observing {kind} ({parameters}), record in {short_path(run.output_dir)}")


def brief_result(summary: Summary) -> Text:
    """Return the line at the end of an attached training: its length, its state, and the number of problems."""
    count = sum(finding["severity"] != "info" for finding in summary.get("findings", ()))
    problems = counted(count, "problem") if count else "no problem"
    state = "" if summary["status"] == "completed" else f" ({summary['status']})"
    loss = "" if summary["training_loss"] is None else f", loss {number_text(summary['training_loss'])}"
    lost = "; ".join(filter(None, [failed_hooks_text(summary), lost_rows_text(summary)]))
    return Text.assemble(
        f"loopscope: {counted(summary['steps'], 'step')}{state}{loss}, {problems} found",
        (f"; {lost}" if lost else "", "bold red"),
        f"; details: loopscope doctor {short_path(Path(summary['output_dir']))}",
    )


def budget_text(report: Mapping[str, Any]) -> str:
    """Return the schedules and the budget in words; empty without a budget.

    >>> budget_text({"budget": 0.05, "every": {"norms": 8}, "expected_hooks": 0.03, "fixed": 0.01})
    'norms every 8 steps, within 5 % of the step'
    >>> budget_text({"budget": 0.05, "every": {}, "expected_hooks": 0.01, "fixed": 0.2})
    'hooks at all of their steps, 1 % of the step; the loss of every step alone costs 20 %, above the budget of 5 %'
    """
    if not report:
        return ""
    share, hooks, fixed = (100 * report[name] for name in ("budget", "expected_hooks", "fixed"))
    schedules = [f"{name} every {every:,} steps" for name, every in report["every"].items()]
    what = listed(schedules, 9) if schedules else "hooks at all of their steps"
    if fixed > share:
        alone = f"the loss of every step alone costs {fixed:.2g} %, above the budget of {share:g} %"
        return f"{what}, {hooks:.2g} % of the step; {alone}"
    if hooks + fixed > 1.1 * share:
        return f"{what}, {hooks + fixed:.2g} % of the step, above the budget of {share:g} %"
    return f"{what}, within {share:g} % of the step"


def final_numbers(summary: Summary) -> dict[str, float]:
    """Return the final training loss and the final accuracies, or the full evaluation if it has no accuracy."""
    final: Mapping[str, float] = summary["final"]
    accuracies = {name: value for name, value in final.items() if name.endswith("_acc")}
    loss = {} if summary["training_loss"] is None else {"loss": summary["training_loss"]}
    return {**loss, **(accuracies or final)}


def result_line(summary: Summary) -> Text:
    """Return the line with the result of a strategy."""
    numbers = "".join(
        f", {name} {number_text(value)}{_mean_text(summary) if name == 'loss' else ''}"
        for name, value in final_numbers(summary).items()
    )
    reached, ending = summary["target_reached"], summary["status"]
    lost = "; ".join(filter(None, [failed_hooks_text(summary), lost_rows_text(summary)]))
    if ending not in TRAINED and summary.get("last_lr") is not None:  # which a record of whole epochs does not show
        numbers += f", lr {number_text(summary['last_lr'])}"
    if ending in TRAINED:
        ending = "ended" if summary.get("experiment") == ATTACHED else "stopped at the limit"
        ending = f"target reached at epoch {reached['epoch']}" if reached else ending
    return Text.assemble(
        (run_name(summary), "bold"),
        f": {ending} after {length_text(summary['epochs'], summary['steps'])}, ",
        f"{duration_text(summary['seconds']['training'])}{numbers}",
        (f"; {lost}" if lost else "", "bold red"),
    )


def _mean_text(summary: Summary) -> str:
    """Return over which steps the training loss is a mean, or an empty text for a summary of an earlier version."""
    over = summary.get("training_loss_over")
    if not over or summary["training_loss"] is None:
        return ""
    if over == "last step":
        return f" ({over})"
    last = summary.get("last_loss")
    newest = f"; last step {number_text(last)}" if last is not None and over != "epoch" else ""
    return f" (mean of {over if over[0].isdigit() else f'the {over}'}{newest})"


def length_text(epochs: int, steps: int) -> str:
    """Return epochs and steps in words, without the epochs of a loop that has none.

    >>> length_text(2, 90), length_text(0, 401)
    ('2 epochs, 90 steps', '401 steps')
    """
    return f"{counted(epochs, 'epoch')}, {counted(steps, 'step')}" if epochs else counted(steps, "step")


def place_text(epoch: int, step: int) -> str:
    """Return a place in a run in words, without the epoch of a loop that has none.

    >>> place_text(1, 90), place_text(0, 401)
    ('epoch 1, step 90', 'step 401')
    """
    return f"epoch {epoch:,}, step {step:,}" if epoch else f"step {step:,}"


def failed_hooks_text(summary: Summary) -> str:
    """Return which hooks the run has lost, since they raised, or an empty text."""
    steps = {error["hook"]: error.get("step") for error in reversed(summary.get("hook_errors", ()))}
    if not steps or summary.get("error"):  # that of a hook which ended the run
        return ""
    texts = [name if step is None else f"{name} (at step {step:,})" for name, step in reversed(steps.items())]
    return f"without {', '.join(texts)}, which raised"


def lost_rows_text(summary: Summary) -> str:
    """Return which sinks failed and lost rows, from which step on, or an empty text."""
    failed = [error for error in summary.get("sink_errors", ()) if error["lost_rows"]]
    texts = [f"{error['sink']} failed at step {error['step']:,} ({error['error']})" for error in failed]
    return f"rows were lost: {', '.join(texts)}" if texts else ""


def run_name(summary: Summary) -> str:
    """Return the strategy of a run, with its seed if the seeds have separate folders."""
    return name_of_run(Path(summary["output_dir"]), summary["strategy"])


def sample_text(strategy: str, sample: str) -> Text:
    """Return a sample of the model's output, indented, without control characters."""
    lines = ["".join(filter(str.isprintable, line)) for line in sample.expandtabs().splitlines()]
    return Text("\n".join([f"{strategy}: sample:", *(f"  {line}" for line in lines)]))


def hook_table(strategy: str, hook: str, rows: Mapping[str, Mapping[str, float]], width: int = 80) -> Group:
    """Return the table of a hook about a strategy."""
    texts = [{hook: name, **{key: number_text(value) for key, value in row.items()}} for name, row in rows.items()]
    return Group(Text(f"{strategy}: {hook}", "bold"), comparison_table(texts, width))


def comparison_rows(summaries: Sequence[Summary], compared_to: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return one row per strategy, as text by column; several seeds give mean ± standard deviation.

    ``compared_to`` maps metrics of the final evaluation to the strategy whose value is subtracted.
    """
    by_strategy: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_strategy.setdefault(summary["strategy"], []).append(summary)
    reached = {strategy: _reached(runs) for strategy, runs in by_strategy.items()}
    return [
        {
            "strategy": strategy,
            "seeds": str(len(runs)) if len(by_strategy) < len(summaries) else "",
            "status": ", ".join(dict.fromkeys(str(run["status"]) for run in runs if run["status"] != "completed")),
            "target": (reached[strategy] or "not reached") if any(reached.values()) else "",
            "epochs": f"{runs[0]['epochs']:,}" if len(runs) == 1 else spread([run["epochs"] for run in runs]),
            **{name: spread(values) for name, values in _numbers(runs, summaries, compared_to or {}).items()},
            "time": duration_text(sum(run["seconds"]["training"] for run in runs) / len(runs)),
            "treatments": ", ".join(runs[0]["treatments"]),
            "failed hooks": ", ".join(dict.fromkeys(error["hook"] for run in runs for error in run["hook_errors"])),
        }
        for strategy, runs in by_strategy.items()
    ]


def _reached(runs: Sequence[Summary]) -> str:
    reached = [f"epoch {run['target_reached']['epoch']}" for run in runs if run["target_reached"]]
    return f"{len(reached)} of {len(runs)}" if len(runs) > 1 and reached else "".join(reached)


def _numbers(
    runs: Sequence[Summary], summaries: Sequence[Summary], compared_to: Mapping[str, str]
) -> dict[str, list[float]]:
    """Return the final numbers of a strategy's runs by column, with distances between runs of the same seed."""
    columns: dict[str, list[float]] = {}
    for run in runs:
        seed = run_name(run).removeprefix(run["strategy"])
        of_seed = [other for other in summaries if run_name(other) == other["strategy"] + seed]
        metrics = {name.partition("/")[2]: value for name, value in run["metrics"].items()}
        for name, value in {**final_numbers(run), **distances(run, of_seed, compared_to), **metrics}.items():
            columns.setdefault(name, []).append(value)
    return columns


def spread(values: Sequence[float]) -> str:
    """Return mean ± sample standard deviation of several values as text, or the single value.

    >>> spread([1.0, 2.0, 3.0]), spread([155]), spread([1.0, float("inf")])
    ('2 ± 1', '155', 'inf ± nan')
    """
    if len(values) == 1:
        return number_text(values[0])
    numbers = np.array(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        return f"{number_text(float(numbers.mean()))} ± {number_text(float(numbers.std(ddof=1)))}"


def distances(summary: Summary, summaries: Sequence[Summary], compared_to: Mapping[str, str]) -> dict[str, float]:
    """Return the differences of final numbers from those of the baseline strategies that have ended.

    >>> runs = [{"strategy": name, "final": {"val_loss": loss}} for name, loss in (("fp32", 4.5), ("fp4", 4.75))]
    >>> [distances(run, runs, {"val_loss": "fp32"}) for run in runs]
    [{}, {'val_loss − fp32': 0.25}]
    """
    finals = {other["strategy"]: other["final"] for other in summaries}
    return {
        f"{name} − {baseline}": summary["final"][name] - finals[baseline][name]
        for name, baseline in compared_to.items()
        if baseline != summary["strategy"] and name in summary["final"] and name in finals.get(baseline, {})
    }


def comparison_table(rows: Sequence[Mapping[str, str]], width: int = 80) -> Group:
    """Lay out rows under the union of their non-empty columns, with remarks below."""
    # A table that is too wide is transposed, and split into as many tables as needed.
    upright = columns_of(rows)
    parts = [upright] if _width(upright) <= width else split_columns(list(zip(*upright, strict=True)), width)
    remarks = [Text(f" {row['strategy']}: {name}: {row[name]}") for row in rows for name in REMARKS if row.get(name)]
    return Group(*map(_table, parts), *remarks)


def columns_of(rows: Sequence[Mapping[str, str]]) -> list[Sequence[str]]:
    """Return the non-empty columns without remarks, each with its name before its texts."""
    fullest_first = sorted(rows, key=len, reverse=True)
    names = dict.fromkeys(name for row in fullest_first for name in row if name not in REMARKS)
    return [[name, *(row.get(name, "") for row in rows)] for name in names if any(row.get(name) for row in rows)]


def split_columns(columns: Sequence[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """Distribute columns over as few tables of ``width`` as possible, each starting with the first column.

    >>> split_columns([["n", "x"], ["a", "1"], ["b", "2"], ["c", "3"]], 9)
    [[['n', 'x'], ['a', '1'], ['b', '2']], [['n', 'x'], ['c', '3']]]
    """
    first, *others = columns
    parts: list[list[Sequence[str]]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and _width([*parts[-1], column]) > width:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _width(columns: Iterable[Sequence[str]]) -> int:
    return sum(max(map(len, texts)) + 2 for texts in columns)


def _table(columns: Sequence[Sequence[str]]) -> Table:
    """Lay out columns with their first text as heading; numbers are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading, *below in columns:
        numeric = all(re.fullmatch(NUMERIC, text) for text in below)
        table.add_column(Text(heading), justify="right" if numeric else "left", no_wrap=True)
    for line in zip(*(below for _, *below in columns), strict=True):
        table.add_row(*map(Text, line))
    return table


def table_in_width(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """Return a table with a line per row, without remarks and without the last columns that do not fit."""
    columns = split_columns(columns_of(rows), width)[0]
    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(columns)):
        table.add_column(justify="right" if index else "left", no_wrap=True)
    # Each column is one text, since rich takes ten times as long for one cell per number.
    table.add_row(*(Text.assemble((heading, "dim"), *(f"\n{text}" for text in texts)) for heading, *texts in columns))
    return table


def findings_text(summary: Summary, width: int | None) -> Text | None:
    """Return the most important findings of a run, wrapped; ``None`` if it has none above ``info``."""
    lines = brief_lines(Diagnosis.of(summary.get("findings", ())), width)
    styles = {label: LABEL_STYLES[label] for label in ("critical", "warning")}
    shown = []
    for line in lines:
        label, colon, rest = printable(line).partition(":")
        shown.append(Text.assemble((f"{label}{colon}", styles[label]), rest) if label in styles else Text(f"{line}"))
    return Text("\n", no_wrap=True).join(shown) if shown else None


def results_text(summaries: Sequence[Summary], plotted: str, *, with_files: bool = False) -> Text:
    """Return the folder and the next command; ``with_files`` also lists files, and all next commands.

    ``plotted`` names a metric for the command that plots.
    """
    from ..runs import RunFolder  # imports torch, unlike the rest of this module

    folders = [RunFolder(Path(summary["output_dir"]), summary["strategy"]) for summary in summaries]
    first, many = folders[0], len(folders) > 1
    above = first.path.parent if first.name == first.strategy else first.path.parent.parent
    files: dict[str, dict[str, None]] = {"record": {}, "weights": {}}
    alerts = []
    for folder in folders:
        names = folder.strategy, "STRATEGY" if many else folder.strategy
        kinds = {pair: "record" for sink in SinkRegistry for pair in zip(*map(sink.file_names, names), strict=True)}
        kinds[tuple(RunFolder(folder.path, name).weights.name for name in names)] = "weights"
        for (name, generic), kind in kinds.items():
            if name != ALERTS and (folder.path / name).exists():
                files[kind][generic] = None
        if (folder.path / ALERTS).exists():
            alerts.append(alert_counts(folder.path, f" of {folder.name}" if many else ""))
    within = f"/ with {', '.join(folder.name for folder in folders)}" if many else ""
    lines = [f"Results: {short_path(above if many else first.path)}{within}"]
    ill = [folder for folder, summary in zip(folders, summaries, strict=True) if has_problem(summary)]
    next_commands = [("doctor", folder) for folder in ill[:1]] + [("show", first)]
    texts = {"record": ", ".join(files["record"]), "alerts": f"{ALERTS}: {', '.join(alerts)}" if alerts else ""}
    texts["weights"] = ", ".join(files["weights"])
    if with_files:
        lines += [f"  {kind:9}{text}" for kind, text in texts.items() if text]
    else:
        next_commands, plotted = next_commands[:1], ""
    for index, (command, folder) in enumerate(next_commands):
        lines.append(f"{'      ' if index else 'Next: '}loopscope {command} {shlex.quote(short_path(folder.path))}")
    if plotted and files["record"] and find_spec("matplotlib"):
        drawn = shlex.quote(short_path(above if many else first.path))
        lines.append(f"      loopscope plot {drawn} --metrics {plotted}")
    return Text("\n".join(map(printable, lines)), no_wrap=True)  # so that a command can be copied as one line


def has_problem(summary: Summary) -> bool:
    """Return whether the diagnosis of a run has a finding above ``info``."""
    return bool(Diagnosis.of(summary.get("findings", ())).at_least("warning"))


def alert_counts(folder: Path, owner: str) -> str:
    """Return the number of a run's alerts, and that of remarks; recoveries do not count."""
    counts = Counter(alert["severity"] == "info" for alert in read_alerts(folder) if not alert.get("is_over"))
    return f"{counts[False]:,}{owner}" + (f" (and {counted(counts[True], 'remark')})" if counts[True] else "")
