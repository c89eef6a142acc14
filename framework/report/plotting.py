"""Pictures of the records in folders, of runs one by one or over their seeds; drawing them imports matplotlib."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import listed, require, require_package
from ..runs import run_folders
from .curves import RecordedRun, read_curves
from .panels import Look, Picture, matcher, metric_picture
from .seeds import contrast, correct, groups_of, mean_curve

if TYPE_CHECKING:
    from .drawing import Drawing

MOST_REMARKED = 3  # so many pairs of groups are told of above a panel
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
    """Draw the metrics that match patterns, as ``loopscope plot`` does; a notebook shows the figure.

    ``runs`` is the folder of a run, or of an experiment, or several; the options are those of the command. Raises
    :class:`UsageError` for what cannot be drawn.
    """
    require_package("matplotlib", "loopscope.plot", "plot")
    from .drawing import figure_of

    require(bool(patterns), "loopscope.plot needs metrics: loopscope.plot(folder, 'training_metrics/loss').")
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else runs
    found, unit = read_runs(map(Path, folders), matcher(patterns), x)
    picture = (seeds_picture if seeds else metric_picture)(found, patterns, overlay=overlay)
    return figure_of(picture, Look(smooth, log_y=log_y, x=unit, size=size, title=title))


def save_picture(picture: Picture, look: Look, path: Path, about: tuple[str, str] = ("", "")) -> None:
    """Draw a picture and write it, whole or not at all, in the format that the name's suffix says.

    ``about`` are a description and keywords, as which programs show them; both lie in the file as plain text.
    """
    from .drawing import figure_of, save

    save(figure_of(picture, look), path, about)


def read_runs(paths: Iterable[Path], wanted: Callable[[str], bool], x: Unit | None) -> tuple[list[RecordedRun], Unit]:
    """Read the runs in folders, each once, by epochs or by steps: as ``x`` says, else epochs where all recorded them.

    Raises :class:`UsageError` where there is none.
    """
    folders = {folder.resolve(): folder for path in paths for folder in run_folders(path, "plot")}
    runs = [read_curves(folder, wanted) for folder in folders.values()]
    without = [str(run.folder) for run in runs if not run.epoch_steps]
    unit: Unit = x or ("step" if without else "epoch")
    require(unit == "step" or not without, f"--x epoch needs the ends of epochs, which {listed(without)} lacks.")
    return [run.in_epochs() for run in runs] if unit == "epoch" else runs, unit


def seeds_picture(runs: Sequence[RecordedRun], patterns: Sequence[str], *, overlay: bool) -> Picture:
    """Show the metrics that match as means over seeds, and whether groups of runs differ in the last point drawn."""
    names = groups_of({str(run.folder): run.run for run in runs})
    groups: dict[str, dict[Any, RecordedRun]] = {name: {} for name in names.values()}
    sentences = []
    for run in runs:
        seed = run.run.config.get("seed")
        require(type(seed) is int, f"A mean over seeds is one of runs that say their seed; {run.folder} says none.")
        if groups[names[str(run.folder)]].setdefault(seed, run) is not run:
            sentences.append(f"Left out, having the options and seed of another run: {run.folder}.")
    means = [_mean(name, list(group.values())) for name, group in groups.items()]
    picture = metric_picture(means, patterns, overlay=overlay)
    few = [name for name, group in groups.items() if len(group) < 2]
    sentences += [f"With one seed nothing can be told about chance: {listed(few)}."] if few else []
    for mean in means:
        found = groups[mean.group].values()
        ends = {name: [float(of.curves[name].steps[-1]) for of in found if name in of.curves] for name in mean.curves}
        cut = [name for name, curve in mean.curves.items() if max(ends[name]) > curve.steps[-1]]
        rare = [name for name in mean.curves if len(ends[name]) < len(found)]
        sentences += [f"{mean.group} is drawn to the end of its shortest run: {listed(cut)}."] if cut else []
        sentences += [f"{mean.group} has in some of its seeds only: {listed(rare)}."] if rare else []
    metrics = dict.fromkeys(name for mean in means for name in mean.curves)
    tests = [
        {"metric": name, "pair": f"{a.group} − {b.group}"}
        | contrast(*(_last_values(groups[each.group], name, each.curves[name].steps[-1]) for each in (a, b)))
        for name in metrics
        for a, b in combinations(means, 2)
        if name in a.curves and name in b.curves
    ]
    correct(tests)
    tested = sum(test["p"] is not None for test in tests)
    panels = [replace(panel, remark=_remark(tests, panel.title, tested)) for panel in picture.panels]
    told = [f"{test['metric']}: {_told(test, tested)}." for test in tests]
    return replace(picture, panels=panels, sentences=[*picture.sentences, *sentences, *told])


def _mean(group: str, runs: Sequence[RecordedRun]) -> RecordedRun:
    """Return one run for several, with the mean of each metric over those that have it."""
    names = dict.fromkeys(name for run in runs for name in run.names)
    found = {name: [run.curves[name] for run in runs if name in run.curves] for name in names}
    curves = {name: mean_curve(curves) for name, curves in found.items() if curves}
    curves = {name: curve for name, curve in curves.items() if len(curve.steps)}
    return replace(runs[0], curves=curves, names=[*names], group=group)


def _last_values(group: Mapping[int, RecordedRun], metric: str, step: float) -> dict[int, float | None]:
    curves = {seed: run.curves[metric] for seed, run in group.items() if metric in run.curves}
    return {seed: float(curve.values[curve.steps == step][0]) for seed, curve in curves.items()}


def _remark(tests: Sequence[Mapping[str, Any]], metric: str, tested: int) -> str:
    """Say in a few words which groups differ in a metric."""
    here = [test for test in tests if test["metric"] == metric]
    if len(here) <= MOST_REMARKED:
        return "; ".join(_told(test, tested) for test in here)
    differ = sum(test["holm"] is not None and test["holm"] < 0.05 for test in here)
    return f"{differ} of {len(here)} pairs differ: p < 0.05, Holm over {tested}"


def _told(test: Mapping[str, Any], tested: int) -> str:
    if test["holm"] is None:
        return f"last {test['pair']}: {test['remark']}"
    difference = f"last {test['pair']}: {test['difference']:.3g} ({test['low']:.3g} to {test['high']:.3g})"
    return f"{difference}, p {test['holm']:.2g} ({test['test']}, Holm over {tested})"
