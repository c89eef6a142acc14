"""Plots of recorded runs, separately or as means over seeds; drawing imports matplotlib."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import listed, require
from ..option_words import option_text
from ..optional_packages import require_package
from ..runs import run_folders, warn_of_changes
from ..seed_groups import groups_of
from .curves import DrawnRun, read_curves
from .panels import Look, Picture, matcher, metric_picture
from .seeds import contrast, correct, mean_curve

if TYPE_CHECKING:
    from .drawing import Drawing

MOST_REMARKED = 3  # at most this many pairs of groups are named above a panel
Unit = Literal["step", "epoch"]


def plot(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *patterns: str,
    seeds: bool = False,
    overlay: bool = False,
    x: Unit | None = None,
    smooth: int = 1,
    log_y: bool | None = None,
    size: tuple[float, float] | None = None,
    title: str | None = None,
) -> "Drawing":
    """Draw the matching metrics like ``loopscope plot``; a notebook shows the figure.

    ``runs`` is the folder of a run or of an experiment, or several folders; the options are those of the command.

    Raises:
        UsageError: if the metrics cannot be drawn.
    """
    require_package("matplotlib", "loopscope.plot")
    from .drawing import figure_of

    require(bool(patterns), "loopscope.plot needs metrics: loopscope.plot(folder, 'training_metrics/loss').")
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    recorded, unit = read_runs(map(Path, folders), matcher(patterns), x)
    picture = picture_of(recorded, patterns, seeds=seeds, overlay=overlay)
    return figure_of(picture, Look(smooth, log_y=log_y, x=unit, size=size, title=title))


def picture_of(runs: Sequence[DrawnRun], patterns: Sequence[str], *, seeds: bool, overlay: bool) -> Picture:
    """Show the matching metrics of single runs, or as means over ``seeds``."""
    draw = seeds_picture if seeds else metric_picture
    return draw(runs, patterns, overlay=overlay)


def save_picture(picture: Picture, look: Look, path: Path, about: tuple[str, str] = ("", "")) -> None:
    """Draw a picture and write it atomically, in the format of the name's suffix.

    ``about`` is a description and keywords, stored in the file's metadata as plain text.
    """
    from .drawing import figure_of, save

    save(figure_of(picture, look), path, about)


def read_runs(paths: Iterable[Path], wanted: Callable[[str], bool], x: Unit | None) -> tuple[list[DrawnRun], Unit]:
    """Read the runs in folders, each once, with ``x`` as unit; by default epochs if all runs recorded them.

    Raises:
        UsageError: if there is no run.
    """
    folders = {folder.resolve(): folder for path in paths for folder in run_folders(path, "plot")}
    for folder in folders.values():
        warn_of_changes(folder)
    runs = [read_curves(folder, wanted) for folder in folders.values()]
    without = [str(run.folder) for run in runs if not run.epoch_steps]
    unit: Unit = x or ("step" if without else "epoch")
    problem = f"{option_text('x', 'epoch')} needs recorded ends of epochs; {listed(without)} has none."
    require(unit == "step" or not without, problem)
    return [run.in_epochs() for run in runs] if unit == "epoch" else runs, unit


def seeds_picture(runs: Sequence[DrawnRun], patterns: Sequence[str], *, overlay: bool) -> Picture:
    """Show the matching metrics as means over seeds, with tests between groups at the last drawn point."""
    names = groups_of({str(run.folder): run.run for run in runs})
    groups: dict[str, dict[Any, DrawnRun]] = {name: {} for name in names.values()}
    sentences = []
    for run in runs:
        seed = run.run.seed
        require(type(seed) is int, f"A mean over seeds needs runs with a recorded seed; {run.folder} has none.")
        if groups[names[str(run.folder)]].setdefault(seed, run) is not run:
            sentences.append(f"Omitted, since another run has the same options and seed: {run.folder}.")
    means = [_mean(name, list(group.values())) for name, group in groups.items()]
    picture = metric_picture(means, patterns, overlay=overlay)
    few = [name for name, group in groups.items() if len(group) < 2]
    sentences += [f"One seed is not enough for a significance test: {listed(few)}."] if few else []
    for mean in means:
        members = groups[mean.group].values()
        ends = {name: [run.curves[name].steps[-1] for run in members if name in run.curves] for name in mean.curves}
        cut = [name for name, curve in mean.curves.items() if max(ends[name]) > curve.steps[-1]]
        rare = [name for name in mean.curves if len(ends[name]) < len(members)]
        sentences += [f"{mean.group} is drawn to the end of its shortest run: {listed(cut)}."] if cut else []
        sentences += [f"Only some seeds of {mean.group} have: {listed(rare)}."] if rare else []
    metrics = dict.fromkeys(name for mean in means for name in mean.curves)
    tests = [
        {"metric": name, "pair": f"{a.group} − {b.group}"}
        | contrast(*(_last_values(groups[mean.group], name, mean.curves[name].steps[-1]) for mean in (a, b)))
        for name in metrics
        for a, b in combinations(means, 2)
        if name in a.curves and name in b.curves
    ]
    correct(tests)
    tested = sum(test["p"] is not None for test in tests)
    panels = [replace(panel, remark=_remark(tests, panel.title, tested)) for panel in picture.panels]
    results = [f"{test['metric']}: {_test_text(test, tested)}." for test in tests]
    return replace(picture, panels=panels, sentences=[*picture.sentences, *sentences, *results])


def _mean(group: str, runs: Sequence[DrawnRun]) -> DrawnRun:
    """Return one run with the mean of each metric over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run.names)
    by_name = {name: [run.curves[name] for run in runs if name in run.curves] for name in names}
    curves = {name: mean_curve(curves) for name, curves in by_name.items() if curves}
    curves = {name: curve for name, curve in curves.items() if len(curve.steps)}
    return replace(runs[0], curves=curves, names=[*names], group=group)


def _last_values(group: Mapping[int, DrawnRun], metric: str, step: float) -> dict[int, float | None]:
    curves = {seed: run.curves[metric] for seed, run in group.items() if metric in run.curves}
    return {seed: float(curve.values[curve.steps == step][0]) for seed, curve in curves.items()}


def _remark(tests: Sequence[Mapping[str, Any]], metric: str, tested: int) -> str:
    """Summarise which groups differ in a metric."""
    here = [test for test in tests if test["metric"] == metric]
    if len(here) <= MOST_REMARKED:
        return "; ".join(_test_text(test, tested) for test in here)
    differ = sum(test["holm"] is not None and test["holm"] < 0.05 for test in here)
    return f"{differ} of {len(here)} pairs differ: p < 0.05, Holm over {tested}"


def _test_text(test: Mapping[str, Any], tested: int) -> str:
    if test["holm"] is None:
        return f"last {test['pair']}: {test['remark']}"
    difference = f"last {test['pair']}: {test['difference']:.3g} ({test['low']:.3g} to {test['high']:.3g})"
    return f"{difference}, p {test['holm']:.2g} ({test['test']}, Holm over {tested})"
