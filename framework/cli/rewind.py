"""The command ``loopscope rewind``: repeats some steps of a run bit for bit, with any hooks."""

from collections.abc import Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from ..console import Mode, watch
from ..errors import listed, require
from ..laboratory.questions import explain, explanation_lines, row_table, rows_by_step
from ..report import inspect_run
from ..runs import ExperimentRunner, Session, StepRange, read_alerts, read_last_step, run_folders, warn_of_changes
from ..training import is_main_process
from .options import without_dots
from .output import Kept, Output, with_output_options
from .parser import CommandParser, line_width, write_lines
from .recorded_run import RecordedRun, add_hook_options, given_hooks
from .user_errors import user_errors
from .watched_run import WatchedRun

ROWS_HOOK, MOST_STEPS = "batch_rows", 5  # the hook that measures rows, and the number of steps whose rows are shown


def rewind_parser() -> CommandParser:
    """Build the parser of ``loopscope rewind``."""
    parser = CommandParser(
        "rewind RUN --step N [--until M] [hooks] | --step N --explain | --spike",
        "Repeat steps N to M of a run bit for bit, from the nearest earlier intact checkpoint, optionally with other "
        "hooks. The run itself is not changed; the metrics are written to RUN/rewinds.",
    )
    parser.add_argument("RUN", nargs="*", help="the folder of one run, OUTPUT/EXPERIMENT/STRATEGY")
    parser.add("step", int, "the first step, counted from 1")
    parser.add("until", int, "the last step (default: the first)")
    parser.add("from_start", bool, "start at step 0, so that hooks have seen all earlier steps", default=False)
    explain = "report the first quantity that departs from its history in the steps up to N, and the cause"
    parser.add("explain", bool, explain, default=False)
    spike = "explain the step of the first alert in the record; alerts about spikes come first"
    parser.add("spike", bool, spike, default=False)
    add_hook_options(parser, "the original hooks")
    parser.add_argument("--traceback", action="store_true", help="show the full traceback of an error")
    return with_output_options(parser)


def rewind(words: Sequence[str]) -> None:
    """Repeat the requested steps, and report the folder of their metrics and the result of the comparison."""
    given = rewind_parser().complete(without_dots(words))
    require(len(given["RUN"]) == 1, "loopscope rewind takes the folder of one run: loopscope rewind RUN --step N.")
    one_step = (given["step"] is None) == given["spike"]
    require(one_step, "loopscope rewind needs one of --step N and --spike.")
    folder, *others = folders = run_folders(Path(given["RUN"][0]), "rewind")
    require(not others, f"{given['RUN'][0]} has {len(folders)} runs; rewind takes one of them: {listed(folders, 9)}.")
    warn_of_changes(folder)
    output = Output.of("rewind", words, given)
    with user_errors(full_traceback=given["traceback"]):
        watched, hooks = WatchedRun.read(folder), given_hooks(given)
        if watched is not None:
            explains = given["explain"] or given["spike"]
            require(not explains, "--explain and --spike start from checkpoints, which a watched run does not have.")
            stretch = StepRange(given["step"], given["until"] or given["step"], given["from_start"])
            path, steps = watched.rewind(stretch, hooks)
            _report(path, stretch, 0, steps, {}, output)
            return
        run = RecordedRun.read(folder)
        if given["explain"] or given["spike"]:
            remedy = "--explain chooses its own hooks; remove --with-hooks, --hooks and --hook-config."
            require(not any(hooks.values()), remedy)
            require(given["until"] is None, "--explain applies to one step; remove --until.")
            alert = _first_alert(folder) if given["spike"] else {}
            _explain(run, int(alert.get("step", given["step"] or 0)), alert, output)
        else:
            stretch = StepRange(given["step"], given["until"] or given["step"], given["from_start"])
            _train(run.session(**hooks), stretch, run.runner, output)


def _train(session: Session, stretch: StepRange, runner: ExperimentRunner[Any], output: Output) -> None:
    """Repeat the steps, report the folder of their metrics, and show the rows with the largest losses if measured."""
    if not is_main_process():
        session.rewind(stretch)
        return
    mode: Mode = "none" if output.is_json else "normal"
    path, since, compared = watch(session, mode, methodcaller("rewind", stretch), until=stretch.until)
    is_measured = ROWS_HOOK in session.options.hooks
    rows = rows_by_step(inspect_run(path).points, ROWS_HOOK, runner.describe_row) if is_measured else {}
    _report(path, stretch, since, compared, rows, output)


def _report(
    path: Path, stretch: StepRange, since: int, compared: Sequence[int], rows: Mapping[int, Any], output: Output
) -> None:
    """Report the folder of a stretch, trained again after the step ``since``, and the steps at which it is identical.

    ``rows`` are those that the hook of rows has measured, by step.
    """
    steps = range(stretch.step, min(stretch.until, stretch.step + MOST_STEPS - 1) + 1)
    content = {
        "run": str(path.parent.parent),
        "step": stretch.step,
        "until": stretch.until,
        "from_step": since,
        "folder": str(path),
        "identical_at": list(compared),
        "rows": {str(step): [vars(row) for row in rows[step]] for step in steps if step in rows},
    }
    cut: dict[str, Kept] = {"rows": "first", "identical_at": "first"}
    if output.is_json:
        output.write(content, cut, list)
        return
    for step in steps:
        if step in rows:
            write_lines(f"Step {step:,}: the largest losses of {len(rows[step])} rows")
            write_lines(*row_table(rows[step], line_width()))
    write_lines(f"Repeated the run from step {since:,}; metrics: {path}")
    if compared:
        write_lines(f"The run is identical, bit for bit, at steps {listed([*compared], 9)}.")
    else:
        write_lines("The run has no checkpoint or digest in these steps, so they could not be compared.")


def _explain(run: RecordedRun, step: int, alert: Mapping[str, Any], output: Output) -> None:
    """Explain a step, or that of an alert, and print the explanation."""
    folder, treatments, describe_row = run.folder, [*run.record.treatments], run.runner.describe_row
    if alert and not output.is_json:
        write_lines(f"Step {step:,}: {alert['sentence']}")

    train_again = partial(run.train_again, is_silent=output.is_json)
    last = read_last_step(folder)
    require(last is None or step <= last, f"--step is {step:,}, but the last step of the run in {folder} is {last}.")
    explanation = explain(train_again, folder, step, describe=describe_row, left_out=treatments, last=last)
    if output.is_json:
        content = {"run": str(folder), "folder": str(explanation.folder), **explanation.as_dict()}
        content |= {"alert": alert["sentence"]} if alert else {}
        output.write(content, {"branches": "first", "rows": "first"}, list)
    else:
        write_lines(*explanation_lines(explanation, line_width()))


def _first_alert(folder: Path) -> dict[str, Any]:
    """Return the first alert; alerts about spikes take precedence, then those that are more than remarks."""
    alerts = [alert for alert in read_alerts(folder) if not alert.get("is_over")]
    remedy = "name the step with --step N --explain. The hook loss_spikes reports spikes."
    require(bool(alerts), f"{folder} has no alerts; {remedy}")
    return min(alerts, key=lambda alert: ("spike" not in alert["hook"], alert["severity"] == "info", alert["step"]))
