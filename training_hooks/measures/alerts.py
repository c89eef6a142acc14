"""Warnings that come once: when parameters get into a condition, and when none is in it any more."""

import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from loopscope.errors import RunNotice, listed
from loopscope.hooks import Alert, Recovery, Remembered, Remembering

NAMED = 5  # parameters that a warning names


def notice(sentence: str) -> None:
    """Tell the user what a hook does without, or measures against, where going on is what was asked for."""
    warnings.warn(sentence, RunNotice, stacklevel=3)


class Alerts(Remembering):
    """Remembers which parameters are in which condition, and queues a sentence for every change.

    Args:
        phrases: for each condition what one parameter is said to do, and what several are.
        noun: what stands in a condition, in the singular.
    """

    counts = Remembered[dict[str, int]](lambda alerts: dict.fromkeys(alerts.phrases, 0), by_options=True)
    """How many parameters were in each condition when it was last looked at."""
    _told = Remembered[dict[str, list[str]]](lambda alerts: {name: [] for name in alerts.phrases}, by_options=True)
    _news = Remembered(
        list[tuple[Any, ...]]
    )  # step, whether it is trouble, sentence, condition, worst value, its limit

    def __init__(self, phrases: Mapping[str, tuple[str, str]], *, noun: str = "parameter") -> None:
        self.phrases = dict(phrases)
        self._noun = noun

    def see(
        self,
        condition: str,
        found: Mapping[str, str],
        *,
        step: int,
        checked: int,
        lingering: Mapping[str, str] = MappingProxyType({}),
        worst: float | None = None,
        limit: float | None = None,
    ) -> None:
        """Note which of ``checked`` parameters are in a condition, the worst first, each with a measured value.

        It is news if one of them was not among those told of since the condition appeared, and if none is left.
        ``lingering`` are those that are out of it, but not far enough for it to be over. ``worst`` is the value of the
        first of ``found``, ``limit`` what it was compared with.
        """
        told, (one, several) = self._told[condition], self.phrases[condition]
        if found.keys() - told:
            named = listed([f"{name} ({value})" for name, value in found.items()], NAMED)
            says = f"{len(found):,} of {checked:,} {self._noun}s {one if len(found) == 1 else several}"
            rest = listed([f"{name} ({value})" for name, value in lingering.items()], NAMED)
            late = f"; not yet recovered: {rest}" if rest else ""
            sentence = f"Step {step:,}: {says}: {named}{late}."
            self._news.append((step, True, sentence, condition, worst, limit))
        elif told and not (found or lingering):
            sentence = f"Step {step:,}: no {self._noun} {one} any more."
            self._news.append((step, False, sentence, condition, None, None))
        self._told[condition] = sorted({*told, *found}) if found or lingering else []
        self.counts[condition] = len(found)

    def told(self, condition: str) -> frozenset[str]:
        """Return who was told of since the condition appeared, those included that have left it meanwhile."""
        return frozenset(self._told[condition])

    def tell(self, step: int) -> None:
        """Give the warnings that have come up by ``step``; that a condition has ended is a notice."""
        due = [news for news in self._news if news[0] <= step]
        self._news = [news for news in self._news if news[0] > step]
        for at, trouble, sentence, condition, worst, limit in due:
            kind = Alert if trouble else Recovery
            warnings.warn(kind(sentence, metric=condition, step=at, value=worst, limit=limit), stacklevel=3)
