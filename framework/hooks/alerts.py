"""Alerts: problems that a hook's ``check`` finds, with their severity, metric, step, value and limit."""

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ..errors import RunNotice, UsageError, shortened, unknown

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities of alerts and of the doctor's findings, the mildest first."""
LARGEST_STEP = 2**53
"""Steps are exact as floats below this number; files of runs contain no larger one."""
ALERTS = "alerts.jsonl"
"""File with all alerts of a run, in the run's folder; written by sinks."""


class Alert(UserWarning):
    """A problem that a hook's ``check`` returns, such as ``Alert("The loss spiked.", metric="loss", value=7.5)``.

    The delivery sets ``hook``, ``epoch``, ``rows`` and a missing step, sends the alert to the sinks, and issues it as a
    Python warning, which a custom training loop shows. An alert of severity ``info`` is issued as a notice.

    Args:
        sentence: a description of the problem, for people.
        metric: the subject: a metric by its name within the hook, or a condition.
        step: the step of the problem, if it differs from the step that ``check`` received.
        value: the value that caused the alert.
        limit: the threshold beyond which a value causes an alert.
        severity: ``critical``: the training cannot succeed; ``warning``: it is probably worse than it could be;
            ``info``: an event that healthy runs have, too.
        id: the id of the doctor's finding that the alert belongs to (default: the words of :attr:`kind`, joined by
            hyphens).

    Raises:
        UsageError: for another severity.
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
        severity: Severity = "warning",
        id: str = "",
    ) -> None:
        super().__init__(sentence)
        if severity not in SEVERITIES:
            raise unknown("severity of an alert:", str(severity), SEVERITIES)
        self.severity: Severity = severity
        self._id = id
        self.metric, self.step, self.value, self.limit = metric, step, value, limit
        self.rows: list[int] | None = None
        """Row numbers of the step's batch, at most 1,024; ``None`` if they are unknown."""

    @property
    def kind(self) -> str:
        """Subject of the alert: ``hook/metric``, or ``hook`` if it names no metric."""
        return f"{self.hook}/{self.metric}" if self.metric else self.hook

    @property
    def id(self) -> str:
        """Id of the doctor's finding that the alert belongs to.

        >>> Alert("The loss spiked.", metric="own_loss").id
        'own-loss'
        """
        return self._id or default_id(self.kind)

    def warning(self) -> Warning:
        """Return the Python warning to issue: the alert itself, or a notice if its severity is ``info``."""
        is_notice = self.severity == "info" and not isinstance(self, RunNotice)
        return AlertNotice(str(self)) if is_notice else self

    def record(self) -> dict[str, Any]:
        """Return the alert's fields as a line of ``alerts.jsonl``."""
        names = ("epoch", "step", "hook", "metric", "severity", "id", "value", "limit", "rows")
        fields = {name: getattr(self, name) for name in names}
        return fields | {"is_over": isinstance(self, Recovery), "sentence": str(self)}


def default_id(kind: str) -> str:
    """Return the id of an alert that has none: the words of ``hook/metric``, joined by hyphens.

    >>> default_id("loss_spikes/loss_rise")
    'loss-spikes-loss-rise'
    """
    return "-".join(re.findall(r"[^\W_]+", kind))


def alert_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line of ``alerts.jsonl``; a line of an earlier version gets a severity and an id.

    Raises:
        UsageError: if the content is no alert.
    """
    texts = [content.get(name) for name in ("hook", "metric", "sentence")]
    step = content.get("step")
    if type(step) is not int or not 0 <= step < LARGEST_STEP or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{shortened(str(content))} is not an alert: it needs step, hook, metric and sentence.")
    hook, metric, _ = texts
    severity = content.get("severity")
    id_, rows = content.get("id"), content.get("rows")
    numbers = {name: content.get(name) for name in ("value", "limit")}
    return {
        **content,
        **{name: value if isinstance(value, (int, float)) else None for name, value in numbers.items()},
        "rows": rows if isinstance(rows, list) and {int}.issuperset(map(type, rows)) else None,
        "severity": severity if severity in SEVERITIES else "info" if content.get("is_over") else "warning",
        "id": id_ if isinstance(id_, str) and id_ else default_id(f"{hook}/{metric}"),
    }


class Recovery(Alert, RunNotice):
    """A notice that the problem of an earlier alert has ended; its severity is ``info``."""

    def __init__(self, sentence: str, **fields: Any) -> None:
        super().__init__(sentence, **{"severity": "info", **fields})


class AlertNotice(RunNotice):
    """The notice of an alert whose severity is ``info``."""
