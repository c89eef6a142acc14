"""A picture of the settings of many runs: parallel coordinates, with the metric that decides as the last axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import shortened
from .relevance import last_part
from .tables import text

MOST_AXES, MOST_LINES = 6, 2000
MOST_TICKS = 12
"""Values of a setting that are ticks at equal distances; of more, only the ends and the middle have a label."""
BINS = 8
WIDTH, TOP, BOTTOM, SIDE, GAP = 960, 44, 300, 90, 24
CLASSES = 5
NAMES = ("seed", "data_seed", "name", "output_dir", "command")
"""Settings that name a run."""


@dataclass(frozen=True)
class SettingAxis:
    """A setting with the height of each run on its axis, from 0 at the bottom to 1."""

    name: str
    heights: NDArray[np.float64]
    ticks: Sequence[tuple[float, str]]
    share: float
    """The share of the variance of the results' ranks that the setting explains by itself."""


def settings_picture(
    labels: Sequence[str], settings: Sequence[Mapping[str, Any]], name: str, results: Sequence[float], direction: int
) -> str:
    """Return the picture as HTML; empty if no setting differs.

    Args:
        labels: the labels of the runs.
        settings: the settings of each run.
        name: the metric that decides.
        results: its value for each run; NaN if it has none, or no finite one.
        direction: 1 if lower results are better, −1 if higher ones are.
    """
    values = np.asarray(results, dtype=np.float64)
    ranks = _ranks(np.where(np.isfinite(values), direction * values, np.inf))
    names = dict.fromkeys(name for run in settings for name in run if name not in NAMES)
    axes = [axis for name in names if (axis := _axis(name, [run.get(name) for run in settings], ranks))]
    axes = sorted(axes, key=_share)[-MOST_AXES:]
    if not axes:
        return ""
    axes.append(_result_axis(name, values))
    places = [SIDE + (WIDTH - 2 * SIDE) * index / (len(axes) - 1) for index in range(len(axes))]
    frame = "".join(_axis_lines(axis, x) for axis, x in zip(axes, places, strict=True))
    shown = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), MOST_LINES)).astype(int)).tolist()
    heights = np.stack([BOTTOM - (BOTTOM - TOP) * axis.heights for axis in axes])
    lines = []
    for index in sorted(shown, key=ranks.__getitem__, reverse=True):
        points = " ".join(f"{x:.0f},{y:.1f}" for x, y in zip(places, heights[:, index], strict=True))
        kind = f"q{int(ranks[index] * CLASSES * 0.999)}" if math.isfinite(values[index]) else "bad"
        lines.append(f'<polyline class="{kind}" points="{points}"><title>{text(labels[index])}</title></polyline>')
    picture = (
        f'<svg class="settings" viewBox="0 0 {WIDTH} {BOTTOM + 40}" role="img" '
        f'aria-label="Settings of the runs, and their {text(last_part(name))}">{"".join(lines)}{frame}</svg>'
    )
    explained = ", ".join(f"{axis.name} {axis.share:.0%}" for axis in reversed(axes[:-1]))
    better = {1: "Lower is better", -1: "Higher is better"}.get(direction, "No direction is known to be better")
    left = f" {len(shown):,} of {len(labels):,} runs are drawn." if len(shown) < len(labels) else ""
    note = (
        f"A line is a run, from its settings to its {name}: blue lines have the best results, orange ones the worst, "
        f"and dashed red ones none that is finite. {better}. Share of the ranks of the results that a setting explains "
        f"by itself: {explained}.{left}"
    )
    return (
        f'<section id="settings"><h2>Settings</h2><p class="note">{text(note, 1000)}</p>'
        f'<div class="wide" role="region" aria-label="Settings" tabindex="0">{picture}</div></section>'
    )


def _share(axis: SettingAxis) -> float:
    return axis.share


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values from 0 to 1; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means = (ends - counts + ends - 1) / 2
    ranks: NDArray[np.float64] = means[places.reshape(-1)] / max(1, len(values) - 1)
    return ranks


def _axis(name: str, values: Sequence[Any], ranks: NDArray[np.float64]) -> SettingAxis | None:
    """Return the axis of a setting; ``None`` if it is equal in all runs, or has too many values that are no numbers."""
    distinct = list(dict.fromkeys(map(repr, values)))
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    is_number = len(numbers) == len(values) and all(map(math.isfinite, numbers))
    if len(distinct) < 2 or not (is_number or len(distinct) <= MOST_TICKS):
        return None
    if len(distinct) > MOST_TICKS:
        heights, ticks = _scale(np.asarray(numbers, dtype=np.float64))
        limits = np.quantile(heights, np.linspace(0, 1, BINS + 1)[1:-1])
        return SettingAxis(name, heights, ticks, _explained(np.digitize(heights, limits), ranks))
    order: list[Any] = (
        sorted(set(numbers)) if is_number else sorted({repr(value): value for value in values}.values(), key=str)
    )
    keys = [repr(value) for value in order]
    if len(keys) != len(distinct):  # 1 and 1.0
        keys, order = distinct, distinct
    group = np.array([keys.index(repr(value)) for value in values])
    # Runs with one value are spread around its tick by their results, so that lines remain apart.
    heights = (group + 0.5 + 0.5 * (ranks - 0.5)) / len(keys)
    ticks = [((index + 0.5) / len(keys), _shown(value)) for index, value in enumerate(order)]
    return SettingAxis(name, heights, ticks, _explained(group, ranks))


def _explained(group: NDArray[Any], ranks: NDArray[np.float64]) -> float:
    """Return which share of the variance of ranks groups explain, adjusted for their number, and at least 0."""
    count, total = len(ranks), float(((ranks - ranks.mean()) ** 2).sum())
    kinds = np.unique(group)
    if not total or len(kinds) >= count:
        return 0.0
    # ε² = 1 − (SS_within / (n − k)) / (SS_total / (n − 1))
    within = sum(float(((ranks[group == kind] - ranks[group == kind].mean()) ** 2).sum()) for kind in kinds)
    return max(0.0, 1 - within / (count - len(kinds)) * (count - 1) / total)


def _scale(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[tuple[float, str]]]:
    """Return heights and ticks of numbers, on a logarithmic axis if they are positive and span two decades."""
    low, high = float(values.min()), float(values.max())
    is_log = low > 0 and high / low >= 100
    scaled = np.log(values) if is_log else values
    bottom, span = float(scaled.min()), float(np.ptp(scaled)) or 1.0
    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    return (scaled - bottom) / span, [(0.0, _shown(low)), (0.5, _shown(middle)), (1.0, _shown(high))]


def _result_axis(name: str, values: NDArray[np.float64]) -> SettingAxis:
    finite = np.isfinite(values)
    heights = np.ones(len(values))
    ticks: list[tuple[float, str]] = []
    room = 1.0 if finite.all() else 0.88  # runs without a finite result end above the others
    if finite.any():
        scaled, marks = _scale(values[finite])
        heights[finite] = room * scaled
        ticks = [(room * height, label) for height, label in marks]
    return SettingAxis(last_part(name), heights, ticks + [(1.0, "not finite")] * (not finite.all()), 0.0)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else shortened(str(value), 14)


def _axis_lines(axis: SettingAxis, x: float) -> str:
    """Return an axis with its name and its ticks."""
    labels = "".join(
        f'<text x="{x + 6:.0f}" y="{BOTTOM - (BOTTOM - TOP) * height + 4:.1f}">{text(label)}</text>'
        for height, label in axis.ticks
    )
    name = f'<text class="name" x="{x:.0f}" y="{TOP - GAP:.0f}">{text(shortened(axis.name, 22))}</text>'
    return f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{TOP}" y2="{BOTTOM}"></line>{name}{labels}'
