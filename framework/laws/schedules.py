"""The learning rates of a training and the steps of its schedule, noted at every update."""

import math
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from ..observing import schedulers_of
from .law import Outcome, broken, holds, not_checked

FEW = 4
"""Updates that show how often a schedule is stepped."""
LEAST = 0.01 * (1 + 1e-9)
"""The part of the largest learning rate at which little is learned."""
MOST_LOW = 0.2
"""The part of all updates that may have such a learning rate at the end of a schedule that lasts."""
RISEN = 0.9
"""The part of the learning rate that was set at which a warm-up counts as over."""
MOST_UPDATES = 150
"""Updates within which the end of a schedule is awaited."""
MOST_PLANNED = 50_000
"""Planned updates whose learning rates are computed, which takes about a second."""
CYCLES = ("Restarts", "Cyclic", "OneCycle", "Plateau")
"""Parts of the names of schedules that rise again, or whose length depends on the losses."""


@dataclass
class _Course:
    """What a schedule has done so far."""

    schedule: Any
    rates: list[float] = field(default_factory=list)
    """The learning rate of the first group at each update."""
    counts: list[int] = field(default_factory=list)
    """The number of steps of the schedule before each update."""

    @property
    def name(self) -> str:
        return type(self.schedule).__name__

    def steps_per_update(self) -> int:
        """Return the smallest number of steps of the schedule between two updates; 0 if too few updates are known."""
        steps = [later - earlier for earlier, later in zip(self.counts, self.counts[1:], strict=False)]
        return min(steps) if len(steps) >= FEW else 0

    def problem(self) -> str:
        """Return a sentence if the schedule is stepped too often; empty if it is not, or it is unknown."""
        steps, peak = self.steps_per_update(), max(self.rates, default=0.0)
        if steps > 1 and not _has_ranks():
            return f"{self.name} is stepped {steps} times for each update"
        if not steps or any(part in self.name for part in CYCLES):
            return ""
        first = self.rates.index(peak)
        low = [place for place, rate in enumerate(self.rates) if place > first and rate <= LEAST * peak]
        if not low:
            return ""
        updates = len(self.rates)
        # Also a right schedule is low in its last updates.
        if self.rates[-1] <= LEAST * peak and updates - low[0] >= 2 * low[0] > 0:
            return (
                f"{self.name} has reduced the learning rate from {peak:.3g} to {self.rates[-1]:.3g} within {low[0]} "
                f"updates, and {updates - low[0]} have followed"
            )
        if self.name == "CosineAnnealingLR" and self.rates[-1] > self.rates[-2] > self.rates[low[-1]] >= 0:
            return f"CosineAnnealingLR has ended after {low[-1]} updates, and the learning rate rises again"
        return ""

    def summary(self) -> str:
        """Return the learning rates of all updates in a few words."""
        first, most, last = self.rates[0], max(self.rates), self.rates[-1]
        return (
            f"{self.name}: from {first:.3g}, at most {most:.3g}, to {last:.3g} in {len(self.rates)} updates, the last"
        )

    def warms_up(self) -> str:
        """Return a sentence if the rate has only risen, and is still below the one that was set; else nothing."""
        group = self.schedule.optimizer.param_groups[0]
        given = max(float(group.get(name, 0.0)) for name in ("initial_lr", "max_lr"))
        if any(part in self.name for part in ("Restarts", "Cyclic", "Plateau")) or len(self.rates) <= FEW:
            return ""
        is_rising = self.rates == sorted(self.rates) and self.rates[-1] > self.rates[0]
        return (
            f"the training has ended after {len(self.rates)} updates, while {self.name} still raises the learning rate "
            f"to {given:.3g}, from {self.rates[0]:.3g} to {self.rates[-1]:.3g} so far"
            if is_rising and self.rates[-1] < RISEN * given
            else ""
        )

    def planned(self, updates: int) -> "_Course | None":
        """Return the course of all updates of a plan, by steps of a copy of the schedule; ``None`` if it is unknown."""
        if self.steps_per_update() != 1 or _has_ranks() or not len(self.rates) < updates <= MOST_PLANNED:
            return None
        optimizer: Any = self.schedule.optimizer
        groups = [{**group, "params": [torch.zeros(1)]} for group in optimizer.param_groups]
        copied = SGD(groups, 0.0)
        course = _Course(self.schedule, [*self.rates], [*self.counts])
        try:
            schedule = deepcopy(self.schedule, {id(optimizer): copied})
            vars(schedule).pop("step", None)  # of a library that has replaced it for the original schedule
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                while len(course.rates) < updates:
                    if schedule.last_epoch == course.counts[-1]:  # otherwise it was stepped after the newest update
                        schedule.step()
                    course.rates.append(float(copied.param_groups[0]["lr"]))
                    course.counts.append(course.counts[-1] + 1)
        except Exception:  # of a schedule that needs a loss, or belongs to another object
            return None
        return course

    def ends_soon(self) -> bool:
        """Return whether the schedule may reach its end within the updates that are watched."""
        if not self.steps_per_update() or len(self.rates) >= MOST_UPDATES or self.problem():
            return False
        length = _length(self.schedule)
        if length is None:
            return self.rates[-1] < 0.9 * max(self.rates)
        return 3 * length < MOST_UPDATES or (self.name == "CosineAnnealingLR" and length + FEW < MOST_UPDATES)


class Schedules:
    """The schedules of the optimizers of a training."""

    def __init__(self) -> None:
        self._courses: dict[int, _Course] = {}

    def find(self, optimizers: Sequence[Optimizer]) -> None:
        """Find the schedules of the optimizers, which takes a look at all objects."""
        for optimizer in optimizers:
            for schedule in schedulers_of(optimizer):
                self._courses.setdefault(id(schedule), _Course(schedule))

    def note(self) -> None:
        """Note an update, before the script steps the schedules."""
        for course in self._courses.values():
            course.rates.append(float(course.schedule.optimizer.param_groups[0]["lr"]))
            course.counts.append(int(getattr(course.schedule, "last_epoch", 0)))

    def problem(self) -> str:
        """Return a sentence on a schedule that is stepped too often, if there is one."""
        return next(filter(None, (course.problem() for course in self._courses.values())), "")

    def outcome(self, *, is_planned: bool = False) -> Outcome:
        """Return what the schedules of a training have shown whose updates were all watched, or are planned."""
        known = [course for course in self._courses.values() if any(course.counts)]
        if not known:
            return not_checked("no schedule of an optimizer was stepped")
        if sentence := next(filter(None, (course.warms_up() for course in known)), ""):
            # Without a plan, a training that ends in its warm-up may be a short run of a script that is tried out.
            return broken(sentence) if is_planned else not_checked(sentence)
        if any(sum(rate <= LEAST * max(one.rates) for rate in one.rates) > MOST_LOW * len(one.rates) for one in known):
            return not_checked("the learning rate was low in many updates")
        return holds("; ".join(map(_Course.summary, known)))

    def planned_outcome(self, updates: int) -> Outcome | None:
        """Return the outcome for all updates of a plan; ``None`` if it does not decide.

        It is known once each schedule has been stepped after some updates.
        """
        courses = {key: course.planned(updates) for key, course in self._courses.items()}
        known = {key: course for key, course in courses.items() if course is not None}
        if not known or len(known) < len(courses):
            return None
        plan = Schedules()
        plan._courses = known
        sentence = plan.problem()
        outcome = broken(sentence) if sentence else plan.outcome(is_planned=True)
        plan_of = f"by the plan of {updates} updates: "
        return None if outcome.verdict == "not checked" else Outcome(outcome.verdict, plan_of + outcome.evidence)

    def end_soon(self) -> bool:
        """Return whether a schedule may end within the updates that are watched."""
        return any(course.ends_soon() for course in self._courses.values())


def _length(schedule: Any) -> float | None:
    """Return the steps after which a schedule has fallen to little, if its attributes show it."""
    given = vars(schedule)
    if "gamma" in given and 0 < given["gamma"] < 1:
        falls = math.log(LEAST) / math.log(given["gamma"])
        return (
            float(falls * given.get("step_size", 1)) if "milestones" not in given else float(max(given["milestones"]))
        )
    known = [
        given[name] for name in ("T_max", "total_iters", "total_steps") if isinstance(given.get(name), (int, float))
    ]
    return float(known[0]) if known else None


def _has_ranks() -> bool:
    """Return whether several ranks train, for which some libraries step a schedule several times."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
