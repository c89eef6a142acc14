"""The mean time of a step of a run by phase, from its summary or its clock, and its largest memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

WORDS = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "evaluation": "evaluation",
    "hooks": "hooks",
    "between": "between steps",
    "other": "other",
}
"""The phases in words."""
LEAST_SHARE = 0.005
"""Smaller shares are 0% in the text."""


@dataclass(frozen=True)
class StepTimes:
    """The mean seconds of a step by phase, on the host, over a number of steps after the first ones."""

    steps: int
    device: str
    """The kind of device of the model; on an accelerator, the host may run ahead of it."""
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, content: Any) -> "StepTimes | None":
        """Return the times that :meth:`.StepClock.report` gave; ``None`` for others, such as those of few steps."""
        try:
            steps, device, seconds = int(content["steps"]), str(content["device"]), dict(content["seconds"])
            times = {name: float(seconds.get(name, 0.0)) for name in WORDS}
        except (LookupError, TypeError, ValueError, OverflowError):
            return None
        is_sound = steps > 0 and all(isfinite(time) and time >= 0 for time in times.values()) and any(times.values())
        return cls(steps, device, times) if is_sound else None

    @property
    def total(self) -> float:
        """The mean seconds of a step."""
        return sum(self.seconds.values())

    def share(self, phase: str) -> float:
        """Return the share of a phase in the time of a step."""
        return self.seconds[phase] / self.total

    @property
    def shares(self) -> list[tuple[str, float]]:
        """The phases in words with their shares, the longest first, without those of 0%."""
        shares = [(words, self.share(name)) for name, words in WORDS.items() if self.share(name) >= LEAST_SHARE]
        return sorted(shares, key=lambda pair: -pair[1])

    def __str__(self) -> str:
        """Return the time of a step, and its parts."""
        parts = ", ".join(f"{share:.0%} {words}" for words, share in self.shares)
        return f"{milliseconds_text(self.total)}: {parts}"


def milliseconds_text(seconds: float) -> str:
    """Return a time in milliseconds, with three digits.

    >>> [milliseconds_text(seconds) for seconds in (0.0123, 0.00012, 4.2)]
    ['12.3 ms', '0.12 ms', '4,200 ms']
    """
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def memory_text(peaks: Any) -> str:
    """Return the largest memory of a run in words, from its summary; empty if it is unknown.

    >>> memory_text({"host": 353e6, "device": 2**30})
    '353 MB, device 1.07 GB'
    """
    known = peaks if isinstance(peaks, Mapping) else {}
    sizes = {name: known[name] for name in ("host", "device") if isinstance(known.get(name), (int, float))}
    texts = [f"{'' if name == 'host' else f'{name} '}{_size_text(size)}" for name, size in sizes.items()]
    return ", ".join(texts)


def _size_text(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
