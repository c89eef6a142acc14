"""The law that the gradient of a batch is the weighted mean of the gradients of its halves."""

import torch

from ...errors import listed
from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..trial import Trial, distance

LEAST_PART = 1e-3
"""The part of the gradient that must remain: the share of the halves is fitted, and its error remains, too."""
SELECTIONS = {"topk", "sort", "argsort", "kthvalue", "quantile", "nanquantile", "median"}

SPREADS = {"std", "var", "std_mean", "var_mean"}
"""Functions that normalise data, such as the advantages of a policy gradient."""


@LawRegistry.register
class HalvesMakeAWhole(Law):
    """Compare the gradient of the batch with those of batches that contain one of its halves twice, in eval mode.

    g = a·g₁ + (1 − a)·g₂, where a is the share of the first half, ½ or that of its tokens: the best a is fitted.
    """

    name = "halves_make_a_whole"
    statement = "the loss of a batch is the mean of the losses of its halves"
    remedy = "sum the losses of rows or tokens and divide once; no root, maximum or normalisation over the batch"

    def check(self, trial: Trial) -> Outcome:
        """Fit the share of the first half, and compare what remains with the noise of rounding."""
        total, count = trial.gradient(), trial.rows
        if count % 2:
            return not_checked("the batch has an odd number of rows")
        if reason := _is_of_batch(trial):
            return not_checked(reason)
        rows = torch.arange(count)
        first, second = rows[: count // 2].repeat(2), rows[count // 2 :].repeat(2)
        one, other = (self._gradient(trial, order) for order in (first, second))
        difference = one - other
        share = float((total - other) @ difference / (difference @ difference).clamp(min=1e-300))
        remaining = distance(total, share * one + (1 - share) * other)
        if not trial.is_noise(remaining) and remaining > LEAST_PART * float(total.norm()):
            part = remaining / max(float(total.norm()), 1e-300)
            return broken(f"no mean of the halves' gradients gives that of the batch: {part:.1%} of it remain")
        named = "apart from batch normalisation" if trial.normalisations() else ""
        return holds(named)

    def _gradient(self, trial: Trial, order: torch.Tensor) -> torch.Tensor:
        constants = trial.with_rows(order)
        if trial.derivation:
            constants = trial.cropped(constants)
        return trial.evaluate(constants, gradients=True, train=False, **trial.derivation).joint_gradient()


def _is_of_batch(trial: Trial) -> str:
    """Return by what the loss depends on the batch as a whole by design, if it does."""
    if trial.compares_rows:
        return "the loss compares the rows of a batch with each other by design"
    names = {call.name for call in trial.step.calls}
    if chosen := sorted(names & SELECTIONS):
        return f"the loss selects rows or terms by design ({listed(chosen, 3)})"
    derived = {call.name for call in trial.step.derivations} if trial.derivation else set()
    if chosen := sorted(derived & (SELECTIONS | SPREADS)):
        return f"the loss normalises or selects data of the batch by design ({listed(chosen, 3)})"
    return ""
