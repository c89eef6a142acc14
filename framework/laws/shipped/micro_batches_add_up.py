"""The law that micro-batches have the gradient of the whole batch."""

import torch

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..trial import TIMES_NOISE, Trial, distance


@LawRegistry.register
class MicroBatchesAddUp(Law):
    """Compare the sum of the gradients of a step's micro-batches with the gradient of all their rows in one pass.

    The factor by which the loop divides is free: only the direction must agree, so that all rows, or all tokens, have
    one weight.
    """

    name = "micro_batches_add_up"
    statement = "micro-batches have the gradient of the whole batch"
    remedy = "divide the summed losses of all micro-batches once, by their rows or valid tokens together"

    def check(self, trial: Trial) -> Outcome:
        """Join the micro-batches, after a test that joining one of them with itself changes nothing."""
        steps = trial.steps
        if len(steps) < 2:
            return not_checked("the step has one backward pass")
        one, noise = trial.gradient(), trial.gradient_noise
        twice = trial.evaluate(trial.joined([steps[0], steps[0]]), gradients=True, train=False)
        factors = [
            factor
            for factor in (1, 2)
            if distance(twice.joint_gradient(), factor * one) <= factor * TIMES_NOISE * noise
        ]
        if not factors:
            return not_checked("the loss cannot be computed for more rows")
        total = torch.stack(
            [trial.evaluate(step=step, gradients=True, train=False).joint_gradient() for step in steps]
        ).sum(0)
        joint = trial.evaluate(trial.joined(steps), gradients=True, train=False).joint_gradient()
        factor = float(total @ joint / (joint @ joint).clamp(min=1e-300))
        remaining, size = distance(total, factor * joint), float(total.norm())
        if not trial.is_noise(remaining, gradients=len(steps)) and remaining > 1e-3 * size:
            return broken(
                f"{remaining / size:.1%} of the gradient of {len(steps)} micro-batches differ from the batch's"
            )
        return holds()
