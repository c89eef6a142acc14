"""Sinks that send the record of a run that is over, or read their own files back."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..errors import UsageError, shortened
from ..hooks import HookPoint, MetricSink

Emit = TypeVar("Emit")


class Record(NamedTuple):
    """What one call of :meth:`MetricSink.emit` was given."""

    epoch: int
    step: int
    hook_point: HookPoint
    metrics: Mapping[str, Any]


class ReplaySink(MetricSink):
    """A sink that ``loopscope replay`` can send the record of a run to."""

    @classmethod
    @abstractmethod
    def replay(cls, folder: Path, **options: str) -> Callable[[], str]:
        """Check that the run in ``folder`` can be sent, and return what sends it and says in a sentence where to.

        Args:
            folder: of one strategy's run.
            options: what the user gave, by the names that :attr:`option` may have.

        Raises:
            UsageError: in both steps, for what the user can change.
        """


class RecordSink(MetricSink):
    """A sink whose file, ``STRATEGY.NAME`` in the folder of a run, can be read back when the run is over."""

    lossless: ClassVar[bool] = False
    """Whether the file is the one to read where there are several."""

    @classmethod
    @abstractmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """Yield each emit, in order; series are :class:`Series`, as they were emitted.

        Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``AttributeError`` for what the sink has not written.
        """


def pass_on(path: Path, emits: Iterable[Emit], take: Callable[[Emit], None]) -> None:
    """Read the emits of the record at ``path`` and give each to ``take``.

    Raises :class:`UsageError` that says after how many emits the record is broken, or why the system refuses.
    """
    taken = 0
    try:
        for emit in emits:
            take(emit)
            taken += 1
    except OSError as error:
        raise UsageError(f"{path} could not be read or passed on after {taken} emits: {error.strerror}.") from error
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {shortened(str(error))}"
        raise UsageError(f"{path} cannot be read after {taken} emits ({reason}).") from error
