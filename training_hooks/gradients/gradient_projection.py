"""Progress towards a reference solution, and the direction of the gradient relative to it."""

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.tensors import cosine_of, in_range, scale_of, trainable
from torch import Tensor

from ..measures import FlatLayout, FlatMemory


def descent_metrics(layout: FlatLayout, gradient: Tensor, remaining: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the descent direction −ḡ relative to d = θ_ref − θ.

    Args:
        layout: the layout of both vectors.
        gradient: ḡ, shape (elements,).
        remaining: d, shape (elements,).
    """
    # cos(−ḡ, d) = −ḡ·d/(‖ḡ‖‖d‖), and −ḡ·d/‖d‖ is the decrease of the loss per unit of distance.
    (scaled,), (direction,) = in_range(gradient), in_range(remaining)
    product, square = -layout.dot(scaled, direction), layout.dot(direction, direction)
    cosine, projection = cosine_of(product, layout.dot(scaled, scaled), square), product / square.sqrt()
    if scaled is not gradient:
        projection = projection * scale_of(gradient)
    return {"gradient_cosine": cosine, "gradient_projection": projection}


def progress_metrics(layout: FlatLayout, moved: Tensor, remaining: Tensor, route: Tensor) -> dict[str, Tensor]:
    """Return the metrics of the displacement relative to the route.

    Args:
        layout: the layout of all vectors.
        moved: θ − θ₀, shape (elements,).
        remaining: d = θ_ref − θ, shape (elements,).
        route: D = θ_ref − θ₀, shape (elements,).
    """
    # progress = (θ − θ₀)·D / ‖D‖², orthogonal = ‖(θ − θ₀) − progress·D‖ / ‖D‖
    distance = layout.norm(remaining)
    moved, route, scaled_remaining = in_range(moved, route, remaining)
    along, squares = layout.dots(moved, route), layout.dots(route, route)
    length, progress = squares.sum().sqrt(), along.sum() / squares.sum()
    deviation = torch.addcmul(moved, route, -progress.to(route.dtype))
    orthogonal, relative_distance = layout.norm(deviation) / length, layout.norm(scaled_remaining) / length
    # Both parts are orthogonal and relative to ‖D‖, so cos(θ − θ₀, D) = progress/√(progress² + orthogonal²).
    metrics = {
        "distance": distance,
        "relative_distance": relative_distance,
        "progress": progress,
        "orthogonal": orthogonal,
        "displacement_cosine": progress / torch.hypot(progress, orthogonal),
    }
    return metrics | {f"parameter_progress/{name}": value for name, value in layout.by_name(along / squares).items()}


@HookRegistry.register
class GradientProjection(TrainingHook):
    """Measure the progress towards a reference solution, and whether the gradient points there.

    θ are the parameters after the epoch (step loop: at SNAPSHOT), θ₀ the initial parameters of the strategy, θ_ref the
    reference; ḡ is the mean gradient of the epoch (step loop: since the last SNAPSHOT). Positive values always
    mean towards the reference.

    Assumes that this run can reach the reference in a straight line: the reference comes from a run with the same
    initial weights. Permuting the units of a network does not change its function, so the direction to an equally good
    solution of another run may be orthogonal to every step. Keeps one copy of the parameters, in float32 or wider.
    """

    name = "gradient_projection"
    loop_points = {"epoch": frozenset({HookPoint.POST_EPOCH}), "step": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    needs_dense_gradients = True
    needs_reference_weights = True
    _memory = Remembered(FlatMemory, merged=True)  # the parameters that the strategy began with
    metrics = """
        gradient_cosine | cos(−ḡ, d), d = θ_ref − θ | [−1, 1], NaN | Positive: descent along ḡ approaches the reference.
            In n dimensions a random direction has a cosine of magnitude about 1/√n.
        gradient_projection | −ḡ·d / ‖d‖ | (−∞, ∞), NaN
            | Decrease of the loss per unit of distance towards the reference, to first order.
        distance | ‖d‖₂ | [0, ∞) | The straight-line distance that remains.
        relative_distance | ‖d‖ / ‖D‖, D = θ_ref − θ₀ | [0, ∞)
            | 1 at the start, 0 at the reference. Above 1: further away than at the start.
        progress | (θ − θ₀)·D / ‖D‖² | (−∞, ∞)
            | The completed share of the route: 0 at the start, 1 at the projection of the reference.
        orthogonal | ‖(θ − θ₀) − progress·D‖ / ‖D‖ | [0, ∞)
            | Distance from the straight route, relative to its length: relative_distance² = (1 − progress)² +
            orthogonal². High without progress: the run heads elsewhere, for example to memorise.
        displacement_cosine | cos(θ − θ₀, D) | [−1, 1], NaN
            | The direction of the total displacement. NaN while no parameter has moved.
        parameter_progress/<parameter> | progress, over the elements of one parameter | (−∞, ∞)
            | Shows which layers arrive first. NaN: the parameter is the same in the reference as at the start.
    """

    def start(self, run: RunInfo) -> None:
        """Keep the initial parameters of the strategy; a resumed run already has them."""
        if not self._memory.names:
            self._memory.reset_to(trainable(run.model), "start")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the metrics; those of the gradient only after an epoch that had one."""
        if ctx.reference_weights is None or not self._memory.names:
            return {}
        layout = self._memory.layout(ctx.model)
        start = self._memory.vectors["start"].data
        current, reference = layout.values().data, layout.copy(ctx.reference_weights, layout.zeros()).data
        remaining = reference - current
        metrics = progress_metrics(layout, current.sub_(start), remaining, reference.sub_(start))
        if ctx.accumulated_grads:
            gradient = layout.copy(ctx.accumulated_grads, layout.zeros()).data
            metrics |= descent_metrics(layout, gradient, remaining)
        return metrics
