"""Pictures drawn with matplotlib: without a window, without pyplot, whatever the user's matplotlibrc says."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatterSciNotation, MaxNLocator, StrMethodFormatter

from ..durable_files import write_whole
from .curves import Curve, Floats
from .panels import COLOURS, DASHES, Look, Panel, Picture, Style, Trace, is_logarithmic, remark

SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.limits": (-4, 6),
    "axes.xmargin": 0.02,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.solid_joinstyle": "round",
    "savefig.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "loopscope",
    "pdf.fonttype": 42,
}
STYLE: Sequence[str | dict[str, Any]] = ["default", SETTINGS]
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
GREY = "#666666"
FAINT = 0.25
FEW_POINTS = 40  # curves of fewer points than this show each
MANY_POINTS = 1000  # curves of more points than this are drawn thinner
PLAIN = 1e-3, 1e6  # logarithmic axes within these bounds have plain numbers, not powers of ten
NOISE = 1e-9  # values that differ by less than this, relatively, are shown as constant
CHARACTER = 0.075  # width of a character of the legend, in inches
# Values that are not finite, with their marks and the heights of these in the panel.
MARKS = ((np.isnan, "x", 0.02), (np.isposinf, "^", 0.98), (np.isneginf, "v", 0.02))
MANY_STEPS = 1_000_000


def figure_of(picture: Picture, look: Look) -> Figure:
    """Draw a picture."""
    with matplotlib.style.context(STYLE):
        rows, columns = layout(len(picture.panels))
        width, height = (7.2, 4.0) if columns == 1 else (4.2 * columns, 2.6 * rows)
        keys = _legend_columns(picture.legend, width)
        key_rows = math.ceil(len(picture.legend) / max(1, keys))
        figure = Figure(figsize=(width, height + 0.2 * key_rows + 0.35), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten().tolist()
        remarks = [remark(panel, look) for panel in picture.panels]
        for index, (panel, text) in enumerate(zip(picture.panels, remarks, strict=True)):
            row = index // columns * columns
            _draw(axes[index], panel, look)
            # What there is to remark stands below the title; the titles of a row stay at one height.
            pad = 17 if any(remarks[row : row + columns]) else 6
            axes[index].set_title(wrapped(panel.title, 52), loc="left", parse_math=False, pad=pad)
            place: dict[str, Any] = {"xytext": (0, 4), "xycoords": "axes fraction", "textcoords": "offset points"}
            axes[index].annotate(text, (0, 1), **place, fontsize=7.5, color=GREY)
        _label_steps(axes, len(picture.panels), columns, look)
        title = [picture.title, f"smoothed over {look.smooth:,} points" if look.smooth > 1 else ""]
        figure.suptitle(", ".join(filter(None, title)), parse_math=False, fontsize=11)
        if picture.legend:
            _add_legend(figure, picture.legend, keys)
        return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, in the format that the name's suffix says."""
    kind = path.suffix[1:].lower()
    with matplotlib.style.context(STYLE):
        write_whole(path, lambda file: figure.savefig(file, format=kind, metadata=UNDATED[kind]))


def layout(panels: int) -> tuple[int, int]:
    """Return rows and columns.

    >>> [layout(panels) for panels in (1, 2, 3, 4, 5, 7, 24)]
    [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 3), (6, 4)]
    """
    columns = {1: 1, 2: 2, 4: 2}.get(panels, 3 if panels <= 9 else 4)
    return math.ceil(panels / columns), columns


def _draw(ax: Axes, panel: Panel, look: Look) -> None:
    """Fill a pair of axes."""
    log_y = is_logarithmic(panel, look)
    if log_y:
        ax.set_yscale("log", nonpositive="mask")
        _plain_numbers(ax.yaxis)
    for curve, style in panel.traces:
        _draw_curve(ax, curve, line_of(style), look.smooth, log_y=log_y)
    _limit(ax, panel.traces, log_y=log_y)
    if panel.baseline is not None:
        ax.axhline(panel.baseline, color=GREY, linewidth=0.8, zorder=1)
    ax.set_ylabel(panel.y_label)


def wrapped(name: str, width: int) -> str:
    r"""Break a long name behind slashes, dots and underscores.

    >>> wrapped("norms/weight_norm/blocks.0.weight", 20)
    'norms/weight_norm/\nblocks.0.weight'
    """
    lines = [""]
    for piece in re.findall(r"[^/._]*[/._]?", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _limit(ax: Axes, traces: Sequence[Trace], *, log_y: bool) -> None:
    """Give constant curves some room, and none to rounding errors; take the numbers off axes without values."""
    values = np.concatenate([curve.values[curve.finite] for curve, _ in traces])
    values = values[values > 0] if log_y else values
    if not len(values):
        ax.set_yticks([])
    elif np.ptp(values) <= NOISE * np.abs(values).max():
        middle = float(values.mean())
        room = abs(middle) / 20 or 0.05
        ax.set_ylim((middle / 2, middle * 2) if log_y else (middle - room, middle + room))


class PlainLogFormatter(LogFormatterSciNotation):
    """Labels those ticks that matplotlib labels, and as plain numbers where all of the axis can have them."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the label of a tick."""
        text = super().__call__(x, pos)
        low, high = sorted(self.axis.get_view_interval()) if self.axis else (0.0, 0.0)
        return f"{x:,g}" if text and PLAIN[0] <= low and high < PLAIN[1] else text


def _plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(PlainLogFormatter())
    axis.set_minor_formatter(PlainLogFormatter(labelOnlyBase=False))


def _draw_curve(ax: Axes, raw: Curve, line: dict[str, Any], smooth: int, *, log_y: bool) -> None:
    """Draw a curve, its gaps marked; a smoothed one with the raw one faintly behind it."""
    steps, values = raw.steps, raw.values
    if smooth > 1:
        ax.plot(steps, values, color=line["color"], linewidth=0.8, alpha=FAINT)
    curve = running_mean(raw, smooth, geometric=log_y) if smooth > 1 else raw
    # Points that no line would show get a dot: those between gaps, and all of a short curve.
    gaps = np.pad(~curve.finite, 1, constant_values=True)
    lone = np.flatnonzero((gaps[:-2] & ~gaps[1:-1] & gaps[2:]) | (len(values) <= FEW_POINTS)).tolist()
    width = 0.9 if len(values) > MANY_POINTS else 1.5
    shown = np.where(curve.finite, curve.values, np.nan)
    ax.plot(steps, shown, **line, linewidth=width, marker="o", markersize=2.5, markevery=lone)
    for is_marked, marker, height in MARKS:
        at = steps[is_marked(values)]
        if len(at):
            edge = ax.get_xaxis_transform()
            ax.plot(at, np.full(len(at), height), marker, color=line["color"], markersize=4, transform=edge)


def running_mean(curve: Curve, window: int, *, geometric: bool = False) -> Curve:
    """Return the mean of the ``window`` values around each point: of those there are, at the ends and in gaps.

    An odd window lies evenly around its point, an even one has one value more before it. Where the value is not
    finite, there is no mean either. A geometric mean, which lies in the middle of a curve on a logarithmic axis, is
    of the values above 0.

    >>> running_mean(Curve.of_points([1, 2, 3, 4], [1.0, 3.0, float("nan"), 5.0]), 3).values
    array([ 2.,  2., nan,  5.])
    """
    shown = curve.finite & (curve.values > 0) if geometric else curve.finite
    logs = np.log(curve.values, where=shown, out=np.zeros_like(curve.values)) if geometric else curve.values
    values = np.where(shown, logs, 0.0)
    window = min(window, 2 * len(shown) + 1)
    sums, counts = _window_sums(values, window), _window_sums(shown.astype(np.float64), window)
    means = np.full_like(sums, np.nan)
    np.divide(sums, counts, out=means, where=curve.finite & (counts > 0))
    return Curve(curve.steps, np.exp(means) if geometric else means)


def _window_sums(values: Floats, window: int) -> Floats:
    """Return the sum of the ``window`` values around each one."""
    # Sums run from both ends of blocks as long as the window, each window being the end of a block and the beginning
    # of the next: the time does not depend on the window, and nothing is subtracted, so that a spike leaves no rounding
    # error behind (van Herk, Pattern Recognition Letters 13, 1992, does this for maxima).
    before, first = window // 2, np.arange(len(values))
    after = -(len(values) + before) % window + window
    blocks = np.pad(values, (before, after)).reshape(-1, window)
    from_left, from_right = blocks.cumsum(axis=1).ravel(), blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()
    return from_left[first + window - 1] + np.where(first % window, from_right[first], 0.0)


def _label_steps(axes: Sequence[Axes], panels: int, columns: int, look: Look) -> None:
    """Label the horizontal axes, at the lowest panel of each column, and remove the axes without a panel."""
    for index, ax in enumerate(axes):
        if index >= panels:
            ax.remove()
        elif index + columns >= panels:
            ax.set_xlabel("step")
            ax.tick_params(labelbottom=True)
    first = axes[0]
    if look.log_x:
        first.set_xscale("log", nonpositive="mask")
        _plain_numbers(first.xaxis)
        return
    last = first.get_xlim()[1]
    first.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    first.xaxis.set_major_formatter(EngFormatter(sep="") if last >= MANY_STEPS else StrMethodFormatter("{x:,.0f}"))


def _add_legend(figure: Figure, entries: Sequence[tuple[str, Style]], columns: int) -> None:
    """Explain the styles below the panels."""
    handles = [Line2D([], [], **line_of(style)) for _, style in entries]
    legend = figure.legend(
        handles, [label for label, _ in entries], loc="outside lower center", ncols=columns, frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _legend_columns(entries: Sequence[tuple[str, Style]], width: float) -> int:
    """Return how many even columns of a legend fit into a width in inches."""
    longest = max((len(label) for label, _ in entries), default=1)
    rows = math.ceil(len(entries) / max(1, int(width / (CHARACTER * longest + 0.6))))
    return math.ceil(len(entries) / max(1, rows))


def line_of(style: Style) -> dict[str, Any]:
    """Return the colour and the dashes of a style, as arguments of matplotlib."""
    return {"color": GREY if style.colour is None else COLOURS[style.colour], "linestyle": DASHES[style.dashes]}
