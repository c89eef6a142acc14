"""Alerts: what a hook's ``check`` warns of, with its metric, where it was and how far it went."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import RunNotice

ALERTS = "alerts.jsonl"
"""The file in the folder of a run that holds all of them, where a sink writes it."""
_ALWAYS = ("always", None, UserWarning, None, 0)


class Alert(UserWarning):
    """A warning of a hook's ``check``, as in ``warnings.warn(Alert("The loss spiked.", metric="loss", value=7.5))``.

    Who calls ``check`` makes an alert of every other warning there, and adds ``hook``, ``epoch`` and a missing step;
    ``rows`` are added last.

    Args:
        sentence: what is wrong, for people.
        metric: what it is about: a metric by its name within the hook, or a condition.
        step: where it was, if that is not the step that ``check`` was told.
        value: how far it went.
        limit: from where on a value is an alert.
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
        """The numbers of the rows of the batch of its step, at most 1,024, where they are known."""

    @property
    def kind(self) -> str:
        """What it is about: ``hook/metric``, or ``hook`` where no metric was named."""
        return f"{self.hook}/{self.metric}" if self.metric else self.hook

    def record(self) -> dict[str, Any]:
        """Return what it says, by the names that it has in ``alerts.jsonl``."""
        names = ("epoch", "step", "hook", "metric", "value", "limit", "rows")
        found = {name: getattr(self, name) for name in names}
        return found | {"is_over": isinstance(self, Recovery), "sentence": str(self)}


class Recovery(Alert, RunNotice):
    """The note that what an alert told of is over."""


@contextmanager
def alerts_caught(hook: str, epoch: int, step: int, found: list[Alert]) -> Iterator[None]:
    """Add what the body warns of to ``found``, whatever Python's filter says; then warn of it, as the filter says."""
    places: list[tuple[Any, ...]] = []
    before = warnings.showwarning

    def take(message: Any, category: type[Warning], *where: Any, **rest: Any) -> None:
        if not issubclass(category, UserWarning):
            before(message, category, *where, **rest)
            return
        kind = Recovery if issubclass(category, RunNotice) else Alert
        alert = message if isinstance(message, Alert) else kind(str(message))
        alert.hook, alert.epoch = hook, epoch
        alert.step = step if alert.step is None else alert.step
        found.append(alert)
        places.append(where[:2])

    # Not by catch_warnings, which would make every module forget of what it has warned already.
    warnings.filters.insert(0, _ALWAYS)  # type: ignore[attr-defined]
    warnings.showwarning = take
    try:
        yield
    finally:
        warnings.showwarning = before
        with suppress(ValueError):  # the body has reset the filter
            warnings.filters.remove(_ALWAYS)  # type: ignore[attr-defined]
    # Without a registry, or a repeated sentence would be swallowed.
    for alert, place in zip(found[len(found) - len(places) :], places, strict=True):
        warnings.warn_explicit(alert, type(alert), *place)
