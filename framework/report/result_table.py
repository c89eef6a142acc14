"""The table of results: a row per run with its final and best numbers, and the settings that differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .comparison import differing_parts
from .relevance import LOSSES, always_on, direction_of, last_part, validation_numbers
from .run_reader import ShownRun
from .tables import RunStyle, grid, text, titled

TRAINING_LOSS = "training loss"
MOST_NUMBERS, MOST_SETTINGS, LONGEST_SETTING = 4, 4, 24
SETTINGS = ("config", "training", "hooks", "treatments")
"""Parts of a record whose differences are settings; the others describe the machine."""


@dataclass(frozen=True)
class Result:
    """The last and the best value of a metric; ``best`` is NaN if neither direction is better."""

    last: float
    """The last recorded value; of the training loss the final loss of the summary, if the run has ended."""
    best: float = math.nan
    best_step: int = 0
    about: str = ""
    """Of what the last value is the mean."""


def result_table(runs: Sequence[ShownRun], styles: Sequence[RunStyle]) -> str:
    """Return the table as HTML; empty if no run could be read."""
    names = _number_names(runs)
    records = {shown.label: shown.run.record for shown in runs if shown.run.record}
    differing = [row for row in differing_parts(records) if row["part"] in SETTINGS] if len(records) > 1 else []
    shown_settings = differing[:MOST_SETTINGS]
    heading = ["run", "steps", *names, *(row["name"] for row in shown_settings)]
    results = {name: [_result(shown, name, heading) for shown in runs] for heading, name in names.items()}
    rows = []
    for index, (shown, style) in enumerate(zip(runs, styles, strict=True)):
        cells = [f'<th scope="row"{titled(shown)}>{style.swatch}{text(shown.label)}</th>', _cell(_steps(shown))]
        for name in names.values():
            is_best = len(runs) > 1 and index == _best_run(name, results[name])
            cells.append(_number_cell(results[name][index], is_best=is_best))
        for row in shown_settings:
            cells.append(_cell(text(row["values"].get(shown.label), LONGEST_SETTING)))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    left = len(differing) - len(shown_settings)
    more = f'<p class="note">{left:,} more settings differ; see below.</p>' if left > 0 else ""
    return grid("Results", heading, rows) + more


def _number_names(runs: Sequence[ShownRun]) -> dict[str, str]:
    """Return the metrics of the columns by their heading: the training loss, then numbers of the validation."""
    recorded = dict.fromkeys(name for shown in runs for name in shown.points)
    losses = [name for name in reversed(LOSSES) if name in recorded][:1]
    validation = sorted(validation_numbers(recorded), key=lambda name: -direction_of(name))
    accuracies = [f"{hook}/train_acc" for hook in always_on() if f"{hook}/train_acc" in recorded]
    chosen = list(dict.fromkeys([*losses, *validation, *accuracies]))[:MOST_NUMBERS]
    names: dict[str, str] = {}
    for name in chosen:
        heading = TRAINING_LOSS if name in losses else last_part(name)
        names[name if heading in names else heading] = name
    return names


def _result(shown: ShownRun, name: str, heading: str) -> Result | None:
    if name not in shown.points:
        return None
    steps, values = (np.asarray(part, dtype=np.float64) for part in shown.points[name])
    last, about = float(values[-1]), ""
    final = shown.run.summary.get("training_loss")
    if heading == TRAINING_LOSS and final is not None:
        last, about = float(final), str(shown.run.summary.get("training_loss_over", ""))
    direction, finite = direction_of(name), np.isfinite(values)
    if not direction or not finite.any():
        return Result(last, about=about)
    place = int(np.argmin(np.where(finite, direction * values, np.inf)))
    return Result(last, float(values[place]), int(steps[place]), about)


def _best_run(name: str, results: Sequence[Result | None]) -> int | None:
    """Return the place of the run with the best last value; ``None`` if all are equal, or no direction is better."""
    direction = direction_of(name)
    lasts = {index: direction * result.last for index, result in enumerate(results) if result}
    finite = {index: value for index, value in lasts.items() if math.isfinite(value)}
    return min(finite, key=finite.__getitem__) if direction and len({*finite.values()}) > 1 else None


def _steps(shown: ShownRun) -> str:
    summary: Mapping[str, int] = shown.run.summary
    steps = summary["steps"] if summary else shown.last[1] if shown.last else None
    return "" if steps is None else f"{steps:,}"


def _cell(content: str) -> str:
    return f"<td>{content}</td>"


def _number_cell(result: Result | None, *, is_best: bool) -> str:
    """Return a cell with the last value, and below it the best with its step."""
    if result is None:
        return "<td>–</td>"
    last = f'<strong class="{"best" if is_best else "last"}">{result.last:.4g}</strong>'
    if not math.isfinite(result.last):
        last = f'<strong class="bad">{result.last}</strong>'
    notes = [f"mean of the {result.about}"] if result.about.startswith("last ") and result.about != "last step" else []
    if math.isfinite(result.best) and f"{result.best:.4g}" != f"{result.last:.4g}":
        notes.append(f"best {result.best:.4g} at {result.best_step:,}")
    return f"<td>{last}{''.join(f'<small>{text(note)}</small>' for note in notes)}</td>"
