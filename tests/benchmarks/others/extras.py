"""Clipping, averages of weights, gradient norms and histograms of gradients, in each framework's own way."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from statistics import median

from loopscope.hooks import Metrics
from torch import aminmax, histc

from tests.benchmarks.others.cost import Build, Train, asking, from_apart, in_turns, joined, timed
from tests.benchmarks.others.frameworks import FRAMEWORKS, OURS, Framework, installed
from tests.benchmarks.others.work import Asked, Seen, loss
from tests.benchmarks.rows import MICROSECONDS, Effort, Row
from tests.benchmarks.subjects import mod_arithmetic
from tests.benchmarks.timing import Spread, difference

EXTRAS = {"CLIPS": ("Clipping", Asked(clips=True)), "AVERAGES": ("Average of weights", Asked(averages=True))}
EXTRAS |= {"NORMS": ("Norm of every gradient", Asked(norms=True))}
BINS = 64
"""Number of bins, as in ``watch``."""
ALONE, BATCHES = "alone", 15


def as_they_do_them(effort: Effort) -> Iterator[Row]:
    """Measure each extra in each framework that has it, against the framework without it."""
    here = list(installed())
    rows = [row for framework in here for row in extras_of(framework, effort)]
    for framework in FRAMEWORKS:
        if framework not in here and (text := from_apart(framework, effort, "extras")):
            rows += read_rows(text)
    yield from sorted(
        rows, key=lambda row: [row.figure.startswith(title) for title, _ in EXTRAS.values()], reverse=True
    )


def extras_of(framework: Framework, effort: Effort) -> list[Row]:
    """Measure each extra that a framework has."""
    ways = {title: (getattr(framework.module, key), asked) for key, (title, asked) in EXTRAS.items()}
    trainings = {ALONE: asking(framework, Asked())}
    trainings |= {
        f"{title}: {framework.title}, {way}": asking(framework, asked) for title, (way, asked) in ways.items() if way
    }
    return list(_against_the_first(framework.title, trainings, effort))


def written_rows(rows: Sequence[Row]) -> str:
    """Write rows of microseconds as one line."""
    return json.dumps([(row.figure, row.against, asdict(row.value)) for row in rows])


def read_rows(text: str) -> list[Row]:
    """Parse the output of :func:`written_rows`."""
    return [Row(figure, against, MICROSECONDS, Spread(**value)) for figure, against, value in json.loads(text)]


def watch(effort: Effort) -> Iterator[Row]:
    """Measure W&B's ``watch`` against its ``log`` alone, and an observer that records the same."""
    label = "Histogram of every gradient"
    trainings = {
        ALONE: asking(OURS, Asked(callbacks=[loss])),
        f"{label}: loopscope, an observer, every step": asking(OURS, Asked(callbacks=[loss, histograms])),
    }
    yield from _against_the_first("an observer of the loss", trainings, effort)
    if find_spec("wandb") is None:
        return
    from tests.benchmarks.others import with_wandb

    theirs: dict[str, Train] = {ALONE: partial(with_wandb.train, every=None)}
    for every, way in (
        (1, "log_freq=1"),
        (with_wandb.DEFAULT_EVERY, f"log_freq={with_wandb.DEFAULT_EVERY}, its default"),
    ):
        theirs[f"{label}: wandb.watch, {way}"] = partial(with_wandb.train, every=every)
    yield from _against_the_first("a bare loop with wandb.log, offline", theirs, effort)


def histograms(seen: Seen) -> Metrics:
    """Return a histogram of every gradient between its smallest and its largest value, and these two."""
    found = {}
    for name, parameter in seen.model.named_parameters():
        if parameter.grad is not None:
            least, largest = (value.item() for value in aminmax(parameter.grad))
            found[f"least/{name}"], found[f"largest/{name}"] = least, largest
            found[f"counts/{name}"] = histc(parameter.grad, BINS, least, largest).tolist()
    return found


def _against_the_first(against: str, trainings: Mapping[str, Train], effort: Effort) -> Iterator[Row]:
    build: Build = partial(mod_arithmetic, effort.quick)
    epochs = partial(timed, effort=effort, build=build, count=BATCHES)
    found = in_turns(trainings, epochs, effort)
    seconds = {way: joined(run.median_step() for run in runs) for way, runs in found.items()}
    bare = median(seconds[ALONE][1])
    extra = {way: [one - other for one, other in zip(*pair, strict=True)] for way, pair in seconds.items()}
    for way in list(trainings)[1:]:
        yield Row(way, f"{against}; bare step {bare * 1e3:.2f} ms", MICROSECONDS, difference(extra[way], extra[ALONE]))
