"""Branches of a training with one change each, and the rises of their losses, for tests of the doctor's hypotheses."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from statistics import median

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext
from loopscope.data import Batch, part_of, rows
from loopscope.errors import LoopscopeError, require, unknown
from loopscope.hooks import Metrics, ModelDataContext
from loopscope.laboratory import CHANGES, LARGEST_RISE, UNCHANGED, TrialChange, rises_by_chance
from loopscope.tensors import copied, norm, overwrite, trainable
from loopscope.training import eagerly
from torch import Tensor

from ..curvature import coming_batches, parts_in
from .changed_steps import BranchesHook, ChangedSteps, possible_changes
from .rows import exclude_shared_rows, measure_rows, outlier_rows, without_rows

FIXED_BATCHES = 4
"""Number of batches whose loss is measured at the end of every branch."""
MOST_MEASURED_ROWS = 128
"""Rows of a batch up to which each is measured; a larger batch is replaced as a whole."""
FEWEST_BRANCHES = 4
FEWEST_ROWS = 8
"""Rows of a batch from which random halves can stand for other batches."""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class HypothesisTest(BranchesHook):
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
        require(
            0 <= self.event < self.steps,
            f"hypothesis_test.event is {self.event}; it must be at least 0, and below steps ({self.steps}).",
        )
        needs_event = any(item.replaces_rows for item in self._changes)
        require(self.event > 0 or not needs_event, "The change without_rows needs hypothesis_test.event.")
        super().__post_init__()

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run all branches from the current state."""
        with eagerly():
            batches = planned_batches(run_ctx, model_ctx, self.branches, self.steps, self.event)
            trials = Trials(model_ctx, batches, self.event - 1, self.usual_norm)
            state = {"level": trials.level, "scale": trials.scale}
            if not math.isfinite(trials.level):
                return {**state, "rise": {}, "rows": [], "ordinary": []}
            changes = possible_changes(self._changes, run_ctx)
            rises, ordinary = trials.rises_by_change(changes), trials.ordinary_rises()
            left_out_rows = trials.left_out_rows if any(item.replaces_rows for item in changes) else []
            return {**state, "rise": rises, "rows": left_out_rows, "ordinary": ordinary}


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
    batch = run_ctx.batch_data
    coming = coming_batches(model_ctx.loader, run_ctx.step, parts_in(batch))
    coming = chain([batch], coming) if run_ctx.hook_point is HookPoint.PRE_STEP else _with_halves(batch, coming)

    def take(count: int) -> list[Batch]:
        return [*islice(coming, count)]

    own = take(steps)
    fixed = [take(FIXED_BATCHES) for _ in range(branches)]
    orders = [own, *([*own[:shared], *take(steps - shared)] for _ in range(branches - 1))]
    if not shared:
        return TrialBatches(orders, fixed, [], [])
    spare, count = take(branches), branches * steps
    others = exclude_shared_rows(own[shared - 1], take(2 * count), fewest=count)
    return TrialBatches(orders, fixed, spare, [others[first : first + steps] for first in range(0, count, steps)])


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
        self.model_ctx, self._batches, self._event, self._usual_norm = model_ctx, batches, event, usual_norm
        # Losses at the same state, with the batches and the random numbers of each order: shape (orders, steps + 1).
        self._references = self._losses(UNCHANGED, batches.orders, frozen=True)
        usual = self._references[:, torch.arange(self._references.shape[1]) != event]
        self.level = float(usual.mean())
        self.scale = float(usual.abs().mean()) or 1.0

    def rises_by_change(self, changes: Sequence[TrialChange]) -> dict[str, list[float]]:
        """Return the mean rises of the loss in the branches of each change, and in those without one."""
        unchanged = self._rises(UNCHANGED)
        rises = {UNCHANGED.name: unchanged}
        for change in changes:
            # Without numbers of 16 bits, float32 changes nothing.
            is_idle = change.precision is not None and not self._has_low_precision
            rises[change.name] = unchanged if is_idle else self._rises(change)
        return rises

    @property
    def _has_low_precision(self) -> bool:
        """Whether a forward pass computes in float16 or bfloat16."""
        steps = ChangedSteps(self.model_ctx, CHANGES["float32"])
        steps.losses(self._batches.fixed[0][:1])
        return steps.converted_count > 0

    def _rises(self, change: TrialChange) -> list[float]:
        orders, references = [[*order] for order in self._batches.orders], self._references.clone()
        if self._event >= 0:
            references[:, self._event] = self.level
        if change.replaces_rows:
            replacements = self._without_rows
            for place, order in enumerate(orders):
                order[self._event] = replacements[place % len(replacements)]
                # A batch that takes the place of the event counts from its loss before the branch.
                if not self.left_out_rows:
                    references[place, self._event] = self.model_ctx.compute_batch_loss(order[self._event])
        return self._measured(self._losses(change, orders) - references).mean(1).tolist()

    def _measured(self, rises: Tensor) -> Tensor:
        """Return the rises, shape (branches, steps + 1), of the steps that count, limited.

        These are all but the first step, whose loss precedes every update, and the end. With an event they are its step
        and the following ones: otherwise the fall of a healthy loss would hide it.
        """
        return self._limited(rises[:, self._event : -1] if self._event >= 0 else rises[:, 1:])

    def _limited(self, rises: Tensor) -> Tensor:
        highest = LARGEST_RISE * self.scale
        return torch.where(rises.isfinite(), rises, highest).clamp(max=highest)

    def ordinary_rises(self) -> list[float]:
        """Return the rises that ordinary batches give by chance in the place of the event, one for each batch."""
        if not (orders := self._batches.ordinary):
            return []
        starts = self._losses(UNCHANGED, orders, frozen=True)
        rises = self._measured(self._losses(UNCHANGED, orders) - starts)
        lucks = self._limited(starts[:, :-1] - self.level) / rises.shape[1]
        return rises_by_chance(lucks.tolist(), rises.mean(1).tolist())

    def _losses(self, change: TrialChange, orders: Sequence[Sequence[Batch]], *, frozen: bool = False) -> Tensor:
        """Return the loss of each step before its update, and the mean of the fixed batches at the end of the branch.

        The shape is (branches, steps + 1), float64 on the CPU. In ``frozen`` branches the parameters are restored after
        every step.
        """
        if change.clips and not self._usual_norm:
            gradients = map(self.model_ctx.compute_batch_gradients, self._batches.fixed[0])
            self._usual_norm = median(float(norm(item)) for item in gradients)
        steps = ChangedSteps(self.model_ctx, change, usual_norm=self._usual_norm)
        branches = []
        for place, (order, fixed) in enumerate(zip(orders, self._batches.fixed, strict=True)):
            with steps.branch(draws=place):  # other dropout masks in every order
                parameters = trainable(self.model_ctx.model)
                start = copied(parameters) if frozen else {}
                losses = []
                for batch in order:
                    losses.append(steps.take(batch))
                    overwrite(parameters, start)
                losses.append(steps.losses(fixed).mean())
            branches.append(torch.stack(losses))
        return torch.stack(branches).cpu()  # one transfer to the host

    @cached_property
    def left_out_rows(self) -> list[int]:
        """The positions of the event's rows that stand out; none in a large batch, or if they are more than half."""
        batch, others = self._batches.orders[0][self._event], self._batches.fixed[0]
        if rows(batch) > MOST_MEASURED_ROWS:
            return []
        usual = torch.cat([measure_rows(self.model_ctx, item) for item in others], dim=1)
        places = outlier_rows(batch, measure_rows(self.model_ctx, batch), others, usual)
        return places if 2 * len(places) <= rows(batch) else []

    @cached_property
    def _without_rows(self) -> Sequence[Batch]:
        """The event's batch without the rows that stand out, or other batches if none does."""
        batch = self._batches.orders[0][self._event]
        return [without_rows(batch, self.left_out_rows)] if self.left_out_rows else self._batches.spare
