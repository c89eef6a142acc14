"""How much the gradient of one epoch agrees with that of the epoch before."""

from collections.abc import Sequence

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory, FlatVector


def agreement(layout: FlatLayout, now: Tensor, before: Tensor, shared: Sequence[str]) -> dict[str, Tensor]:
    """Return how two mean gradients agree, the metrics of :class:`Consecutive`; overwrites ``before``.

    Both are the elements of flat vectors, shape (elements,). ``shared`` names the parameters that had a gradient both
    times, the ones with a cosine of their own.
    """
    products, squares, earlier = layout.dots(now, before), layout.dots(now, now), layout.dots(before, before)
    product, square, square_before = products.sum(), squares.sum(), earlier.sum()
    change = torch.sub(now, before, out=before)
    cosines = layout.by_name(products / (squares.sqrt() * earlier.sqrt()))
    return {
        "cosine": product / (square.sqrt() * square_before.sqrt()),
        "norm_ratio": square.sqrt() / square_before.sqrt(),
        "relative_change": layout.norm(change) / square_before.sqrt(),
        **{f"parameter_cosine/{name}": cosines[name] for name in shared},
    }


@HookRegistry.register
class Consecutive(TrainingHook):
    """Measure the cosine between the mean gradients of successive epochs, over all parameters and for each.

    The mean gradient is that over the epoch's steps, as POST_BACKWARD saw it. In the step loop an epoch is one pass
    over the data (or ``interval`` steps), and the report comes at POST_BACKWARD of its last step.

    Assumes at least two epochs, and that the same parameters are trained in both; where that changes, the report is
    left out. A parameter without gradient stands for zeros. Keeps two gradients in float32 or wider: the last mean, and
    the one to come.

    Args:
        interval: in the step loop, the steps to a mean gradient; 0: one pass over the data.
    """

    name = "consecutive"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.POST_BACKWARD})}
    needs_grads = True
    _memory = Remembered(FlatMemory)
    _owners = Remembered(dict[str, list[str]])  # by vector of the memory: the parameters that had a gradient
    _summed = Remembered(int)
    metrics = """
        cosine | ḡ·ḡ' / (‖ḡ‖₂ ‖ḡ'‖₂), ḡ the mean over the epoch's steps of the gradient, ḡ' that of the epoch before
            | [−1, 1] | Near 1: epochs push in one direction; 0: what one epoch asks for, the next has forgotten; below
            0: they contradict each other, as when overshooting a valley. NaN: one of the two is zero.
        norm_ratio | ‖ḡ‖₂ / ‖ḡ'‖₂ | [0, ∞] | Above 1: the gradient grows from epoch to epoch.
        relative_change | ‖ḡ − ḡ'‖₂ / ‖ḡ'‖₂ | [0, ∞]
            | 0: the same gradient; √2 at equal norms: at a right angle. Unlike the cosine it sees the length.
        parameter_cosine/<parameter> | ḡ_p·ḡ'_p / (‖ḡ_p‖₂ ‖ḡ'_p‖₂) of one parameter that had a gradient in both epochs
            | [−1, 1] | Which layers still have a steady direction.
    """

    def __init__(self, *, interval: int = 0) -> None:
        require(interval >= 0, f"consecutive.interval is {interval}; it must be 0 (one pass over the data) or more.")
        self._interval = interval

    def start(self, run: RunInfo) -> None:
        """Refuse a run that has no two epochs to compare; raises :class:`UnsuitableError`."""
        length = run.steps_per_epoch if run.loop == "epoch" else self._interval or run.steps_per_epoch
        if run.steps < 2 * length:
            remedy = " Set --hook-config consecutive.interval=STEPS to a shorter one." if run.loop == "step" else ""
            raise UnsuitableError(
                f"Hook 'consecutive' compares the mean gradients of two intervals of {length} steps, and the run has "
                f"{run.steps} steps.{remedy}"
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return how the finished epoch's mean gradient agrees with that before; nothing while there is only one."""
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            return self._gather(ctx)
        if not ctx.accumulated_grads:
            self.reset()
            return {}
        layout = self._layout(ctx)
        now = layout.copy(ctx.accumulated_grads, self._memory.work(layout))
        return self._compare(layout, now, [name for name in layout.names if name in ctx.accumulated_grads])

    def _layout(self, ctx: RunDataContext) -> FlatLayout:
        """Return the layout of the trained parameters; where these are others than before, begin anew."""
        trained = trainable(ctx.model)
        if self._memory.names == list(trained):
            return self._memory.layout(ctx.model)
        self.reset()
        return self._memory.begin(trained)

    def _compare(self, layout: FlatLayout, now: FlatVector, owners: list[str]) -> Metrics:
        """Return how a mean gradient agrees with the last one, which it replaces; ``owners`` had a gradient."""
        before = self._memory.vectors.get("before")
        shared = [name for name in owners if name in self._owners.get("before", ())]
        self._memory.vectors, self._owners, self._memory.spare = {"before": now}, {"before": owners}, before
        return {} if before is None else agreement(layout, now.data, before.data, shared)

    def _gather(self, ctx: RunDataContext) -> Metrics:
        """Add a step's gradient to the sum, in the step loop; at the end of an interval compare the mean."""
        layout = self._memory.layout(ctx.model) if self._summed else self._layout(ctx)
        vectors, gradients = self._memory.vectors, layout.gradients()
        if not self._summed:
            vectors["sum"] = layout.copy({}, self._memory.work(layout))
            self._memory.spare, self._owners["sum"] = None, []
        layout.add(gradients, vectors["sum"])
        self._owners["sum"] += [name for name in gradients if name not in self._owners["sum"]]
        self._summed += 1
        length = self._interval or len(ctx.loader)
        if ctx.step % length:
            return {}
        steps, self._summed = self._summed, 0
        if steps < length or not self._owners["sum"]:
            self.reset()
            return {}
        vectors["sum"].data.div_(steps)
        return self._compare(layout, vectors["sum"], self._owners["sum"])
