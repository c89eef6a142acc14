"""The metrics that an experiment wants in its progress line."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..hooks import HookPoint, MetricSink, RunInfo, Series
from .grid import flattened
from .text import number_text


class ProgressNumbers(MetricSink):
    """Keep what was delivered last of some metrics; of a series its mean, as the loss beside it is one.

    Args:
        metrics: full names by label; a label with several names stands before all of their values.
    """

    name = "progress"

    def __init__(self, metrics: Mapping[str, Sequence[str]]) -> None:
        self.metrics = metrics
        self._wanted = {name for names in metrics.values() for name in names}
        self._newest: dict[str, float] = {}

    def set_run_context(self, run: RunInfo) -> None:
        """Begin a strategy: its values are its own."""
        self._newest.clear()

    def emit(self, metrics: Mapping[str, Any], epoch: int, hook_point: HookPoint, *, step: int) -> None:
        """Note the numbers that are wanted."""
        for name, value in flattened(metrics):
            if name in self._wanted:
                self._newest[name] = (
                    sum(value.values) / len(value.values) if isinstance(value, Series) else float(value)
                )

    def texts(self) -> dict[str, str]:
        """Return what there is to say, by label; nothing under a label of which a value is missing.

        Several values under one label have two significant digits each, so that a line holds them.

        >>> numbers = ProgressNumbers({"overflow": ["h/elements", "h/tensors"], "other": ["h/other"]})
        >>> numbers.emit({"h/elements": 0.25, "h/tensors": Series([1, 2], [1.0, 0.0])}, 0, HookPoint.POST_STEP, step=2)
        >>> numbers.texts()
        {'overflow': 'overflow 0.25/0.5'}
        """
        known = {label: names for label, names in self.metrics.items() if all(name in self._newest for name in names)}
        return {label: f"{label} {_joined([self._newest[name] for name in names])}" for label, names in known.items()}


def _joined(values: Sequence[float]) -> str:
    return "/".join(f"{value:.2g}" for value in values) if len(values) > 1 else number_text(values[0])
