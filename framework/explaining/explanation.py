"""``loopscope rewind --explain``: the steps before trained again and watched, and the unusual one in branches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..durable_files import plain_json, write_json
from ..errors import UsageError
from ..report import inspect_run
from ..runs import EXPLANATION, REWINDS, DivergedError, Stretch
from .departures import HISTORY, LOOKED_AT, WINDOW, Departure, History, departures, read_history
from .rows import Describe, ExplainedRow, measured_rows
from .verdict import Harm, harms, verdict

HISTORY_HOOK, BRANCHES_HOOK = "step_history", "what_if"
WATCHED = {
    "output": "output of {}",
    "gradient": "gradient of {}",
    "update": "largest change of {}",
    "copies": "number of copies of one row",
}
"""What the branches can measure of a batch, in words."""
MOST_TRIED = 4
"""Steps that are taken in branches, in order, until one of them shows a cause."""
TrainAgain = Callable[[Stretch, str, Mapping[str, Any]], Path]
"""Trains a stretch of the run again with one hook and its options, and returns the folder of what it measured."""


@dataclass(frozen=True)
class Branch:
    """A way of taking the step; medians where it was taken several times."""

    name: str
    times: int
    loss: float | None
    effect: float
    later: float | None
    removed: float | None = None
    """The share of the harm."""


@dataclass(frozen=True)
class Explanation:
    """What happened at a step: where, why, and the verdict."""

    step: int
    """That was asked about."""
    cause: str | None
    """data, step size, optimizer state, precision, fault or chance; ``None`` where it cannot be told."""
    verdict: str
    where: Departure | None = None
    rows: Sequence[ExplainedRow] = ()
    branches: Sequence[Branch] = ()
    left_out: Sequence[str] = ()
    """The hooks that commit, which take no part in the branches."""
    folder: Path | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return everything but the folder as plain values."""
        return dict(plain_json({name: value for name, value in asdict(self).items() if name != "folder"}))

    @property
    def standing_out(self) -> list[ExplainedRow]:
        """The rows that stand out, each once, the largest loss first."""
        rows = {row.name: row for row in self.rows if row.stands_out}
        return sorted(rows.values(), key=lambda row: -row.loss)


def explain(
    train_again: TrainAgain,
    folder: Path,
    step: int,
    *,
    describe_row: Describe = lambda index: None,
    left_out: Sequence[str] = (),
    last: int | None = None,
) -> Explanation:
    """Find what left its history first in the steps up to ``step``, and by branches why; write it beside the record.

    Args:
        train_again: trains a stretch of the run again.
        folder: of the run; ``rewinds/explained_step_N`` in it gets everything.
        step: counted from 1.
        describe_row: what a row of the data set is, for people.
        left_out: the run's hooks that commit.
        last: the last step of the run, if it has ended.
    """
    label = f"explained_step_{step}"
    try:
        explanation = _explained(train_again, label, step, describe_row, left_out, last or step + 1)
    except DivergedError as error:
        cause, word = (None, "It cannot be told") if error.in_other_environment else ("fault", "Fault")
        sentence = f"{word}: the run is not repeated by the same program on the same data. {error}"
        explanation = Explanation(step, cause, sentence)
    place = folder / REWINDS / label
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / EXPLANATION, explanation.as_dict())
    object.__setattr__(explanation, "folder", place)
    return explanation


def _explained(
    train_again: TrainAgain, label: str, step: int, describe_row: Describe, left_out: Sequence[str], last: int
) -> Explanation:
    first = max(1, step - HISTORY - WINDOW - LOOKED_AT)
    watched = train_again(Stretch(first, min(step + 1, last), label=f"{label}/history"), HISTORY_HOOK, {})
    history = read_history(inspect_run(watched), HISTORY_HOOK)
    found, why_not = departures(history, step)
    if not found:
        return Explanation(step, None, f"It cannot be told: nothing to explain was found. {why_not}", left_out=left_out)
    for where in found[:MOST_TRIED]:
        judged = _judged(train_again, label, where, history, describe_row, last)
        explanation = replace(judged, step=step, left_out=left_out)
        if explanation.cause is not None:
            break
    return explanation


def _judged(
    train_again: TrainAgain, label: str, where: Departure, history: History, describe_row: Describe, last: int
) -> Explanation:
    """Take a step in branches, and judge by them."""
    stretch = Stretch(where.step, min(where.step + 1, last), label=f"{label}/branches")
    tried = train_again(stretch, BRANCHES_HOOK, _options(history, where))
    found = read_branches(inspect_run(tried).points, where.step)
    rows = measured_rows(found["rows"], describe_row, found["standing_out"])
    bad = harms(found, *_runs_own(history, where), WATCHED.get(where.quantity, "").format(where.name))
    said = verdict(found, bad, [*dict.fromkeys(row.name for row in rows if row.stands_out)])
    branches = [_branch(name, found, bad) for name in found["effect"]]
    return Explanation(where.step, said.cause, said.sentence, where, rows, branches)


def _watched(where: Departure) -> str:
    return f"{where.quantity}/{where.name}".rstrip("/")


def _runs_own(history: History, where: Departure) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the run had at the step, and at the steps before it, of what harm can be seen in."""
    names = {"loss": "loss", "effect": "effect", "size": _watched(where)}
    own, usual = {}, {}
    for metric, name in names.items():
        series = history.get(name, {})
        if where.step in series:
            own[metric] = series[where.step]
        usual[metric] = [value for step, value in sorted(series.items()) if step < where.step][-HISTORY:]
    return own, usual


def _options(history: History, where: Departure) -> dict[str, Any]:
    """Return the options of the branches: the usual norm, rate and layer that the history tells."""
    before = range(where.step - WINDOW, where.step)
    gradients = [each for name, each in history.items() if name.startswith("gradient/")]
    squares = [sum(each.get(step, np.nan) ** 2 for each in gradients) for step in before]
    norms = [value**0.5 for value in squares if np.isfinite(value)]
    rates = [history["lr"][step] for step in before if step in history["lr"]]
    options: dict[str, Any] = {"step": where.step}
    if norms and np.median(norms) > 0:
        options["usual_norm"] = float(np.median(norms))
    if "lr" in (where.quantity, *where.others) and rates and history["lr"][where.step] > 0 and np.median(rates) > 0:
        options["usual_rate"] = float(np.median(rates) / history["lr"][where.step])
    if where.quantity in WATCHED:
        options["watch"] = _watched(where)
    if where.quantity == "output" and where.name != "logits":
        options["layer"] = where.name
    return options


def read_branches(points: Sequence[Any], step: int) -> dict[str, Any]:
    """Return what the hook of the branches recorded of a step, and at the step after it, as nested dicts."""
    found: dict[str, Any] = {"rows": {}, "loss": {}, "effect": {}, "later": {}, "standing_out": []}
    for _, at, _, metric, value in points:
        hook, *path = metric.split("/", 2)
        if hook == BRANCHES_HOOK and at in (step, step + 1):
            if len(path) == 1:
                found[path[0]] = value
            else:
                found.setdefault(path[0], {})[path[1]] = value
    if not found["loss"]:
        raise UsageError(f"Step {step} could not be taken again in branches: hook {BRANCHES_HOOK!r} recorded nothing.")
    return found


def _branch(name: str, found: Mapping[str, Any], bad: Sequence[Harm]) -> Branch:
    numbers = [found[metric].get(name) for metric in ("loss", "effect", "later")]
    loss, effect, later = [None if each is None else float(np.median(each)) for each in numbers]
    removed = bad[0].removed(name) if bad and name != "run" else None
    return Branch(name, len(found["loss"].get(name, [0])), loss, effect or 0.0, later, removed)
