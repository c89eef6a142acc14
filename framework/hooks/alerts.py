"""Alerts: warnings of a hook's ``check``, with their metric, step, value and limit."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import RunNotice

ALERTS = "alerts.jsonl"
"""File with all alerts of a run, in the run's folder; written by sinks."""
_ALWAYS = ("always", None, UserWarning, None, 0)


class Alert(UserWarning):
    """A warning of a hook's ``check``, as in ``warnings.warn(Alert("The loss spiked.", metric="loss", value=7.5))``.

    The caller of ``check`` converts every other warning to an alert and sets ``hook``, ``epoch`` and a missing step;
    the dispatch sets ``rows``.

    Args:
        sentence: a description of the problem, for people.
        metric: the subject: a metric by its name within the hook, or a condition.
        step: the step of the problem, if it differs from the step that ``check`` received.
        value: the value that caused the alert.
        limit: the threshold beyond which a value causes an alert.
    """

    hook: str = ""
    epoch: int = 0

    def __init__(
        self,
        sentence: str,
        *,
        metric: str = "",
        step: int | None = None,
        value: float | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__(sentence)
        self.metric, self.step, self.value, self.limit = metric, step, value, limit
        self.rows: list[int] | None = None
        """Row numbers of the step's batch, at most 1,024; ``None`` if they are unknown."""

    @property
    def kind(self) -> str:
        """Subject of the alert: ``hook/metric``, or ``hook`` if it names no metric."""
        return f"{self.hook}/{self.metric}" if self.metric else self.hook

    def record(self) -> dict[str, Any]:
        """Return the alert's fields as a line of ``alerts.jsonl``."""
        names = ("epoch", "step", "hook", "metric", "value", "limit", "rows")
        fields = {name: getattr(self, name) for name in names}
        return fields | {"is_over": isinstance(self, Recovery), "sentence": str(self)}


class Recovery(Alert, RunNotice):
    """A notice that the problem of an earlier alert has ended."""


@contextmanager
def collect_alerts(hook: str, epoch: int, step: int, alerts: list[Alert]) -> Iterator[None]:
    """Append every warning of the body to ``alerts``, even if Python's filters hide it; then issue it again.

    The second time, Python's filters apply.
    """
    sources: list[tuple[Any, ...]] = []
    show_warning = warnings.showwarning

    def collect(message: Any, category: type[Warning], *where: Any, **rest: Any) -> None:
        if not issubclass(category, UserWarning):
            show_warning(message, category, *where, **rest)
            return
        kind = Recovery if issubclass(category, RunNotice) else Alert
        alert = message if isinstance(message, Alert) else kind(str(message))
        alert.hook, alert.epoch = hook, epoch
        alert.step = step if alert.step is None else alert.step
        alerts.append(alert)
        sources.append(where[:2])

    # Not catch_warnings: it resets the registry of shown warnings of every module, so warnings would repeat.
    warnings.filters.insert(0, _ALWAYS)  # type: ignore[attr-defined]
    warnings.showwarning = collect
    try:
        yield
    finally:
        warnings.showwarning = show_warning
        with suppress(ValueError):  # the body has reset the filter
            warnings.filters.remove(_ALWAYS)  # type: ignore[attr-defined]
    # Without a registry argument: Python would otherwise suppress a repeated sentence.
    for alert, source in zip(alerts[len(alerts) - len(sources) :], sources, strict=True):
        warnings.warn_explicit(alert, type(alert), *source)  # file name and line
