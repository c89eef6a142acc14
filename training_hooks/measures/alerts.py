"""Alerts that are sent once: when parameters enter a condition, and when all of them have left it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from loopscope.errors import RunNotice, listed, warn
from loopscope.hooks import Alert, Recovery, Remembered, Remembering

NAMED = 5  # parameters that a warning names


def notice(sentence: str) -> None:
    """Issue a notice, a message that does not stop the run and is no warning."""
    warn(sentence, RunNotice, stacklevel=3)


class Alerts(Remembering):
    """Tracks the parameters in each condition, and queues an alert for every change.

    Args:
        phrases: for each condition the predicate for one parameter, and the predicate for several.
        noun: the noun for a checked item, in the singular.
    """

    counts = Remembered[dict[str, int]](lambda alerts: dict.fromkeys(alerts.phrases, 0), by_options=True)
    """Number of parameters in each condition at its last check."""
    # The names of both attributes are keys of saved states: what each condition's last alert named, and unsent alerts.
    _told = Remembered[dict[str, list[str]]](lambda alerts: {name: [] for name in alerts.phrases}, by_options=True)
    # step, whether the condition starts (or ends), message, condition, worst value, its limit
    _news = Remembered(list[tuple[Any, ...]])

    def __init__(self, phrases: Mapping[str, tuple[str, str]], *, noun: str = "parameter") -> None:
        self.phrases = dict(phrases)
        self._noun = noun

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
    ) -> None:
        """Record which of ``checked`` parameters are in a condition, worst first, each with a measured value.

        An alert is queued if a parameter was not reported before since the condition appeared, and when all have left
        the condition. ``lingering`` parameters have left it, but not far enough to end it. ``worst`` is the value of
        the first of ``affected``, ``limit`` the threshold of the condition.
        """
        reported, (one, several) = self._told[condition], self.phrases[condition]
        if affected.keys() - reported:
            names = listed([f"{name} ({value})" for name, value in affected.items()], NAMED)
            summary = f"{len(affected):,} of {checked:,} {self._noun}s {one if len(affected) == 1 else several}"
            lingering_names = listed([f"{name} ({value})" for name, value in lingering.items()], NAMED)
            suffix = f"; not yet recovered: {lingering_names}" if lingering_names else ""
            sentence = f"Step {step:,}: {summary}: {names}{suffix}."
            self._news.append((step, True, sentence, condition, worst, limit))
        elif reported and not (affected or lingering):
            sentence = f"Step {step:,}: no {self._noun} {one} any more."
            self._news.append((step, False, sentence, condition, None, None))
        self._told[condition] = sorted({*reported, *affected}) if affected or lingering else []
        self.counts[condition] = len(affected)

    def reported(self, condition: str) -> frozenset[str]:
        """Return the parameters reported since the condition appeared, including those that have left it since."""
        return frozenset(self._told[condition])

    def take_due(self, step: int) -> list[Alert]:
        """Remove and return the queued alerts of all steps up to ``step``; the end of a condition is a recovery."""
        due = [message for message in self._news if message[0] <= step]
        self._news = [message for message in self._news if message[0] > step]
        return [
            (Alert if starts else Recovery)(sentence, metric=condition, step=start_step, value=worst, limit=limit)
            for start_step, starts, sentence, condition, worst, limit in due
        ]
