"""Change of the parameters over an epoch, in total and per parameter."""

from collections.abc import Mapping

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.tensors import total_of, trainable
from torch import Tensor

from ..measures import WeightCopy, WeightMemory


def delta_metrics(previous: WeightCopy, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics of :class:`ParameterDelta` from the parameters at the last report and the current ones."""
    lengths, largest, changed, previous_lengths = previous.movement(parameters)
    metrics = {
        "total_delta": total_of(lengths),
        "total_relative_delta": total_of(lengths) / total_of(previous_lengths),
        "max_abs_delta": largest.max(),
        "changed_fraction": changed.sum() / sum(value.numel() for value in parameters.values()),
    }
    by_parameter = {"delta": lengths, "relative_delta": lengths / previous_lengths, "max_abs": largest}
    for metric, values in by_parameter.items():
        metrics |= {f"{metric}/{name}": value for name, value in zip(parameters, values.unbind(), strict=True)}
    return metrics


@HookRegistry.register
class ParameterDelta(TrainingHook):
    """Measure how far the trained parameters move over an epoch, or between SNAPSHOTs in the step loop.

    The change is the net change between two reports (the first: since the start of the strategy), by updates, weight
    decay and committing hooks. Movements that cancel out in between do not count.

    Assumes that the same parameters are trained from one report to the next; if the set of trained parameters changes,
    the hook skips a report. Keeps one copy of the parameters in float32 or wider, which path_length shares; for a
    model on the CPU, a large one is in a temporary file (in ``TMPDIR``) instead of memory.
    """

    name = "parameter_delta"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    _memory = Remembered(WeightMemory, merged=True)  # the parameters at the last report
    metrics = """
        total_delta | ‖Δ‖₂ over all trained parameters, Δ = θ − θ', θ' those one epoch before (step loop: one SNAPSHOT)
            | [0, ∞) | The net movement. Far below the sum of the steps (path_length): the steps cancel.
        total_relative_delta | ‖Δ‖₂ / ‖θ'‖₂ | [0, ∞], NaN
            | Movement relative to the weights; near 0: training has settled or the learning rate has run out.
        max_abs_delta | max |Δᵢ| over all elements | [0, ∞)
            | Near total_delta: a single element moves. Under Adam at most about the sum of the learning rates while
            gradients are steady; up to (1 − β₁)/√(1 − β₂) times that sum, 3.2 by default, for rare gradients, and
            weight decay comes in addition.
        changed_fraction | elements with Δᵢ ≠ 0 / all elements | [0, 1] | Below 1: rows of tokens that never occur,
            parameters without gradient, or updates rounded away in low precision.
        delta/<parameter> | ‖Δ_p‖₂ of one parameter | [0, ∞) | Shows which layers move. 0: no movement.
        relative_delta/<parameter> | ‖Δ_p‖₂ / ‖θ'_p‖₂ of one parameter | [0, ∞], NaN
            | Comparable between layers. ∞: the parameter was all zero before, like initial biases; NaN: it still is.
        max_abs/<parameter> | max |Δᵢ| over the parameter's elements | [0, ∞) | Shows the layer of an outlier.
    """

    def start(self, run: RunInfo) -> None:
        """Keep the initial parameters of the strategy; a resumed run already has those of the last report."""
        if not self._memory.names:
            self._memory.reset_to(run.model, trainable(run.model), "before")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the change since the last report, or nothing if other parameters are trained now; keep the current."""
        trained = trainable(ctx.model)
        if not self._memory.holds(trained):
            self._memory.reset_to(ctx.model, trained, "before")
            return {}
        parameters = self._memory.parameters(ctx.model)
        metrics = delta_metrics(self._memory.copies["before"], parameters)
        self._memory.keep("before", ctx.model)
        return metrics
