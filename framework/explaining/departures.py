"""The first step at which anything leaves its own history, by ranks, however many things are looked at.

Each quantity of a step is compared with its ``WINDOW`` values before: z is its distance from their median in spreads
(1.4826 times the median distance from it, at least ``FLOOR`` of the value). Divided by the largest z that the quantity
had in the steps before, it says how far it leaves what it has been. The largest of these over all quantities is what a
step is ranked by among the steps before, for each of which it is found in the same way, with the step itself left out:
so the number of quantities is accounted for, as they depend on each other (Westfall and Young, 1993), and the number of
steps that are looked at by Bonferroni's factor.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..report import FoundRun, departure_text

WINDOW = 32
FLOOR = 0.05
LEAST = 3.0
"""What the largest z before counts at least, so that a quantity that hardly moves has to move far."""
LEVEL = 0.05
HISTORY = 200
"""Steps before those in question that a departure is ranked among, where there are as many."""
LOOKED_AT = 8
"""Steps that are looked at, the last being the one in question; fewer where the history is too short for as many."""
LATE = ("update", "state")
"""Quantities that are told at the step after."""
ORDER = ("lr", "copies", "output", "loss", "gradient", "state", "update", "effect")
"""What a step computes, in this order."""
TWO_SIDED = ("state",)

History = Mapping[str, Mapping[int, float]]
"""The values of each quantity by step."""


@dataclass(frozen=True)
class Departure:
    """What left its history at a step, and how surely."""

    step: int
    quantity: str
    """``lr``, ``copies`` of a row, ``loss``, ``effect`` (on the next loss), or by name ``output``, ``gradient``,
    ``state``, ``update``."""
    name: str
    """Of the parameter, of the layer for outputs (``logits``: the model's), empty for the loss."""
    value: float
    usual: float
    """The median of the steps before."""
    p: float
    """Of the step's rank, times the steps looked at."""
    comparisons: int
    others: Sequence[str]
    """What else left its history at that step."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        return departure_text(self.as_dict())


def read_history(run: FoundRun, hook: str) -> dict[str, dict[int, float]]:
    """Return the quantities that ``step_history`` recorded, each by the step that it is about; NaN as infinite."""
    found: dict[str, dict[int, float]] = {}
    for _, step, _, metric, value in run.points:
        quantity = metric.removeprefix(f"{hook}/")
        if quantity != metric and isinstance(value, (int, float)):
            number = math.inf if math.isnan(value) else float(value)
            found.setdefault(quantity, {})[step - quantity.startswith(LATE)] = number
    losses, before = found.get("loss", {}), found.pop("loss_before", {})
    known = {step: value for step, value in before.items() if step + 1 in losses and math.isfinite(value)}
    found["effect"] = {step: losses[step + 1] - value for step, value in known.items()}
    return found


def scores(values: np.ndarray, *, both: np.ndarray) -> np.ndarray:
    """Return z of each value that has ``WINDOW`` values before it.

    Shapes (quantities, steps) and (quantities, steps − WINDOW); ``both``, of shape (quantities,), says where small
    values count like large ones. What is not finite has an infinite z; in a window it is left out.
    """
    windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW, axis=1)[:, :-1]
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(windows), windows, np.nan)
        empty = np.isnan(finite).all(-1)
        finite[empty] = 0.0
        middle = np.nanmedian(finite, -1)
        spread = 1.4826 * np.nanmedian(np.abs(finite - middle[..., None]), -1)
        now = values[:, WINDOW:]
        z = (now - middle) / np.maximum(spread, FLOOR)
    z = np.where(both[:, None], np.abs(z), z)
    return np.where(empty, 0.0, np.where(np.isnan(now), 0.0, np.where(np.isfinite(now), z, np.inf)))


def departures(history: History, step: int) -> tuple[list[Departure], str]:
    """Return what left its history in the last steps up to ``step``, by step; if nothing did, why, in words."""
    steps = _unbroken(history.get("loss", {}), step)
    names = [name for name in history if _order(name) is not None]
    ranked = len(steps) - WINDOW
    looked_at = min(LOOKED_AT, int(LEVEL * (ranked + 1)))
    while looked_at > 0 and looked_at > LEVEL * (ranked - looked_at + 1):
        looked_at -= 1
    if looked_at < 1:
        return [], (
            f"Step {step:,} has {max(0, len(steps) - 1):,} recorded steps before it, too few to tell what is unusual: "
            f"{WINDOW + round(1 / LEVEL)} are needed."
        )
    values = np.array([_scaled(history[name], steps, name) for name in names])
    z = np.concatenate([scores(part, both=both) for part, both in _parts(values, names)])
    before = z[:, :-looked_at]
    top = np.sort(np.where(np.isfinite(before), before, 1e9), axis=1)[:, -2:]
    is_top = before >= top[:, -1:]
    elsewhere = np.maximum(np.where(is_top, top[:, :1], top[:, -1:]), LEAST)
    null = (np.minimum(before, 1e12) / elsewhere).max(0)
    limits = np.maximum(top[:, -1], LEAST)
    found = []
    for place, number in enumerate(steps[-looked_at:]):
        now = np.minimum(z[:, before.shape[1] + place], 1e12) / limits
        p = looked_at * (1 + int((null >= now.max()).sum())) / (len(null) + 1)
        if p <= LEVEL and now.max() > 1:
            far = [index for index in range(len(names)) if now[index] > max(1.0, float(null.max()))]
            found.append(_departure(history, names, now, far, number, p))
    if found:
        return found[_is_of_the_step_after(found) :], ""
    return [], (
        f"None of {len(names):,} quantities left its history in the steps {steps[-looked_at]:,} to {step:,}, by ranks "
        f"among the {before.shape[1]:,} steps before."
    )


def _is_of_the_step_after(found: Sequence[Departure]) -> bool:
    """Return whether only the loss of the step after shows the first one, and that step has more."""
    if len(found) < 2 or found[1].step != found[0].step + 1:
        return False
    first, second = ({each.quantity, *each.others} for each in found[:2])
    return first == {"effect"} and not second <= {"loss", "effect"}


def _departure(
    history: History, names: Sequence[str], now: np.ndarray, far: Sequence[int], step: int, p: float
) -> Departure:
    """Return the earliest of what left its history, in the order in which a step computes it."""
    # Layers stand in the order of the pass, quantities of another kind by how far they left.
    places = {index: index if names[index].startswith("output/") else -float(now[index]) for index in far}
    first, *others = (names[index] for index in sorted(far, key=lambda each: (_order(names[each]) or 0, places[each])))
    quantity, _, name = first.partition("/")
    series = history[first]
    usual = float(np.median([series[each] for each in sorted(series) if step - WINDOW <= each < step] or [np.nan]))
    return Departure(step, quantity, name, series[step], usual, min(p, 1.0), len(names), others[:9])


def _order(name: str) -> int | None:
    kind = name.partition("/")[0]
    return ORDER.index(kind) if kind in ORDER else None


def _unbroken(losses: Mapping[int, float], step: int) -> list[int]:
    """Return the steps up to ``step`` that were recorded without a gap, at most as many as are looked at."""
    groups = groupby(enumerate(sorted(losses)), lambda item: item[1] - item[0])
    runs = ([number for _, number in each] for _, each in groups)
    found = next((run for run in runs if step in run), [])
    return [each for each in found if step - HISTORY - WINDOW - LOOKED_AT < each <= step]


def _scaled(series: Mapping[int, float], steps: Sequence[int], name: str) -> list[float]:
    """Return logarithms of what is positive, of an optimizer's state their changes; multiples of a size of others."""
    found = np.array([series.get(each, np.nan) for each in steps])
    finite = found[np.isfinite(found)]
    with np.errstate(divide="ignore", invalid="ignore"):
        if len(finite) and (finite >= 0).all():
            least = finite[finite > 0].min() if (finite > 0).any() else 1.0
            logs = np.log(np.where(np.isfinite(found), np.maximum(found, least * 1e-3), found))
            return list(np.diff(logs, prepend=logs[:1])) if name.startswith("state/") else list(logs)
    size = float(np.median(np.abs(finite))) if len(finite) else 1.0
    return list(found / (size or 1.0))


def _parts(values: np.ndarray, names: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut the quantities into pieces whose windows fit into memory."""
    both = np.array([name.startswith(TWO_SIDED) for name in names])
    return [(values[first : first + 256], both[first : first + 256]) for first in range(0, len(values), 256)]
