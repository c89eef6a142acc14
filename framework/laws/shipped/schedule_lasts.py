"""The law that a schedule of learning rates does not end before the training."""

from ..law import Law, Outcome, not_checked
from ..trial import Trial


class ScheduleLasts(Law):
    """Watch the learning rates and the steps of the schedule at all updates, up to the 150th.

    A schedule is stepped once for each update, or for each epoch. What it does is no part of a step: the hook adds it.
    """

    name = "schedule_lasts"
    statement = "the schedule of the learning rate does not end before the training"
    remedy = "step the schedule in the unit of its length: once per update, or once per epoch"

    def check(self, trial: Trial) -> Outcome:
        """Leave the verdict to what is seen at later updates."""
        return not_checked("the end of a schedule was not seen")
