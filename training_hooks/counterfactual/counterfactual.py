"""Effect of the data order on an epoch: its gradient compared with those of the same epoch in shuffled orders."""

from collections.abc import Iterator, Sequence

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, RunDataContext
from loopscope.errors import require
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.student_t import critical_t
from loopscope.tensors import Vector, dot, minus, trainable
from torch import Tensor

from ..measures import notice
from .splits import CONFIDENCE, FEWEST, squared_errors

POWERFUL = 5
"""Shuffles from which no notice reports that single epochs show little; the class states the power."""
NO_ORDERING = 1e-5
"""Share of ‖g‖² below which the part of g orthogonal to c̄ is float32 rounding, without a meaningful direction."""


def inner_products(vectors: Sequence[Vector]) -> Tensor:
    """Return the Gram matrix of n vectors, shape (n, n)."""
    rows: list[list[Tensor]] = []
    for i, vector in enumerate(vectors):
        rows.append([rows[j][i] if j < i else dot(vector, other) for j, other in enumerate(vectors)])
    return torch.stack([torch.stack(row) for row in rows])


def shuffled_epochs(model_ctx: ModelDataContext, count: int) -> Iterator[Vector]:
    """Retrain the epoch in ``count`` new random orders, each from the state before it, and yield the mean gradients."""
    for _ in range(count):
        model_ctx.restore_pre_epoch()
        yield model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())


def energy_outside(gram: Tensor, one: int, others: Sequence[int]) -> Tensor:
    """Return 1 − max(0, cos)² of vector ``one`` and the mean of ``others``: the energy share outside that mean."""
    chosen = list(others)
    # With m = mean of v_j over others: cos² = (v_one·m)² / (‖v_one‖²‖m‖²), where v_one·m and ‖m‖² are means in the Gram
    # matrix.
    across = gram[one, chosen].mean().clamp(min=0)
    squared_cosine = across.square() / (gram[one, one] * gram[chosen][:, chosen].mean())
    return 1 - squared_cosine.clamp(max=1)  # which rounding may exceed, as for the cosines below


def ordering_split(gram: Tensor) -> dict[str, Tensor]:
    """Split the observed epoch gradient g into content and ordering.

    ``gram`` has shape (K + 1, K + 1), K ≥ 2: the inner products of g, at index 0, and of the gradients c₁…c_K of K
    shuffled epochs. The excess compares g and every c_k with the mean of the other K − 1 shuffles. If the order has no
    effect, g, c₁…c_K are exchangeable, both terms of the excess have the same distribution, and its expectation is
    exactly zero for any noise. ``ordering_fraction`` uses all K shuffles. If the order has no effect, it is below the
    null (0.875 instead of 0.9 for a noise energy of 3 times the signal's and K = 3), so it is not a term of the excess.
    Comparing the null with one more shuffle instead would cost one more epoch each time. A negative cosine counts as 0
    in every term: an epoch against its content is all ordering, and clamping only one term would bias the excess.
    """
    count = len(gram) - 1
    shuffles = range(1, count + 1)
    others = {k: [j for j in shuffles if j != k] for k in shuffles}
    matched = torch.stack([energy_outside(gram, 0, others[k]) for k in shuffles]).mean()
    null = torch.stack([energy_outside(gram, k, others[k]) for k in shuffles]).mean()
    # ‖c̄‖² = mean of c_j·c_k, g·c̄ = mean of g·c_k; content g·c̄/‖c̄‖, and ‖ordering‖² = ‖g‖² − (g·c̄)²/‖c̄‖²
    mean_norm = gram[1:, 1:].mean().sqrt()
    projection = gram[0, 1:].mean() / mean_norm
    lengths = gram.diagonal().clamp(min=0).sqrt()
    cosines = (gram / torch.outer(lengths, lengths)).clamp(-1, 1)
    among_shuffles = cosines[1:, 1:]
    return {
        "ordering_fraction": energy_outside(gram, 0, shuffles),
        "ordering_fraction_matched": matched,
        "null_fraction": null,
        "excess": matched - null,
        "content_norm": projection.abs(),
        "ordering_norm": (gram[0, 0] - projection.square()).clamp(min=0).sqrt(),
        "content_cosine": (projection / lengths[0]).clamp(-1, 1),
        "observed_coherence": cosines[0, 1:].mean(),
        "shuffle_coherence": (among_shuffles.sum() - among_shuffles.diagonal().sum()) / (count * (count - 1)),
        "observed_norm": lengths[0],
        "shuffled_norm": lengths[1:].mean(),
    }


def split_errors(gram: Tensor) -> dict[str, Tensor]:
    """Return the errors of :func:`ordering_split` from the same Gram matrix; empty for fewer than 3 shuffles.

    They are the standard errors by :func:`.splits.squared_errors`, and the half-width of the 95 % interval of the
    excess by Student's t with K − 1 degrees of freedom.
    """
    count = len(gram) - 1
    if count < FEWEST:
        return {}
    squared = squared_errors(gram, torch.arange(1, count + 1, device=gram.device)[None])
    errors = {f"{name}_error": values[0].sqrt() for name, values in squared._asdict().items()}
    return errors | {"excess_half_width": critical_t(count - 1, CONFIDENCE) * errors["excess_error"]}


def solution_alignment(gram: Tensor) -> dict[str, Tensor]:
    """Return the cosines of observed epoch, content and ordering with the direction to a reference solution.

    ``gram`` has shape (K + 2, K + 2): the inner products of g, c₁…c_K and, at the last index, of the direction d from
    the parameters before the epoch to the reference. Gradients point uphill, hence cos(−·, d).
    """
    # content = share·c̄ with share = g·c̄ / ‖c̄‖², and ordering = g − content; ‖ordering‖² = ‖g‖² − share²·‖c̄‖²
    square, toward = gram.diagonal().clamp(min=0), -gram[:-1, -1]
    mean_square, mean_toward = gram[1:-1, 1:-1].mean(), toward[1:].mean()
    share = gram[0, 1:-1].mean() / mean_square
    ordering_square = square[0] - share.square() * mean_square
    ordering_cosine = (toward[0] - share * mean_toward) / (ordering_square * square[-1]).sqrt()
    has_ordering = ordering_square > NO_ORDERING * square[0]
    cosines = (toward / (square[:-1] * square[-1]).sqrt()).clamp(-1, 1)
    return {
        "solution_cosine": cosines[0],
        "content_solution_cosine": (share.sign() * mean_toward / (mean_square * square[-1]).sqrt()).clamp(-1, 1),
        "ordering_solution_cosine": torch.where(has_ordering, ordering_cosine.clamp(-1, 1), torch.nan),
        "shuffled_solution_cosine": cosines[1:].mean(),
        "solution_excess": cosines[0] - cosines[1:].mean(),
    }


@HookRegistry.register
class Counterfactual(InterventionHook):
    """Retrain the epoch in shuffled orders and split its gradient into content and ordering.

    From the state before the epoch, K epochs on shuffled data give mean gradients c₁…c_K (as ``accumulated_grads``: the
    mean over steps of the gradients before any commit). The part of the observed g along their mean c̄ is due to the
    content of the data, the rest to the order and to chance; the null measures chance alone. The hook runs after every
    epoch up to epoch 49, then at snapshots, and costs K epochs each time.

    A negative cosine counts as 0 in every fraction: an epoch against its content is ordering, not content.
    content_cosine and observed_coherence keep the sign.

    Errors come from the same inner products, and need K ≥ 3. The errors of the two fractions are by the jackknife over
    the shuffles. The error of the excess is the larger of its jackknife over the shuffles and the scatter of placebos,
    where each shuffle in turn replaces g. If the excess is outside the interval of this error, the error instead
    includes the chance in g, which is estimated by that of a shuffled epoch (delta method along the differences of
    pairs of shuffles) and added to the jackknife. The 95 % interval excess ± excess_half_width (Student's t, K − 1
    degrees of freedom) is conservative. In simulations with 30 and 300 dimensions, K = 3 to 8 and noise of 0.1 to 10
    times the signal's energy it covers zero in 97 % to 100 % if the order has no effect, and the expected excess of a
    planted effect in 94 % to 100 %; but in 88 % to 92 % for an epoch against its content if K is 3 or 4 and the noise
    10, and in 88 % to 100 % in 3 dimensions.

    Three shuffles find little: in simulations with noise of 0.3 to 1 times the signal's energy, a true excess of 0.2 in
    one epoch is beyond its half-width in 10 % to 11 % of cases in 30 dimensions and 72 % to 79 % in 300; with K = 5 in
    19 % to 35 % and 97 % to 100 %, with K = 8 in 27 % to 47 % and in nearly all. Choose K = 5 or more to test single
    epochs, or average several epochs. The hook issues a notice for smaller K.

    A fixed order that is repeated every epoch differs from new shuffles for another reason, too: it produced the state
    at which it is measured. So compare a sorted order with a fixed random one (strategy ``fixed-random`` of
    mod_arithmetic), not with zero; docs/studies.md has an example.

    Assumes that observed and shuffled epochs differ only in the order of the data. In a run with committing hooks
    (clipping, smoothing) the shuffled epochs run without those commits, so the excess includes their effect. Dropout
    masks differ, which counts as chance. Needs the memory of K gradients. With several processes, each shuffles the
    rows of its loader. These are all rows if the loader splits batches that all ranks draw alike, as a distributed
    sampler does. Otherwise they are the rows of the rank, and the assignment of rows to ranks is not shuffled.

    Args:
        k: number of shuffled epochs, at least 2, because the null compares each with the others; errors need 3.
    """

    name = "counterfactual"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    needs_experiment_loop = True
    loop_points = {"epoch": {HookPoint.POST_EPOCH: (None, 49), HookPoint.SNAPSHOT: (50, None)}}
    needs_grads = True
    needs_pre_epoch_state = True
    uses_reference_weights = True
    metrics = f"""
        ordering_fraction | 1 − max(0, cos(g, c̄))²: the share of ‖g‖² that is not along c̄ | [0, 1], NaN
            | 1 for an epoch against its content (content_cosine below 0). Compare it with the null: with noise of r
            times the signal's energy and without an effect of the order it is about 1 − 1/((1+r)(1+r/K)).
        ordering_fraction_error | √((K−1)/K Σᵢ (x₋ᵢ − mean x₋)²), x₋ᵢ without shuffle i | [0, ∞), NaN
            | The standard error over the choice of the shuffles, for this g (jackknife). For an interval multiply it by
            Student's t for K − 1 degrees of freedom (4.30 for 3); its measured coverage is below. Needs K ≥ 3.
        ordering_fraction_matched | mean over k of 1 − max(0, cos(g, mean of the c_j, j ≠ k))² | [0, 1], NaN
            | The same for K − 1 shuffles, comparable with the null.
        null_fraction | mean over k of 1 − max(0, cos(c_k, mean of the c_j, j ≠ k))² | [0, 1], NaN
            | The result of a shuffled epoch instead of the observed one: chance alone.
        null_fraction_error | as ordering_fraction_error | [0, ∞), NaN
            | The standard error of null_fraction over the choice of the shuffles, to be used with the same t. Needs
            K ≥ 3.
        excess | ordering_fraction_matched − null_fraction | [−1, 1], NaN
            | The effect of the order. Its expectation is zero for a random order; single values scatter, so use several
            epochs. Negative: more typical than a random order.
        excess_error | √max(J, (1 − 1/K²)·mean pᵢ²), J the jackknife's variance over the shuffles, pᵢ the excess of
            shuffle i instead of g against the others; if |excess| exceeds t(95 %, K − 1) times that: √(J + v_g), if
            larger, v_g the variance due to the chance in g | [0, ∞), NaN
            | The standard error of the excess, including the chance in the one observed epoch. Needs K ≥ 3.
        excess_half_width | t(95 %, K − 1)·excess_error | [0, ∞), NaN
            | A smaller |excess| is not significant by itself. Conservative. Needs K ≥ 3.
        content_norm | |g·c̄| / ‖c̄‖ | [0, ∞), NaN | The part of g that is independent of the order.
        ordering_norm | ‖g − (g·c̄ / ‖c̄‖²) c̄‖ | [0, ∞), NaN | The rest: order and chance. The squares of both add up
            to ‖g‖².
        content_cosine | cos(g, c̄) | [−1, 1], NaN | The signed coherence with the content. Negative: this order works
            against the data.
        shuffle_coherence | mean over pairs i < j of cos(c_i, c_j) | [−1, 1], NaN
            | The agreement of single shuffled epochs: about 1/(1+r). Near 0: K is too small for a conclusion.
        observed_coherence | mean over k of cos(g, c_k) | [−1, 1], NaN
            | The agreement of shuffled epochs with the observed one; below shuffle_coherence: its order differs from
            random orders.
        observed_norm | ‖g‖₂ | [0, ∞) | The norm of the observed epoch's mean gradient.
        shuffled_norm | mean over k of ‖c_k‖₂ | [0, ∞)
            | Above observed_norm: gradients that add up in random orders cancel in the observed order.
        solution_cosine | cos(−g, d), d = θ_ref − θ₀, θ₀ the parameters before the epoch | [−1, 1], NaN
            | Needs a reference solution, like the four metrics below. Positive: the epoch leads to the reference.
        content_solution_cosine | cos(−(g·c̄ / ‖c̄‖²) c̄, d) | [−1, 1], NaN
            | Positive: the part of g that is independent of the order leads to the reference.
        ordering_solution_cosine | cos(−(g − (g·c̄ / ‖c̄‖²) c̄), d) | [−1, 1], NaN
            | Positive: the rest, order and chance, leads to the reference; near 0: it is unrelated. NaN: the rest is
            zero (ordering_norm² below {NO_ORDERING:.0e}·‖g‖²).
        shuffled_solution_cosine | mean over k of cos(−c_k, d) | [−1, 1], NaN | The cosine for random orders.
        solution_excess | solution_cosine − shuffled_solution_cosine | [−2, 2], NaN
            | Positive: this order leads to the reference better than a random one, for which the expectation is zero.
    """

    def __init__(self, *, k: int = 3) -> None:
        require(k >= 2, f"counterfactual.k is {k}; it must be at least 2, because the null compares shuffles.")
        self.k = k

    def start(self, run: RunInfo) -> None:
        """Issue a notice if there are too few shuffles for errors, or to find an effect in one epoch."""
        if self.k < FEWEST:
            notice(
                f"counterfactual.k is {self.k}; errors of the fractions and the excess need at least {FEWEST} "
                f"shuffles ({hook_option_text(self.name, k=FEWEST)})."
            )
        elif self.k < POWERFUL:
            notice(
                f"counterfactual.k is {self.k}, which may find an excess of 0.2 in only one of ten single epochs; "
                f"choose {POWERFUL} or more ({hook_option_text(self.name, k=POWERFUL)}), or average many epochs."
            )

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Run the shuffled epochs and return the split; nothing for an epoch without gradients."""
        if not run_ctx.accumulated_grads:
            return {}
        vectors = [run_ctx.accumulated_grads, *shuffled_epochs(model_ctx, self.k)]
        if run_ctx.reference_weights is not None:
            model_ctx.restore_pre_epoch()
            start = trainable(model_ctx.model)
            vectors.append(minus({name: run_ctx.reference_weights[name] for name in start}, start))
        gram = inner_products(vectors)
        epoch_gram = gram[: self.k + 1, : self.k + 1]
        alignment = {} if run_ctx.reference_weights is None else solution_alignment(gram)
        return ordering_split(epoch_gram) | split_errors(epoch_gram) | alignment
