"""Entanglement of consecutive batches and curvature along updates."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import require, unknown
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.tensors import (
    Vector,
    accumulate,
    copied,
    cosine,
    dot,
    laid_out_like,
    max_abs,
    minus,
    norm,
    overwrite,
    power_of_two,
    trainable,
)
from torch import Tensor
from torch.optim import Adam, Optimizer

from .product_method import CHOICES, EXACT_PRODUCTS, Choice, Chosen, choose_method
from .stability import adam_preconditioner, refuse_exact_on_shards, stability_threshold, steps_taken


def curvature_along(direction: Vector, product: Vector) -> Tensor:
    """Return the Rayleigh quotient dᵀ(Hd)/‖d‖² from a direction d and the product H d."""
    return dot(direction, product) / dot(direction, direction)


def preconditioned_curvature(direction: Vector, product: Vector, preconditioner: Vector) -> Tensor:
    """Return dᵀHd/dᵀPd, the Rayleigh quotient of P^(−1/2)·H·P^(−1/2) along P^(1/2)·d, from d, H d and a diagonal P."""
    scale = power_of_two(max_abs(preconditioner))
    weighted = {name: direction[name] * (value / scale) for name, value in preconditioner.items() if name in direction}
    return dot(direction, product) / (dot(direction, weighted) * scale)


@dataclass(frozen=True)
class StepStart:
    """The start of a step: its number, the parameters before it, and the learning rate of each parameter.

    ``threshold`` is the optimizer's stability threshold at these learning rates, if known.
    """

    step: int
    parameters: Mapping[str, Tensor]
    rates: Mapping[str, float]
    threshold: float | None = None


@dataclass
class Trail:
    """The entanglements of the current burst: the last one, their sum, and the sum of their norms."""

    last: Mapping[str, Tensor] = field(default_factory=dict)
    total: Mapping[str, Tensor] = field(default_factory=dict)
    length: Tensor | None = None

    def add(self, change: Vector) -> dict[str, Tensor]:
        """Record an entanglement; from the second on, return its coherence with the earlier ones."""
        last, total = moved_like(change, self.last), moved_like(change, self.total)
        length = norm(change)
        # A copy, since the state of a cancelled step refers to the earlier sum.
        self.last, self.total = change, accumulate(copied(total), change)
        if self.length is None:
            self.length = length
            return {}
        self.length = self.length.to(length.device) + length
        # cos(E, E′), and ‖ΣE‖/Σ‖E‖ over the burst
        return {"coherence": cosine(change, last), "burst_coherence": norm(self.total) / self.length}


def moved_like(live: Vector, values: Vector) -> dict[str, Tensor]:
    """Move values, which may come from a checkpoint, to the devices of the live tensors with the same names."""
    return {name: values[name].to(tensor.device) for name, tensor in live.items() if name in values}


ENTANGLEMENT = """
    entanglement_norm | ‖E‖₂, E = g_B(θ + Δθ) − g_B(θ) | [0, ∞)
        | The change that the step on A made to the gradient of the next batch B; exact for every optimizer.
    entanglement_ratio | ‖E‖₂ / ‖g_B(θ)‖₂ | [0, ∞], NaN
        | Above about 1: the previous step dominates the gradient of B, so the order matters.
    entanglement_cosine | cos(E, g_B(θ)) | [−1, 1], NaN
        | Negative: the step on A did part of the work of B. Positive: it steepened B's loss. Near 0: it rotated B's
        gradient.
    gradient_cosine | cos(g_A, g_B(θ)), g_A the gradient at POST_BACKWARD | [−1, 1], NaN
        | Agreement of consecutive batches at the same parameters. NaN here and below: a vector was zero.
"""
APPROXIMATION = """
    {0}_norm | ‖{1}‖₂ | [0, ∞) | Size of {2}.
    {0}_error | ‖{1} − E‖₂ / ‖E‖₂ | [0, ∞], NaN | 0: equal to E; 1: as inaccurate as predicting 0.
    {0}_cosine | cos({1}, E) | [−1, 1], NaN | 1: the direction is correct, independent of the size.
"""
CURVATURE_AND_OWN_STEP = """
    update_curvature | ΔθᵀH_BΔθ / ‖Δθ‖² | (−∞, ∞), NaN | Curvature of B's loss along the step on A.
    gradient_curvature | vᵀH_B v / ‖v‖², v = −η·g_A | (−∞, ∞), NaN
        | Curvature of B's loss along g_A; above update_curvature: the optimizer avoids steep directions.
    preconditioned_curvature | ΔθᵀH_BΔθ / ΔθᵀPΔθ, P = √v̂ + ε of Adam after the step on A | (−∞, ∞), NaN
        | The Rayleigh quotient of P^(−1/2)·H_B·P^(−1/2) along P^(1/2)Δθ: never above its largest eigenvalue.
    stability_ratio | SGD: update_curvature/(2/η), with momentum μ and dampening τ update_curvature/((2+2μ)/((1−τ)η)),
        with Nesterov momentum update_curvature/((2+2μ)/((1+2μ)η)), weight decay λ subtracted from each of these
        thresholds; Adam and AdamW: preconditioned_curvature/((1−β₁ᵗ)·(2+2β₁)/((1−β₁)η)), t the number of steps
        including that on A | (−∞, ∞), NaN
        | Above 1: on a quadratic loss with this curvature, training would diverge along the update. Missing for other
        optimizers, for parameter groups with different settings, and if weight decay alone diverges.
    coherence | cos(E, E′), E′ the entanglement of the previous step | [−1, 1], NaN
        | Positive: consecutive steps change the next gradient in the same direction, so effects of the order add up.
    burst_coherence | ‖ΣE‖₂ / Σ‖E‖₂ over the burst so far, from its second entanglement on | [0, 1], NaN
        | 1: all entanglements of the burst have the same direction. About 1/√m after m of them: they are unrelated.
    update_solution_cosine | cos(Δθ, θ_ref − θ), θ_ref the reference solution | [−1, 1], NaN
        | Positive: the step on A moved towards the reference.
    entanglement_solution_cosine | cos(−E, θ_ref − θ) | [−1, 1], NaN
        | Positive: the step on A turned B's descent direction towards the reference.
    gradient_solution_cosine | cos(−g_B(θ), θ_ref − θ) | [−1, 1], NaN
        | Positive: without the step on A, descent on B moves towards the reference; the baseline for the others.
    own_loss_change | L_B(θ′ + Δθ′) − L_B(θ′), Δθ′ the step on B, θ′ the parameters before it | (−∞, ∞)
        | The effect of the step on the loss of its own batch; positive: it overshot.
    own_loss_change_predicted | g_B(θ′)·Δθ′ | (−∞, ∞)
        | The same to first order; positive: the optimizer stepped uphill on the loss of this batch.
    own_gain_ratio | own_loss_change / own_loss_change_predicted | [−∞, ∞], NaN
        | 1: the loss is linear along the step. About 1/2: the step leads to the minimum along its line. Negative: the
        loss changed against its prediction, so the step usually raised it.
    own_entanglement_ratio | ‖g_B(θ′ + Δθ′) − g_B(θ′)‖₂ / ‖g_B(θ′)‖₂ | [0, ∞), NaN
        | The relative change of the gradient of the step's own batch: the baseline for entanglement_ratio.
    own_entanglement_cosine | cos(g_B(θ′ + Δθ′) − g_B(θ′), g_B(θ′)) | [−1, 1], NaN
        | −1: the step consumed part of its gradient; positive: the loss becomes steeper downhill.
    own_curvature | Δθ′·(g_B(θ′ + Δθ′) − g_B(θ′)) / ‖Δθ′‖² | (−∞, ∞), NaN
        | Mean curvature of B's loss along its own step; near 2/η: SGD is close to instability.
"""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Hessian(InterventionHook):
    """Measure how each step changes the gradient of the next batch, exactly and by the Hessian.

    A is the batch of a step, B that of the next step, Δθ the update from A, and θ the parameters before A. The
    entanglement of A and B is E = g_B(θ + Δθ) − g_B(θ), the difference of two gradients, exact for every optimizer. Its
    first-order part is H_B Δθ, with H_B the Hessian of B's loss at θ; only under plain SGD it equals −η·H_B g_A. At
    PRE_STEP of B the hook compares the three; at POST_STEP it compares each update with its own batch. All quantities
    are those of the training loss in the current modes of the model (dropout with one fixed mask for all gradients at a
    point, BatchNorm with the statistics of the batch).

    Curvature along the update is also compared with the stability threshold of the optimizer: for SGD 2/η (more with
    momentum) minus its weight decay, which adds to the Hessian; for Adam and AdamW, in the metric of P = √v̂ + ε,
    (1−β₁ᵗ)·(2+2β₁)/((1−β₁)η) with η the learning rate of step t (the P of Cohen et al. includes the factor 1−β₁ᵗ).
    With a reference solution θ_ref (``--reference``), updates, entanglement and gradients are compared with θ_ref − θ.

    The hook runs in bursts. Each call compares with the previous step, so the first step of a burst has no
    entanglement, and the second no coherence. During a burst the hook stores three vectors of the size of the
    parameters.

    Assumes a twice differentiable loss; for ReLU networks the derivatives are those of the current linear piece. The
    thresholds assume a quadratic loss, full batches, and for Adam a constant P; they ignore Adam's weight decay.

    Args:
        epsilon: absolute step of ``finite_difference`` along the normalised vector.
        every_n_steps: number of steps between the starts of bursts.
        burst_length: number of consecutive steps of a burst, at least 2.
        method: method for Hessian-vector products, ``"exact"`` (reverse over reverse), central
            ``"finite_difference"``, or ``"auto"``: exact, unless exact products fail or are wrong, which the first call
            checks.
        warmup: number of steps before the first burst.
    """

    name = "hessian"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})
    needs_loss = True
    needs_next_batch = True
    needs_prev_step_grads = True
    uses_reference_weights = True
    _departure = Remembered[StepStart | None](None, saved=False)
    _trail = Remembered(Trail, saved=False)
    _method = Remembered[Chosen]("", saved=False)
    metrics = (
        ENTANGLEMENT
        + APPROXIMATION.format("first_order", "H_B Δθ", "the part of E that is linear in the update")
        + APPROXIMATION.format(
            "sgd",
            "−η·H_B g_A",
            "the first-order part of E under plain SGD; far too small under AdamW; missing without learning rates",
        )
        + CURVATURE_AND_OWN_STEP
        + EXACT_PRODUCTS
    )

    epsilon: float = 1e-2
    every_n_steps: int = 1000
    burst_length: int = 11
    method: Choice = "auto"
    warmup: int = 0

    def __post_init__(self) -> None:
        every, length = self.every_n_steps, self.burst_length
        require(0 < self.epsilon < math.inf, f"hessian.epsilon is {self.epsilon}; it must be a positive number.")
        if self.method not in CHOICES:
            raise unknown("hessian.method", self.method, CHOICES)
        sentence = f"hessian.burst_length is {length}; entanglement needs at least 2 consecutive steps."
        require(length >= 2 or every <= 1, sentence)
        self.step_schedule = StepSchedule(mode="burst", every_n_steps=every, burst_length=length, warmup=self.warmup)
        self._optimizer_class: type[Optimizer] = Optimizer

    def start(self, run: RunInfo) -> None:
        """Store the optimizer's class; raises :class:`UnsuitableError` if shards rule out exact products."""
        if self.method == "exact":
            refuse_exact_on_shards(self.name, run.model)
        self._optimizer_class = run.optimizer_class

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the entanglement with the previous batch (PRE_STEP), or the step's effect on its own (POST_STEP)."""
        if run_ctx.hook_point is HookPoint.PRE_STEP:
            groups = run_ctx.optimizer_groups
            rates = {name: group.lr for group in groups for name in group.names if not math.isnan(group.lr)}
            steps = steps_taken(model_ctx.optimizer_state) + 1  # including the step that starts now
            threshold = stability_threshold(self._optimizer_class, groups, steps)
            start = StepStart(run_ctx.step, copied(trainable(run_ctx.model)), rates, threshold)
            previous, self._departure = self._departure, start
            if previous is None or previous.step != run_ctx.step - 1 or not run_ctx.prev_step_grads:
                self._trail = Trail()
                return {}
            return self._entanglement(previous, run_ctx, model_ctx)
        departure = self._departure
        if not self.step_schedule.is_due(run_ctx.step + 1):
            method = self._method
            self.reset()
            self._method = method  # once for all bursts of the run
        return {} if departure is None else _own_step(departure, model_ctx)

    def _entanglement(self, previous: StepStart, ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        gradient = ctx.prev_step_grads or {}
        live = trainable(model_ctx.model)
        after = model_ctx.compute_batch_gradients()
        start = moved_like(live, previous.parameters)
        update = minus(live, start)
        overwrite(live, start)
        before = model_ctx.compute_batch_gradients()
        # E = g_B(θ + Δθ) − g_B(θ), exact for every optimizer
        change = minus(after, before)
        size = norm(change)
        metrics: dict[str, Any] = {
            "entanglement_norm": size,
            "entanglement_ratio": size / norm(before),
            "entanglement_cosine": cosine(change, before),
            "gradient_cosine": cosine(gradient, before),
        }
        rates = previous.rates  # the update of plain SGD is −η·g_A
        sgd_update = {name: -rates[name] * value for name, value in gradient.items() if name in rates}
        steps = [("first_order", update, "update"), ("sgd", sgd_update, "gradient")]
        if not self._method:
            self._method = choose_method(self.name, self.method, self.epsilon, model_ctx)
        metrics["exact_products"] = self._method == "exact"
        times, products = model_ctx.hessian_operator(method=self._method, epsilon=self.epsilon), {}
        for label, step, kind in steps if sgd_update else steps[:1]:
            products[kind] = product = times(step)
            metrics |= {
                f"{label}_norm": norm(product),
                f"{label}_error": norm(minus(product, change)) / size,
                f"{label}_cosine": cosine(product, change),
                f"{kind}_curvature": curvature_along(step, product),
            }
        curvature = metrics["update_curvature"]
        if issubclass(self._optimizer_class, Adam):
            preconditioner = adam_preconditioner(model_ctx.optimizer_state, ctx.optimizer_groups)
            curvature = preconditioned_curvature(update, products["update"], preconditioner)
            metrics["preconditioned_curvature"] = curvature
        if previous.threshold is not None:
            metrics["stability_ratio"] = curvature / previous.threshold
        if ctx.reference_weights is not None:
            solution = minus(moved_like(live, ctx.reference_weights), start)
            metrics |= {
                "update_solution_cosine": cosine(update, solution),
                "entanglement_solution_cosine": -cosine(change, solution),
                "gradient_solution_cosine": -cosine(before, solution),
            }
        # Under tensor parallelism a gradient may have another layout than its parameter.
        return metrics | self._trail.add({name: laid_out_like(value, live[name]) for name, value in change.items()})

    def state_dict(self) -> dict[str, Any]:
        """Return the chosen method, and the state of the current burst; empty before the first burst."""
        chosen = {"method": self._method} if self._method else {}
        return (
            chosen if self._departure is None else {**vars(self._departure), "trail": dict(vars(self._trail)), **chosen}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the burst in which :meth:`state_dict` was called."""
        kept = dict(state)
        self._method = kept.pop("method", "")
        self._trail = Trail(**kept.pop("trail", {}))
        self._departure = StepStart(**kept) if kept else None


def _own_step(departure: StepStart, model_ctx: ModelDataContext) -> Metrics:
    """Return the effect of an update on the gradient and loss of its own batch."""
    live = trainable(model_ctx.model)
    start = moved_like(live, departure.parameters)
    update = minus(live, start)
    loss_after, after = model_ctx.compute_batch_loss(), model_ctx.compute_batch_gradients()
    overwrite(live, start)
    loss_before, before = model_ctx.compute_batch_loss(), model_ctx.compute_batch_gradients()
    loss_change, predicted, change = loss_after - loss_before, dot(before, update), minus(after, before)
    return {
        "own_loss_change": loss_change,
        "own_loss_change_predicted": predicted,
        "own_gain_ratio": loss_change / predicted,
        "own_entanglement_ratio": norm(change) / norm(before),
        "own_entanglement_cosine": cosine(change, before),
        # g(θ + Δθ) − g(θ) = ∫₀¹ H(θ + tΔθ)Δθ dt, so this is the mean of ΔθᵀHΔθ/‖Δθ‖² along the step.
        "own_curvature": curvature_along(update, change),
    }
