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


class StepClock:
    """Adds up the time of the phases that a loop enters.

    No device is synchronised: on an accelerator, a phase is the time in which the host starts its kernels, and waits.
    """

    __slots__ = ("_counted", "_device", "_seconds", "_since", "_steps", "phase", "thread")

    def __init__(self) -> None:
        self.restart()

    def restart(self, device: str = "cpu") -> None:
        """Count the steps of this thread from now on, of a model on this kind of device."""
        self._device = device
        self._seconds = [0.0] * len(PHASES)
        self._counted = self._seconds  # up to the end of the newest step, since anything may follow the last one
        self._steps, self.phase, self._since, self.thread = 0, BETWEEN, perf_counter(), get_ident()

    def enter(self, phase: int) -> int:
        """End the phase in progress, and return it."""
        now, ended = perf_counter(), self.phase
        self._seconds[ended] += now - self._since
        self.phase, self._since = phase, now
        return ended

    @contextmanager
    def during(self, phase: int) -> Iterator[None]:
        """Let the body be a phase within the one in progress."""
        outer = self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)

    def end_step(self) -> None:
        """Note the end of a step."""
        self.enter(BETWEEN)
        self._steps += 1
        if self._steps == WARM_UP:
            self._seconds = [0.0] * len(PHASES)
        self._counted = self._seconds.copy()

    def report(self) -> dict[str, Any]:
        """Return the number of counted steps, the kind of device, and the mean seconds of a step by phase.

        Empty without counted steps, and in a loop whose passes are not seen.
        """
        count, seconds = self._steps - WARM_UP, self._counted
        if count <= 0 or not seconds[FORWARD]:
            return {}
        means = {name: time / count for name, time in zip(PHASES, seconds, strict=True)}
        return {"steps": count, "device": self._device, "seconds": means}
