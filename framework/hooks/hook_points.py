"""Hook points of a training loop, and the schedules that select steps and epochs."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from ..errors import UsageError, require

LoopType = Literal["epoch", "step"]
"""Type of a loop: counted in passes over the data, or in steps."""
EpochWindow = tuple[int | None, int | None]
"""First and last epoch, both included; ``None`` is no limit."""
LoopPoints = Mapping[str, "Set[HookPoint] | Mapping[HookPoint, EpochWindow]"]
"""Hook points by loop type, each with a window of epochs or without."""
ENDLESS = 2**31
"""Length of a run or an epoch of unknown length."""


class HookPoint(IntEnum):
    """The hook points of the epoch loop, in order; the step loop has the indented ones and SNAPSHOT.

    In the step loop an interval, from one SNAPSHOT to the next, takes the place of an epoch. SNAPSHOT is also called at
    the end of every run.

    It is an ``IntEnum``, so that a member can index a list of listeners at C speed.

    ::

        PRE_EPOCH
          for each batch:
              PRE_STEP
              zero_grad, forward, backward
              POST_BACKWARD
              PRE_UPDATE
              optimizer.step, per-step scheduler
              POST_STEP
          flush step metrics, per-epoch scheduler, evaluate
        POST_EPOCH
        SNAPSHOT
    """

    PRE_EPOCH = 0
    PRE_STEP = 1
    POST_BACKWARD = 2  # gradients complete, unscaled, not yet clipped
    PRE_UPDATE = 3  # the gradients that the optimizer will use; observers only
    POST_STEP = 4  # gradients not yet zeroed
    POST_EPOCH = 5
    SNAPSHOT = 6


STEP_POINTS = frozenset({HookPoint.PRE_STEP, HookPoint.POST_BACKWARD, HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
"""The points within a step."""
EPOCH_END = (HookPoint.POST_EPOCH, HookPoint.SNAPSHOT)
"""The points at the end of an epoch; the step loop has only the second."""
POINTS_OF_LOOP: dict[str, frozenset[HookPoint]] = {
    "epoch": frozenset(HookPoint),
    "step": STEP_POINTS | {HookPoint.SNAPSHOT},
}
ALWAYS: EpochWindow = (None, None)


def windows_for(hook_points: Set[HookPoint], loop_points: LoopPoints | None, loop: str) -> dict[HookPoint, EpochWindow]:
    """Return a hook's points in one loop type, each with its epoch window (inclusive bounds, ``None`` is open).

    ``loop`` is ``"epoch"`` or ``"step"``; an attached loop is one of these, too.

    A hook with ``loop_points`` but no entry for this loop has no points. In the step loop, a hook whose ``hook_points``
    are all outside of steps has SNAPSHOT.

    Raises:
        UsageError: a point is not a :class:`HookPoint`.
    """
    if loop_points is None:
        requested: dict[HookPoint, EpochWindow] = dict.fromkeys(hook_points, ALWAYS)
    else:
        entry = loop_points.get(loop, frozenset())
        requested = dict(entry) if isinstance(entry, Mapping) else dict.fromkeys(entry, ALWAYS)
    for point in requested:
        if not isinstance(point, HookPoint):
            members = ", ".join(member.name for member in HookPoint)
            raise UsageError(f"Unknown hook point {point!r}. Known members of HookPoint: {members}.")
    if loop == "step" and loop_points is None and requested and not STEP_POINTS & requested.keys():
        return {HookPoint.SNAPSHOT: ALWAYS}
    return {point: window for point, window in requested.items() if point in POINTS_OF_LOOP[loop]}


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """The steps on which a hook is called at step-level points; steps count from 1, with one rule for all points.

    ``continual`` selects every step, ``stride`` every ``every_n_steps``-th step, and ``burst`` the first
    ``burst_length`` of every ``every_n_steps`` steps. The first ``warmup`` steps are skipped and do not count. The
    steps in ``also`` are selected in addition.

    >>> burst = StepSchedule(mode="burst", every_n_steps=10, burst_length=2, warmup=3)
    >>> [step for step in range(1, 26) if burst.is_due(step)]
    [4, 5, 14, 15, 24, 25]
    >>> early = StepSchedule(mode="stride", every_n_steps=10, also=(2, 5))
    >>> [step for step in range(1, 26) if early.is_due(step)]
    [1, 2, 5, 11, 21]
    """

    mode: Literal["continual", "stride", "burst"] = "continual"
    every_n_steps: int = 1
    burst_length: int = 1
    warmup: int = 0
    also: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("every_n_steps", "burst_length", "warmup")}
        if invalid := [name for name, number in numbers.items() if type(number) is not int]:
            raise UsageError(f"{invalid[0]} is {numbers[invalid[0]]!r}; it must be an integer.")
        if self.mode not in ("continual", "stride", "burst"):
            raise UsageError(f"Unknown step schedule {self.mode!r}. Known: continual, stride, burst.")
        require(self.every_n_steps >= 1, f"every_n_steps is {self.every_n_steps}; it must be at least 1.")
        if not 1 <= self.burst_length <= self.every_n_steps and self.mode == "burst":
            raise UsageError(
                f"burst_length is {self.burst_length}; it must be in 1..every_n_steps ({self.every_n_steps})."
            )
        require(self.warmup >= 0, f"warmup is {self.warmup}; it must be at least 0.")

    def is_due(self, step: int) -> bool:
        """Return whether the schedule selects ``step``, counted from 1."""
        if step <= self.warmup:
            return False
        if self.mode == "continual" or step - self.warmup in self.also:
            return True
        length = self.burst_length if self.mode == "burst" else 1
        return (step - self.warmup - 1) % self.every_n_steps < length

    def next_due(self, step: int) -> int:
        """Return the first step from ``step`` on that the schedule selects.

        >>> StepSchedule(mode="stride", every_n_steps=10, also=(2, 5)).next_due(3)
        5
        """
        step = max(step, self.warmup + 1)
        if self.is_due(step):
            return step
        following = step + self.every_n_steps - (step - self.warmup - 1) % self.every_n_steps
        return min([self.warmup + other for other in self.also if self.warmup + other >= step] + [following])


EVERY_STEP = StepSchedule()
"""The schedule that is due at every step."""
