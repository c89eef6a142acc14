"""Plots drawn with matplotlib, without pyplot or a window, and independent of the user's matplotlibrc."""

import math
import re
import warnings
from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator

from ..durable_files import write_atomically
from ..errors import require
from .curves import Floats, MetricCurve
from .panels import COLOURS, DASHES, Look, Panel, Picture, Style, Trace, is_logarithmic, remark

SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": "medium",
    "text.parse_math": False,  # names are not formulas
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.solid_joinstyle": "round",
    "savefig.dpi": 150,
    # Text stays text, not outlines.
    "svg.fonttype": "none",
    # Without a salt, the ids in an SVG are random, and equal plots give different files.
    "svg.hashsalt": "loopscope",
    "pdf.fonttype": 42,
}
STYLE: Sequence[str | dict[str, Any]] = ["default", SETTINGS]
# With a date, equal plots would give different files.
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
DESCRIPTION = {"svg": "Description", "pdf": "Subject", "png": "Description"}
GREY = "#666666"
FAINT = 0.25
BAND = "mean over seeds, 95 % t-interval"
FEW_POINTS = 40  # curves of fewer points than this show each
MANY_POINTS = 1000  # curves of more points than this are drawn thinner
PLAIN = 1e-3, 1e6  # axes within these bounds have plain numbers, not powers of ten
DIGITS = 10  # significant digits of a tick; further digits are rounding errors
NOISE = 1e-9  # values that differ by less than this, relatively, are shown as constant
CHARACTER = 0.075  # width of a character, in inches
ROOM = 3.2, 2.1  # inches of a panel with full-size text; smaller panels have smaller text
SMALLEST, LEAST = 0.5, 0.27  # smallest factors of text and panel
# Non-finite values with their markers and the heights of these in the panel.
MARKS = ((np.isnan, "x", 0.02), (np.isposinf, "^", 0.98), (np.isneginf, "v", 0.02))


class Drawing(Figure):
    """A figure that notebooks display without pyplot."""

    def _repr_png_(self) -> bytes:
        with matplotlib.style.context(STYLE), BytesIO() as file:
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()


def figure_of(picture: Picture, look: Look) -> Drawing:
    """Draw a picture; raises :class:`UsageError` if the requested size is too small for its panels."""
    rows, columns = layout(len(picture.panels), look.size)
    width, height = look.size or ((7.2, 4.4) if columns == 1 else (4.2 * columns, 2.6 * rows + 0.4))
    scale = max(SMALLEST, min(1.0, width / columns / ROOM[0], (height - 0.5) / rows / ROOM[1]))
    text = scale * CHARACTER
    sizes = {"font.size": 9 * scale, "lines.linewidth": 1.5 * scale, "lines.markersize": 2.5 * scale}
    with matplotlib.style.context([*STYLE, sizes]):
        legend = [(wrapped(label, int(width / text / 2) - 8), line) for label, line in _legend(picture, look)]
        longest = max((len(line) for label, _ in legend for line in label.split("\n")), default=0)
        keys = min(max(1, int(width / (text * longest + 0.6 * scale))), max(1, len(legend)))
        height += 0 if look.size else 0.2 * math.ceil(len(legend) / keys)
        figure = Drawing(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten().tolist()
        room = int((width / columns - 0.6 * scale) / text)  # characters above a panel, right of its axis
        remarks = [wrapped(remark(panel, look), room) for panel in picture.panels]
        for index, (panel, below) in enumerate(zip(picture.panels, remarks, strict=True)):
            row = index // columns * columns
            _draw(axes[index], panel, look)
            # Remarks are below the title; the titles of a row have the same height.
            lines = max(below.count("\n") + bool(below) for below in remarks[row : row + columns])
            axes[index].set_title(wrapped(panel.title, room), loc="left", pad=(6 + 10.5 * lines) * scale)
            place: dict[str, Any] = {"xytext": (0, 4 * scale), "xycoords": "axes fraction"}
            axes[index].annotate(below, (0, 1), **place, textcoords="offset points", fontsize="small", color=GREY)
            axes[index].tick_params(labelsize=9 * scale)  # ticks are created later, under another style
        _label_steps(axes, len(picture.panels), columns, look, max(2, min(6, room // 9)))
        figure.suptitle(wrapped(picture.title if look.title is None else look.title, int(width / text / 1.3)))
        if legend:
            handles = [Line2D([], [], label=label, **line) for label, line in legend]
            figure.legend(handles=handles, loc="outside lower center", ncols=keys, frameon=False)
        return figure


def save(figure: Figure, path: Path, about: tuple[str, str] = ("", "")) -> None:
    """Write a figure atomically, in the format of the name's suffix."""
    kind = path.suffix[1:].lower()
    metadata = UNDATED[kind] | {DESCRIPTION[kind]: about[0], "Keywords": about[1]}
    with matplotlib.style.context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("once", "Glyph")  # otherwise each layout pass warns about a missing glyph
        write_atomically(path, partial(figure.savefig, format=kind, metadata=metadata))


def layout(panels: int, size: tuple[float, float] | None = None) -> tuple[int, int]:
    """Return rows and columns of panels, fitted to a size in inches; raises :class:`UsageError` if it is too small.

    >>> [layout(panels) for panels in (1, 2, 3, 4, 5, 7, 24)]
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (6, 4)]
    >>> layout(6, (4, 12)), layout(6, (12, 4))
    ((6, 1), (2, 3))
    """
    columns = {1: 1, 2: 2, 4: 2}.get(panels, 3 if panels <= 9 else 4)
    if size is not None:
        (width, height), counts = size, range(1, panels + 1)
        rooms = [min(width / n / ROOM[0], (height - 0.5) / math.ceil(panels / n) / ROOM[1]) for n in counts]
        require(max(rooms) >= LEAST, f"A size of {width:g}x{height:g} inches is too small for {panels} panels.")
        columns = rooms.index(max(rooms)) + 1
    return math.ceil(panels / columns), columns


def _draw(ax: Axes, panel: Panel, look: Look) -> None:
    """Draw a panel."""
    log_y = is_logarithmic(panel, look)
    if log_y:
        ax.set_yscale("log", nonpositive="mask")
    _set_labels(ax.yaxis)
    for curve, style in panel.traces:
        _draw_curve(ax, curve, line_of(style), look.smooth, log_y=log_y)
    _limit(ax, panel.traces, log_y=log_y)
    if panel.baseline is not None:
        ax.axhline(panel.baseline, color=GREY, linewidth=0.8, zorder=1)
    ax.set_ylabel(panel.y_label)


def wrapped(name: str, width: int) -> str:
    r"""Wrap a text after slashes, underscores, spaces and dots, not within numbers unless necessary.

    >>> wrapped("norms/weight_norm/blocks.0.weight", 20), wrapped("a\nbcdefghij", 8)
    ('norms/weight_norm/\nblocks.0.weight', 'a?bcdefg\nhij')
    """
    lines, width = [""], max(width, 8)
    inner, end = r"(?:[^/._ ]|\.(?=\d))", r"(?:[/_ ]|\.(?!\d))"  # do not split a number at its point
    for piece in re.findall(rf"{inner}{{0,{width - 1}}}{end}|{inner}{{1,{width}}}", name):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += "".join(character if character.isprintable() else "?" for character in piece)
    return "\n".join(lines)


def _limit(ax: Axes, traces: Sequence[Trace], *, log_y: bool) -> None:
    """Set limits around constant curves, so that rounding errors are not magnified; hide ticks without values."""
    values = np.concatenate([curve.values[curve.finite] for curve, _ in traces])
    values = values[values > 0] if log_y else values
    if not len(values):
        ax.set_yticks([])
    elif np.ptp(values) <= NOISE * np.abs(values).max():
        middle = float(values.mean())
        room = abs(middle) / 20 or 0.05
        ax.set_ylim((middle / 2, middle * 2) if log_y else (middle - room, middle + room))


class TickLabels(LogFormatterSciNotation):
    """Tick labels in one style for all axes; a logarithmic axis labels the same ticks as matplotlib."""

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the labels of all ticks of an axis."""
        axis: Any = self.axis
        texts = ["x"] * len(values) if axis.get_scale() == "linear" else super().format_ticks(list(values))
        low, high = sorted(axis.get_view_interval())
        labelled_ticks = [value for value, text in zip(values, texts, strict=True) if text and low <= value <= high]
        labels = dict(zip(labelled_ticks, tick_labels(labelled_ticks, axis.get_scale() == "linear"), strict=True))
        return [labels.get(value, "") for value in values]


def tick_labels(ticks: Sequence[float], even: bool) -> list[str]:
    """Format ticks plainly, or like 1e-5 if very small or large; ``even`` ticks all in the same format.

    >>> tick_labels([0, 2500, 5000], True), tick_labels([0, 0.25, 0.5], True), tick_labels([0, 2.5e-5, 5e-5], True)
    (['0', '2,500', '5,000'], ['0.00', '0.25', '0.50'], ['0', '2.5e-5', '5e-5'])
    >>> tick_labels([1e-4, 0.01, 1, 1000, 1e6], False)
    ['1e-4', '0.01', '1', '1,000', '1e6']
    """
    if not even:
        return [text for tick in ticks for text in tick_labels([tick], True)]
    largest = max(map(abs, ticks), default=0)
    if largest >= PLAIN[1] or 0 < largest < PLAIN[0]:
        texts = [np.format_float_scientific(tick, DIGITS - 1, trim="-", exp_digits=1) for tick in ticks]
        return [text.replace(".e", "e").removesuffix("e+0").replace("e+", "e") for text in texts]
    texts = [np.format_float_positional(tick, DIGITS, fractional=False, trim="-") for tick in ticks]
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _set_labels(axis: Axis) -> None:
    axis.set_major_formatter(TickLabels())
    if axis.get_scale() == "log":
        axis.set_minor_formatter(TickLabels(labelOnlyBase=False))


def _draw_curve(ax: Axes, raw: MetricCurve, line: dict[str, Any], smooth: int, *, log_y: bool) -> None:
    """Draw a curve with marked gaps; a smoothed curve has the original faintly behind it."""
    steps, values, thick = raw.steps, raw.values, rcParams["lines.linewidth"]
    if raw.half is not None:
        # A logarithmic axis cannot show an interval that includes 0.
        least = values[values > 0].min(initial=math.inf) / 2 if log_y else -math.inf
        band = {"color": line["color"], "alpha": FAINT, "linewidth": 0}
        ax.fill_between(steps, np.maximum(values - raw.half, least), values + raw.half, **band)
    if smooth > 1:
        ax.plot(steps, values, color=line["color"], linewidth=thick / 2, alpha=FAINT)
    curve = running_mean(raw, smooth, geometric=log_y) if smooth > 1 else raw
    # Points without a line get a dot: those between gaps, and all points of a short curve.
    gaps = np.pad(~curve.finite, 1, constant_values=True)
    isolated_points = np.flatnonzero((gaps[:-2] & ~gaps[1:-1] & gaps[2:]) | (len(values) <= FEW_POINTS)).tolist()
    width = thick * 0.6 if len(values) > MANY_POINTS else thick
    shown = np.where(curve.finite, curve.values, np.nan)
    ax.plot(steps, shown, **line, linewidth=width, marker="o", markevery=isolated_points)
    for is_marked, marker, height in MARKS:
        marked_steps = steps[is_marked(values)]
        if len(marked_steps):
            place: dict[str, Any] = {"markersize": 1.6 * rcParams["lines.markersize"], "color": line["color"]}
            place["transform"] = ax.get_xaxis_transform()
            ax.plot(marked_steps, np.full(len(marked_steps), height), marker, **place)


def running_mean(curve: MetricCurve, window: int, *, geometric: bool = False) -> MetricCurve:
    """Return the centred running mean over ``window`` points.

    An even window gets one more point. The window shrinks towards both ends, so that the first and the last value do
    not change. Non-finite values are ignored, and the mean at their position is NaN. A geometric mean, suited to a
    logarithmic axis, uses only positive values.

    >>> running_mean(MetricCurve.of_points([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, float("nan"), 8.0]), 3).values
    array([ 1.,  3.,  4., nan,  8.])
    """
    # mean_i = Σ x_j / count over valid |j − i| ≤ h_i with h_i = min(half, distance to the nearer end). The geometric
    # mean is the exponential of the mean logarithm. All arrays have shape (points,).
    valid = curve.finite & (curve.values > 0) if geometric else curve.finite
    logs = np.log(curve.values, where=valid, out=np.zeros_like(curve.values)) if geometric else curve.values
    half = min(window // 2, (len(valid) - 1) // 2)
    sums, counts = _window_sums(np.where(valid, logs, 0.0), half), _window_sums(valid.astype(np.float64), half)
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=curve.finite & (counts > 0))
    return MetricCurve(curve.steps, np.exp(means) if geometric else means)


def _window_sums(values: Floats, half: int) -> Floats:
    """Return the sum of each value and ``half`` values on both sides, or fewer on both sides near the ends."""
    # Cumulative sums run from both ends of blocks of the window's length; each window is the end of one block and the
    # beginning of the next. The time does not depend on the window, and without subtraction a spike leaves no rounding
    # error (van Herk, Pattern Recognition Letters 13, 1992, does this for maxima).
    window, first = 2 * half + 1, np.arange(len(values) - 2 * half)
    blocks = np.pad(values, (0, -len(values) % window)).reshape(-1, window)
    from_left, from_right = blocks.cumsum(axis=1).ravel(), blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    inner = from_left[first + window - 1] + np.where(first % window, from_right[first], 0.0)
    return np.concatenate([values.cumsum()[: 2 * half : 2], inner, values[::-1].cumsum()[: 2 * half : 2][::-1]])


def _label_steps(axes: Sequence[Axes], panels: int, columns: int, look: Look, most: int) -> None:
    """Label the horizontal axis of the lowest panel in each column, and remove unused axes."""
    for index, ax in enumerate(axes):
        if index >= panels:
            ax.remove()
        elif index + columns >= panels:
            ax.set_xlabel(look.x)
            ax.tick_params(labelbottom=True)
    first = axes[0]
    if look.log_x:
        first.set_xscale("log", nonpositive="mask")
        first.xaxis.set_major_locator(LogLocator(numticks=most + 1))
    else:
        has_integer_steps = look.x == "step" or np.ptp(first.get_xlim()) > 3
        first.xaxis.set_major_locator(MaxNLocator(nbins=most, integer=has_integer_steps))
    _set_labels(first.xaxis)


def _legend(picture: Picture, look: Look) -> list[tuple[str, dict[str, Any]]]:
    """Return the entries of the legend with arguments of their lines: styles, band, smoothing."""
    entries = [(label, line_of(style)) for label, style in picture.legend]
    if any(curve.half is not None for panel in picture.panels for curve, _ in panel.traces):
        entries += [(BAND, {"color": GREY, "alpha": FAINT, "linewidth": 6})]
    if look.smooth > 1:
        kinds = {is_logarithmic(panel, look) for panel in picture.panels}
        kind = "geometric mean" if kinds == {True} else "mean"
        mean = f"{kind} of {look.smooth // 2 * 2 + 1:,} points, fewer towards the ends"
        mean += "; geometric on logarithmic axes" if len(kinds) > 1 else ""
        faint = {"color": GREY, "alpha": 2 * FAINT, "linewidth": 0.8}
        entries += [(mean, {"color": GREY}), ("as recorded", faint)]
    return entries


def line_of(style: Style) -> dict[str, Any]:
    """Return the colour and dashes of a style as arguments of matplotlib."""
    return {"color": GREY if style.colour is None else COLOURS[style.colour], "linestyle": DASHES[style.dashes]}
