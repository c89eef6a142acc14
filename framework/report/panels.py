"""What a picture shows, before it is drawn: panels, their curves, and how runs and metrics are told apart."""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import translate
from pathlib import Path

import numpy as np

from ..errors import UsageError, listed
from ..hooks import HookRegistry, MetricPanel
from ..runs import require
from .curves import Curve, RecordedRun

# Those of Okabe and Ito, which people with any colour vision tell apart, without the yellow that is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ALONE = len(COLOURS) - 1  # the colour of a curve that needs no explanation
DASHES: Sequence[str | tuple[float, Sequence[float]]] = ("solid", (0, (4, 1.5)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)))
NEAREST = 4
FEW = 3  # so many runs, or patterns, are named in the name of a file
MOST_PANELS = 24
MOST_CURVES = len(COLOURS) * len(DASHES)
DECADES = 3  # a vertical axis is logarithmic by itself where positive values span more decades than this


@dataclass(frozen=True)
class Look:
    """What the user may change about a picture."""

    smooth: int = 1  # points of the running mean; 1 leaves the curves as they are
    log_x: bool = False
    log_y: bool | None = None  # logarithmic vertical axes: yes, no, or wherever the values span many decades
    x: str = "step"  # what the horizontal axes show
    size: tuple[float, float] | None = None  # inches; by default as much as the panels need
    title: str | None = None  # instead of the picture's own


@dataclass(frozen=True)
class Style:
    """Indices of a colour, none being grey, and of a kind of dashes."""

    colour: int | None
    dashes: int = 0

    @classmethod
    def numbered(cls, index: int) -> "Style":
        """Return a style of its own for each of up to ``MOST_CURVES`` curves."""
        return cls(index % len(COLOURS), index // len(COLOURS))


Trace = tuple[Curve, Style]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    traces: Sequence[Trace]
    y_label: str = ""
    log_y: bool | None = None
    baseline: float | None = None  # a value that is marked by a thin line
    remark: str = ""


@dataclass(frozen=True)
class Picture:
    """All that is drawn, and in sentences what is not."""

    words: Sequence[str]  # what is drawn of which runs, for the name of a file
    title: str  # of what it is drawn
    panels: Sequence[Panel]
    legend: Sequence[tuple[str, Style]]
    sentences: Sequence[str] = ()


def matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that is true for metrics asked for by full name or by pattern.

    ``*``, ``?`` and ``[...]`` stop at slashes, ``**`` does not, and ``**/`` may stand for nothing.

    >>> [name for name in ("a/x", "a/b/x", "x", "a[0]") if matcher(["*/x", "a[0]"])(name)]
    ['a/x', 'a[0]']
    >>> [name for name in ("a/x", "a/b/x", "x", "a") if matcher(["**/x"])(name)]
    ['a/x', 'a/b/x', 'x']
    """
    shapes = [re.compile(_expression(pattern), re.DOTALL) for pattern in patterns]
    return lambda name: name in patterns or any(shape.fullmatch(name) for shape in shapes)


def _expression(pattern: str) -> str:
    """Return a pattern as a regular expression; brackets as :mod:`fnmatch` reads them."""
    texts = re.split(r"((?<![^/])\*\*/|\*\*?|\?|\[!?\]?[^\]]*\])", pattern)
    texts[::2] = map(re.escape, texts[::2])
    stars = {"*": "[^/]*", "**": ".*", "**/": "(?:.*/)?"}
    # What fnmatch makes of one character is taken out of the group and the end around it.
    texts[1::2] = [stars.get(wild) or f"(?!/){translate(wild)[4:-3]}" for wild in texts[1::2]]
    return "".join(texts)


def metric_picture(runs: Sequence[RecordedRun], patterns: Sequence[str], *, overlay: bool) -> Picture:
    """Show the metrics that match, each in a panel or all in one; raises :class:`UsageError` for none or too many."""
    metrics = _chosen(runs, patterns)
    many = f"These are {len(runs)} runs; at most {MOST_CURVES} can be told apart in a panel."
    require(len(runs) <= MOST_CURVES, many)
    labels = [run.group for run in runs if run.group] or run_labels([run.folder.resolve() for run in runs])
    matches = matcher(patterns)
    others = dict.fromkeys(name for run in runs for name in run.others if matches(name))
    sentences = [f"Left out, being lists or texts: {listed(list(others))}."] if others else []
    for run, label in zip(runs, labels, strict=True):
        missing = [metric for metric in metrics if metric not in run.curves]
        sentences += [f"{label} has no {listed(missing)}."] if missing else []
    if overlay and len(metrics) > 1:
        panels, legend = _overlaid(runs, labels, metrics)
    else:
        _require_few(metrics, MOST_PANELS, f"a picture has at most {MOST_PANELS} panels")
        panels = [Panel(metric, told_apart(runs, {metric: 0})) for metric in metrics]
        legend = legend_of(labels, {})
    subjects = [(re.findall(r"[\w.-]+", pattern) or ["all"])[-1].strip("_.-") for pattern in patterns]
    words = [*_words(runs, labels), *(subjects if len(subjects) <= FEW else [f"{len(subjects)}_metrics"])]
    return Picture(words, common_title(runs), panels, legend if len(legend) > 1 else [], sentences)


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest names that tell runs apart: of their paths' last parts, those in which they differ.

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


def common_title(runs: Sequence[RecordedRun]) -> str:
    """Name what all runs share: the experiment, and the strategy."""
    experiments = {run.run.experiment for run in runs}
    names = {run.group or run.folder.resolve().name for run in runs}
    return "/".join([*experiments, *(names if len(names) == 1 else ())]) if len(experiments) == 1 else ""


def _words(runs: Sequence[RecordedRun], labels: Sequence[str]) -> list[str]:
    """Return what names the runs in the name of a file."""
    several = labels if len(labels) <= FEW else [f"{len(labels)}_runs"]
    return [*common_title(runs).split("/"), *(several if len(labels) > 1 else ())]


def _chosen(runs: Sequence[RecordedRun], patterns: Sequence[str]) -> list[str]:
    """List the metrics that match, in the order of the patterns and of the records."""
    known = list(dict.fromkeys(name for run in runs for name in run.names))
    others = list(dict.fromkeys(name for run in runs for name in run.others))
    if not known:
        raise UsageError(f"There is nothing to draw: {listed([str(run.folder) for run in runs])} holds no metric yet.")
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = matcher([pattern])
        found = [name for name in known if matches(name)]
        if not found:
            raise no_match(pattern, known, [name for name in others if matches(name)])
        chosen |= dict.fromkeys(found)
    return list(chosen)


def no_match(pattern: str, known: Sequence[str], others: Sequence[str]) -> UsageError:
    """Make the error for a pattern that matches no number: ``others`` are the lists and texts that it matches."""
    if others:
        return UsageError(f"{listed(others)} cannot be drawn as curves: the values are lists or texts, not numbers.")
    for deep in (re.sub(r"\*+", "**", pattern), f"**/{pattern}") if "*" in pattern else ():
        if found := list(filter(matcher([deep]), known)):
            hint = f"* stops at slashes, ** does not, and {deep!r} matches {listed(found)}"
            return UsageError(f"No metric matches {pattern!r}; {hint}.")
    near = near_names(pattern, known)
    verb = "is" if len(near) == 1 else "are"
    hint = f"the nearest {verb} {', '.join(near)}" if near else f"there are {listed(known)}"
    return UsageError(f"No metric matches {pattern!r}; {hint}.")


def near_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names nearest to a pattern, by their whole or by one of their parts.

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
    runs: Sequence[RecordedRun], labels: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Panel], list[tuple[str, Style]]]:
    """Show all metrics in one panel: those of one run by colour, those of several by dashes."""
    if len(runs) == 1:
        _require_few(metrics, MOST_CURVES, f"at most {MOST_CURVES} can be told apart in a panel")
    require(
        len(runs) == 1 or (len(metrics) <= len(DASHES) and len(runs) <= len(COLOURS)),
        f"--overlay tells at most {len(COLOURS)} runs apart by colour and {len(DASHES)} metrics by dashes, but "
        f"these are {len(runs)} runs and {len(metrics)} metrics; leave out --overlay, or narrow the patterns.",
    )
    shared = posixpath.commonpath([posixpath.dirname(metric) for metric in metrics])
    numbers = {metric: number for number, metric in enumerate(metrics)}
    legend = legend_of(labels, {metric.removeprefix(f"{shared}/"): number for metric, number in numbers.items()})
    return [Panel(shared, told_apart(runs, numbers))], legend


def _require_few(metrics: Sequence[str], most: int, why: str) -> None:
    narrow = f"narrow the patterns. They match {listed(metrics)}."
    require(len(metrics) <= most, f"--metrics matches {len(metrics)} metrics, and {why}; {narrow}")


def told_apart(runs: Sequence[RecordedRun], numbers: Mapping[str, int]) -> list[Trace]:
    """Return the curves of numbered metrics: of one run in colours; of several in dashes, and the runs in colours."""
    return [
        (run.curves[metric], Style.numbered(number if len(runs) == 1 else index + number * len(COLOURS)))
        for index, run in enumerate(runs)
        for metric, number in numbers.items()
        if metric in run.curves
    ]


def legend_of(labels: Sequence[str], names: Mapping[str, int]) -> list[tuple[str, Style]]:
    """Explain :func:`told_apart`: of one run the names; of several the runs, and in grey the dashes of the names."""
    if len(labels) == 1:
        return [(name, Style.numbered(number)) for name, number in names.items()]
    by_run = [(label, Style.numbered(index)) for index, label in enumerate(labels)]
    return by_run + [(name, Style(None, number)) for name, number in names.items()]


def hook_panels(picture: str) -> list[MetricPanel]:
    """Gather the panels of a picture from all hooks, in the order of their places, metrics under their full names."""

    def named(hook: str, by_metric: Mapping[str, str]) -> dict[str, str]:
        return {f"{hook}/{metric}": text for metric, text in by_metric.items()}

    found = [(hook.name, panel) for hook in HookRegistry for panel in hook.panels if panel.picture == picture]
    panels = [replace(panel, curves=named(of, panel.curves), shares=named(of, panel.shares)) for of, panel in found]
    return sorted(panels, key=lambda panel: panel.place)


def hook_picture(picture: str, runs: Sequence[RecordedRun]) -> Picture:
    """Show the panels of a picture that hooks ask for, those there are; raises :class:`UsageError` for none."""
    panels = hook_panels(picture)
    by_label = dict(zip(run_labels([run.folder.resolve() for run in runs]), runs, strict=True))
    require(len(runs) <= len(COLOURS), f"These are {len(runs)} runs; --{picture} tells at most {len(COLOURS)} apart.")
    texts = [text for text in dict.fromkeys(text for panel in panels for text in panel.curves.values()) if text]
    require(len(texts) <= len(DASHES), f"--{picture} tells at most {len(DASHES)} kinds apart; hooks ask for {texts}.")
    drawn = [panel for panel in panels if any(metric in run.curves for run in runs for metric in panel.curves)]
    hooks = dict.fromkeys(metric.partition("/")[0] for panel in panels for metric in panel.curves)
    require(
        bool(drawn),
        f"{listed([str(run.folder) for run in runs])} holds no metric of {' or '.join(hooks)}; the hooks that "
        f"--{picture} draws are switched on with --hooks.",
    )
    numbers = {text: number for number, text in enumerate(texts)}
    shown = {text for panel in drawn for text in panel.curves.values()}
    legend = legend_of(list(by_label), {text: number for text, number in numbers.items() if text in shown})
    figure = [_panel(panel, by_label, numbers) for panel in drawn]
    words = [*_words(runs, list(by_label)), picture]
    return Picture(words, common_title(runs), figure, legend, _missing(panels, by_label))


def _panel(panel: MetricPanel, runs: Mapping[str, RecordedRun], numbers: Mapping[str, int]) -> Panel:
    unexplained = ALONE if len(runs) == 1 else 0
    by_metric = {metric: numbers.get(text, unexplained) for metric, text in panel.curves.items()}
    traces = told_apart(list(runs.values()), by_metric)
    remarks = []
    for metric, word in panel.shares.items():
        means = {
            label: f"{run.curves[metric].values.mean():.0%}" for label, run in runs.items() if metric in run.curves
        }
        texts = list(means.values()) if len(runs) == 1 else [f"{label} {mean}" for label, mean in means.items()]
        remarks += [f"{word}: {', '.join(texts)}"] if texts else []
    return Panel(panel.title, traces, panel.y_label, panel.log_y, panel.baseline, "; ".join(remarks))


def _missing(panels: Sequence[MetricPanel], runs: Mapping[str, RecordedRun]) -> list[str]:
    """Say which runs lack what a panel shows."""
    sentences = []
    for panel in panels:
        without = [label for label, run in runs.items() if run.curves.keys().isdisjoint(panel.curves)]
        hook = next(iter(panel.curves)).partition("/")[0]
        sentences += [f"{panel.title}: {hook} recorded none in {listed(without)}."] if without else []
    return sentences


def is_logarithmic(panel: Panel, look: Look) -> bool:
    """Decide on a vertical axis: as asked for, else as the panel wants it, else by the span of the values."""
    values = np.concatenate([curve.values[curve.finite] for curve, _ in panel.traces])
    wanted = panel.log_y if look.log_y is None else look.log_y
    if wanted is not None:
        return wanted and bool((values > 0).any())
    return len(values) > 0 and bool(values.min() > 0) and bool(values.max() / values.min() > 10**DECADES)


def remark(panel: Panel, look: Look) -> str:
    """Return the panel's remark and what of it cannot be drawn where it belongs."""
    values = np.concatenate([curve.values for curve, _ in panel.traces])
    steps = np.concatenate([curve.steps for curve, _ in panel.traces])
    counts = {
        "NaN (×)": np.isnan(values),
        "∞ (▲)": values == np.inf,
        "−∞ (▼)": values == -np.inf,
        "not above 0, left out": np.isfinite(values) & (values <= 0) & is_logarithmic(panel, look),
        "at step 0, left out": (steps <= 0) & look.log_x,
    }
    texts = [f"{found.sum():,} {text}" for text, found in counts.items() if found.any()]
    return ", ".join([panel.remark, *texts] if panel.remark else texts)
