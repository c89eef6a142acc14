"""The law that a batch has the same gradient in any order of its rows."""

import torch

from ..law import Law, LawRegistry, Outcome, broken, holds
from ..trial import Trial, distance


@LawRegistry.register
class OrderDoesNotMatter(Law):
    """Compute the gradient of the batch with inputs and targets in another order of rows, in eval mode."""

    name = "order_does_not_matter"
    statement = "the order of rows does not change the gradient"
    remedy = "let no row depend on its position in the batch, and pair inputs and targets by rows"

    def check(self, trial: Trial) -> Outcome:
        """Compare the gradients of two orders with the noise of rounding."""
        whole = trial.gradient()
        order = torch.randperm(trial.rows, generator=torch.Generator().manual_seed(0))
        other = trial.evaluate(trial.with_rows(order), gradients=True, train=False, **trial.derivation).joint_gradient()
        difference = distance(other, whole)
        if trial.is_noise(difference):
            return holds()
        size = float(whole.norm())
        noise = trial.gradient_noise / size
        return broken(f"another order changes the gradient by {difference / size:.2%}, rounding by {noise:.0e}")
