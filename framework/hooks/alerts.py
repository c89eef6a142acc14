"""Alerts: problems that a hook's ``check`` finds, with their metric, step, value and limit."""

from typing import Any

from ..errors import RunNotice

ALERTS = "alerts.jsonl"
"""File with all alerts of a run, in the run's folder; written by sinks."""


class Alert(UserWarning):
    """A problem that a hook's ``check`` returns, such as ``Alert("The loss spiked.", metric="loss", value=7.5)``.

    The dispatch sets ``hook``, ``epoch``, ``rows`` and a missing step, sends the alert to the sinks, and issues it as a
    Python warning, which a custom training loop shows.

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
