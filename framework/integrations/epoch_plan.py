"""The steps of a run's epochs: those that have happened, and those that are expected."""

from collections.abc import Callable, Mapping
from typing import Any

from ..hooks import ENDLESS


class EpochPlan:
    """The number of steps in each epoch of a loop, whose accumulation or data may change during the run.

    Later epochs are expected to have as many steps as the current one, unless the loop knows more. An epoch that the
    loop announces with the same length as the previous one is expected to have as many steps as that one had.
    """

    def __init__(self) -> None:
        self.steps: int | None = None
        """The steps of the current epoch, if known."""
        self.limit = ENDLESS
        """The steps after which the loop ends, within an epoch or not."""
        self.schedule: Callable[[int], int] | None = None
        """Returns the steps of an epoch, if the loop knows them in advance."""
        self._epoch = self._first_step = 0  # of the current epoch
        self._announced: int | None = None

    def begin_epoch(self, epoch: int, first_step: int, announced: int | None) -> None:
        """Note the start of an epoch after ``first_step`` steps; the loop has ``announced`` its length, if known."""
        self._epoch, self._first_step = epoch, first_step
        if announced is not None and announced != self._announced:
            self.steps = self._announced = announced

    def end_epoch(self, epoch: int, step: int) -> None:
        """Note the end of an epoch after ``step`` steps."""
        if step > self._first_step:
            self.steps = step - self._first_step
        self._epoch, self._first_step = epoch + 1, step

    def steps_until(self, epoch: int) -> int:
        """Return the number of steps before ``epoch`` starts."""
        coming = range(self._epoch, epoch)
        if self.schedule is not None:
            later = sum(map(self.schedule, coming))
        else:
            later = len(coming) * (ENDLESS if self.steps is None else self.steps)
        return min(self._first_step + later, self.limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan of the current epoch."""
        return {"epoch": self._epoch, "first_step": self._first_step, "steps": self.steps, "announced": self._announced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._epoch, self._first_step = state["epoch"], state["first_step"]
        self.steps, self._announced = state["steps"], state["announced"]
