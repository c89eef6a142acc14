"""Estimates and errors of the counterfactual split by number of shuffles, to check whether a few are enough."""

from itertools import combinations

import torch
from loopscope import DebugInterventionHook, HookPoint, HookRegistry, RunDataContext
from loopscope.errors import require
from loopscope.hooks import Metrics, ModelDataContext
from loopscope.student_t import critical_t
from torch import Tensor

from .counterfactual import inner_products, shuffled_epochs
from .splits import FEWEST, Splits, splits, squared_errors

MOST = 12
"""Largest number of shuffles: their 4,083 subsets of two or more can all be enumerated."""


def estimates_by_count(gram: Tensor) -> tuple[dict[int, Splits], dict[int, Splits]]:
    """Return mean estimates over all sets of K of the n shuffles, K = 2…n, and root mean square errors, K = 3…n.

    ``gram`` has shape (n + 1, n + 1), with the observed epoch at index 0.
    """
    gram = gram.double()
    estimates: dict[int, Splits] = {}
    errors: dict[int, Splits] = {}
    for count in range(2, len(gram)):
        sets = torch.tensor(list(combinations(range(1, len(gram)), count)), device=gram.device)
        set_splits = splits(gram, torch.zeros(len(sets), dtype=torch.long, device=gram.device), sets)
        estimates[count] = Splits(*[values.mean() for values in set_splits])
        if count >= FEWEST:
            errors[count] = Splits(*[values.mean().sqrt() for values in squared_errors(gram, sets)])
    return estimates, errors


def smallest_within(half_widths: dict[int, Tensor], tolerance: float) -> Tensor:
    """Return the smallest K such that the half-widths of K and more are at most ``tolerance``, otherwise NaN."""
    smallest = next(iter(half_widths.values())).new_full((), torch.nan, dtype=torch.float64)
    are_within = torch.ones_like(smallest, dtype=torch.bool)
    for count in sorted(half_widths, reverse=True):
        are_within = are_within & (half_widths[count] <= tolerance)
        smallest = torch.where(are_within, count, smallest)
    return smallest


@HookRegistry.register
class CounterfactualValidator(DebugInterventionHook):
    """Check whether K shuffles are enough for ``counterfactual``, from the sets of K out of many shuffles.

    At snapshots the epoch is retrained in ``k_max`` shuffled orders. For every K, ordering_fraction, null_fraction and
    excess (as in ``counterfactual``) are averaged over all sets of K shuffles. Their standard error is that of a single
    set of K, as the root mean square over the sets. The confidence interval of the excess is estimate ± t·error, with t
    the quantile of Student's t with K − 1 degrees of freedom; the page of ``counterfactual`` describes the error, and
    why the interval is conservative. For K below ``k_max`` it is even more so, because the average over sets scatters
    less than a single set.

    The error of the excess includes the chance in the single observed order, which only more epochs reduce, not more
    shuffles. The errors of the fractions do not include it.

    Assumes that shuffled epochs are independent draws, as their seeds ensure, and that observed and shuffled epochs
    differ only in their order; ``counterfactual`` describes shuffling with several processes. Costs ``k_max`` epochs
    per snapshot, and the memory of ``k_max`` gradients.

    Args:
        k_max: shuffles to draw, from 3 to 12.
        confidence: confidence level of the intervals, between 0 and 1.
        tolerance: largest acceptable half-width of the interval of the excess.
    """

    name = "counterfactual_validator"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    needs_experiment_loop = True
    loop_points = {"epoch": frozenset({HookPoint.SNAPSHOT})}
    needs_grads = True
    needs_pre_epoch_state = True
    metrics = """
        ordering_fraction | by K: mean over sets of K shuffles of 1 − max(0, cos(g, c̄))² | [0, 1], NaN
            | Falls with K for noisy shuffles, because more shuffles determine c̄ better.
        ordering_fraction_error | by K ≥ 3: √ mean over sets of the jackknife variance (K−1)/K Σᵢ (x₋ᵢ − mean x₋)²
            | [0, ∞), NaN | The standard error of ordering_fraction over the choice of K shuffles. For an interval
            multiply it by Student's t for K − 1 degrees of freedom; measured coverage is below.
        null_fraction | by K: mean over sets of the mean over k of 1 − max(0, cos(c_k, mean of the c_j, j ≠ k))²
            | [0, 1], NaN | The fraction due to chance alone with K shuffles.
        null_fraction_error | as ordering_fraction_error | [0, ∞), NaN
            | The standard error of null_fraction over the choice of K shuffles, to be used with the same t.
        excess | by K: mean over sets of ordering_fraction_matched − null_fraction | [−1, 1], NaN
            | The effect of the order. It should hardly depend on K; if it does, small K are biased here.
        excess_error | by K ≥ 3: root mean square over sets of the excess_error of counterfactual | [0, ∞), NaN
            | The standard error of the excess of one epoch with K shuffles, including the chance in its order.
        excess_half_width | by K ≥ 3: t(confidence, K − 1)·excess_error | [0, ∞), NaN
            | A smaller |excess| of counterfactual with this K is not significant by itself.
        excess_low | excess − half-width at k_max | (−∞, ∞), NaN | Above 0: the order has an effect.
        excess_high | excess + half-width at k_max | (−∞, ∞), NaN | Below 0: more typical than chance.
        sufficient_k | the smallest K with excess_half_width ≤ tolerance for K and more | {3, …, k_max}, NaN
            | The k to use for counterfactual. NaN: k_max shuffles are not enough; average over epochs instead.
    """

    def __init__(self, *, k_max: int = 8, confidence: float = 0.95, tolerance: float = 0.1) -> None:
        require(FEWEST <= k_max <= MOST, f"counterfactual_validator.k_max is {k_max}; it must be in {FEWEST}..{MOST}.")
        require(0 < confidence < 1, f"{self.name}.confidence is {confidence}; it must be between 0 and 1.")
        require(tolerance > 0, f"{self.name}.tolerance is {tolerance}; it must be a positive number.")
        self.k_max, self.confidence, self.tolerance = k_max, confidence, tolerance

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the shuffled epochs and return estimates and errors; empty for an epoch without gradients."""
        if not run_ctx.accumulated_grads:
            return {}
        return self.estimate(inner_products([run_ctx.accumulated_grads, *shuffled_epochs(model_ctx, self.k_max)]))

    def estimate(self, gram: Tensor) -> Metrics:
        """Return the metrics from the inner products of the observed epoch, at index 0, and the shuffled epochs."""
        estimates, errors = estimates_by_count(gram)
        half_widths = {count: critical_t(count - 1, self.confidence) * error.excess for count, error in errors.items()}
        excess, half_width = estimates[self.k_max].excess, half_widths[self.k_max]
        metrics: dict[str, Metrics | Tensor] = {}
        for index, name in enumerate(Splits._fields):
            metrics[name] = {str(count): estimate[index] for count, estimate in estimates.items()}
            metrics[f"{name}_error"] = {str(count): error[index] for count, error in errors.items()}
        return metrics | {
            "excess_half_width": {str(count): width for count, width in half_widths.items()},
            "excess_low": excess - half_width,
            "excess_high": excess + half_width,
            "sufficient_k": smallest_within(half_widths, self.tolerance),
        }
