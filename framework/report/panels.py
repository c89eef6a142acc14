"""Content of a plot: panels, curves, and the styles that distinguish runs and metrics."""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import translate
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UsageError, listed
from ..names import as_names
from ..option_words import option_text
from ..runs import require
from .curves import DrawnRun, MetricCurve

if TYPE_CHECKING:
    from ..hooks import MetricPanel

# The Okabe-Ito palette, distinguishable with any colour vision, without yellow, which is invisible on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ALONE = len(COLOURS) - 1  # the colour of a curve that needs no explanation
DASHES: Sequence[str | tuple[float, Sequence[float]]] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
NEAREST = 4
FEW = 3  # at most this many runs or patterns are part of a file name
MOST_PANELS = 24
LONGEST_LABEL = 24  # the common parts of longer names of runs are cut
MOST_CURVES = len(COLOURS) * len(DASHES)
DECADES = 3  # by default a vertical axis is logarithmic if positive values span more decades


@dataclass(frozen=True)
class Look:
    """Options of a plot."""

    smooth: int = 1  # points of the running mean; 1 for none
    log_x: bool = False
    log_y: bool | None = None  # logarithmic vertical axes: yes, no, or if values span many decades
    x: str = "step"  # unit of the horizontal axes
    size: tuple[float, float] | None = None  # inches; by default fits the panels
    title: str | None = None  # by default the title of the picture


@dataclass(frozen=True)
class Style:
    """Index of a colour (``None`` for grey) and of a dash pattern."""

    colour: int | None
    dashes: int = 0

    @classmethod
    def numbered(cls, index: int) -> "Style":
        """Return a unique style for each index below ``MOST_CURVES``."""
        return cls(index % len(COLOURS), index // len(COLOURS))


Trace = tuple[MetricCurve, Style]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    traces: Sequence[Trace]
    y_label: str = ""
    log_y: bool | None = None
    baseline: float | None = None  # a value marked by a thin line
    remark: str = ""


@dataclass(frozen=True)
class Picture:
    """The content of a plot, and sentences about omitted content."""

    words: Sequence[str]  # runs and metrics, for the file name
    title: str
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, Style]]
    sentences: Sequence[str] = ()


def matcher(patterns: str | Sequence[str]) -> Callable[[str], bool]:
    """Return a function that selects metrics by full name or by pattern.

    ``*``, ``?`` and ``[...]`` do not match slashes, ``**`` does, and ``**/`` also matches an empty text. ``*`` alone
    matches every name.

    >>> [name for name in ("a/x", "a/b/x", "x", "a[0]") if matcher(["*/x", "a[0]"])(name)]
    ['a/x', 'a[0]']
    >>> [name for name in ("a/x", "a/b/x", "x", "a") if matcher(["**/x"])(name)]
    ['a/x', 'a/b/x', 'x']
    """
    names = as_names(patterns)
    shapes = [re.compile(_expression(pattern), re.DOTALL) for pattern in names]

    def matches(name: str) -> bool:
        return name in names or any(shape.fullmatch(name) for shape in shapes)

    return matches


def _expression(pattern: str) -> str:
    """Convert a pattern to a regular expression, with brackets like in :mod:`fnmatch`."""
    if pattern == "*":  # every metric has a slash in its name, so that * would match none
        return ".*"
    texts = re.split(r"((?<![^/])\*\*/|\*\*?|\?|\[!?\]?[^\]]*\])", pattern)
    texts[::2] = map(re.escape, texts[::2])
    stars = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
    # fnmatch.translate wraps its result in "(?s:" and ")\\Z", which the slice removes.
    texts[1::2] = [stars.get(wild) or f"(?!/){translate(wild)[4:-3]}" for wild in texts[1::2]]
    return "".join(texts)


def metric_picture(runs: Sequence[DrawnRun], patterns: Sequence[str], *, overlay: bool) -> Picture:
    """Show the matching metrics in one panel each or in one; raises :class:`UsageError` for none or too many."""
    metrics = _chosen(runs, patterns)
    problem = f"A panel can distinguish at most {MOST_CURVES} runs, but got {len(runs)}."
    require(len(runs) <= MOST_CURVES, problem)
    labels = [run.group for run in runs if run.group] or run_labels([run.folder.resolve() for run in runs])
    matches = matcher(patterns)
    others = dict.fromkeys(name for run in runs for name in run.others if matches(name))
    sentences = [f"Omitted, since the values are lists or texts: {listed(list(others))}."] if others else []
    for run, label in zip(runs, labels, strict=True):
        missing = [metric for metric in metrics if metric not in run.curves]
        sentences += [f"{label} has no {listed(missing)}."] if missing else []
    if overlay and len(metrics) > 1:
        panels, legend = _overlaid(runs, labels, metrics)
    else:
        _require_few(metrics, MOST_PANELS, f"a picture has at most {MOST_PANELS} panels")
        panels = [Panel(metric, distinguishable_traces(runs, {metric: 0})) for metric in metrics]
        legend = legend_of(labels, {})
    subjects = [(re.findall(r"[\w.-]+", pattern) or ["all"])[-1].strip("_.-") for pattern in patterns]
    words = [*_words(runs, labels), *(subjects if len(subjects) <= FEW else [f"{len(subjects)}_metrics"])]
    return Picture(words, common_title(runs), panels, legend if len(legend) > 1 else [], sentences)


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest names that distinguish runs: the last parts of their paths that differ.

    >>> run_labels([Path("/out/mod/stride"), Path("/out/mod/target")])
    ['stride', 'target']
    >>> run_labels([Path("/seed1/mod/stride"), Path("/seed2/mod/stride")])
    ['seed1', 'seed2']
    >>> run_labels([Path("/a/mod/stride"), Path("/a/mod/target"), Path("/b/mod/stride")])
    ['a/stride', 'a/target', 'b/stride']
    """
    tails = [folder.parts[::-1] for folder in folders]
    chosen: list[list[str]] = [[] for _ in folders]
    for depth in range(max(map(len, tails))):
        parts = [tail[depth] if depth < len(tail) else "" for tail in tails]
        if len(set(parts)) > 1 or len(folders) == 1:
            chosen = [[part, *rest] if part else rest for part, rest in zip(parts, chosen, strict=True)]
        if chosen[0] and len(set(map(tuple, chosen))) == len(folders):
            break
    return ["/".join(parts) for parts in chosen]


def elided(labels: Sequence[str]) -> list[str]:
    """Return labels without their common beginning and end, cut between words; short ones stay as they are.

    >>> elided(["llama3-8b-sft-cosine-lr1-s0", "llama3-8b-sft-cosine-lr3-s0"])
    ['…lr1…', '…lr3…']
    >>> elided(["plain", "plain-2"])
    ['plain', 'plain-2']
    """
    if len(labels) < 2 or max(map(len, labels)) <= LONGEST_LABEL:
        return list(labels)
    words = [re.findall(r"[^-_/\s]+[-_/\s]*|[-_/\s]+", label) for label in labels]
    fewest = min(map(len, words)) - 1
    first = next((at for at in range(fewest) if len({line[at] for line in words}) > 1), fewest)
    last = next((at for at in range(fewest - first) if len({line[-1 - at] for line in words}) > 1), fewest - first)
    cut = ["".join(line[first : len(line) - last]) for line in words]
    start, end = "…" if first else "", "…" if last else ""
    return [f"{start}{text.rstrip('-_/ ') if end else text}{end}" for text in cut]


def common_title(runs: Sequence[DrawnRun]) -> str:
    """Return the experiment and the strategy, if all runs share them."""
    experiments = {run.run.experiment for run in runs}
    names = {run.group or run.folder.resolve().name for run in runs}
    return "/".join([*experiments, *(names if len(names) == 1 else ())]) if len(experiments) == 1 else ""


def _words(runs: Sequence[DrawnRun], labels: Sequence[str]) -> list[str]:
    """Return the names of the runs for the file name."""
    several = labels if len(labels) <= FEW else [f"{len(labels)}_runs"]
    return [*common_title(runs).split("/"), *(several if len(labels) > 1 else ())]


def _chosen(runs: Sequence[DrawnRun], patterns: Sequence[str]) -> list[str]:
    """Return the matching metrics, in the order of the patterns and the records."""
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    others = list(dict.fromkeys(name for run in runs for name in run.others))
    if not names:
        raise UsageError(f"There is nothing to draw: {listed([str(run.folder) for run in runs])} has no metrics yet.")
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = matcher([pattern])
        matching = [name for name in names if matches(name)]
        if not matching:
            raise no_match(pattern, names, [name for name in others if matches(name)])
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def no_match(pattern: str, names: Sequence[str], others: Sequence[str]) -> UsageError:
    """Return the error for a pattern that matches no number; ``others`` are the lists and texts that it matches."""
    if others:
        return UsageError(f"{listed(others)} cannot be drawn as curves: the values are lists or texts, not numbers.")
    for deep in (re.sub(r"\*+", "**", pattern), f"**/{pattern}") if "*" in pattern else ():
        if matching := list(filter(matcher([deep]), names)):
            hint = f"* does not match slashes, ** does: {deep!r} matches {listed(matching)}"
            return UsageError(f"No metric matches {pattern!r}; {hint}.")
    near = near_names(pattern, names)
    verb = "is" if len(near) == 1 else "are"
    hint = f"the nearest {verb} {', '.join(near)}" if near else f"recorded metrics: {listed(names)}"
    return UsageError(f"No metric matches {pattern!r}; {hint}.")


def near_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names nearest to a pattern, compared as a whole and by parts.

    >>> near_names("los", ["norms/total_grad_norm", "training_metrics/loss"])
    ['training_metrics/loss']
    """
    word = re.sub(r"[*?\[\]]", "", pattern)

    def nearness(name: str) -> float:
        parts = (name, *name.split("/"))
        inside = 0.9 if word and word in name else 0.0
        return max(inside, *(SequenceMatcher(None, word, part).ratio() for part in parts))

    nearest = sorted(names, key=lambda name: (-nearness(name), name))[:NEAREST]
    return [name for name in nearest if nearness(name) >= 0.6]


def _overlaid(
    runs: Sequence[DrawnRun], labels: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Panel], list[tuple[str, Style]]]:
    """Show all metrics in one panel: by colour for one run, by dashes for several."""
    if len(runs) == 1:
        _require_few(metrics, MOST_CURVES, f"a panel can distinguish at most {MOST_CURVES}")
    overlay = option_text("overlay")
    require(
        len(runs) == 1 or (len(metrics) <= len(DASHES) and len(runs) <= len(COLOURS)),
        f"{overlay} can distinguish {len(COLOURS)} runs by colour and {len(DASHES)} metrics by "
        f"dashes, but got {len(runs)} runs and {len(metrics)} metrics; remove {overlay}, or narrow the patterns.",
    )
    shared = posixpath.commonpath([posixpath.dirname(metric) for metric in metrics])
    numbers = {metric: number for number, metric in enumerate(metrics)}
    legend = legend_of(labels, {metric.removeprefix(f"{shared}/"): number for metric, number in numbers.items()})
    return [Panel(shared, distinguishable_traces(runs, numbers))], legend


def _require_few(metrics: Sequence[str], most: int, why: str) -> None:
    narrow = f"narrow them: {listed(metrics)}."
    require(len(metrics) <= most, f"The patterns match {len(metrics)} metrics, and {why}; {narrow}")


def distinguishable_traces(runs: Sequence[DrawnRun], numbers: Mapping[str, int]) -> list[Trace]:
    """Return the curves of numbered metrics: coloured by metric for one run, else dashed by metric, coloured by run."""
    return [
        (run.curves[metric], Style.numbered(number if len(runs) == 1 else index + number * len(COLOURS)))
        for index, run in enumerate(runs)
        for metric, number in numbers.items()
        if metric in run.curves
    ]


def legend_of(labels: Sequence[str], names: Mapping[str, int]) -> list[tuple[str, Style]]:
    """Return the legend of :func:`distinguishable_traces`: names for one run, else runs and dashes of names."""
    if len(labels) == 1:
        return [(name, Style.numbered(number)) for name, number in names.items()]
    by_run = [(label, Style.numbered(index)) for index, label in enumerate(labels)]
    return by_run + [(name, Style(None, number)) for name, number in names.items()]


def hook_panels(picture: str) -> "list[MetricPanel]":
    """Return the panels of a picture from all hooks, ordered by place, with full names of metrics."""

    def full(hook: str, by_metric: Mapping[str, str]) -> dict[str, str]:
        return {f"{hook}/{metric}": text for metric, text in by_metric.items()}

    from ..hooks import HookRegistry  # needs torch, unlike the rest of this module

    pairs = [(hook.name, panel) for hook in HookRegistry for panel in hook.panels if panel.picture == picture]
    panels = [replace(panel, curves=full(hook, panel.curves), shares=full(hook, panel.shares)) for hook, panel in pairs]
    return sorted(panels, key=attrgetter("place"))


def hook_picture(picture: str, runs: Sequence[DrawnRun]) -> Picture:
    """Show the panels that hooks define for a picture; raises :class:`UsageError` if no metric was recorded."""
    panels = hook_panels(picture)
    by_label = dict(zip(run_labels([run.folder.resolve() for run in runs]), runs, strict=True))
    limit = f"{option_text(picture)} can distinguish at most"
    require(len(runs) <= len(COLOURS), f"{limit} {len(COLOURS)} runs, but got {len(runs)}.")
    texts = [text for text in dict.fromkeys(text for panel in panels for text in panel.curves.values()) if text]
    require(len(texts) <= len(DASHES), f"{limit} {len(DASHES)} kinds of curves, but hooks define {texts}.")
    drawn = [panel for panel in panels if any(metric in run.curves for run in runs for metric in panel.curves)]
    hooks = dict.fromkeys(metric.partition("/")[0] for panel in panels for metric in panel.curves)
    folders = listed([str(run.folder) for run in runs])
    require(bool(drawn), f"{folders} has no metrics of {' or '.join(hooks)}; enable these hooks.")
    numbers = {text: number for number, text in enumerate(texts)}
    shown = {text for panel in drawn for text in panel.curves.values()}
    legend = legend_of(list(by_label), {text: number for text, number in numbers.items() if text in shown})
    figure = [_panel(panel, by_label, numbers) for panel in drawn]
    words = [*_words(runs, list(by_label)), picture]
    return Picture(words, common_title(runs), figure, legend, _missing(panels, by_label))


def _panel(panel: "MetricPanel", runs: Mapping[str, DrawnRun], numbers: Mapping[str, int]) -> Panel:
    unexplained = ALONE if len(runs) == 1 else 0
    by_metric = {metric: numbers.get(text, unexplained) for metric, text in panel.curves.items()}
    traces = distinguishable_traces(list(runs.values()), by_metric)
    remarks = []
    for metric, word in panel.shares.items():
        curves = {f"{label} " * (len(runs) > 1): run.curves.get(metric) for label, run in runs.items()}
        texts = [f"{owner}{curve.values.mean():.0%}" for owner, curve in curves.items() if curve is not None]
        remarks += [f"{word}: {', '.join(texts)}"] if texts else []
    return Panel(panel.title, traces, panel.y_label, panel.log_y, panel.baseline, "; ".join(remarks))


def _missing(panels: Sequence["MetricPanel"], runs: Mapping[str, DrawnRun]) -> list[str]:
    """Return sentences about runs without the metrics of a panel."""
    sentences = []
    for panel in panels:
        without = [label for label, run in runs.items() if run.curves.keys().isdisjoint(panel.curves)]
        hook = next(iter(panel.curves)).partition("/")[0]
        sentences += [f"{panel.title}: {hook} recorded none in {listed(without)}."] if without else []
    return sentences


def is_logarithmic(panel: Panel, look: Look) -> bool:
    """Return whether the vertical axis is logarithmic: by option, else by panel, else by the span of the values."""
    values = np.concatenate([curve.values[curve.finite] for curve, _ in panel.traces])
    wanted = panel.log_y if look.log_y is None else look.log_y
    if wanted is not None:
        return wanted and bool((values > 0).any())
    return len(values) > 0 and bool(values.min() > 0) and bool(values.max() / values.min() > 10**DECADES)


def remark(panel: Panel, look: Look) -> str:
    """Return the panel's remark and the number of values that cannot be drawn at their position."""
    values = np.concatenate([curve.values for curve, _ in panel.traces])
    steps = np.concatenate([curve.steps for curve, _ in panel.traces])
    counts = {
        "NaN (×)": np.isnan(values),
        "∞ (▲)": values == np.inf,
        "−∞ (▼)": values == -np.inf,
        "not above 0, omitted": np.isfinite(values) & (values <= 0) & is_logarithmic(panel, look),
        "at step 0, omitted": (steps <= 0) & look.log_x,
    }
    texts = [f"{mask.sum():,} {text}" for text, mask in counts.items() if mask.any()]
    return ", ".join([panel.remark, *texts] if panel.remark else texts)
