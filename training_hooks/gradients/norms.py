"""Norms of the epoch's mean gradient and of the weights, over the whole model and for each parameter."""

from loopscope import HookPoint, HookRegistry, RunDataContext, TrainingHook
from loopscope.hooks import Metrics
from loopscope.tensors import max_abs, norm, norm_of_each, trainable


@HookRegistry.register
class Norms(TrainingHook):
    """Measure the norms of the epoch's mean gradient and of the weights, in total and per parameter.

    The mean is taken over the gradients at POST_BACKWARD of the epoch's steps; the weights are those after the epoch.

    Assumes nothing about the model; a parameter without any gradient in the epoch has no gradient norm.
    """

    name = "norms"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    needs_grads = True
    metrics = """
        total_grad_norm | ‖ḡ‖₂, ḡ the mean over the epoch's steps of the gradient of all trainable parameters | [0, ∞)
            | The part of the gradient that persists over an epoch: opposing steps cancel in ḡ, so it is below the mean
            norm of the steps' gradients.
        total_weight_norm | ‖θ‖₂ over all trainable parameters, after the epoch | [0, ∞)
            | Weight decay reduces it; in grokking it peaks while the data are memorised and falls afterwards.
        grad_weight_ratio | ‖ḡ‖₂ / ‖θ‖₂ | [0, ∞)
            | The gradient relative to the weights; not the update ratio, which depends on the optimizer.
        max_abs_grad | max |ḡᵢ| over all elements | [0, ∞) | Near total_grad_norm: one element carries the gradient.
        grad_norm/<parameter> | ‖ḡ_p‖₂ of one parameter | [0, ∞)
            | Shows which layers the gradient reaches. 0: the parameter has a gradient of exactly zero.
        weight_norm/<parameter> | ‖θ_p‖₂ of one parameter | [0, ∞) | Shows which layers grow or decay.
    """

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the norms; no gradient metrics after an epoch in which no parameter had a gradient."""
        weights = trainable(ctx.model)
        weight_norm = norm(weights)
        metrics = {"total_weight_norm": weight_norm}
        metrics |= {f"weight_norm/{name}": value for name, value in norm_of_each(weights).items()}
        if ctx.accumulated_grads:
            grad_norm = norm(ctx.accumulated_grads)
            metrics["total_grad_norm"] = grad_norm
            metrics["grad_weight_ratio"] = grad_norm / weight_norm
            metrics["max_abs_grad"] = max_abs(ctx.accumulated_grads)
            metrics |= {f"grad_norm/{name}": value for name, value in norm_of_each(ctx.accumulated_grads).items()}
        return metrics
