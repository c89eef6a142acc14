"""How the gradient and the way made so far lie to the straight line from the parameters to a reference solution."""

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory


def downhill(layout: FlatLayout, gradient: Tensor, way: Tensor) -> dict[str, Tensor]:
    """Return how the descent direction −ḡ lies to the way d = θ_ref − θ; flat vectors of a layout."""
    product, distance = -layout.dot(gradient, way), layout.norm(way)
    return {"gradient_cosine": product / (layout.norm(gradient) * distance), "gradient_projection": product / distance}


def journey(layout: FlatLayout, moved: Tensor, way: Tensor, route: Tensor) -> dict[str, Tensor]:
    """Split what was travelled along the route; flat vectors θ − θ₀, θ_ref − θ and θ_ref − θ₀."""
    along, squares = layout.dots(moved, route), layout.dots(route, route)
    length, progress = squares.sum().sqrt(), along.sum() / squares.sum()
    aside = torch.addcmul(moved, route, -progress.to(route.dtype))
    orthogonal, distance = layout.norm(aside) / length, layout.norm(way)
    metrics = {
        "distance": distance,
        "relative_distance": distance / length,
        "progress": progress,
        "orthogonal": orthogonal,
        "displacement_cosine": progress / torch.hypot(progress, orthogonal),
    }
    return metrics | {f"parameter_progress/{name}": value for name, value in layout.by_name(along / squares).items()}


@HookRegistry.register
class GradientProjection(TrainingHook):
    """Measure how far training has come towards a reference solution, and whether the gradient points there.

    θ are the parameters after the epoch (step loop: at SNAPSHOT), θ₀ those that the strategy began with, θ_ref the
    reference; ḡ is the mean gradient of the epoch (of the last ``log_every`` steps). Positive always means towards
    the reference.

    Assumes that the reference is a solution that this run can reach in a straight line: it comes from a run with the
    same initial weights. A network computes the same with its units permuted, so that another solution, though as
    good, may lie at a right angle to every step. Keeps one copy of the parameters, in float32 or wider.
    """

    name = "gradient_projection"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    needs_reference_weights = True
    _memory = Remembered(FlatMemory, merged=True)  # the parameters that the strategy began with
    metrics = """
        gradient_cosine | cos(−ḡ, d), d = θ_ref − θ | [−1, 1] | Positive: descent along ḡ comes nearer to the reference.
            In n dimensions a direction without any relation to d has a cosine of about 1/√n.
        gradient_projection | −ḡ·d / ‖d‖ | (−∞, ∞)
            | The slope of the loss, downhill, along the way to the reference: what a step of one unit would gain.
        distance | ‖d‖₂ | [0, ∞) | What remains, in a straight line.
        relative_distance | ‖d‖ / ‖D‖, D = θ_ref − θ₀ | [0, ∞)
            | 1 at the start, 0 at the reference. Above 1: further away than at the start.
        progress | (θ − θ₀)·D / ‖D‖² | (−∞, ∞)
            | The share of the route that is behind: 0 at the start, 1 level with the reference.
        orthogonal | ‖(θ − θ₀) − progress·D‖ / ‖D‖ | [0, ∞)
            | How far off the straight route, in its length: relative_distance² = (1 − progress)² + orthogonal². High
            while progress stands still: the run goes elsewhere, to memorise for instance.
        displacement_cosine | cos(θ − θ₀, D) | [−1, 1]
            | The direction of all that was travelled. NaN while nothing has moved.
        parameter_progress/<parameter> | progress, over the elements of one parameter | (−∞, ∞)
            | Which layers are there first. NaN: the reference has not moved this parameter.
    """

    def start(self, run: RunInfo) -> None:
        """Keep the parameters that the strategy begins with, unless it goes on from a checkpoint."""
        if not self._memory.names:
            self._memory.begin(trainable(run.model), "start")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics; none of the gradient after an epoch without gradients."""
        if ctx.reference_weights is None or not self._memory.names:
            return {}
        layout = self._memory.layout(ctx.model)
        start = self._memory.vectors["start"].data
        here, reference = layout.values().data, layout.copy(ctx.reference_weights, layout.zeros()).data
        way = reference - here
        metrics = journey(layout, here.sub_(start), way, reference.sub_(start))
        if ctx.accumulated_grads:
            gradient = layout.copy(ctx.accumulated_grads, layout.zeros()).data
            metrics |= downhill(layout, gradient, way)
        return metrics
