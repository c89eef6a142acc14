"""Interfaces of sinks that replay the record of a completed run, and of sinks whose files can be read back."""

import operator
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..errors import UsageError, shortened
from ..hooks import LARGEST_STEP, HookPoint, MetricSink, Series, SinkRegistry
from ..option_words import is_command_line

Emit = TypeVar("Emit")


class Record(NamedTuple):
    """The arguments of one call of :meth:`MetricSink.emit`."""

    epoch: int
    step: int
    hook_point: HookPoint
    metrics: Mapping[str, Any]


class ReplaySink(MetricSink):
    """A sink to which ``loopscope replay`` can send the record of a run."""

    @classmethod
    @abstractmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Check the run in ``folder``, and return a function that sends it and returns a sentence with its destination.

        Args:
            folder: the folder of one strategy's run.
            options: the user's options, by the names that :attr:`option` may have.

        Raises:
            UsageError: from the check or the function, for a problem that the user can solve.
        """


class RecordSink(MetricSink):
    """A sink whose file, ``STRATEGY.NAME`` in the folder of a run, can be read back after the run."""

    lossless: ClassVar[bool] = False
    """Whether this sink's file is preferred when a run has files of several sinks."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """Yield each emit, in order; series are :class:`Series`, as they were emitted.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: for content that the sink has not written.
        """


def forward_emits(path: Path, emits: Iterable[Emit], take: Callable[[Emit], None]) -> None:
    """Read the emits of the record at ``path`` and pass each to ``take``.

    Raises:
        UsageError: if the record is damaged or cannot be read; the message has the number of emits before it,
            and the line.
    """
    count = 0
    try:
        for emit in emits:
            if isinstance(emit, Record):
                _check(emit)
            take(emit)
            count += 1
    except OSError as error:
        raise UsageError(f"{path} could not be read or replayed after {count} emits: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {shortened(str(error))}"
        line = f", at line {count + 1:,}" if path.suffix == ".jsonl" else ""
        raise UsageError(f"{path} cannot be read after {count} emits{line} ({reason}).") from error


def _check(emit: Record) -> None:
    """Raise ``ValueError`` for an emit that no sink has written, so that readers need not expect it."""
    steps = [emit.epoch, emit.step]
    for name, value in emit.metrics.items():
        if isinstance(value, Series):
            if type(value.steps) is not list or type(value.values) is not list:
                raise ValueError(f"{name} is not a series of steps and values")
            if len(value.steps) != len(value.values):
                raise ValueError(f"{name} has {len(value.values)} values at {len(value.steps)} steps")
            steps += value.steps
    if {*map(type, steps)} != {int} or min(steps) < 0 or max(steps) >= LARGEST_STEP:
        raise ValueError("an epoch or a step is no number of steps")


def record_of(folder: Path, strategy: str) -> tuple[type[RecordSink], Path]:
    """Return the best record in a folder and its sink; raises :class:`UsageError` if there is no record."""
    import_module("loopscope.sinks")  # registers the shipped ones, which a script may not have used
    readable = [sink for sink in SinkRegistry if issubclass(sink, RecordSink)]
    best_first = sorted(readable, key=operator.attrgetter("lossless"), reverse=True)
    files = {sink: folder / sink.file_names(strategy)[0] for sink in best_first}
    for sink, path in files.items():
        if path.is_file():
            return sink, path
    names = " nor ".join(path.name for path in files.values())
    ways = " or ".join(f"without --no-{str(sink.flag)[2:]}" if sink.default else f"with {sink.flag}" for sink in files)
    ways = ways if is_command_line() else f"with the sink {' or '.join(repr(sink.name) for sink in files)}"
    raise UsageError(f"{folder} has neither {names}; a run started {ways} writes its metrics there.")
