"""Host time of the steps of a training by phase, read at the events of its loop that exist anyway."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

PHASES = ("data", "forward", "backward", "update", "evaluation", "hooks", "between", "other")
"""``between`` lies between an update and the next step, ``other`` between a backward pass and the update."""
# Numbers instead of an enum, since a step enters a phase about ten times.
DATA, FORWARD, BACKWARD, UPDATE, EVALUATION, HOOKS, BETWEEN, OTHER = range(len(PHASES))
WARM_UP = 10
"""Steps at the start that do not count: workers start, kernels are compiled, caches are empty."""


END = len(PHASES)
"""The event at the end of a step, after which the loop is between two steps."""
MANY_EVENTS = 4096
"""Events after which they are added up."""


class StepClock:
    """Adds up the time of the phases that a loop enters.

    No device is synchronised: on an accelerator, a phase is the time in which the host starts its kernels, and waits.
    An event of a step is :attr:`mark` with a phase and :attr:`now`, which calls no function of Python.
    """

    __slots__ = ("_counted", "_device", "_seconds", "_steps", "events", "mark", "now", "thread")

    def __init__(self) -> None:
        self.events: list[tuple[int, float]] = []
        """The phases that were entered, with the times, since :meth:`add_up`; the first one has begun before."""
        self.mark, self.now = self.events.append, perf_counter
        self.restart()

    def restart(self, device: str = "cpu") -> None:
        """Count the steps of this thread from now on, of a model on this kind of device."""
        self._device = device
        self._seconds = [0.0] * len(PHASES)
        self._counted = self._seconds  # up to the end of the newest step, since anything may follow the last one
        self._steps, self.thread = 0, get_ident()
        self.events[:] = [(BETWEEN, self.now())]

    @property
    def phase(self) -> int:
        """The phase in progress."""
        phase = self.events[-1][0]
        return BETWEEN if phase == END else phase

    def enter(self, phase: int) -> None:
        """End the phase in progress."""
        self.mark((phase, self.now()))

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Let the body be a phase within the one in progress."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def add_up(self) -> None:
        """Add the times of the events to those of their phases."""
        phase, since = self.events[0]
        for entered, now in self.events[1:]:
            self._seconds[phase] += now - since
            phase, since = entered, now
            if entered == END:
                phase = BETWEEN
                self._steps += 1
                if self._steps == WARM_UP:
                    self._seconds = [0.0] * len(PHASES)
                self._counted = self._seconds.copy()
        self.events[:] = [(phase, since)]

    def report(self) -> dict[str, Any]:
        """Return the number of counted steps, the kind of device, and the mean seconds of a step by phase.

        Empty without counted steps, and in a loop whose passes are not seen.
        """
        self.add_up()
        count, seconds = self._steps - WARM_UP, self._counted
        if count <= 0 or not seconds[FORWARD]:
            return {}
        means = {name: time / count for name, time in zip(PHASES, seconds, strict=True)}
        return {"steps": count, "device": self._device, "seconds": means}
