"""Norms of the epoch's mean gradient and of the weights, over the whole model and for each parameter."""

from collections.abc import Sequence
from dataclasses import dataclass

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.tensors import max_abs, norm, norm_of_each

from ..measures import FamilyFile, SeriesBudget, compute_once, joint_weight_norm, reported_series, weight_norms


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Norms(TrainingHook):
    """Measure the norms of the epoch's mean gradient and of the weights, in total and of single parameters.

    The mean is taken over the gradients at POST_BACKWARD of the epoch's steps; the weights are those after the epoch.

    Assumes nothing about the model; a parameter without any gradient in the epoch has no gradient norm.

    Args:
        names: globs, separated by commas, of parameters that are always reported; ``*`` selects all.
        top: number of parameters with the largest norms that each family reports in addition.
        bottom: number of parameters with the smallest norms that each family reports in addition.
        write_all: write the norms of all parameters to a file in the run's folder.
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
        grad_weight_ratio | ‖ḡ‖₂ / ‖θ‖₂ | [0, ∞], NaN
            | The gradient relative to the weights; not the update ratio, which depends on the optimizer.
        max_abs_grad | max |ḡᵢ| over all elements | [0, ∞) | Near total_grad_norm: one element carries the gradient.
        grad_norm/<parameter> | ‖ḡ_p‖₂ of one parameter; of a model with more than top + bottom parameters, of those
            where it is largest or smallest, and of names | [0, ∞)
            | Shows which layers the gradient reaches. 0: the parameter has a gradient of exactly zero.
        weight_norm/<parameter> | ‖θ_p‖₂ of one parameter, chosen in the same way | [0, ∞)
            | Shows which layers grow or decay.
    """

    names: str = ""
    top: int = 10
    bottom: int = 10
    write_all: bool = False

    _file = Remembered(FamilyFile)

    def __post_init__(self) -> None:
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Check the patterns of names, and choose the file."""
        self._budget.check_names(dict(run.model.named_parameters()))
        if self.write_all:
            self._file.start(self.name, run)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the norms; no gradient metrics after an epoch in which no parameter had a gradient."""
        weight_norm = compute_once(ctx, joint_weight_norm)
        metrics = {"total_weight_norm": weight_norm}
        families = {"weight_norm": compute_once(ctx, weight_norms)}
        if ctx.accumulated_grads:
            grad_norm = norm(ctx.accumulated_grads)
            metrics["total_grad_norm"] = grad_norm
            metrics["grad_weight_ratio"] = grad_norm / weight_norm
            metrics["max_abs_grad"] = max_abs(ctx.accumulated_grads)
            families["grad_norm"] = norm_of_each(ctx.accumulated_grads)
        file = self._file if self.write_all else None
        return reported_series(families, self._budget, metrics, step=ctx.step, file=file)
