"""The law that rounding errors of the gradient are below the noise of the batch."""

from copy import deepcopy

import torch

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..trial import Trial, distance


@LawRegistry.register
class PrecisionIsEnough(Law):
    """Compare loss and gradient with those of float64, and their error with the difference of the batch's halves."""

    name = "precision_is_enough"
    statement = "rounding errors are below the noise of the batch"
    remedy = "use a GradScaler for float16, compute softmax, sums and losses in float32, and keep weights in float32"

    def check(self, trial: Trial) -> Outcome:
        """Compute the gradient in both precisions."""
        step, count = trial.loss_step(), trial.rows
        with trial.branch():
            wide = deepcopy(trial.model).double()
            for module in wide.modules():
                module.training = False
        pairs = dict(zip(trial.model.modules(), wide.modules(), strict=True))
        wide_parameters = dict(zip(map(id, trial.model.parameters()), wide.parameters(), strict=True))
        doubles = {
            index: wide_parameters.get(id(tensor), tensor.double())
            for index, tensor in enumerate(step.constants)
            if tensor.is_floating_point()
        }
        exact = trial.evaluate(doubles, gradients=True, train=False, modules=pairs, autocast=False, owner=wide)
        one, other = trial.gradient(), exact.joint_gradient()
        if not one.isfinite().all():
            if other.isfinite().all() and exact.loss.isfinite().all():
                return broken("loss or gradients are not finite, and finite in float64")
            return not_checked("the loss is not finite in float64 either")
        error, size = distance(one, other), float(other.norm())
        rows = torch.arange(count)
        halves = (
            [
                trial.evaluate(trial.with_rows(half), gradients=True, train=False).joint_gradient()
                for half in (rows[: count // 2].repeat(2), rows[count // 2 : count // 2 * 2].repeat(2))
            ]
            if count % 2 == 0
            else []
        )
        # The halves' difference is twice the standard error of the batch's mean gradient.
        noise = distance(*halves) / 2 if halves else size
        if error > noise and error > 1e-3 * size:
            return broken(f"the gradient is {error / max(size, 1e-300):.1%} off that of float64")
        return holds(f"the gradient's error is {error / max(size, 1e-300):.1e}")
