"""How much the parameters change over an epoch, as a whole and one by one."""

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory, FlatSpace


def change(layout: FlatLayout, before: Tensor, now: Tensor) -> dict[str, Tensor]:
    """Return how ``now`` differs from ``before``, the metrics of :class:`ParameterDelta`; overwrites ``before``.

    Both are the elements of flat vectors, shape (elements,).
    """
    earlier = layout.dots(before, before)
    delta = torch.sub(now, before, out=before)
    squares, changed, largest = layout.dots(delta, delta), layout.nonzeros(delta), layout.maxima(delta.abs_())
    metrics = {
        "total_delta": squares.sum().sqrt(),
        "total_relative_delta": (squares.sum() / earlier.sum()).sqrt(),
        "max_abs_delta": largest.max(),
        "changed_fraction": changed / FlatSpace(layout.parameters).size,
    }
    each = {"delta": squares.sqrt(), "relative_delta": (squares / earlier).sqrt(), "max_abs": largest}
    for metric, values in each.items():
        metrics |= {f"{metric}/{name}": value for name, value in layout.by_name(values).items()}
    return metrics


@HookRegistry.register
class ParameterDelta(TrainingHook):
    """Measure how far the trained parameters have moved over an epoch, in the step loop from SNAPSHOT to SNAPSHOT.

    The change is that between two reports (before the first: since the strategy began), whatever made it: updates,
    weight decay, a hook that commits. It is the net change: what was taken back in between does not show.

    Assumes that the same parameters are trained from one report to the next; where that changes, the next report is
    left out. Keeps two copies of the parameters in float32 or wider (one to work in).
    """

    name = "parameter_delta"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    _memory = Remembered(FlatMemory, merged=True)  # the parameters at the last report
    metrics = """
        total_delta | ‖Δ‖₂ over all trained parameters, Δ = θ − θ', θ' those one epoch before (step loop: one SNAPSHOT)
            | [0, ∞) | The net movement. Far below the sum of the steps (path_length): the steps cancel.
        total_relative_delta | ‖Δ‖₂ / ‖θ'‖₂ | [0, ∞]
            | Movement relative to the weights; near 0: training has settled or the learning rate has run out.
        max_abs_delta | max |Δᵢ| over all elements | [0, ∞)
            | Near total_delta: one element does the moving. Under Adam about the learning rate × steps at most.
        changed_fraction | elements with Δᵢ ≠ 0 / all elements | [0, 1] | Below 1: rows of tokens that never occur,
            parameters without gradient, or updates rounded away in low precision.
        delta/<parameter> | ‖Δ_p‖₂ of one parameter | [0, ∞) | Which layers move; 0: it stands still.
        relative_delta/<parameter> | ‖Δ_p‖₂ / ‖θ'_p‖₂ of one parameter | [0, ∞]
            | Comparable between layers. ∞: it was zero before, as biases are at first; NaN: and still is.
        max_abs/<parameter> | max |Δᵢ| over the parameter's elements | [0, ∞) | Finds the outlier's layer.
    """

    def start(self, run: RunInfo) -> None:
        """Keep the parameters that the strategy begins with, unless it goes on from a checkpoint."""
        if not self._memory.names:
            self._memory.begin(trainable(run.model), "before")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the change since the last report, nothing if other parameters were trained then; keep what is now."""
        trained = trainable(ctx.model)
        if self._memory.names != list(trained):
            self._memory.begin(trained, "before")
            return {}
        layout = self._memory.layout(ctx.model)
        now, before = layout.copy(layout.parameters, self._memory.work(layout)), self._memory.vectors["before"]
        self._memory.vectors, self._memory.spare = {"before": now}, before
        return change(layout, before.data, now.data)
