"""Metrics through a trainer's own loggers: the sink named ``trainer``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..hooks import HookPoint, MetricSink, Series
from .attach_options import AttachOptions

Send = Callable[[dict[str, float], int], None]


class LoggerSink(MetricSink):
    """Passes the numbers of each step on, in order; lists are left out, which no logger takes."""

    name: ClassVar[str] = "trainer"

    def __init__(self, send: Send) -> None:
        self._send = send

    @classmethod
    def leaves(cls, strategy: str) -> Sequence[str]:
        """Name nothing: the files are the loggers'."""
        return ()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Send what came at each step in one call."""
        by_step: dict[int, dict[str, float]] = {}
        for at, name, number in numbers_in(metrics, step):
            by_step.setdefault(at, {})[name] = number
        for at, numbers in sorted(by_step.items()):
            self._send(numbers, at)


def numbers_in(metrics: Mapping[str, Any], step: int) -> Iterator[tuple[int, str, float]]:
    """Yield each number with its step and its name; a number in a dict is named ``metric/key``.

    >>> [*numbers_in({"norms/total": Series([1, 2], [0.5, 0.25]), "spread": {"max": 3.0}}, 2)]
    [(1, 'norms/total', 0.5), (2, 'norms/total', 0.25), (2, 'spread/max', 3.0)]
    """
    for name, value in metrics.items():
        if isinstance(value, Series):
            for at, item in zip(value.steps, value.values, strict=True):
                yield from numbers_in({name: item}, at)
        elif isinstance(value, Mapping):
            yield from numbers_in({f"{name}/{key}": item for key, item in value.items()}, step)
        elif isinstance(value, (int, float)):
            yield step, name, float(value)


def through_trainer(choices: AttachOptions, send: Send) -> AttachOptions:
    """Return the choices with the sink that sends metrics in the place of its name."""
    return replace(choices, sinks=[LoggerSink(send) if item == LoggerSink.name else item for item in choices.sinks])
