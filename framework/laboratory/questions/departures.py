"""Detection of the first step with an unusual quantity, by a rank test over all recorded quantities.

Each quantity of a step is compared with its previous ``WINDOW`` values without their linear trend: z is its distance
from their median, in units of their robust standard deviation (1.4826 times the median distance from the median, at
least ``SMALLEST_SPREAD``). z divided by the largest earlier z of the quantity measures its departure. A step is ranked
among the earlier steps by its largest departure over all quantities; that of an earlier step is computed in the same
way, without the step itself. The ranks account for the number of dependent quantities (Westfall and Young, 1993), and
Bonferroni's factor for the number of tested steps.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from ...report import FoundRun
from ..explained_step import Deviation
from ..usual_values import median_and_spread, without_trend
from .repeated_steps import recorded

WINDOW = 32
SMALLEST_WINDOW = 16
"""The least number of previous values, in a history that is too short for ``WINDOW``."""
SMALLEST_SPREAD = 0.05
"""Lower bound of the spread, on the scale of :func:`_scaled`: 5 % for a quantity that is compared by logarithms."""
SMALLEST_LIMIT = 3.0
"""Lower bound of the largest earlier z, in spreads, so that an almost constant quantity needs a large change."""
LEVEL = 0.05
"""Significance level of the test, after Bonferroni's correction for the number of tested steps."""
HISTORY = 200
"""Largest number of earlier steps that a departure is ranked among."""
MOST_TESTED_STEPS = 8
"""Largest number of tested steps, the last of which is the step in question; fewer if the history is short."""
FEWEST_RANKED = round(1 / LEVEL)
"""The least number of steps after the window, the tested one included, with which a rank can reach the level."""
RECORDED_ONE_STEP_LATER = ("update", "state")
"""Quantities of a step that ``step_history`` records at the following step."""
ORDER = ("lr", "copies", "output", "loss", "gradient", "state", "update", "effect")
"""The quantities in the order in which a step computes them."""
TWO_SIDED = ("state",)

History = Mapping[str, Mapping[int, float]]
"""The values of each quantity by step."""


def read_history(run: FoundRun, hook: str) -> dict[str, dict[int, float]]:
    """Return the quantities that ``step_history`` recorded, each by the step that it describes; NaN becomes ∞."""
    history: dict[str, dict[int, float]] = {}
    for step, quantity, value in recorded(run.points, hook):
        if isinstance(value, (int, float)):
            number = math.inf if math.isnan(value) else float(value)
            history.setdefault(quantity, {})[step - quantity.startswith(RECORDED_ONE_STEP_LATER)] = number
    losses, losses_before = history.get("loss", {}), history.pop("loss_before", {})
    usable = {step: value for step, value in losses_before.items() if step + 1 in losses and math.isfinite(value)}
    history["effect"] = {step: losses[step + 1] - value for step, value in usable.items()}
    return history


def scores(values: np.ndarray, *, both: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Return z of each value with ``window`` earlier values.

    Maps shape (quantities, steps) to (quantities, steps − window). ``both``, of shape (quantities,), marks two-sided
    quantities. A value that is not finite has an infinite z, and windows ignore it.
    """
    windows = without_trend(np.lib.stride_tricks.sliding_window_view(values, window, axis=1)[:, :-1])
    middle, spread = median_and_spread(windows)
    current = values[:, window:]
    with np.errstate(invalid="ignore"):
        # z = (x − median) / max(1.4826·median|x − median|, SMALLEST_SPREAD), shape (quantities, steps − window)
        z = (current - middle) / np.maximum(spread, SMALLEST_SPREAD)
    z = np.where(both[:, None], np.abs(z), z)
    return np.where(np.isinf(middle), 0.0, np.where(np.isnan(current), 0.0, np.where(np.isfinite(current), z, np.inf)))


def departures(history: History, step: int) -> tuple[list[Deviation], str]:
    """Return the departures in the last steps up to ``step``, in order; without any, the reason in words."""
    steps = _consecutive_steps(history.get("loss", {}), step)
    names = [name for name in history if _order(name) is not None]
    # as many steps to rank among as the level needs for one tested step
    window = min(WINDOW, max(SMALLEST_WINDOW, len(steps) - FEWEST_RANKED))
    ranked = len(steps) - window
    tested_steps = min(MOST_TESTED_STEPS, int(LEVEL * (ranked + 1)))
    # The smallest possible p of n tested steps, n/(earlier steps + 1), must not exceed the level.
    while tested_steps > 0 and tested_steps > LEVEL * (ranked - tested_steps + 1):
        tested_steps -= 1
    if tested_steps < 1:
        return [], (
            f"Step {step:,} has only {max(0, len(steps) - 1):,} recorded steps before it; the test needs at least "
            f"{SMALLEST_WINDOW + FEWEST_RANKED - 1}."
        )
    values = np.array([_scaled(history[name], steps, name) for name in names])
    both = np.array([name.startswith(TWO_SIDED) for name in names])
    parts = [slice(first, first + 256) for first in range(0, len(values), 256)]  # whose windows fit into memory
    z = np.concatenate([scores(values[part], both=both[part], window=window) for part in parts])
    # null: the largest departure of each earlier step, z over the largest z of the other earlier steps, shape (steps,)
    earlier = z[:, :-tested_steps]
    top = np.sort(np.where(np.isfinite(earlier), earlier, 1e9), axis=1)[:, -2:]
    is_top = earlier >= top[:, -1:]
    other_top = np.maximum(np.where(is_top, top[:, :1], top[:, -1:]), SMALLEST_LIMIT)
    null = (np.minimum(earlier, 1e12) / other_top).max(0)
    limits = np.maximum(top[:, -1], SMALLEST_LIMIT)
    departures_by_step = []
    for index_of_step, number in enumerate(steps[-tested_steps:]):
        sizes = np.minimum(z[:, earlier.shape[1] + index_of_step], 1e12) / limits
        # p = tested steps · (1 + earlier steps that departed at least as far)/(earlier steps + 1)
        p = tested_steps * (1 + int((null >= sizes.max()).sum())) / (len(null) + 1)
        if p <= LEVEL and sizes.max() > 1:
            departed = [index for index in range(len(names)) if sizes[index] > max(1.0, float(null.max()))]
            departures_by_step.append(_departure(history, names, sizes, departed, number, p))
    if departures_by_step:
        return departures_by_step[_belongs_to_next_step(departures_by_step) :], ""
    return [], (
        f"None of {len(names):,} quantities was unusual in the steps {steps[-tested_steps]:,} to {step:,}, by ranks "
        f"among the {earlier.shape[1]:,} steps before."
    )


def _belongs_to_next_step(departures_by_step: Sequence[Deviation]) -> bool:
    """Return whether the first departure is only an effect on the next loss, and the next step has other departures."""
    if len(departures_by_step) < 2 or departures_by_step[1].step != departures_by_step[0].step + 1:
        return False
    first, second = ({departure.quantity, *departure.others} for departure in departures_by_step[:2])
    return first == {"effect"} and not second <= {"loss", "effect"}


def _departure(
    history: History, names: Sequence[str], sizes: np.ndarray, departed: Sequence[int], step: int, p: float
) -> Deviation:
    """Return the departure of the quantity that a step computes first among ``departed``, indices of ``names``."""
    # Layers are in the order of the forward pass; other quantities are ordered by the size of their departure.
    order_within_kind = {
        index: index if names[index].startswith("output/") else -float(sizes[index]) for index in departed
    }
    order = sorted(departed, key=lambda index: (_order(names[index]) or 0, order_within_kind[index]))
    first, *others = (names[index] for index in order)
    quantity, _, name = first.partition("/")
    series = history[first]
    usual = float(np.median([series[other] for other in sorted(series) if step - WINDOW <= other < step] or [np.nan]))
    return Deviation(step, quantity, name, series[step], usual, min(p, 1.0), len(names), others[:9])


def _order(name: str) -> int | None:
    kind = name.partition("/")[0]
    return ORDER.index(kind) if kind in ORDER else None


def _consecutive_steps(losses: Mapping[int, float], step: int) -> list[int]:
    """Return the steps up to ``step`` that were recorded without a gap, at most as many as the test uses."""
    groups = groupby(enumerate(sorted(losses)), lambda item: item[1] - item[0])
    runs = ([number for _, number in group] for _, group in groups)
    unbroken = next((run for run in runs if step in run), [])
    return [number for number in unbroken if step - HISTORY - WINDOW - MOST_TESTED_STEPS < number <= step]


def _scaled(series: Mapping[int, float], steps: Sequence[int], name: str) -> list[float]:
    """Return logarithms of non-negative series (their changes for optimizer state), scaled values of others."""
    values = np.array([series.get(step, np.nan) for step in steps])
    finite = values[np.isfinite(values)]
    with np.errstate(divide="ignore", invalid="ignore"):
        if len(finite) and (finite >= 0).all():
            least = finite[finite > 0].min() if (finite > 0).any() else 1.0
            # Zeros count as a thousandth of the smallest positive value, since log 0 is infinite.
            logs = np.log(np.where(np.isfinite(values), np.maximum(values, least * 1e-3), values))
            return list(np.diff(logs, prepend=logs[:1])) if name.startswith("state/") else list(logs)
    size = float(np.median(np.abs(finite))) if len(finite) else 1.0
    return list(values / (size or 1.0))
