"""The sink ``trainer``, which sends metrics to a Trainer's loggers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..errors import unknown
from ..hooks import HookPoint, MetricSink, Series, SinkRegistry
from .attach_options import AttachOptions

Send = Callable[[dict[str, float], int], None]


class LoggerSink(MetricSink):
    """Sends the numbers of each step to the loggers, in order; lists are left out, since no logger accepts them."""

    name: ClassVar[str] = "trainer"

    def __init__(self, send: Send) -> None:
        self._send = send

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return no file names, since the files belong to the loggers."""
        return ()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Send the numbers of each step in one call."""
        by_step: dict[int, dict[str, float]] = {}
        for number_step, name, number in numbers_in(metrics, step):
            by_step.setdefault(number_step, {})[name] = number
        for number_step, numbers in sorted(by_step.items()):
            self._send(numbers, number_step)


def numbers_in(metrics: Mapping[str, Any], step: int) -> Iterator[tuple[int, str, float]]:
    """Yield each number with its step and its name; a number in a dict is named ``metric/key``.

    >>> [*numbers_in({"norms/total": Series([1, 2], [0.5, 0.25]), "spread": {"max": 3.0}}, 2)]
    [(1, 'norms/total', 0.5), (2, 'norms/total', 0.25), (2, 'spread/max', 3.0)]
    """
    for name, value in metrics.items():
        if isinstance(value, Series):
            for item_step, item in zip(value.steps, value.values, strict=True):
                yield from numbers_in({name: item}, item_step)
        elif isinstance(value, Mapping):
            yield from numbers_in({f"{name}/{key}": item for key, item in value.items()}, step)
        elif isinstance(value, (int, float)):
            yield step, name, float(value)


def route_through_trainer(options: AttachOptions, send: Send) -> AttachOptions:
    """Return the options with a :class:`LoggerSink` in place of the sink's name.

    Raises:
        UsageError: for an unknown name; the message lists ``trainer`` as well.
    """
    known = {LoggerSink.name, *SinkRegistry.names()}
    for item in options.sinks:
        if isinstance(item, str) and item not in known:
            raise unknown("sink", item, known)
    return replace(options, sinks=[LoggerSink(send) if item == LoggerSink.name else item for item in options.sinks])
