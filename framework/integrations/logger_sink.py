"""Metrics through a trainer's own loggers: the sink named ``trainer``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..hooks import HookPoint, MetricSink, Series
from .choices import Choices

Send = Callable[[dict[str, float], int], None]


class LoggerSink(MetricSink):
    """Passes the numbers of each step on, as floats by full name; what is no number stays in the record."""

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
        for name, value in metrics.items():
            series = value if isinstance(value, Series) else Series([step], [value])
            for at, number in zip(series.steps, series.values, strict=True):
                for inner, leaf in _flat(name, number):
                    by_step.setdefault(at, {})[inner] = leaf
        for at in sorted(by_step):
            self._send(by_step[at], at)


def _flat(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(f"{name}/{key}", item)]
    return [(name, float(value))] if isinstance(value, (int, float)) else []


def through_trainer(choices: Choices, send: Send) -> Choices:
    """Return the choices with the sink that sends metrics in the place of its name."""
    return replace(choices, sinks=[LoggerSink(send) if item == LoggerSink.name else item for item in choices.sinks])
