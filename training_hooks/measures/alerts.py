"""Alerts that are sent once: when parameters enter a condition, and when all of them have left it."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from loopscope.errors import RunNotice, listed, warn
from loopscope.hooks import Alert, Recovery, Remembered, Remembering, Severity

NAMED = 5  # parameters that a warning names


def notice(sentence: str) -> None:
    """Issue a notice, a message that does not stop the run and is no warning."""
    warn(sentence, RunNotice, stacklevel=3)


def _nothing_reported(alerts: "Alerts") -> dict[str, list[str]]:
    return {name: [] for name in alerts.phrases}


class Alerts(Remembering):
    """Tracks the parameters in each condition, and queues an alert for every change.

    Args:
        phrases: for each condition the predicate for one parameter, and the predicate for several.
        noun: the noun for a checked item, in the singular.
        ids: for each condition the id of the doctor's finding that it belongs to.
    """

    counts = Remembered[dict[str, int]](lambda alerts: dict.fromkeys(alerts.phrases, 0), by_options=True)
    """Number of parameters in each condition at its last check."""
    # The names of both attributes are keys of saved states: what each condition's last alert named, and unsent alerts.
    _told = Remembered[dict[str, list[str]]](_nothing_reported, by_options=True)
    _serious = Remembered[dict[str, list[str]]](_nothing_reported, by_options=True)
    """The parameters whose condition has been reported as more than a remark, by condition."""
    # step, whether the condition starts (or ends), message, condition, worst value, its limit, severity
    _news = Remembered(list[tuple[Any, ...]])

    def __init__(
        self,
        phrases: Mapping[str, tuple[str, str]],
        *,
        noun: str = "parameter",
        ids: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.phrases = dict(phrases)
        self._noun = noun
        self._ids = dict(ids)

    def update(
        self,
        condition: str,
        affected: Mapping[str, str],
        *,
        step: int,
        checked: int,
        lingering: Mapping[str, str] = MappingProxyType({}),
        worst: float | None = None,
        limit: float | None = None,
        serious: Collection[str] | None = None,
        severity: Severity = "warning",
    ) -> None:
        """Record which of ``checked`` parameters are in a condition, worst first, each with a measured value.

        An alert is queued if a parameter was not reported before since the condition appeared, and when all have left
        the condition. ``lingering`` parameters have left it, but not far enough to end it. ``worst`` is the value of
        the first of ``affected``, ``limit`` the threshold of the condition. The alert has the ``severity`` if one of
        the new parameters is in ``serious`` (by default all are), otherwise ``info``; it is repeated when a parameter
        that was reported with ``info`` becomes serious.
        """
        reported, (one, several) = self._told[condition], self.phrases[condition]
        serious_names = affected.keys() if serious is None else affected.keys() & set(serious)
        newly_serious = serious_names - set(self._serious[condition])
        if newly_serious or affected.keys() - reported:
            affected = dict(sorted(affected.items(), key=lambda item: item[0] not in newly_serious))
            names = listed([f"{name} ({value})" for name, value in affected.items()], NAMED)
            summary = f"{len(affected):,} of {checked:,} {self._noun}s {one if len(affected) == 1 else several}"
            lingering_names = listed([f"{name} ({value})" for name, value in lingering.items()], NAMED)
            suffix = f"; not yet recovered: {lingering_names}" if lingering_names else ""
            sentence = f"Step {step:,}: {summary}: {names}{suffix}."
            self._news.append((step, True, sentence, condition, worst, limit, severity if newly_serious else "info"))
        elif reported and not (affected or lingering):
            sentence = f"Step {step:,}: no {self._noun} {one} any more."
            self._news.append((step, False, sentence, condition, None, None, "info"))
        is_over = not (affected or lingering)
        self._told[condition] = [] if is_over else sorted({*reported, *affected})
        self._serious[condition] = [] if is_over else sorted({*self._serious[condition], *serious_names})
        self.counts[condition] = len(affected)

    def reported(self, condition: str) -> frozenset[str]:
        """Return the parameters reported since the condition appeared, including those that have left it since."""
        return frozenset(self._told[condition])

    def take_due(self, step: int) -> list[Alert]:
        """Remove and return the queued alerts of all steps up to ``step``; the end of a condition is a recovery."""
        due = [message for message in self._news if message[0] <= step]
        self._news = [message for message in self._news if message[0] > step]
        return [self._alert(*message) for message in due]

    def _alert(
        self,
        step: int,
        starts: bool,
        sentence: str,
        condition: str,
        worst: float | None,
        limit: float | None,
        severity: Severity,
    ) -> Alert:
        kind = Alert if starts else Recovery
        finding = self._ids.get(condition, "")
        return kind(sentence, metric=condition, step=step, value=worst, limit=limit, severity=severity, id=finding)
