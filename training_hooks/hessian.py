"""How one step changes the gradient of the next batch, and of its own: entanglement and curvature along updates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from framework.contexts import MetricInfo, RunDataContext
from framework.curvature import METHODS, Method
from framework.errors import UsageError, unknown
from framework.hook_points import HookPoint, StepSchedule
from framework.hooks import InterventionHook
from framework.metrics import Metrics
from framework.param_vectors import Vector, copied, cosine, dot, minus, norm, overwrite, trainable
from framework.registry import HookRegistry
from framework.sapi import ModelDataContext


def curvature_along(direction: Vector, product: Vector) -> Tensor:
    """Return the Rayleigh quotient dᵀ(Hd)/‖d‖² from a direction d and the product H d."""
    return dot(direction, product) / dot(direction, direction)


def approximation(estimate: Vector, exact: Vector) -> dict[str, Tensor]:
    """Compare an estimate with the exact vector: its norm, the norm of the difference over ‖exact‖, the cosine."""
    return {
        "norm": norm(estimate),
        "error": norm(minus(estimate, exact)) / norm(exact),
        "cosine": cosine(estimate, exact),
    }


def entanglement_metrics(before: Vector, after: Vector, previous: Vector, update: Vector) -> dict[str, Tensor]:
    """Describe the change of a gradient from ``before`` to ``after`` by an ``update`` made from batch A.

    ``previous`` is the gradient of A, ``before`` and ``after`` those of batch B around the update.
    """
    change = minus(after, before)
    return {
        "entanglement_norm": norm(change),
        "entanglement_ratio": norm(change) / norm(before),
        "entanglement_cosine": cosine(change, before),
        "gradient_cosine": cosine(previous, before),
        "update_norm": norm(update),
    }


def own_step_metrics(before: Vector, after: Vector, update: Vector, loss_change: Tensor) -> dict[str, Tensor]:
    """Describe what an update did to the batch that it was made from: gradients around it and the loss change."""
    change = minus(after, before)
    predicted = dot(before, update)
    return {
        "own_loss_change": loss_change,
        "own_loss_change_predicted": predicted,
        "own_gain_ratio": loss_change / predicted,
        "own_entanglement_ratio": norm(change) / norm(before),
        "own_entanglement_cosine": cosine(change, before),
        "own_curvature": curvature_along(update, change),
    }


@dataclass(frozen=True)
class Departure:
    """Where a step set out from: its number, the parameters before it and the learning rate of each of them."""

    step: int
    parameters: Mapping[str, Tensor]
    rates: Mapping[str, float]

    def sgd_update(self, gradient: Vector) -> dict[str, Tensor]:
        """Return −η·g, the update that plain SGD would have made of ``gradient``."""
        return {name: -self.rates[name] * value for name, value in gradient.items() if name in self.rates}


@HookRegistry.register
class Hessian(InterventionHook):
    """Measure how each step changes the gradient of the next batch, exactly and by the Hessian.

    A is the batch of a step, B that of the next, Δθ the update made from A. Their entanglement is
    E = g_B(θ + Δθ) − g_B(θ), θ the parameters before A: two gradients, exact for every optimizer. Its first-order part
    is H_B Δθ, H_B the Hessian of B's loss at θ; under plain SGD, and only there, that equals −η·H_B g_A. PRE_STEP of B
    compares the three; POST_STEP holds each update against its own batch. Everything is that of the training loss in
    the model's present modes (dropout with one fixed mask for all gradients of a point, BatchNorm on the batch).

    Fires in bursts. A hook call compares with the step before, so the first step of a burst has no entanglement. A
    burst keeps one copy of the parameters and frees it at its end.

    Args:
        epsilon: absolute step of ``finite_difference`` along the normalised vector.
        every_n_steps: a burst begins every so many steps.
        burst_length: consecutive steps of a burst, at least 2.
        method: Hessian-vector products ``"exact"`` (reverse over reverse) or by central ``"finite_difference"``.
        warmup: steps before the first burst.
    """

    name = "hessian"
    hook_points = frozenset({HookPoint.PRE_STEP, HookPoint.POST_STEP})
    needs_prev_step_grads = True

    def __init__(
        self,
        *,
        epsilon: float = 1e-2,
        every_n_steps: int = 1000,
        burst_length: int = 11,
        method: Method = "exact",
        warmup: int = 0,
    ) -> None:
        if not (epsilon > 0 and math.isfinite(epsilon)):
            raise UsageError(f"hessian.epsilon is {epsilon}; it must be a positive number.")
        if method not in METHODS:
            raise unknown("hessian.method", method, METHODS)
        if burst_length < 2 and every_n_steps > 1:
            raise UsageError(
                f"hessian.burst_length is {burst_length}; entanglement needs at least 2 consecutive steps."
            )
        self.step_schedule = StepSchedule(
            mode="burst", every_n_steps=every_n_steps, burst_length=burst_length, warmup=warmup
        )
        self.epsilon = epsilon
        self.method: Method = method
        self._departure: Departure | None = None

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the entanglement with the previous batch (PRE_STEP), the step's effect on its own (POST_STEP)."""
        if run_ctx.hook_point is HookPoint.PRE_STEP:
            previous, self._departure = self._departure, _departure(run_ctx)
            if previous is None or previous.step != run_ctx.step - 1 or not run_ctx.prev_step_grads:
                return {}
            return self._entanglement(previous, run_ctx.prev_step_grads, model_ctx)
        departure = self._departure
        if not self.step_schedule.is_due(run_ctx.step + 1):
            self._departure = None
        return {} if departure is None else _own_step(departure, model_ctx)

    def _entanglement(self, previous: Departure, gradient: Vector, model_ctx: ModelDataContext) -> Metrics:
        live = trainable(model_ctx.model)
        after = model_ctx.compute_batch_gradients()
        start = _placed_like(live, previous.parameters)
        update = minus(live, start)
        overwrite(live, start)
        before = model_ctx.compute_batch_gradients()
        metrics = entanglement_metrics(before, after, gradient, update)

        exact = minus(after, before)
        sgd_update = previous.sgd_update(gradient)
        for label, step, kind in (("first_order", update, "update"), ("sgd", sgd_update, "gradient")):
            product = model_ctx.hessian_vector_product(step, method=self.method, epsilon=self.epsilon)
            metrics |= {f"{label}_{key}": value for key, value in approximation(product, exact).items()}
            metrics[f"{kind}_curvature"] = curvature_along(step, product)
        return metrics

    def reset(self) -> None:
        """Forget the burst under way."""
        self._departure = None

    def state_dict(self) -> dict[str, Any]:
        """Return what the rest of a burst needs; empty between bursts."""
        return {} if self._departure is None else dict(vars(self._departure))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the burst in which :meth:`state_dict` was called."""
        self._departure = Departure(**state) if state else None

    def describe_metrics(self) -> Sequence[MetricInfo]:
        """Describe the comparison with the next batch (PRE_STEP) and with the step's own (POST_STEP)."""
        return [
            MetricInfo(
                "entanglement_norm",
                "‖E‖₂, E = g_B(θ + Δθ) − g_B(θ)",
                "[0, ∞)",
                "How much the step on A changed the gradient of the next batch B; exact for every optimizer.",
            ),
            MetricInfo(
                "entanglement_ratio",
                "‖E‖₂ / ‖g_B(θ)‖₂",
                "[0, ∞)",
                "Above about 1 the gradient of B is mostly made by the step before it: order matters.",
            ),
            MetricInfo(
                "entanglement_cosine",
                "cos(E, g_B(θ))",
                "[−1, 1]",
                "Negative: A did part of the work of B. Positive: A steepened B's loss. Near 0: A turned B's gradient.",
            ),
            MetricInfo(
                "gradient_cosine",
                "cos(g_A, g_B(θ)), g_A as POST_BACKWARD saw it",
                "[−1, 1]",
                "Agreement of consecutive batches at the same parameters. NaN here and below: a vector was zero.",
            ),
            MetricInfo("update_norm", "‖Δθ‖₂", "[0, ∞)", "The length of the step on A, as the optimizer made it."),
            *_approximation_infos("first_order", "H_B Δθ", "the part of E that is linear in the update"),
            *_approximation_infos(
                "sgd", "−η·H_B g_A", "what E would be to first order under plain SGD; under AdamW it is far too small"
            ),
            MetricInfo(
                "update_curvature",
                "ΔθᵀH_BΔθ / ‖Δθ‖²",
                "(−∞, ∞)",
                "Curvature of B's loss along the step on A.",
            ),
            MetricInfo(
                "gradient_curvature",
                "vᵀH_B v / ‖v‖², v = −η·g_A",
                "(−∞, ∞)",
                "Curvature of B's loss along g_A; above update_curvature: the optimizer avoids steep directions.",
            ),
            MetricInfo(
                "own_loss_change",
                "L_B(θ′ + Δθ′) − L_B(θ′), Δθ′ the step on B, θ′ the parameters before it",
                "(−∞, ∞)",
                "What the step did to the loss of its own batch; positive: it overshot.",
            ),
            MetricInfo(
                "own_loss_change_predicted",
                "g_B(θ′)·Δθ′",
                "(−∞, ∞)",
                "The same to first order; positive: the optimizer stepped uphill, against the gradient of this batch.",
            ),
            MetricInfo(
                "own_gain_ratio",
                "own_loss_change / own_loss_change_predicted",
                "(−∞, ∞)",
                "1: the loss is linear along the step. About 1/2: the step goes to the minimum along its line. "
                "Negative: the step raised the loss that it was to lower.",
            ),
            MetricInfo(
                "own_entanglement_ratio",
                "‖g_B(θ′ + Δθ′) − g_B(θ′)‖₂ / ‖g_B(θ′)‖₂",
                "[0, ∞)",
                "How much a step changes the gradient of its own batch: the yardstick for entanglement_ratio.",
            ),
            MetricInfo(
                "own_entanglement_cosine",
                "cos(g_B(θ′ + Δθ′) − g_B(θ′), g_B(θ′))",
                "[−1, 1]",
                "−1: the step used up part of its own gradient; positive: the loss gets steeper downhill.",
            ),
            MetricInfo(
                "own_curvature",
                "Δθ′·(g_B(θ′ + Δθ′) − g_B(θ′)) / ‖Δθ′‖²",
                "(−∞, ∞)",
                "Mean curvature of B's loss along its own step; against 2/η it tells how near SGD is to instability.",
            ),
        ]


def _approximation_infos(label: str, formula: str, reading: str) -> list[MetricInfo]:
    return [
        MetricInfo(f"{label}_norm", f"‖{formula}‖₂", "[0, ∞)", f"Size of {reading}."),
        MetricInfo(f"{label}_error", f"‖{formula} − E‖₂ / ‖E‖₂", "[0, ∞)", "0: it is E; 1: as bad as predicting 0."),
        MetricInfo(
            f"{label}_cosine", f"cos({formula}, E)", "[−1, 1]", "Whether the direction is right, apart from size."
        ),
    ]


def _departure(ctx: RunDataContext) -> Departure:
    rates = {name: group.lr for group in ctx.optimizer_groups for name in group.names}
    return Departure(ctx.step, copied(trainable(ctx.model)), rates)


def _placed_like(live: Vector, values: Vector) -> dict[str, Tensor]:
    """Move values, which may come from a checkpoint, to the devices of the live parameters."""
    return {name: values[name].to(parameter.device) for name, parameter in live.items() if name in values}


def _own_step(departure: Departure, model_ctx: ModelDataContext) -> Metrics:
    live = trainable(model_ctx.model)
    start = _placed_like(live, departure.parameters)
    update = minus(live, start)
    loss_after, after = model_ctx.compute_batch_loss(), model_ctx.compute_batch_gradients()
    overwrite(live, start)
    loss_before, before = model_ctx.compute_batch_loss(), model_ctx.compute_batch_gradients()
    return own_step_metrics(before, after, update, loss_after - loss_before)
