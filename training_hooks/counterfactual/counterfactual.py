"""Effect of the data order on an epoch: its gradient compared with those of the same epoch in shuffled orders."""

from collections.abc import Iterator, Sequence

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, RunDataContext
from loopscope.errors import require
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.state import Vector, dot, minus, trainable
from loopscope.training import critical_t
from torch import Tensor

from ..measures import notice
from .splits import CONFIDENCE, FEWEST, squared_errors

NO_ORDERING = 1e-5
"""A remainder of g without c̄ below this share of ‖g‖² is float32 rounding, without a direction."""


def inner_products(vectors: Sequence[Vector]) -> Tensor:
    """Return the Gram matrix of n vectors, shape (n, n)."""
    rows: list[list[Tensor]] = []
    for i, vector in enumerate(vectors):
        rows.append([rows[j][i] if j < i else dot(vector, other) for j, other in enumerate(vectors)])
    return torch.stack([torch.stack(row) for row in rows])


def shuffled_epochs(model_ctx: ModelDataContext, count: int) -> Iterator[Vector]:
    """Train the epoch again in fresh orders, each from the state before it, and yield the mean gradients."""
    for _ in range(count):
        model_ctx.restore_pre_epoch()
        yield model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())


def energy_outside(gram: Tensor, one: int, others: Sequence[int]) -> Tensor:
    """Return 1 − max(0, cos)² of v_one and the mean of v_others: the share of ‖v_one‖² that is not along that mean."""
    chosen = list(others)
    across = gram[one, chosen].mean().clamp(min=0)
    return 1 - across.square() / (gram[one, one] * gram[chosen][:, chosen].mean())


def ordering_split(gram: Tensor) -> dict[str, Tensor]:
    """Split the observed epoch gradient g into content and ordering.

    ``gram`` has shape (K + 1, K + 1), K ≥ 2: the inner products of g, at index 0, and of the gradients c₁…c_K of K
    shuffled epochs. The excess compares like with like: g and c_k are both held against the mean of the other K − 1
    shuffles. Where the order has no effect g, c₁…c_K are exchangeable, both terms have one distribution, and the
    expectation of the excess is exactly zero for any noise. ``ordering_fraction`` uses all K shuffles: without
    any effect of the order it lies below the null (0.875 against 0.9 at a noise energy of 3 times the signal's and
    K = 3), so it is no term of the excess. A negative cosine counts as 0, in every term: an epoch against its content
    is all ordering, and clamping one term alone would bias the excess.
    """
    count = len(gram) - 1
    shuffles = range(1, count + 1)
    others = {k: [j for j in shuffles if j != k] for k in shuffles}
    matched = torch.stack([energy_outside(gram, 0, others[k]) for k in shuffles]).mean()
    null = torch.stack([energy_outside(gram, k, others[k]) for k in shuffles]).mean()
    mean_norm = gram[1:, 1:].mean().sqrt()
    projection = gram[0, 1:].mean() / mean_norm
    lengths = gram.diagonal().clamp(min=0).sqrt()
    cosines = gram[1:, 1:] / torch.outer(lengths[1:], lengths[1:])
    return {
        "ordering_fraction": energy_outside(gram, 0, shuffles),
        "ordering_fraction_matched": matched,
        "null_fraction": null,
        "excess": matched - null,
        "content_norm": projection.abs(),
        "ordering_norm": (gram[0, 0] - projection.square()).clamp(min=0).sqrt(),
        "content_cosine": projection / lengths[0],
        "observed_coherence": (gram[0, 1:] / (lengths[0] * lengths[1:])).mean(),
        "shuffle_coherence": (cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1)),
        "observed_norm": lengths[0],
        "shuffled_norm": lengths[1:].mean(),
    }


def split_errors(gram: Tensor) -> dict[str, Tensor]:
    """Return the errors of :func:`ordering_split`, from the same Gram matrix: empty for fewer than 3 shuffles.

    Standard errors as :func:`.splits.squared_errors` defines them, and the half-width of the 95 % interval of the
    excess by Student's t with K − 1 degrees of freedom.
    """
    count = len(gram) - 1
    if count < FEWEST:
        return {}
    squared = squared_errors(gram, torch.arange(1, count + 1, device=gram.device)[None])
    errors = {f"{name}_error": values[0].sqrt() for name, values in squared._asdict().items()}
    return errors | {"excess_half_width": critical_t(count - 1, CONFIDENCE) * errors["excess_error"]}


def solution_alignment(gram: Tensor) -> dict[str, Tensor]:
    """Return how well observed epoch, content and ordering point to a reference solution.

    ``gram`` has shape (K + 2, K + 2): the inner products of g, c₁…c_K and, at the end, of the way d from the parameters
    before the epoch to the reference. Gradients point uphill, hence cos(−·, d).
    """
    square, toward = gram.diagonal().clamp(min=0), -gram[:-1, -1]
    mean_square, mean_toward = gram[1:-1, 1:-1].mean(), toward[1:].mean()
    share = gram[0, 1:-1].mean() / mean_square
    ordering_square = square[0] - share.square() * mean_square
    ordering_cosine = (toward[0] - share * mean_toward) / (ordering_square * square[-1]).sqrt()
    there_is_ordering = ordering_square > NO_ORDERING * square[0]
    cosines = toward / (square[:-1] * square[-1]).sqrt()
    return {
        "solution_cosine": cosines[0],
        "content_solution_cosine": share.sign() * mean_toward / (mean_square * square[-1]).sqrt(),
        "ordering_solution_cosine": torch.where(there_is_ordering, ordering_cosine, torch.nan),
        "shuffled_solution_cosine": cosines[1:].mean(),
        "solution_excess": cosines[0] - cosines[1:].mean(),
    }


@HookRegistry.register
class Counterfactual(InterventionHook):
    """Retrain the epoch in shuffled orders and split its gradient into content and ordering.

    From the state before the epoch, K epochs on reshuffled data give mean gradients c₁…c_K (as ``accumulated_grads``:
    the mean over the steps of the gradients before any commit). What the observed g shares with their mean c̄ is due
    to the content of the data, the rest to their order and to chance; the null says how much chance alone gives. Fires
    after every epoch up to epoch 49, then at snapshots, and costs K epochs each time.

    A negative cosine counts as 0 in every fraction: an epoch that runs against its content is ordering, not content.
    content_cosine and observed_coherence keep the sign.

    Errors come from the same inner products, and need K ≥ 3. Those of the two fractions are the jackknife's over the
    shuffles. That of the excess is the larger of its jackknife over the shuffles and of the scatter of placebos, each
    shuffle in turn in the place of g; an excess beyond what these allow gets the chance in g added to the jackknife,
    taken to be as large as in a shuffled epoch (delta method along the differences of pairs of shuffles). The 95 %
    interval excess ± excess_half_width (Student's t, K − 1 degrees of freedom) is conservative. In simulations of 30
    and 300 dimensions, K = 3 to 8 and noise of 0.1 to 10 times the signal's energy it covers zero in 97 % to 100 % if
    the order has no effect, and the expected excess of a planted one in 94 % to 100 %; but in 88 % to 92 % for an epoch
    against its content if K is 3 or 4 and the noise 10, and in 88 % to 100 % in 3 dimensions.

    A fixed order that is repeated every epoch differs from fresh shuffles for another reason, too: it made the state
    that it is judged at. So hold a sorted order against a fixed random one (strategy ``fixed-random`` of
    mod_arithmetic), not against zero; docs/counterfactuals.md does, in numbers.

    Assumes that the order of the data is all that parts the observed epoch from the shuffled ones. In a run with
    committing hooks (clipping, smoothing) the shuffled epochs run without those commits: the excess then holds their
    effect, too. Dropout masks differ, which counts as chance. Takes the memory of K gradients. Over several processes
    each shuffles what its loader has: all rows, where the loader parts batches that all ranks draw alike, as a
    distributed sampler does; else its own, and which rank sees a row is then no part of what is shuffled.

    Args:
        k: number of shuffled epochs, at least 2, since the null holds each against the others; errors need 3.
    """

    name = "counterfactual"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_experiment_loop = True
    loop_points = {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
    needs_grads = True
    needs_pre_epoch_state = True
    uses_reference_weights = True
    metrics = f"""
        ordering_fraction | 1 − max(0, cos(g, c̄))²: the share of ‖g‖² that is not along c̄ | [0, 1]
            | 1 for an epoch against its content (content_cosine below 0). Says nothing without the null: with noise of
            r times the signal's energy and no effect of the order it is about 1 − 1/((1+r)(1+r/K)).
        ordering_fraction_error | √((K−1)/K Σᵢ (x₋ᵢ − mean x₋)²), x₋ᵢ without shuffle i | [0, ∞)
            | The standard error that the choice of the shuffles gives to it, for this g (jackknife). From K = 3 on.
        ordering_fraction_matched | mean over k of 1 − max(0, cos(g, mean of the c_j, j ≠ k))² | [0, 1]
            | The same against K − 1 shuffles, as the null is measured.
        null_fraction | mean over k of 1 − max(0, cos(c_k, mean of the c_j, j ≠ k))² | [0, 1]
            | What a shuffled epoch in the place of the observed one gives: chance alone.
        null_fraction_error | as ordering_fraction_error | [0, ∞) | Its standard error. From K = 3 on.
        excess | ordering_fraction_matched − null_fraction | [−1, 1]
            | The effect of the order. Its expectation is zero if the order is as good as a random one; single values
            scatter about it: look at several epochs. Negative: more typical than a random order.
        excess_error | √max(J, (1 − 1/K²)·mean pᵢ²), J the jackknife's variance over the shuffles, pᵢ the excess of
            shuffle i in the place of g against the others; an excess beyond t(95 %, K − 1) times that: √(J + v_g), if
            larger, v_g the variance by the chance in g | [0, ∞)
            | The standard error of the excess, the chance in the one observed epoch included. From K = 3 on.
        excess_half_width | t(95 %, K − 1)·excess_error | [0, ∞)
            | A smaller excess says nothing by itself. Conservative. From K = 3 on.
        content_norm | |g·c̄| / ‖c̄‖ | [0, ∞) | The part of g that the data give in any order.
        ordering_norm | ‖g − (g·c̄ / ‖c̄‖²) c̄‖ | [0, ∞) | The rest: order and chance. Squared, the two add up to ‖g‖².
        content_cosine | cos(g, c̄) | [−1, 1] | The signed coherence with the content. Negative: this order works against
            the data.
        shuffle_coherence | mean over pairs i < j of cos(c_i, c_j) | [−1, 1]
            | How well one shuffled epoch determines the gradient: about 1/(1+r). Near 0: K is too small to tell.
        observed_coherence | mean over k of cos(g, c_k) | [−1, 1]
            | How well shuffled epochs determine the observed one; below shuffle_coherence: its order is unlike theirs.
        observed_norm | ‖g‖₂ | [0, ∞) | The norm of the observed epoch's mean gradient.
        shuffled_norm | mean over k of ‖c_k‖₂ | [0, ∞)
            | Above observed_norm: the observed order makes steps cancel that otherwise add up.
        solution_cosine | cos(−g, d), d = θ_ref − θ₀, θ₀ the parameters before the epoch | [−1, 1]
            | Only with a reference solution, as the four below. Positive: the observed epoch leads to it.
        content_solution_cosine | cos(−(g·c̄ / ‖c̄‖²) c̄, d) | [−1, 1]
            | Positive: what the data give in any order leads to it.
        ordering_solution_cosine | cos(−(g − (g·c̄ / ‖c̄‖²) c̄), d) | [−1, 1]
            | Positive: the rest, order and chance, leads to it; near 0: it leads neither way. NaN: there is no
            rest (ordering_norm² below {NO_ORDERING:.0e}·‖g‖²).
        shuffled_solution_cosine | mean over k of cos(−c_k, d) | [−1, 1] | What a random order gives.
        solution_excess | solution_cosine − shuffled_solution_cosine | [−2, 2]
            | Positive: this order leads to the reference better than a random one, whose expectation is zero.
    """

    def __init__(self, *, k: int = 3) -> None:
        require(k >= 2, f"counterfactual.k is {k}; it must be at least 2: the null compares shuffles.")
        self.k = k

    def start(self, run: RunInfo) -> None:
        """Issue a notice if there are too few shuffles for errors."""
        if self.k < FEWEST:
            notice(
                f"counterfactual.k is {self.k}: fractions and excess come without errors, which need at least {FEWEST} "
                f"shuffles (--hook-config counterfactual.k={FEWEST})."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the shuffled epochs and return the split; nothing for an epoch without gradients."""
        if not run_ctx.accumulated_grads:
            return {}
        vectors = [run_ctx.accumulated_grads, *shuffled_epochs(model_ctx, self.k)]
        if run_ctx.reference_weights is not None:
            model_ctx.restore_pre_epoch()
            here = trainable(model_ctx.model)
            vectors.append(minus({name: run_ctx.reference_weights[name] for name in here}, here))
        gram = inner_products(vectors)
        among = gram[: self.k + 1, : self.k + 1]
        aligned = {} if run_ctx.reference_weights is None else solution_alignment(gram)
        return ordering_split(among) | split_errors(among) | aligned
