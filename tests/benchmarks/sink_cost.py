"""Throughput of the metric files in scalars a second, compared with Lightning's CSVLogger and torch's SummaryWriter."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from loopscope.hooks import HookPoint, MetricSink, Series
from loopscope.sinks import CSVSink, JSONLSink

from tests.benchmarks.rows import PER_SECOND, TIMES, Effort, Row
from tests.benchmarks.timing import Spread, Turns, ratio
from tests.sinks.emits import run_info

SCALARS_PER_SECOND = 200_000
FAMILY = "norms/grad_norm/<parameter>"

Metrics = Mapping[str, Any]
Writer = Callable[[], None]
"""Writes a block."""


@dataclass(frozen=True)
class Load:
    """The contents of a block: emits of one kind."""

    title: str
    point: HookPoint
    emits: Sequence[Metrics]

    @property
    def scalars(self) -> int:
        """The number of scalars written."""
        return sum(len(row) for row in self.rows())

    def described(self) -> list[str]:
        """Return the names of the described metrics."""
        names = {name: None for emit in self.emits for name in emit}
        return list(dict.fromkeys(FAMILY if name.startswith("norms/") else name for name in names))

    def rows(self) -> list[dict[str, float]]:
        """Return the same numbers in the form of step loggers: those of each step, by name."""
        return list(chain.from_iterable(_rows(emit) for emit in self.emits))


Logger = Callable[[Load, Path, ExitStack], Writer]


def _rows(emit: Metrics) -> list[dict[str, float]]:
    if isinstance(next(iter(emit.values())), Series):
        steps = range(len(next(iter(emit.values())).steps))
        return [{name: series.values[index] for name, series in emit.items()} for index in steps]
    row = {}
    for name, value in emit.items():
        row |= {f"{name}/{index}": item for index, item in enumerate(value)} if type(value) is list else {name: value}
    return [row]


def loads() -> Iterator[Load]:
    """Yield typical emits of runs: random numbers converted from float32 tensors."""
    random = Random(0)

    def numbers(length: int) -> list[float]:
        return torch.tensor([random.gauss(0, 1) for _ in range(length)]).tolist()

    def series(metrics: int, steps: Sequence[int]) -> Metrics:
        return {f"weight_updates/metric_{index}": Series([*steps], numbers(len(steps))) for index in range(metrics)}

    named = [f"training_metrics/metric_{index}" for index in range(60)]
    named += [f"norms/grad_norm/layers.{index}.self_attn.out_proj.weight" for index in range(40)]
    epochs = [dict(zip(named, numbers(100), strict=True)) for _ in range(20)]
    lists = [epoch | {f"attention/entropy_{index}": numbers(12) for index in range(8)} for epoch in epochs]
    yield Load("100 metrics at the end of an epoch", HookPoint.POST_EPOCH, epochs)
    yield Load("100 metrics and 8 lists", HookPoint.POST_EPOCH, lists)
    yield Load("Series of 20 metrics over 100 steps", HookPoint.POST_STEP, [series(20, range(4901, 5001))])
    yield Load("17 metrics of one step", HookPoint.POST_STEP, [series(17, [step]) for step in range(4901, 5001)])


def file_sinks(effort: Effort) -> Iterator[Row]:
    """Measure both sinks under every load, and the installed loggers for comparison."""
    loggers = dict(installed())
    for load in loads():
        seconds = measured(load, loggers, effort.times(25))
        for sink in (JSONLSink, CSVSink):
            ours = seconds[sink.name]
            rates = [load.scalars / block_seconds for block_seconds in ours]
            figure = f"{sink.name}: {load.title}"
            spread = Spread.of(rates, max(rates))
            yield Row(figure, "scalars a second", PER_SECOND, spread, floor=SCALARS_PER_SECOND)
            for name in loggers:
                yield Row(figure, f"speed of {name}", TIMES, ratio(seconds[name], ours), floor=1.0)


def installed() -> Iterator[tuple[str, Logger]]:
    """Yield the installed loggers by name, and report the missing ones."""
    for name, (package, logger) in LOGGERS.items():
        if find_spec(package) is not None:
            yield name, logger
        else:
            sys.stderr.write(f"No row against {name}: {package} is not installed (make bench installs it).\n")


def measured(load: Load, loggers: Mapping[str, Logger], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every block, by name of the sink or logger."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        writers = {sink.name: emitted(load, sink(), Path(folder), stack) for sink in (JSONLSink, CSVSink)}
        for index, (name, logger) in enumerate(loggers.items()):
            writers[name] = logger(load, Path(folder) / str(index), stack)
        turns = Turns(list(writers.values()))
        turns.round()
        turns.forget()
        for _ in range(rounds):
            turns.round()
    return dict(zip(writers, turns.seconds, strict=True))


def emitted(load: Load, sink: MetricSink, folder: Path, stack: ExitStack) -> Writer:
    """Return a block of emits that have all reached the operating system at its end."""
    sink.set_run_context(run_info(folder, described=load.described()))
    stack.callback(sink.close, "completed")

    def write() -> None:
        for step, metrics in enumerate(load.emits):
            sink.emit(metrics, 0, load.point, step=step)

    return write


def csv_logger(load: Load, folder: Path, stack: ExitStack) -> Writer:
    """Return a block of rows for Lightning's CSVLogger, which writes every 100 rows, saved at the end."""
    from lightning_fabric.loggers import CSVLogger

    logger, rows, steps = CSVLogger(str(folder)), load.rows(), count()

    def write() -> None:
        for row in rows:
            logger.log_metrics(row, next(steps))
        logger.save()

    return write


def summary_writer(load: Load, folder: Path, stack: ExitStack) -> Writer:
    """Return a block of calls of ``SummaryWriter.add_scalar``, flushed at the end."""
    from torch.utils.tensorboard import SummaryWriter

    writer, rows, steps = SummaryWriter(str(folder)), load.rows(), count()
    stack.callback(writer.close)

    def write() -> None:
        for row in rows:
            step = next(steps)
            for name, value in row.items():
                writer.add_scalar(name, value, step)
        writer.flush()

    return write


LOGGERS: dict[str, tuple[str, Logger]] = {
    "CSVLogger": ("lightning_fabric", csv_logger),
    "SummaryWriter": ("tensorboard", summary_writer),
}
