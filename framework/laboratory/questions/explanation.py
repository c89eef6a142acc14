"""``loopscope rewind --explain``: retrains the steps before a spike, and the unusual step in branches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...durable_files import write_json
from ...errors import UsageError
from ...report import inspect_run
from ...runs import EXPLANATION, REWINDS, DivergedError, Stretch
from ..effects import Harm
from ..explained_step import Branch, Departure, Explanation
from ..usual_values import median_outcome
from ..verdict import Verdict, harms, is_damaged_before, precision_verdict, verdict
from .departures import HISTORY, MOST_TESTED_STEPS, WINDOW, History, departures, read_history
from .repeated_steps import TrainAgain, recorded_values
from .rows import Describe, measured_rows

HISTORY_HOOK, BRANCHES_HOOK = "step_history", "what_if"
WATCHED = {
    "output": "output of {}",
    "gradient": "gradient of {}",
    "update": "largest change of {}",
    "copies": "number of copies of one row",
}
"""Descriptions of the quantities that branches can measure on a batch."""
MOST_TRIED = 4
"""Largest number of steps to run in branches before one of them shows a cause."""


def _undescribed(index: int) -> None:
    """Describe no row."""


def explain(
    train_again: TrainAgain,
    folder: Path,
    step: int,
    *,
    describe_row: Describe = _undescribed,
    left_out: Sequence[str] = (),
    last: int | None = None,
) -> Explanation:
    """Find the first departure in the steps up to ``step`` and its cause, and write both to the run's folder.

    Args:
        train_again: trains a stretch of the run again.
        folder: the run's folder; the results are in its subfolder ``rewinds/explained_step_N``.
        step: the step in question, counted from 1.
        describe_row: returns a readable description of a row of the data set.
        left_out: the run's committing hooks.
        last: the last step of the run, if it has ended.
    """
    label = f"explained_step_{step}"
    try:
        explanation = _explain(train_again, label, step, describe_row, left_out, last or step + 1)
    except DivergedError as error:
        cause, word = (None, "Inconclusive") if error.in_other_environment else ("fault", "Fault")
        sentence = f"{word}: the same program on the same data does not reproduce the run. {error}"
        explanation = Explanation(step, cause, sentence)
    place = folder / REWINDS / label
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / EXPLANATION, explanation.as_dict())
    # The dataclass is frozen; this sets the folder once its file is written.
    object.__setattr__(explanation, "folder", place)
    return explanation


def _explain(
    train_again: TrainAgain, label: str, step: int, describe_row: Describe, left_out: Sequence[str], last: int
) -> Explanation:
    begin = max(1, step - HISTORY - WINDOW - MOST_TESTED_STEPS)
    watched = train_again(Stretch(begin, min(step + 1, last), label=f"{label}/history"), HISTORY_HOOK, {})
    history = read_history(inspect_run(watched), HISTORY_HOOK)
    found_departures, reason = departures(history, step)
    if not found_departures:
        return Explanation(step, None, f"Inconclusive: found nothing to explain. {reason}", left_out=left_out)
    first: Explanation | None = None
    for where in found_departures[:MOST_TRIED]:
        explanation = replace(
            _judge(train_again, label, where, history, describe_row, last), step=step, left_out=left_out
        )
        if explanation.cause is not None:
            return explanation
        first = first or explanation
    assert first is not None  # there is at least one departure
    return first


def _judge(
    train_again: TrainAgain, label: str, where: Departure, history: History, describe_row: Describe, last: int
) -> Explanation:
    """Run a step in branches, and return the explanation that they give."""
    stretch = Stretch(where.step, min(where.step + 1, last), label=f"{label}/branches")
    folder = train_again(stretch, BRANCHES_HOOK, _options(history, where))
    branch_values = _branch_values(folder, where.step)
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


def _watched_name(where: Departure) -> str:
    return f"{where.quantity}/{where.name}".rstrip("/")


def _run_values(history: History, where: Departure) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the run's loss, effect and watched size at the step, and at the earlier steps."""
    names = {"loss": "loss", "effect": "effect", "size": _watched_name(where)}
    at_step, usual = {}, {}
    for metric, name in names.items():
        series = history.get(name, {})
        if where.step in series:
            at_step[metric] = series[where.step]
        usual[metric] = [value for step, value in sorted(series.items()) if step < where.step][-HISTORY:]
    return at_step, usual


def _options(history: History, where: Departure) -> dict[str, Any]:
    """Return the options of the branches: usual norm, usual learning rate, watched quantity and layer."""
    steps = range(where.step - WINDOW, where.step)
    gradients = [series for name, series in history.items() if name.startswith("gradient/")]
    squares = [sum(series.get(step, np.nan) ** 2 for series in gradients) for step in steps]
    norms = [value**0.5 for value in squares if np.isfinite(value)]
    rates = [history["lr"][step] for step in steps if step in history["lr"]]
    options: dict[str, Any] = {"step": where.step}
    if norms and np.median(norms) > 0:
        options["usual_norm"] = float(np.median(norms))
    if "lr" in (where.quantity, *where.others) and rates and history["lr"][where.step] > 0 and np.median(rates) > 0:
        options["usual_rate"] = float(np.median(rates) / history["lr"][where.step])
    if where.quantity in WATCHED:
        options["watch"] = _watched_name(where)
    if where.quantity == "output" and where.name != "logits":
        options["layer"] = where.name
    return options


def _branch_values(folder: Path, step: int) -> dict[str, Any]:
    """Return the values that the branches hook recorded at a step and the next one, by metric and branch."""
    empty: dict[str, Any] = {"rows": {}, "loss": {}, "effect": {}, "later": {}, "standing_out": []}
    values = empty | recorded_values(inspect_run(folder).points, BRANCHES_HOOK, (step, step + 1))
    if not values["loss"]:
        raise UsageError(f"Step {step} could not be repeated in branches: hook {BRANCHES_HOOK!r} recorded nothing.")
    return values


def _branch(name: str, values: Mapping[str, Any], found_harms: Sequence[Harm]) -> Branch:
    numbers = [values[metric].get(name) for metric in ("loss", "effect", "later")]
    loss, effect, later = [None if number is None else median_outcome(number) for number in numbers]
    removed = found_harms[0].removed_share(name) if found_harms and name != "run" else None
    return Branch(name, len(values["loss"].get(name, [0])), loss, effect or 0.0, later, removed)
