"""Branches of a training with one change each, and the rises of their losses, for tests of the doctor's hypotheses."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import torch
from loopscope import DebugInterventionHook, HookPoint, HookRegistry, RunDataContext, StepSchedule
from loopscope.data import Batch, part_of, rows
from loopscope.errors import LoopscopeError, UnsuitableError, require, unknown
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.laboratory import CHANGES, LARGEST_RISE, UNCHANGED, TrialChange, rises_by_chance
from loopscope.tensors import copied, norm, overwrite, trainable
from loopscope.training import eagerly
from torch import Tensor

from ..curvature import coming_batches, parts_in
from .changed_steps import ChangedSteps
from .rows import exclude_shared_rows, measure_rows, outliers, repeated

FIXED_BATCHES = 4
"""Number of batches whose loss is measured at the end of every branch."""
MOST_MEASURED_ROWS = 128
"""Rows of a batch up to which each is measured; a larger batch is replaced as a whole."""
FEWEST_BRANCHES = 4
FEWEST_ROWS = 8
"""Rows of a batch from which random halves can stand for other batches."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class HypothesisTest(DebugInterventionHook):
    """Train branches from the state before one step, unchanged and with one change each, and measure their losses.

    ``loopscope doctor --test`` and ``scope.diagnose(test=True)`` use it. Every branch trains ``steps`` steps and is
    rolled back. The first unchanged branch trains on the run's own next batches, the others on later ones; each changed
    branch has the batches and the random numbers of an unchanged one, so that their difference is the effect of the
    change. So has a branch whose parameters are restored after every step: the rise of a loss is counted from there. If
    the step of an event is given, all branches have the batches up to that step in common, and further unchanged
    branches have only ordinary batches: the spread of their rises is that of chance.

    * ``half_rate``, ``tenth_rate``, ``hundredth_rate``, ``tenfold_rate``: all learning rates times ½, 0.1, 0.01, 10
    * ``clipped``: gradients clipped at ``usual_norm``
    * ``float32``: all operations of the passes in that precision
    * ``fresh_state``: with a reset optimizer
    * ``no_decay``: without weight decay
    * ``without_rows``: without the rows of the event's batch that stand out, or with another batch in its place

    Assumes a run of one process, and batches that resemble each other: in a sorted order a change of the data looks
    like a rise. Per-epoch schedulers do not advance, and committing hooks (clipping) are disabled in the branches.
    Learning rates that are not numbers are not changed.

    Args:
        branches: number of unchanged branches, and of branches with each change.
        changes: names of the changes, separated by commas.
        event: the position of the event's step in a branch, counted from 1; 0 without an event.
        step: the first step of the branches, counted from 1.
        steps: number of steps of a branch.
        usual_norm: the norm at which to clip; 0: the median norm on the fixed batches.
    """

    name = "hypothesis_test"
    hook_points = frozenset({HookPoint.PRE_STEP})
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    metrics = f"""
        rise | mean of L − L of the branch with restored parameters, over steps 2, 3, … and the mean L of
            {FIXED_BATCHES} further batches after the branch; with an event over its step (there: L − level) and those
            after it. Each is at most {LARGEST_RISE:.0f}·scale. A list with a value for each branch
            | (−∞, {LARGEST_RISE:.0f}·scale] | Compare a change with `unchanged`, value by value.
        level | mean L at the state before the branches, over all batches except the event's | (−∞, ∞)
            | Not finite: the state is damaged already.
        scale | mean size of these L | (0, ∞) | The unit of small effects.
        ordinary | with an event, for each of the branches × steps batches of ordinary branches: (L − level at the
            state before them)/(measured steps) + the rise of its branch from there − its mean over these branches;
            the first term alone if every ordinary branch rises by more than those
            | (−∞, ∞) | Rises below the largest of these are chance.
        rows | positions of the rows of the event's batch that `without_rows` leaves out | a list
            | Empty: no row stands out, and another batch took its place.
    """

    branches: int = 4
    changes: str = "half_rate,tenth_rate"
    event: int = 0
    step: int = 1
    steps: int = 10
    usual_norm: float = 0.0

    def __post_init__(self) -> None:
        known = {name: change for name, change in CHANGES.items() if change.findings}
        names = [name.strip() for name in self.changes.split(",") if name.strip()]
        if wrong := [name for name in names if name not in known]:
            raise unknown("change", wrong[0], known)
        self._changes = [known[name] for name in names]
        require(
            self.branches >= FEWEST_BRANCHES,
            f"hypothesis_test.branches is {self.branches}; an error needs at least {FEWEST_BRANCHES}.",
        )
        require(self.steps >= 2, f"hypothesis_test.steps is {self.steps}; it must be at least 2.")
        require(self.step >= 1, f"hypothesis_test.step is {self.step}; steps are counted from 1.")
        require(
            0 <= self.event < self.steps,
            f"hypothesis_test.event is {self.event}; it must be at least 0, and below steps ({self.steps}).",
        )
        needs_event = any(item.replaces_rows for item in self._changes)
        require(self.event > 0 or not needs_event, "The change without_rows needs hypothesis_test.event.")
        require(self.usual_norm >= 0, f"hypothesis_test.usual_norm is {self.usual_norm}; it must be at least 0.")
        self.step_schedule = StepSchedule(mode="burst", every_n_steps=2**62, burst_length=1, warmup=self.step - 1)

    def start(self, run: RunInfo) -> None:
        """Reject several processes."""
        if run.ranks.are_many:
            raise UnsuitableError("Hook 'hypothesis_test' needs a run of one process.")

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run all branches from the current state."""
        with eagerly():
            batches = planned_batches(run_ctx, model_ctx, self.branches, self.steps, self.event)
            trials = Trials(model_ctx, batches, self.event - 1, self.usual_norm)
            has_rates = not any(math.isnan(group.lr) for group in run_ctx.optimizer_groups)
            possible = [item for item in self._changes if has_rates or item.rate_factor == 1]
            return self._measure(trials, possible)

    def _measure(self, trials: "Trials", changes: Sequence[TrialChange]) -> Metrics:
        if not math.isfinite(trials.level):
            return {"level": trials.level, "scale": trials.scale, "rise": {}, "rows": [], "ordinary": []}
        rises = {UNCHANGED.name: trials.rises(UNCHANGED)}
        for change in changes:
            is_idle = change.precision is not None and not trials.has_low_precision
            # Without numbers of 16 bits, float32 changes nothing.
            rises[change.name] = rises[UNCHANGED.name] if is_idle else trials.rises(change)
        ordinary = trials.ordinary_rises()
        values = {"level": trials.level, "scale": trials.scale, "rows": trials.left_out_rows}
        return {**values, "rise": rises, "ordinary": ordinary}


@dataclass(frozen=True)
class TrialBatches:
    """The batches of the branches."""

    orders: Sequence[Sequence[Batch]]
    """The batches of each unchanged branch, in order."""
    fixed: Sequence[Sequence[Batch]]
    """The batches of the loss at the end of each branch, which would share their luck if they were the same."""
    spare: Sequence[Batch]
    """A batch for each branch, to take the place of that of the event."""
    ordinary: Sequence[Sequence[Batch]]
    """The batches of branches without the event, without rows of its batch; none without an event."""


def planned_batches(
    run_ctx: RunDataContext, model_ctx: ModelDataContext, branches: int, steps: int, shared: int
) -> TrialBatches:
    """Return the batches of branches whose first ``shared`` batches are the same.

    Between two steps of a loop whose data are unknown, random halves of the rows of its last batch are the batches.

    Raises:
        LoopscopeError: if there are neither data nor a last batch with enough rows.
    """
    parts = parts_in(run_ctx.batch_data)
    coming = coming_batches(model_ctx.loader, run_ctx.step, parts)
    if run_ctx.hook_point is HookPoint.PRE_STEP:
        coming = _with_first(run_ctx.batch_data, coming)
    else:
        coming = _with_halves(run_ctx.batch_data, coming)
    own = [*islice(coming, steps)]
    fixed = [[*islice(coming, FIXED_BATCHES)] for _ in range(branches)]
    orders = [own] + [[*own[:shared], *islice(coming, steps - shared)] for _ in range(branches - 1)]
    if not shared:
        return TrialBatches(orders, fixed, [], [])
    spare = [*islice(coming, branches)]
    count = branches * steps
    others = exclude_shared_rows(own[shared - 1], [*islice(coming, 2 * count)], fewest=count)
    return TrialBatches(
        orders, fixed, spare, [others[place * steps : (place + 1) * steps] for place in range(branches)]
    )


def _with_first(first: Batch, coming: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    yield from coming


def _with_halves(last: Batch | None, coming: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the coming batches, or random halves of the last batch if the data are unknown."""
    try:
        yield next(coming)
    except LoopscopeError:
        count = 0 if last is None else rows(last)
        if count < FEWEST_ROWS:
            raise
        while True:
            yield part_of(last, torch.randperm(count)[: count // 2])
    yield from coming


class Trials:
    """Branches from the current state, each rolled back."""

    def __init__(self, model_ctx: ModelDataContext, batches: TrialBatches, event: int, usual_norm: float) -> None:
        """Measure the losses at the state before the branches; ``event`` is the index of the event's step, or −1."""
        self.model_ctx, self._batches, self._event = model_ctx, batches, event
        self._usual_norm = usual_norm
        self.left_out_rows: list[int] = []
        self._replacement: list[Batch] = []
        # Losses at the same state, with the batches and the random numbers of each order: shape (orders, steps + 1).
        self._references = self._losses_of_all(UNCHANGED, frozen=True)
        usual = [loss for losses in self._references for index, loss in enumerate(losses) if index != event]
        self.level = sum(usual) / len(usual)
        self.scale = sum(map(abs, usual)) / len(usual) or 1.0

    @property
    def has_low_precision(self) -> bool:
        """Whether a forward pass computes in float16 or bfloat16."""
        steps = ChangedSteps(self.model_ctx, CHANGES["float32"])
        steps.loss(self._batches.fixed[0][0])
        return steps.converted_count > 0

    def rises(self, change: TrialChange) -> list[float]:
        """Return the mean rise of the loss in each branch with a change.

        It is the mean over the steps and the end, without the first step, whose loss precedes every update. With an
        event it is the mean over its step and the following ones: otherwise the fall of a healthy loss would hide it.
        """
        return [self._rise(place, losses, change) for place, losses in enumerate(self._losses_of_all(change))]

    def _rise(self, place: int, losses: Sequence[float], change: TrialChange) -> float:
        references = list(self._references[place])
        if self._event >= 0:
            is_replaced = change.replaces_rows and not self.left_out_rows
            # A batch that takes the place of the event counts from its loss before the branch.
            batch = self._batches.spare[place] if is_replaced else None
            references[self._event] = self.level if batch is None else float(self.model_ctx.compute_batch_loss(batch))
        rises = [self._limited(loss - reference) for loss, reference in zip(losses, references, strict=True)]
        rises = rises[self._event : -1] if self._event >= 0 else rises[1:]
        return sum(rises) / len(rises)

    def _limited(self, rise: float) -> float:
        highest = LARGEST_RISE * self.scale
        return min(rise, highest) if math.isfinite(rise) else highest

    def ordinary_rises(self) -> list[float]:
        """Return the rises that ordinary batches give by chance in the place of the event, one for each batch."""
        orders = self._batches.ordinary
        if not orders:
            return []
        starts = self._losses_of_all(UNCHANGED, orders, frozen=True)
        rises = [
            [self._limited(loss - start) for loss, start in zip(*pair, strict=True)][self._event : -1]
            for pair in zip(self._losses_of_all(UNCHANGED, orders), starts, strict=True)
        ]
        measured = len(rises[0])
        lucks = [[self._limited(start - self.level) / measured for start in losses[:-1]] for losses in starts]
        return rises_by_chance(lucks, [sum(values) / measured for values in rises])

    def _losses_of_all(
        self, change: TrialChange, orders: Sequence[Sequence[Batch]] = (), *, frozen: bool = False
    ) -> list[list[float]]:
        """Return the losses of all branches with a change, after one transfer to the host."""
        if change.clips:
            self._usual_norm = self._usual_norm or self._measured_norm()
        losses = [
            self._losses(place, batches, change, frozen=frozen)
            for place, batches in enumerate(orders or self._batches.orders)
        ]
        return torch.stack(losses).tolist()  # type: ignore[no-any-return]

    def _losses(self, place: int, order: Sequence[Batch], change: TrialChange, *, frozen: bool = False) -> Tensor:
        """Return the loss of each step of a branch, before its update, and the mean of the fixed batches at its end.

        In a ``frozen`` branch the parameters are restored after every step.
        """
        batches, steps = list(order), ChangedSteps(self.model_ctx, change, usual_norm=self._usual_norm)
        if change.replaces_rows:
            batches[self._event] = self._without_rows(place)
        with steps.branch(draws=place):  # other dropout masks in every order
            parameters = trainable(self.model_ctx.model)
            start = copied(parameters) if frozen else {}
            losses = []
            for batch in batches:
                losses.append(steps.take(batch))
                overwrite(parameters, start)
            last = [steps.loss(batch) for batch in self._batches.fixed[place]]
        return torch.stack([*losses, torch.stack(last).mean()])

    def _measured_norm(self) -> float:
        """Return the median gradient norm on the fixed batches."""
        return median(float(norm(self.model_ctx.compute_batch_gradients(batch))) for batch in self._batches.fixed[0])

    def _without_rows(self, place: int) -> Batch:
        """Return the event's batch without the rows that stand out, or another batch if none does."""
        if not self._replacement:
            batch = self._batches.orders[0][self._event]
            self.left_out_rows = self._rows_standing_out(batch)
            rest = [row for row in range(rows(batch)) if row not in self.left_out_rows]
            is_part = 2 * len(rest) >= rows(batch) and self.left_out_rows
            self.left_out_rows = self.left_out_rows if is_part else []
            self._replacement = [part_of(batch, rest)] if is_part else list(self._batches.spare)
        return self._replacement[place % len(self._replacement)]

    def _rows_standing_out(self, batch: Batch) -> list[int]:
        if rows(batch) > MOST_MEASURED_ROWS:
            return []
        others = self._batches.fixed[0]
        usual = torch.cat([measure_rows(self.model_ctx, item) for item in others], dim=1)
        return sorted({*outliers(measure_rows(self.model_ctx, batch), usual), *repeated(batch, others)})
