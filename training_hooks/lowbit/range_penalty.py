"""Closeness of the weights to both ends of a narrow format's range, and the effect of a penalty on it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.lowbit import OFFSET, RangePenalty, penalised_matrices
from loopscope.tensors import joint_norm, norms, stacks_of_experts, total_of
from torch import Tensor


def mean_squares(matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the means of w² and of (w + 1e-6)⁻² over all elements, zero-dimensional, float32 or wider.

    Processes one matrix at a time, so that at most one of them is copied.
    """
    elements = sum(matrix.numel() for matrix in matrices)
    wide = (matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32)) for matrix in matrices)
    # mean (w + 1e-6)⁻² = ‖(w + 1e-6)⁻¹‖²/n over all n elements, from one norm per matrix
    inverse_norm = total_of(norms(matrix.add(OFFSET).reciprocal_() for matrix in wide))
    return joint_norm(list(matrices)).square() / elements, inverse_norm.square() / elements


def gradient_norm(penalty: RangePenalty, matrices: Sequence[Tensor]) -> Tensor:
    """Return the norm of the penalty's gradient, (2λ/n)·‖α₁·w − α₂·(w + 1e-6)⁻³‖₂ for n elements, zero-dimensional.

    Computes in float64, since the squares of these numbers leave the range of float32.
    """
    wide = (matrix.detach().double() for matrix in matrices)
    # d/dw of λ·(α₁·mean w² + α₂·mean (w + 1e-6)⁻²) is (2λ/n)·(α₁·w − α₂·(w + 1e-6)⁻³), elementwise.
    slopes = (matrix.mul(penalty.large).sub_(matrix.add(OFFSET).pow_(-3), alpha=penalty.small) for matrix in wide)
    elements = sum(matrix.numel() for matrix in matrices)
    return torch.mul(total_of(norms(slopes)), 2 * penalty.weight / elements)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class RangePenaltyReport(TrainingHook):
    """Measure how close weights come to zero and to large values, and the share of a penalty on both in the loss.

    The hook reports two means over all elements of the trained matrices, those of experts included, but no weights of
    convolutions: of w², which large
    weights dominate, and of (w + 1e-6)⁻², which a few weights near zero dominate. The experiment ``lowbit_lm`` can add
    λ·(α₁·mean w² + α₂·mean (w + 1e-6)⁻²) to its loss (``--reg-lambda``). It then enables this hook with the same
    factors, and the hook also reports the penalty, its share and the loss without it.

    Assumes that the loss of a run with a ``weight`` above 0 contains this penalty, with these factors and on these
    matrices. The hook itself adds nothing to the loss.

    Args:
        weight: λ, the weight of the penalty in the loss; 0 if the loss has no penalty.
        large: α₁, the weight of the mean of w² in the penalty.
        small: α₂, the weight of the mean of (w + 1e-6)⁻² in the penalty.
        pattern: names of the matrices, with wildcards.
        every_n_steps: steps between two reports.
    """

    name = "range_penalty"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    metrics = """
        mean_square | mean of w² over every element of the matrices | [0, ∞)
            | Grows with the weights; weight decay and α₁ limit it.
        mean_inverse_square | mean of (w + 1e-6)⁻² over every element of the matrices | (0, ∞]
            | Dominated by the weights nearest to −1e-6: among a million Gaussian weights with σ = 0.02 the nearest
            alone contributes about 1e9. Jumps: single weights cross zero.
        penalty | λ·(α₁·mean_square + α₂·mean_inverse_square) | [0, ∞]
            | The part of the loss that does not depend on the data; reported if λ > 0.
        penalty_grad_norm | (2λ/n)·‖α₁·w − α₂·(w + 1e-6)⁻³‖₂ over all n elements of the matrices | [0, ∞]
            | The penalty's contribution to the gradient, mostly from one weight near zero. Far above the norm of the
            data's gradient: clipping by the joint norm leaves almost nothing of it; choose a smaller λ or α₂.
        data_loss | loss of the step − penalty | [0, ∞) for cross-entropy
            | training_metrics/loss without the penalty. Loses its last digits if the penalty is much larger.
        share | penalty / loss of the step | [0, 1]
            | A share of the loss, not of its gradient, which the penalty may dominate at a share of 0.1 %: compare
            penalty_grad_norm with the norm of the whole gradient.
    """

    weight: float = 0.0
    large: float = 1.0
    small: float = 1.0
    pattern: str = "*"
    every_n_steps: int = 100

    def __post_init__(self) -> None:
        factors = {"weight": self.weight, "large": self.large, "small": self.small}
        for option, value in factors.items():
            require(0 <= value < float("inf"), f"range_penalty.{option} is {value}; it must be a number of at least 0.")
        every = self.every_n_steps
        require(every >= 1, f"range_penalty.every_n_steps is {every}; it must be at least 1.")
        self._penalty = RangePenalty(**factors)
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def start(self, run: RunInfo) -> None:
        """Raise :class:`UnsuitableError` for a model without matrices to penalise."""
        matrices = any(parameter.ndim == 2 for parameter in run.model.parameters()) or stacks_of_experts(run.model)
        if not (matrices and penalised_matrices(run.model, self.pattern)):
            raise UnsuitableError(
                f"Hook {self.name!r} needs trained matrices whose name matches {self.pattern!r}; the model has none."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return both means; with a penalty also its value, gradient norm and share."""
        matrices = list(penalised_matrices(ctx.model, self.pattern).values())
        square, inverse_square = mean_squares(matrices)
        means = {"mean_square": square, "mean_inverse_square": inverse_square}
        if not self._penalty.weight or not isinstance(ctx.loss, Tensor):
            return means
        penalty = self._penalty.weight * (self._penalty.large * square + self._penalty.small * inverse_square)
        data_loss = ctx.loss - penalty
        return {
            **means,
            "penalty": penalty,
            "penalty_grad_norm": gradient_norm(self._penalty, matrices),
            "data_loss": data_loss,
            "share": penalty / (data_loss + penalty),
        }
