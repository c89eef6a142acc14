"""``loopscope rewind --explain``: retrains the steps before a spike, and the unusual step in branches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...durable_files import write_json
from ...errors import UsageError
from ...report import inspect_run
from ...runs import EXPLANATION, REWINDS, DivergedError, StepRange
from ..effects import Excess
from ..explained_step import Branch, Deviation, Explanation
from ..usual_values import median_outcome, usual_norm
from ..verdict import Verdict, harms, is_damaged_before, precision_verdict, verdict
from .departures import HISTORY, MOST_TESTED_STEPS, WINDOW, History, departures, read_history
from .repeated_steps import Describe, TrainAgain, measure, measured_rows

HISTORY_HOOK, BRANCHES_HOOK = "step_history", "what_if"
WATCHED = {
    "output": "output of {}",
    "gradient": "gradient of {}",
    "update": "largest change of {}",
    "copies": "number of copies of one row",
}
"""Descriptions of the quantities that branches can measure on a batch."""
Stretches = Callable[[int, int, str], StepRange]
"""Returns the stretch from a step to another one, at most the last of the run, with the name of its folder."""
MOST_TRIED = 4
"""Largest number of steps to run in branches before one of them shows a cause."""


def explain(
    train_again: TrainAgain, folder: Path, step: int, *, describe: Describe, left_out: Sequence[str], last: int | None
) -> Explanation:
    """Find the first departure in the steps up to ``step`` and its cause, and write both to the run's folder.

    Args:
        train_again: trains a stretch of the run again.
        folder: the run's folder; the results are in its subfolder ``rewinds/explained_step_N``.
        step: the step in question, counted from 1.
        describe: returns a readable description of a row of the data set.
        left_out: the run's committing hooks.
        last: the last step of the run, if it has ended.
    """
    place = folder / REWINDS / f"explained_step_{step}"

    def stretch(first: int, end: int, name: str) -> StepRange:
        return StepRange(first, min(end, last or step + 1), label=f"{place.name}/{name}")

    try:
        explanation = replace(_explain(train_again, stretch, step, describe), left_out=left_out)
    except DivergedError as error:
        cause, word = (None, "Inconclusive") if error.in_other_environment else ("fault", "Fault")
        sentence = f"{word}: the same program on the same data does not reproduce the run. {error}"
        explanation = Explanation(step, cause, sentence)
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / EXPLANATION, explanation.as_dict())
    return replace(explanation, folder=place)


def _explain(train_again: TrainAgain, stretch: Stretches, step: int, describe_row: Describe) -> Explanation:
    begin = max(1, step - HISTORY - WINDOW - MOST_TESTED_STEPS)
    folder = train_again(stretch(begin, step + 1, "history"), HISTORY_HOOK, {})
    history = read_history(inspect_run(folder), HISTORY_HOOK)
    found_departures, reason = departures(history, step)
    if not found_departures:
        return Explanation(step, None, f"Inconclusive: found nothing to explain. {reason}")
    explanations: list[Explanation] = []
    for where in found_departures[:MOST_TRIED]:
        branches = stretch(where.step, where.step + 1, "branches")
        explanations.append(replace(_judge(train_again, branches, where, history, describe_row), step=step))
        if explanations[-1].cause is not None:
            return explanations[-1]
    return explanations[0]


def _judge(
    train_again: TrainAgain, stretch: StepRange, where: Deviation, history: History, describe_row: Describe
) -> Explanation:
    """Run a step in branches, and return the explanation that they give."""
    measured = measure(train_again, stretch, BRANCHES_HOOK, _options(history, where))
    if not measured:
        raise UsageError(f"Step {where.step} could not be repeated in branches: {BRANCHES_HOOK!r} recorded nothing.")
    branch_values = {"standing_out": [], **measured}
    rows = measured_rows(branch_values["rows"], describe_row, branch_values["standing_out"])
    at_step, usual = _run_values(history, where)
    found_harms = harms(branch_values, at_step, usual, WATCHED.get(where.quantity, "").format(where.name))
    if is_damaged_before(branch_values, usual):
        # A wider precision that repairs the step also repairs the losses before it.
        result = precision_verdict(branch_values, found_harms) or Verdict(
            None,
            f"Inconclusive: before step {where.step:,} the losses of fresh batches are already unusual (median "
            f"{median_outcome(branch_values['loss']['fresh']):.3g}), so the cause is in an earlier step.",
        )
    else:
        result = verdict(branch_values, found_harms, [*dict.fromkeys(row.name for row in rows if row.stands_out)])
    branches = [_branch(name, branch_values, found_harms) for name in branch_values["effect"]]
    return Explanation(where.step, result.cause, result.sentence, where, rows, branches)


def _watched_name(where: Deviation) -> str:
    return f"{where.quantity}/{where.name}".rstrip("/")


def _run_values(history: History, where: Deviation) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the run's loss, effect and watched size at the step, and at the earlier steps."""
    names = {"loss": "loss", "effect": "effect", "size": _watched_name(where)}
    at_step, usual = {}, {}
    for metric, name in names.items():
        series = history.get(name, {})
        if where.step in series:
            at_step[metric] = series[where.step]
        usual[metric] = [value for step, value in sorted(series.items()) if step < where.step][-HISTORY:]
    return at_step, usual


def _options(history: History, where: Deviation) -> dict[str, Any]:
    """Return the options of the branches: usual norm, usual learning rate, watched quantity and layer."""
    steps = range(where.step - WINDOW, where.step)
    gradients = [series for name, series in history.items() if name.startswith("gradient/")]
    norms = [sum(series.get(step, np.nan) ** 2 for series in gradients) ** 0.5 for step in steps]
    rates = [history["lr"][step] for step in steps if step in history["lr"]]
    options: dict[str, Any] = {"step": where.step, "usual_norm": usual_norm(norms)}
    if "lr" in (where.quantity, *where.others) and rates and history["lr"][where.step] > 0 and np.median(rates) > 0:
        options["usual_rate"] = float(np.median(rates) / history["lr"][where.step])
    if where.quantity in WATCHED:
        options["watch"] = _watched_name(where)
    if where.quantity == "output" and where.name != "logits":
        options["layer"] = where.name
    return options


def _branch(name: str, values: Mapping[str, Any], found_harms: Sequence[Excess]) -> Branch:
    numbers = [values[metric].get(name) for metric in ("loss", "effect", "later")]
    loss, effect, later = [None if number is None else median_outcome(number) for number in numbers]
    removed = found_harms[0].removed_share(name) if found_harms and name != "run" else None
    return Branch(name, len(values["loss"].get(name, [0])), loss, effect or 0.0, later, removed)
