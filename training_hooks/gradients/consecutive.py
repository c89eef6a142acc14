"""Agreement between the mean gradients of successive epochs."""

from collections.abc import Sequence

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import ENDLESS, Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import cosine_of, in_range, trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory, FlatVector, is_overflowed


def agreement(layout: FlatLayout, gradient: Tensor, previous: Tensor, shared: Sequence[str]) -> dict[str, Tensor]:
    """Return the metrics of :class:`Consecutive` for two mean gradients; overwrites ``previous``.

    Args:
        layout: the layout of both vectors.
        gradient: the newer mean gradient, shape (elements,).
        previous: the older one, shape (elements,).
        shared: names of the parameters that had a gradient in both epochs; each gets its own cosine.
    """
    # cos = ḡ·ḡ' / (‖ḡ‖‖ḡ'‖), from the inner products by parameter, shape (parameters,), and from their sums
    gradient, previous = in_range(gradient, previous)
    products = layout.dots(gradient, previous)
    squares, previous_squares = layout.dots(gradient, gradient), layout.dots(previous, previous)
    product, square, previous_square = products.sum(), squares.sum(), previous_squares.sum()
    change = torch.sub(gradient, previous, out=previous)
    cosines = layout.by_name(cosine_of(products, squares, previous_squares))
    return {
        "cosine": cosine_of(product, square, previous_square),
        "norm_ratio": square.sqrt() / previous_square.sqrt(),
        "relative_change": layout.norm(change) / previous_square.sqrt(),
        **{f"parameter_cosine/{name}": cosines[name] for name in shared},
    }


@HookRegistry.register
class Consecutive(TrainingHook):
    """Measure the cosine between the mean gradients of successive epochs, over all parameters and for each.

    The mean is taken over the gradients at POST_BACKWARD of the epoch's steps. In the step loop an epoch is one pass
    over the data (or ``interval`` steps), and the hook reports at POST_BACKWARD of its last step.

    Assumes at least two epochs that train the same parameters; if the set of trained parameters changes, the hook skips
    a report. Steps that a loss scaler skips are left out of the mean of an epoch; in the step loop an interval with one
    has no mean, and neither it nor the next one has a report. A parameter without a gradient counts as zeros. Keeps two
    gradients in float32 or wider: the last mean and the current sum.

    Args:
        interval: steps per mean gradient in the step loop; 0 stands for one pass over the data.
    """

    name = "consecutive"
    needs_dense_gradients = True
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.POST_BACKWARD})}
    needs_grads = True
    has_fixed_schedule = True
    _memory = Remembered(FlatMemory)
    _owners = Remembered(dict[str, list[str]])  # for each vector of the memory: the parameters that had a gradient
    _summed = Remembered(int)
    metrics = """
        cosine | ḡ·ḡ' / (‖ḡ‖₂ ‖ḡ'‖₂), ḡ the mean over the epoch's steps of the gradient, ḡ' that of the epoch before
            | [−1, 1], NaN | Near 1: successive epochs push in one direction; 0: their directions are unrelated; below
            0: they oppose each other, as when the steps overshoot a valley. NaN: one of the two is zero.
        norm_ratio | ‖ḡ‖₂ / ‖ḡ'‖₂ | [0, ∞], NaN | Above 1: the gradient grows from epoch to epoch.
        relative_change | ‖ḡ − ḡ'‖₂ / ‖ḡ'‖₂ | [0, ∞], NaN
            | 0: the same gradient; √2 at equal norms: orthogonal. Unlike the cosine it depends on the length.
        parameter_cosine/<parameter> | ḡ_p·ḡ'_p / (‖ḡ_p‖₂ ‖ḡ'_p‖₂) of one parameter that had a gradient in both epochs
            | [−1, 1], NaN | Shows which layers still have a steady direction.
    """

    def __init__(self, *, interval: int = 0) -> None:
        require(interval >= 0, f"consecutive.interval is {interval}; it must be 0 (one pass over the data) or more.")
        self._interval = interval

    def start(self, run: RunInfo) -> None:
        """Check that the run has two epochs to compare.

        Raises:
            UnsuitableError: if it has fewer.
        """
        length = run.steps_per_epoch if run.loop == "epoch" else self._interval or run.steps_per_epoch
        if run.steps < 2 * length:
            fewer = hook_option_text(self.name, interval="STEPS")
            if length >= ENDLESS:
                raise UnsuitableError(
                    "Hook 'consecutive' compares the mean gradients of two passes over the data, but their length is "
                    f"unknown; set {fewer}."
                )
            remedy = f" Set fewer steps with {fewer}." if run.loop == "step" else ""
            raise UnsuitableError(
                f"Hook 'consecutive' compares the mean gradients of two intervals of {length} steps, but the run has "
                f"only {run.steps} steps.{remedy}"
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Compare the finished epoch's mean gradient with the previous one; return nothing after the first epoch."""
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            return self._gather(ctx)
        if not ctx.accumulated_grads:
            self.reset()
            return {}
        layout = self._layout(ctx)
        mean = layout.copy(ctx.accumulated_grads, self._memory.scratch(layout))
        return self._compare(layout, mean, [name for name in layout.names if name in ctx.accumulated_grads])

    def _layout(self, ctx: RunDataContext) -> FlatLayout:
        """Return the layout of the trained parameters; if these have changed, discard all earlier gradients."""
        trained = trainable(ctx.model)
        if self._memory.holds(trained):
            return self._memory.layout(ctx.model)
        self.reset()
        return self._memory.reset_to(trained)

    def _compare(self, layout: FlatLayout, mean: FlatVector, owners: list[str]) -> Metrics:
        """Compare a mean gradient with the previous one, then replace that; ``owners`` are parameters with gradient."""
        previous = self._memory.vectors.get("before")
        shared = [name for name in owners if name in self._owners.get("before", ())]
        self._memory.vectors, self._owners, self._memory.spare = {"before": mean}, {"before": owners}, previous
        return {} if previous is None else agreement(layout, mean.data, previous.data, shared)

    def _gather(self, ctx: RunDataContext) -> Metrics:
        """Add a step's gradient to the sum in the step loop; compare the mean at the end of an interval.

        An interval with a step that the loss scaler skips has no mean, so the next one has none to compare with.
        """
        if is_overflowed(ctx):
            self.reset()
            return {}
        layout = self._memory.layout(ctx.model) if self._summed else self._layout(ctx)
        vectors, gradients = self._memory.vectors, layout.gradients()
        if not self._summed:
            vectors["sum"] = layout.copy({}, self._memory.scratch(layout))
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
