"""Clipping of the gradient's norm, as a declared change of the run."""

import math
from collections.abc import Sequence

from framework.commits import StatePart
from framework.contexts import MetricInfo, RunDataContext
from framework.errors import UsageError
from framework.hook_points import HookPoint
from framework.hooks import InterventionHook
from framework.metrics import Metrics
from framework.registry import HookRegistry
from framework.sapi import ModelDataContext


@HookRegistry.register
class GradClip(InterventionHook):
    """Scale the gradients of every step so that their joint norm is at most ``max_norm``.

    The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``: with float32 and float64 gradients the run is bit for
    bit the one that calls it between backward and update. Lower precisions are reduced in float32.

    Assumes that one norm over all parameters is what shall be bounded, and gradients that are unscaled already.

    Args:
        max_norm: the largest Euclidean norm of all gradients together.
    """

    name = "grad_clip"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    mutates = False
    commits = frozenset({StatePart.GRADIENTS})

    def __init__(self, *, max_norm: float = 1.0) -> None:
        if not (max_norm > 0 and math.isfinite(max_norm)):
            raise UsageError(f"grad_clip.max_norm is {max_norm}; it must be a positive number.")
        self.max_norm = max_norm

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Ask for the scaled gradients and return what that does to their norm."""
        norm, factor = model_ctx.clip_gradients(self.max_norm)
        return {
            "norm_before": norm,
            "norm_after": norm * factor,
            "coefficient": factor,
            "clipped": (factor < 1).to(norm.dtype),
        }

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the norms around clipping."""
        return [
            MetricInfo(
                "norm_before",
                "‖g‖₂ of all gradients together, before clipping",
                "[0, ∞)",
                "Its trend shows whether max_norm fits; a spike far above max_norm is a bad batch or a beginning "
                "divergence. Infinite or NaN: the gradients held such values, and clipping does not mend them.",
            ),
            MetricInfo("norm_after", "c·‖g‖₂, c the coefficient", "[0, max_norm]", "What the optimizer is given."),
            MetricInfo(
                "coefficient",
                "c = min(1, max_norm / (‖g‖₂ + 1e-6))",
                "[0, 1]",
                "The factor on every gradient. Far below 1 throughout: max_norm normalises the gradient.",
            ),
            MetricInfo(
                "clipped",
                "1 if c < 1, else 0",
                "{0, 1}",
                "Its mean is the share of clipped steps; above about one half the learning rate is set by max_norm.",
            ),
        ]
