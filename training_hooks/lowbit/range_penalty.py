"""How near weights come to both ends of a narrow format's range, and what a penalty on that adds to the loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.lowbit import OFFSET, RangePenalty, penalised
from loopscope.state import joint_norm, norms
from torch import Tensor


def mean_squares(matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the means of w² and of (w + 1e-6)⁻² over all elements, zero-dimensional, float32 or wider.

    One matrix after another, so that never more than one of them is copied.
    """
    elements = sum(matrix.numel() for matrix in matrices)
    wide = (matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32)) for matrix in matrices)
    inverse_norm = torch.linalg.vector_norm(norms(matrix.add(OFFSET).reciprocal_() for matrix in wide))
    return joint_norm(list(matrices)).square() / elements, inverse_norm.square() / elements


def gradient_norm(penalty: RangePenalty, matrices: Sequence[Tensor]) -> Tensor:
    """Return the norm of the penalty's gradient, (2λ/n)·‖α₁·w − α₂·(w + 1e-6)⁻³‖₂ for n elements, zero-dimensional.

    In float64, since the squares of these numbers leave the range of float32.
    """
    wide = (matrix.detach().double() for matrix in matrices)
    slopes = (each.mul(penalty.large).sub_(each.add(OFFSET).pow_(-3), alpha=penalty.small) for each in wide)
    elements = sum(matrix.numel() for matrix in matrices)
    return torch.mul(torch.linalg.vector_norm(norms(slopes)), 2 * penalty.weight / elements)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class RangePenaltyReport(TrainingHook):
    """Measure how near weights come to zero and to large values, and the share of a penalty on both in the loss.

    Two means over every element of the trained matrices: that of w², which large weights rule, and that of
    (w + 1e-6)⁻², which a few weights next to zero rule. The experiment ``lowbit_lm`` can add
    λ·(α₁·mean w² + α₂·mean (w + 1e-6)⁻²) to its loss (``--reg-lambda``); it switches this hook on then, with the same
    numbers, and the hook reports the penalty, its share and the loss without it.

    Assumes that a run with a ``weight`` above 0 has this penalty in its loss, with these numbers and on these matrices:
    the hook adds nothing to the loss.

    Args:
        weight: λ, the weight of the penalty in the loss; at 0 the run has none.
        large: α₁, the weight of the mean of w² in it.
        small: α₂, the weight of the mean of (w + 1e-6)⁻².
        pattern: names of the matrices, with wildcards.
        every_n_steps: steps from one report to the next.
    """

    name = "range_penalty"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    metrics = """
        mean_square | mean of w² over every element of the matrices | [0, ∞)
            | Grows with the weights; weight decay and α₁ hold it.
        mean_inverse_square | mean of (w + 1e-6)⁻² over every element of the matrices | (0, ∞]
            | Ruled by the weights nearest to −1e-6: of a million Gaussian ones with σ = 0.02 the nearest alone gives
            about 1e9. Jumps are single weights that cross zero.
        penalty | λ·(α₁·mean_square + α₂·mean_inverse_square) | [0, ∞]
            | What the loss holds beside that of the data; reported where λ > 0.
        penalty_grad_norm | (2λ/n)·‖α₁·w − α₂·(w + 1e-6)⁻³‖₂ over all n elements of the matrices | [0, ∞]
            | What the penalty gives to the gradient, mostly through one weight next to zero. Far above the norm of the
            rest, clipping by a joint norm leaves nothing of the data's gradient: choose a smaller λ or α₂.
        data_loss | loss of the step − penalty | [0, ∞) for cross-entropy
            | training_metrics/loss without the penalty. Its last digits are lost where the penalty is much larger.
        share | penalty / loss of the step | [0, 1]
            | Of the loss, not of its gradient, which the penalty may rule at a share of 0.1 %: compare
            penalty_grad_norm with the gradient's whole norm.
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
        """Refuse a model without matrices whose range is penalised."""
        matrices = any(parameter.ndim == 2 for parameter in run.model.parameters())
        if not (matrices and penalised(run.model, self.pattern)):
            raise UnsuitableError(
                f"Hook {self.name!r} needs trained matrices whose name matches {self.pattern!r}; the model has none."
            )

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return both means, and of a penalty its value, gradient and share."""
        matrices = list(penalised(ctx.model, self.pattern).values())
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
