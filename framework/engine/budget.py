"""A bound on the CPU time of hooks, kept by schedules that are thinned by powers of two.

See ``docs/decisions/0045-hooks-have-a-budget.md``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import itemgetter
from time import thread_time
from typing import Any, Literal, NamedTuple, TypeVar

from ..hooks import STEP_POINTS, HookPoint, Metrics, RunDataContext, StepSchedule, TrainingHook
from ..training import Ranks
from .hook_set import HookSet
from .listeners import Listener
from .metric_delivery import MetricDelivery

FIRST_WINDOW = 32
"""Steps with full schedules, which contain all early checks; the first decision follows."""
FIRST_SECONDS = 1.0
"""CPU seconds of hooks before which their schedules stay: a short training loses nothing by them."""
WINDOW = 128
"""Steps between two later decisions."""
WARM_UP = 4
"""First steps, which load code and fill caches, and do not count."""
METERED = 4
"""Steps before a decision in which the calls of the loop into loopscope are timed."""
MOST = 2**10
"""The largest factor by which a schedule is thinned."""
LEAST_PART = 0.2
"""The part of the budget that hooks may use even if what no schedule can thin has used up the budget."""
RELAXED = 0.75
"""The part of the budget that relaxed schedules must fit, so that schedules do not change back and forth."""
PAYBACK = 512
"""Steps within which time above the budget is saved again."""
CHECKED_CALLS = 3
"""First calls of a hook, with full checks, whose times are replaced by that of the next call."""
REMEMBERED_CALLS = 64
"""Calls over which the time of a call is averaged."""
PASSES = -1
"""In place of a hook point: the calls of a hook during the passes of a step."""

POINTS = {point.name: int(point) for point in STEP_POINTS}
AFTER_BACKWARD = frozenset({int(point) for point in STEP_POINTS} - {int(HookPoint.PRE_STEP)})
RECORDING = -2
"""In place of a hook point: the record of gradient norms, for all hooks that need them."""
Result = TypeVar("Result")
Factors = dict[str, int]
"""The factor by which the schedule of a hook is thinned, a power of two, by its name."""
Decisions = Mapping[int, Mapping[str, int]]
"""The factors of an earlier run, by the step after which they were chosen."""


class RecordedBudget(TrainingHook):
    """The origin of the chosen factors in the record, ``budget/thinning``; it is never called."""

    name = "budget"

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return nothing."""
        return {}


BUDGET = RecordedBudget()
THINNING = "thinning"
"""The metric with the factors by hook, at each step after which they change."""


@dataclass(frozen=True)
class BudgetSettings:
    """The budget of a run.

    Args:
        share: the bound, as a share of the CPU time of the training; ``None`` to repeat ``decisions``.
        hooks: names of the hooks whose schedules may be thinned.
        decisions: those of an earlier run.
    """

    share: float | None
    hooks: Collection[str]
    decisions: Decisions | None = None


class CallCost(NamedTuple):
    """The cost of a hook at one hook point."""

    hook: str
    point: int
    every: int
    """Steps from one group of calls to the next, without thinning."""
    length: int
    """Calls of a group, which are in successive steps."""
    seconds: float
    """The CPU time of a call."""


def cost_per_step(
    costs: Iterable[CallCost], shared: Mapping[int, float], occupied: Mapping[int, set[int]], factors: Mapping[str, int]
) -> float:
    """Return the mean CPU seconds of a step for hooks whose schedules are thinned by ``factors``.

    Args:
        costs: the costs of the hooks.
        shared: the seconds that all hooks of one call of a hook point share, by point.
        occupied: steps between the calls of hooks that are not thinned, by point; they pay what they share.
        factors: the factors by hook.
    """
    seconds, spacings = 0.0, {point: set[int]() for point in shared}
    for cost in costs:
        every = cost.every * factors[cost.hook]
        seconds += cost.seconds * cost.length / every
        if cost.point in spacings:
            spacings[cost.point].add(max(1, every // cost.length))
    for point, every_n in spacings.items():
        others = occupied.get(point, set())
        seconds += shared[point] * (_visited_share(every_n | others) - _visited_share(others))
    return seconds


def _visited_share(spacings: Iterable[int]) -> float:
    """Return the share of the steps that are in one of the schedules with these numbers of steps between two calls."""
    counted: list[int] = []
    for spacing in sorted(spacings):
        if all(spacing % smaller for smaller in counted):  # otherwise its steps are among those of the smaller one
            counted.append(spacing)
    return min(1.0, sum(1 / spacing for spacing in counted))


def thinner(cost: Callable[[Factors], float], factors: Factors, seconds: float) -> Factors:
    """Return factors, from these on, with which a step costs at most so many ``seconds``, or the largest ones.

    The schedule whose next doubling saves most is doubled first: each doubling halves what a hook sees.
    """
    total = cost(factors)
    while total > seconds:
        options = [factors | {name: 2 * factor} for name, factor in factors.items() if factor < MOST]
        if not options:
            break
        total, _, factors = min((cost(option), place, option) for place, option in enumerate(options))
    return factors


def denser(cost: Callable[[Factors], float], factors: Factors, seconds: float) -> Factors:
    """Return factors, from these on, that are smaller as long as a step costs at most so many ``seconds``.

    The schedule whose denser calls cost least is relaxed first.
    """
    while True:
        options = [factors | {name: factor // 2} for name, factor in factors.items() if factor > 1]
        if not options:
            return factors
        total, _, option = min((cost(option), place, option) for place, option in enumerate(options))
        if total > seconds:
            return factors
        factors = option


def thinned(schedule: StepSchedule, factor: int) -> StepSchedule:
    """Return a schedule with ``factor`` times as many steps between two groups of calls.

    >>> dense = StepSchedule(mode="burst", every_n_steps=10, burst_length=2)
    >>> [step for step in range(1, 45) if thinned(dense, 2).is_due(step)]
    [1, 2, 21, 22, 41, 42]
    """
    if factor == 1:
        return schedule
    mode: Literal["burst", "stride"] = "burst" if schedule.mode == "burst" else "stride"
    every = 1 if schedule.mode == "continual" else schedule.every_n_steps
    # Steps in ``also`` are early ones; others would not be among the steps of the hook's other schedules.
    return replace(schedule, mode=mode, every_n_steps=factor * every, also=())


class Meter:
    """The CPU time of the calls of a loop into loopscope, without that of hooks, over a few steps."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.hook_seconds = 0.0
        """The time of hooks, of the series that they need, and of the delivery of their metrics."""
        self.delivery_seconds = 0.0
        self.named_seconds = 0.0
        """The time of hooks without a budget, which counts neither as that of hooks nor as that of the training."""
        self.seconds = 0.0
        """The time of the other parts of the calls."""
        self._entries: list[tuple[object, Sequence[str]]] = []
        self._replaced: list[tuple[object, str, Any]] = []
        self._is_in_call = False

    @property
    def is_on(self) -> bool:
        """Whether calls are timed."""
        return bool(self._replaced)

    @property
    def all_hook_seconds(self) -> float:
        """The time of all hooks."""
        return self.hook_seconds + self.named_seconds

    def observe(self, target: object, names: Sequence[str]) -> None:
        """Time these methods of an object after :meth:`start`."""
        self._entries.append((target, names))

    def start(self) -> None:
        """Time the calls from now on; nothing is timed before, since timing costs as much as a small call."""
        self.seconds = 0.0
        for target, names in self._entries:
            for name in names:
                if (function := getattr(target, name)) is not None:
                    self._replaced.append((target, name, vars(target).get(name)))
                    setattr(target, name, self._timed(function))

    def stop(self) -> None:
        """Put the methods back."""
        for target, name, earlier in reversed(self._replaced):
            if earlier is None:
                delattr(target, name)
            else:
                setattr(target, name, earlier)
        self._replaced = []

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*inputs: Any, **options: Any) -> Any:
            if self._is_in_call:
                return function(*inputs, **options)
            self._is_in_call = True
            since, of_hooks = self._now(), self.all_hook_seconds
            try:
                return function(*inputs, **options)
            finally:
                self._is_in_call = False
                self.seconds += self._now() - since - (self.all_hook_seconds - of_hooks)

        return timed

    def of_delivery(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that always times another one, as a part of the hooks' time."""

        @wraps(function)
        def timed(*inputs: Any, **options: Any) -> Any:
            since = self._now()
            try:
                return function(*inputs, **options)
            finally:
                seconds = self._now() - since
                self.hook_seconds += seconds
                self.delivery_seconds += seconds

        return timed


class Budget:
    """Measures hooks and training, and thins the schedules of hooks until their time is within the budget.

    The time is the CPU time of the thread that trains, which other processes do not change. Decisions are made after
    fixed steps, so that all ranks make them together; ranks use the factors of the first one.
    """

    def __init__(self, settings: BudgetSettings, hooks: HookSet, delivery: MetricDelivery, ranks: Ranks) -> None:
        self.now: Callable[[], float] = thread_time
        self.meter = Meter(self.now)
        self.share, self._names, self._decisions = settings.share, {*settings.hooks}, settings.decisions
        self._hooks, self._delivery, self._ranks = hooks, delivery, ranks
        self.factors: Factors = {}
        self._original: dict[str, tuple[TrainingHook, StepSchedule, Mapping[HookPoint, StepSchedule]]] = {}
        self._calls: dict[tuple[str, int], tuple[int, float]] = {}  # the number of calls, and the mean time of one
        self._shared: dict[int, tuple[int, float]] = {}
        self._call_seconds = 0.0  # of all calls at hook points
        self._pass_step = 0
        self._pass_seconds: dict[str, float] = {}
        self.next_event = 0
        """The step after which :meth:`end_step` has something to do."""
        self._since: tuple[int, float] | None = None
        # of the meter at the start of the window
        self._hook_seconds = self._delivery_seconds = self._named_seconds = 0.0
        self._has_begun = False
        """Whether the hooks have used up the time that is free."""
        self._paces: list[float] = []
        self._fixed: float | None = None
        self._delivered = 0.0
        self._spent = self._trained = 0.0  # since the first decision
        self._newest: dict[str, float] = {}
        self._report: dict[str, Any] = {}  # once the run has ended
        self.reporter: Listener | None = None
        """The listener whose loss is recorded at every step, also without a call of its hook."""

    # The life cycle

    def start(self, step: int) -> None:
        """Note the schedules that hooks have chosen at their start, and use the factors of a restored record."""
        for hook in self._hooks:
            is_free = hook.name in self._names and not hook.has_fixed_schedule
            if is_free and any(item.point in STEP_POINTS for item in self._hooks.listeners.of(hook)):
                self._original[hook.name] = hook, hook.step_schedule, hook.point_schedules
        self.factors = dict.fromkeys(self._original, 1)
        self.reporter = None if self._hooks.listeners.recorded is not None else self._loss_reporter()
        restored = self._delivery.last().get(f"{BUDGET.name}/{THINNING}", {})
        self._apply({name: int(factor) for name, factor in restored.items()})
        if self._decisions is None and self._original:
            self._plan_next(step)
            self.next_event = step + WARM_UP
        elif self._decisions is not None:
            self.next_event = min((at for at in self._decisions if at > step), default=0)

    def repeat(self, decisions: Decisions) -> None:
        """Repeat the decisions of an earlier run instead of measuring; called before :meth:`start`."""
        self._decisions = decisions

    def _loss_reporter(self) -> Listener | None:
        """Return the listener at the last point of a step whose hook reports the loss."""
        points = sorted(STEP_POINTS, reverse=True)
        all_listeners = (item for point in points for item in self._hooks.listeners.at[point])
        return next((item for item in all_listeners if item.hook.loop_values and item.takes_every_step), None)

    def end(self) -> None:
        """Put the schedules of the hooks back, which another run may use."""
        self._report = self.report()
        self.meter.stop()
        self._apply(dict.fromkeys(self.factors, 1))

    # Measurements, which the calls of hooks report

    def time_call(self, hook: str, where: str, call: Callable[[], Result]) -> Result:
        """Make a call at a hook point, or of another method, which is part of what all hooks share."""
        if where not in POINTS:
            return call()
        since = self.now()
        try:
            return call()
        finally:
            seconds = self.now() - since
            self._call_seconds += seconds
            if hook in self._original:
                self._add(self._calls, (hook, POINTS[where]), seconds)
            else:
                self.meter.named_seconds += seconds

    def time_visit(self, point: int, call: Callable[[], object]) -> None:
        """Call the due hooks at a point, or record gradients for them."""
        since, of_calls, of_named = self.now(), self._call_seconds, self.meter.named_seconds
        try:
            call()
        finally:
            seconds = self.now() - since
            self.meter.hook_seconds += seconds - (self.meter.named_seconds - of_named)
            self._add(self._shared, point, seconds - (self._call_seconds - of_calls))

    def time_pass(self, hook: str, step: int, call: Callable[[], Result]) -> Result:
        """Make a call during a pass of the training; those of one step count as one."""
        since = self.now()
        try:
            return call()
        finally:
            self._add_pass(hook, step, self.now() - since)

    def _add_pass(self, hook: str, step: int, seconds: float) -> None:
        if hook not in self._original:
            self.meter.named_seconds += seconds
            return
        if step != self._pass_step:
            self._end_passes()
            self._pass_step = step
        self._pass_seconds[hook] = self._pass_seconds.get(hook, 0.0) + seconds
        self.meter.hook_seconds += seconds

    def _end_passes(self) -> None:
        for name, seconds in self._pass_seconds.items():
            self._add(self._calls, (name, PASSES), seconds)
        self._pass_seconds = {}

    @staticmethod
    def _add(means: dict[Any, tuple[int, float]], key: object, seconds: float) -> None:
        count, mean = means.get(key, (0, 0.0))
        weight = 1.0 if count <= CHECKED_CALLS else 1 / min(count - CHECKED_CALLS + 1, REMEMBERED_CALLS)
        means[key] = count + 1, mean + weight * (seconds - mean)

    # Decisions

    def end_step(self, step: int) -> None:
        """Start to time calls, or decide, after the steps that are planned for it."""
        if not self.next_event or step < self.next_event:
            return
        if self._decisions is not None:
            self._repeat(step)
        elif self._since is None:
            self._open_window(step)
            self.next_event = self._decision_step - METERED
        elif not self.meter.is_on:
            self.meter.start()
            self.next_event = self._decision_step
        else:
            self.meter.stop()
            self._decide(step)
            self._plan_next(step)
            self._open_window(step)

    def _plan_next(self, step: int) -> None:
        """Plan the next decision, at a step that does not depend on where a resumed run has started."""
        following = (step // WINDOW + 1) * WINDOW
        if step < FIRST_WINDOW:
            following = FIRST_WINDOW
        elif following - step < FIRST_WINDOW:
            following += WINDOW
        self._decision_step = following
        self.next_event = following - METERED

    def _open_window(self, step: int) -> None:
        self._since = step, self.now()
        self._hook_seconds, self._delivery_seconds = self.meter.hook_seconds, self.meter.delivery_seconds
        self._named_seconds = self.meter.named_seconds

    def _repeat(self, step: int) -> None:
        """Use the recorded factors of an earlier run."""
        decisions = self._decisions or {}
        if step in decisions:
            self._change(dict(decisions[step]), step)
        self.next_event = min((at for at in decisions if at > step), default=0)

    def _decide(self, step: int) -> None:
        """Choose the factors for the following steps, and record them if they change."""
        self._end_passes()
        began, since = self._since or (step - 1, self.now())
        steps, meter = step - began, self.meter
        metered = self.meter.seconds / METERED
        self._fixed = metered if self._fixed is None else (self._fixed + metered) / 2
        of_hooks, of_named = (
            (meter.hook_seconds - self._hook_seconds) / steps,
            (meter.named_seconds - self._named_seconds) / steps,
        )
        delivered = (self.meter.delivery_seconds - self._delivery_seconds) / steps
        self._delivered = (self._delivered + delivered) / 2
        training = max((self.now() - since) / steps - of_hooks - of_named - self._fixed, 1e-9)
        if self._has_begun:
            self._spent += steps * (of_hooks + self._fixed)
            self._trained += steps * training
        self._paces = [*self._paces[-1:], training]
        pace = min(self._paces)  # a single slow window, such as one with an evaluation, does not relax schedules
        self._has_begun = self._has_begun or meter.hook_seconds >= FIRST_SECONDS
        factors = self._factors_within(pace) if self._has_begun else dict(self.factors)
        if self._ranks.are_many:
            factors = self._ranks.gather(factors)[0]
        self._change(factors, step)
        if not self._has_begun:
            return
        cost, current = self._cost_function()
        self._newest = {"training": pace, "fixed": self._fixed + self._delivered, "hooks": cost(current)}

    def _factors_within(self, pace: float) -> Factors:
        """Return the factors with which hooks are within their part of the budget, at a pace of training."""
        cost, current = self._cost_function()
        if not current:
            return dict(self.factors)
        budget = (self.share or 0.0) * pace
        excess = max(0.0, self._spent - (self.share or 0.0) * self._trained) / PAYBACK
        part = max(budget - (self._fixed or 0.0) - self._delivered - excess, LEAST_PART * budget)
        following = thinner(cost, current, part)
        return self.factors | (denser(cost, current, RELAXED * part) if following == current else following)

    def _cost_function(self) -> tuple[Callable[[Factors], float], Factors]:
        """Return the cost of a step as a function of factors, and the current factors of the measured hooks."""
        costs: list[CallCost] = []
        occupied: dict[int, set[int]] = {}
        for hook in self._hooks:
            listeners = [item for item in self._hooks.listeners.of(hook) if item.point in STEP_POINTS]
            for item in listeners:
                if hook.name not in self._original and item is not self._hooks.listeners.recorded:
                    for point in _places(int(item.point)):
                        occupied.setdefault(point, set()).add(item.schedule.every_n_steps)
            if hook.name not in self._original:
                continue
            _, of_steps, of_points = self._original[hook.name]
            places = {int(item.point): of_points.get(item.point, of_steps) for item in listeners} | {PASSES: of_steps}
            for point, schedule in places.items():
                if (hook.name, point) in self._calls:
                    length = schedule.burst_length if schedule.mode == "burst" else 1
                    every = 1 if schedule.mode == "continual" else schedule.every_n_steps
                    cost = CallCost(hook.name, point, every, length, self._calls[hook.name, point][1])
                    costs += [cost, *(cost._replace(point=place, seconds=0.0) for place in _places(point)[1:])]
        shared = {point: mean for point, (_, mean) in self._shared.items()}
        known = {cost.hook: self.factors[cost.hook] for cost in costs}
        return partial(cost_per_step, costs, shared, occupied), known

    def _change(self, factors: Factors, step: int) -> None:
        """Use other factors after a step, and record them."""
        if self._apply(factors):
            self._delivery.add(BUDGET, HookPoint.POST_STEP, step, {THINNING: dict(self.factors)})

    def _apply(self, factors: Mapping[str, int]) -> bool:
        """Set the schedules of hooks, and return whether one has changed."""
        changed = {name: factor for name, factor in factors.items() if self.factors.get(name, factor) != factor}
        for name, factor in changed.items():
            hook, of_steps, of_points = self._original[name]
            hook.step_schedule = thinned(of_steps, factor)
            hook.point_schedules = {point: thinned(schedule, factor) for point, schedule in of_points.items()}
            self.factors[name] = factor
        if changed:
            self._hooks.listeners.reschedule()
        return bool(changed)

    # Results

    def report(self) -> dict[str, Any]:
        """Return the budget, the schedules and the measured shares, for the summary; empty before a decision."""
        if self._report or not self._newest:
            return self._report
        training = self._newest["training"]
        content: dict[str, Any] = {
            "budget": self.share,
            "every": self._spacings(),
            "expected_hooks": self._newest["hooks"] / training,
            "fixed": self._newest["fixed"] / training,
        }
        return content | ({"measured": self._spent / self._trained} if self._trained else {})

    def _spacings(self) -> dict[str, int]:
        """Return the steps between two calls of each thinned hook, most frequent first."""
        spacings = {}
        for name, factor in self.factors.items():
            hook = self._original[name][0]
            places = [item.schedule for item in self._hooks.listeners.of(hook) if item.point in STEP_POINTS]
            if factor > 1 and places:
                spacings[name] = min(schedule.every_n_steps for schedule in places)
        return dict(sorted(spacings.items(), key=itemgetter(1)))


def _places(point: int) -> list[int]:
    """Return a point and, if hooks at it need the record of gradients, its place."""
    return [point, RECORDING] if point in AFTER_BACKWARD else [point]
