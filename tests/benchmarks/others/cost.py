"""Costs of a step in each framework relative to a bare loop, with and without callbacks, and its guarantees."""

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.others.frameworks import APART, FRAMEWORKS, Framework
from tests.benchmarks.others.guarantees import what_a_draw_does, what_a_write_does
from tests.benchmarks.others.prices import KINDS, Side
from tests.benchmarks.others.work import THREE_VALUES, Asked, TurnsOfData, Work, bare_steps, batches_of
from tests.benchmarks.rows import Effort
from tests.benchmarks.subjects import Subject, small_mlp
from tests.benchmarks.timing import Spread, difference

BATCHES, EPOCHS, ROUNDS = 100, 3, 3
ASKED: Mapping[str, Asked] = dict(
    zip(KINDS, (Asked(), Asked(receives_all_events=True), Asked(callbacks=THREE_VALUES)), strict=True)
)
Build = Callable[[], Subject]
Train = Callable[[Work], None]
Seconds = list[float]


def side_by_side(effort: Effort) -> Iterator[Side]:
    """Measure every installed framework, and list the missing ones."""
    for framework in FRAMEWORKS:
        yield side(framework, effort)


def side(framework: Framework, effort: Effort) -> Side:
    """Measure one framework, here or in its separate environment."""
    try:
        assert framework.train
    except ImportError:
        return _apart(framework, effort)
    trainings = {kind: asking(framework, asked) for kind, asked in ASKED.items()}
    found = in_turns(trainings, partial(timed, effort=effort), effort)
    prices = {kind: difference(*joined(run.mean_step() for run in runs)) for kind, runs in found.items()}
    return Side(
        framework.name, prices, framework.module.LOGS, what_a_draw_does(framework), what_a_write_does(framework)
    )


def _apart(framework: Framework, effort: Effort) -> Side:
    text = from_apart(framework, effort, "side")
    return read(text) if text else Side(framework.title, why_not="not installed")


def from_apart(framework: Framework, effort: Effort, what: str) -> str:
    """Return the output of a framework's separate environment, or nothing if it does not exist."""
    if framework.title != "fastai" or not APART.exists() or not effort.share:
        return ""
    command = [str(APART), "-m", "tests.benchmarks.others", framework.title, str(effort.share), what]
    return subprocess.run(command, cwd=APART.parents[2], capture_output=True, text=True, check=True).stdout


def read(text: str) -> Side:
    """Return the row that :func:`written` wrote."""
    fields = json.loads(text)
    return Side(**{**fields, "prices": {kind: Spread(**price) for kind, price in fields["prices"].items()}})


def written(side: Side) -> str:
    """Write a row as one line."""
    return json.dumps(asdict(side))


def asking(framework: Framework, asked: Asked) -> Train:
    """Return the framework's training with the requested extras."""
    return lambda work: framework.train(work, asked)


def in_turns(
    trainings: Mapping[str, Train], epochs: Callable[[Train], TurnsOfData], effort: Effort
) -> dict[str, list[TurnsOfData]]:
    """Train in turn in several ways; return the times of each."""
    found: dict[str, list[TurnsOfData]] = {name: [] for name in trainings}
    for turn in range(effort.times(ROUNDS)):
        for name in trainings if turn % 2 else reversed(list(trainings)):
            found[name].append(epochs(trainings[name]))
    return found


def timed(train: Train, effort: Effort, build: Build = small_mlp, count: int = BATCHES) -> TurnsOfData:
    """Train once, in turn with a bare loop, on separate models."""
    ours, other = build(), build()
    batches = batches_of(ours, effort.times(count) + 1)
    data = TurnsOfData(batches, bare_steps(other.task.model, other.task.optimizer, batches))
    with TemporaryDirectory() as folder:
        train(Work(ours.task.model, ours.task.optimizer, data, 2 + effort.times(EPOCHS), Path(folder)))
    return data


def joined(runs: Iterable[tuple[Seconds, Seconds]]) -> tuple[Seconds, Seconds]:
    """Join the blocks of several trainings, of the framework and of the bare loop."""
    theirs, bare = zip(*runs, strict=True)
    return list(chain(*theirs)), list(chain(*bare))
