"""Records for tests of ``loopscope plot``, written by real sinks: given values, or a run of a tied model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loopscope.hooks import HookPoint
from loopscope.report import Look, metric_picture, read_curves
from loopscope.report.curves import DrawnRun
from loopscope.report.drawing import figure_of
from loopscope.runs import CONFIG
from loopscope.sinks import CSVSink, JSONLSink
from loopscope.training_hooks.clipping import EmbeddingProvenance, OutputProjectionClip
from matplotlib.figure import Figure
from PIL import Image

from tests.sinks.emits import run_info
from tests.support import Case
from tests.support import train as train_model

CURVE = "m/loss"
SLOPE = [0.5, 1.0, 2.0, 1.5, 3.0]


def describe(folder: Path, experiment: str, strategy: str) -> None:
    """Write the configuration of a run in ``folder``."""
    content = {"experiment": experiment, "strategy": strategy, "config": {}, "treatments": {}}
    (folder / CONFIG).write_text(json.dumps(content))


def record(
    root: Path,
    emits: list[tuple[int, dict[str, Any]]],
    *,
    strategy: str = "only",
    point: HookPoint = HookPoint.POST_EPOCH,
    sink_class: type[JSONLSink | CSVSink] = JSONLSink,
) -> Path:
    """Send metrics of a run of experiment ``exp`` to a sink, and return the run's folder."""
    folder = root / "exp" / strategy
    folder.mkdir(parents=True)
    describe(folder, "exp", strategy)
    sink = sink_class()
    sink.set_run_context(run_info(folder, strategy, [CURVE, "m/grad/<parameter>"]))
    for step, metrics in emits:
        sink.emit(metrics, 0, point, step=step)
    sink.close("completed")
    return folder


def curve_record(root: Path, values: list[float], *, strategy: str = "only") -> Path:
    """Record a curve with a value at each step, starting at 1."""
    return record(root, [(step, {CURVE: value}) for step, value in enumerate(values, 1)], strategy=strategy)


def everything(folder: Path) -> DrawnRun:
    """Read all curves of a record."""
    return read_curves(folder, lambda name: True)


def tied_record(folder: Path, *, clip: bool = True) -> Path:
    """Train a small tied model with both hooks in the current folder, and return the folder of its record."""
    Path("unused").mkdir()
    hooks = [EmbeddingProvenance(), *([OutputProjectionClip(window_size=2)] if clip else [])]
    train_model(Case("tied", loop="step"), hooks, steps=12, audit=False, every_step=False, sinks=[JSONLSink()])
    describe(Path("unused"), "support", "only")
    return Path("unused").rename(folder)


def pixels(path: Path, colour: str) -> int:
    """Count the pixels of a picture with the colour ``#rrggbb``."""
    wanted = [int(colour[begin : begin + 2], 16) for begin in (1, 3, 5)]
    with Image.open(path) as image:
        return int((np.asarray(image.convert("RGB")) == wanted).all(axis=2).sum())


def figure(*folders: Path, patterns: Sequence[str] = ("**",), overlay: bool = False, **look: Any) -> Figure:
    """Draw metrics of runs, by default all; ``look`` are fields of :class:`Look`."""
    runs = [everything(folder) for folder in folders]
    return figure_of(metric_picture(runs, patterns, overlay=overlay), Look(**look))
