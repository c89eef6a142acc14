"""Estimates and errors of the counterfactual split by number of shuffles, to check whether a few are enough."""

from itertools import combinations

import torch
from loopscope import DebugInterventionHook, HookPoint, HookRegistry, RunDataContext
from loopscope.errors import require
from loopscope.hooks import Metrics, ModelDataContext
from loopscope.training import critical_t
from torch import Tensor

from .counterfactual import inner_products, shuffled_epochs
from .splits import FEWEST, Splits, splits, squared_errors

MOST = 12
"""Shuffles whose subsets can all be enumerated: 4,083 of them."""


def by_count(gram: Tensor) -> tuple[dict[int, Splits], dict[int, Splits]]:
    """Return for K = 2…n the mean estimates over all sets of K of the n shuffles, and the root mean square errors.

    ``gram`` has shape (n + 1, n + 1), the observed epoch at index 0. Errors begin at K = 3.
    """
    gram = gram.double()
    estimates: dict[int, Splits] = {}
    errors: dict[int, Splits] = {}
    for count in range(2, len(gram)):
        sets = torch.tensor(list(combinations(range(1, len(gram)), count)), device=gram.device)
        found = splits(gram, torch.zeros(len(sets), dtype=torch.long, device=gram.device), sets)
        estimates[count] = Splits(*[values.mean() for values in found])
        if count >= FEWEST:
            errors[count] = Splits(*[values.mean().sqrt() for values in squared_errors(gram, sets)])
    return estimates, errors


def smallest_within(half_widths: dict[int, Tensor], tolerance: float) -> Tensor:
    """Return the smallest K from which on all half-widths are at most ``tolerance``; NaN if none exists."""
    found = next(iter(half_widths.values())).new_full((), torch.nan, dtype=torch.float64)
    unbroken = torch.ones_like(found, dtype=torch.bool)
    for count in sorted(half_widths, reverse=True):
        unbroken = unbroken & (half_widths[count] <= tolerance)
        found = torch.where(unbroken, count, found)
    return found


@HookRegistry.register
class CounterfactualValidator(DebugInterventionHook):
    """Check whether K shuffles are enough for ``counterfactual``, from the sets of K out of many shuffles.

    At snapshots the epoch is retrained in ``k_max`` shuffled orders. For every K, ordering_fraction, null_fraction and
    excess (as ``counterfactual`` defines them) are averaged over all sets of K shuffles, with the standard error that
    a single set of K has, root mean square over the sets. The confidence interval of the excess is estimate ± t·error,
    t the quantile of Student's t with K − 1 degrees of freedom; the page of ``counterfactual`` says how the error is
    made and that the interval is conservative. Averages over sets scatter less than one set, so that for K below
    ``k_max`` it is wider still.

    The error of the excess includes the chance in the single observed order, which only more epochs reduce, not more
    shuffles. The errors of the fractions do not include it.

    Assumes that shuffled epochs are independent draws, which their seeds make them, and that observed and shuffled
    epochs differ in nothing but their order; over several processes they are shuffled as ``counterfactual`` says. Costs
    ``k_max`` epochs at every snapshot, and the memory of as many gradients.

    Args:
        k_max: shuffles to draw, from 3 to 12.
        confidence: of the intervals, between 0 and 1.
        tolerance: the half-width of the interval of the excess that is small enough.
    """

    name = "counterfactual_validator"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    needs_experiment_loop = True
    loop_points = {"epoch": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    needs_pre_epoch_state = True
    metrics = """
        ordering_fraction | by K: mean over sets of K shuffles of 1 − max(0, cos(g, c̄))² | [0, 1]
            | Falls with K where shuffles are noisy: c̄ is then the better known, the more there are.
        ordering_fraction_error | by K ≥ 3: √ mean over sets of the jackknife variance (K−1)/K Σᵢ (x₋ᵢ − mean x₋)²
            | [0, ∞) | The standard error that the choice of K shuffles gives to ordering_fraction.
        null_fraction | by K: mean over sets of the mean over k of 1 − max(0, cos(c_k, mean of the c_j, j ≠ k))²
            | [0, 1] | What chance alone gives with K shuffles.
        null_fraction_error | as ordering_fraction_error | [0, ∞) | Its standard error.
        excess | by K: mean over sets of ordering_fraction_matched − null_fraction | [−1, 1]
            | The effect of the order. Should not depend much on K; if it does, small K are biased here.
        excess_error | by K ≥ 3: root mean square over sets of the excess_error of counterfactual | [0, ∞)
            | The standard error of the excess of one epoch with K shuffles, including the chance in its order.
        excess_half_width | by K ≥ 3: t(confidence, K − 1)·excess_error | [0, ∞)
            | An excess of counterfactual with this K that is smaller says nothing by itself.
        excess_low | excess − half-width at k_max | (−∞, ∞) | Above 0: the order has an effect.
        excess_high | excess + half-width at k_max | (−∞, ∞) | Below 0: more typical than chance.
        sufficient_k | the smallest K from which on excess_half_width ≤ tolerance | {3, …, k_max}, NaN
            | The k to give counterfactual. NaN: not even k_max shuffles are enough; average over epochs instead.
    """

    def __init__(self, *, k_max: int = 8, confidence: float = 0.95, tolerance: float = 0.1) -> None:
        require(FEWEST <= k_max <= MOST, f"counterfactual_validator.k_max is {k_max}; it must be in {FEWEST}..{MOST}.")
        require(0 < confidence < 1, f"{self.name}.confidence is {confidence}; it must lie between 0 and 1.")
        require(tolerance > 0, f"{self.name}.tolerance is {tolerance}; it must be a positive number.")
        self.k_max, self.confidence, self.tolerance = k_max, confidence, tolerance

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the shuffled epochs and return estimates and errors; nothing for an epoch without gradients."""
        if not run_ctx.accumulated_grads:
            return {}
        return self.estimated(inner_products([run_ctx.accumulated_grads, *shuffled_epochs(model_ctx, self.k_max)]))

    def estimated(self, gram: Tensor) -> Metrics:
        """Return the metrics from the inner products of the observed epoch, at index 0, and the shuffled ones."""
        estimates, errors = by_count(gram)
        half_widths = {count: critical_t(count - 1, self.confidence) * error.excess for count, error in errors.items()}
        middle, width = estimates[self.k_max].excess, half_widths[self.k_max]
        found: dict[str, Metrics | Tensor] = {}
        for index, name in enumerate(Splits._fields):
            found[name] = {str(count): each[index] for count, each in estimates.items()}
            found[f"{name}_error"] = {str(count): each[index] for count, each in errors.items()}
        return found | {
            "excess_half_width": {str(count): each for count, each in half_widths.items()},
            "excess_low": middle - width,
            "excess_high": middle + width,
            "sufficient_k": smallest_within(half_widths, self.tolerance),
        }
