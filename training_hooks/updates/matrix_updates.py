"""Spectra of the true updates of weight matrices, and the momentum against the gradient."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StepSchedule
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.tensors import Vector
from torch import Tensor

from ..measures import SeriesBudget, entropy_of_shares, stable_rank, stacked
from .weight_matrices import WeightMatrix, spread, weight_matrices
from .weight_tracking import spectra_by_size

MOMENTA = ("momentum_buffer", "exp_avg")
"""Keys under which optimizers keep an average of gradients: SGD and Muon, then Adam and its relatives."""


def singular_values_by_name(matrices: Vector) -> dict[str, Tensor]:
    """Return the singular values of each matrix, float64, descending, shape (min(out, in),)."""
    return {
        name: values
        for names, spectra in spectra_by_size(matrices)
        for name, values in zip(names, spectra.unbind(), strict=True)
    }


def spectral_metrics(update: Tensor, weight: Tensor, out_features: int, in_features: int) -> dict[str, Tensor]:
    """Return the metrics of one matrix from the singular values of its update and of the matrix before it.

    Args:
        update: σ(ΔW), descending, shape (min(out, in),).
        weight: σ(W₋), in the same form.
        out_features: number of rows.
        in_features: number of columns.

    >>> metrics = spectral_metrics(torch.tensor([2.0, 2.0]), torch.tensor([4.0, 1.0]), 8, 2)
    >>> {name: value.item() for name, value in metrics.items()}["update_entropy"]
    1.0
    """
    scale, count = math.sqrt(out_features / in_features), len(update)
    # Rounding may leave the ranges of equal singular values by 1e-16.
    return {
        "update_norm": update[0],
        "update_stable_rank": stable_rank(update).clamp(1, count),
        "update_entropy": (entropy_of_shares(update / update.sum()) / math.log(count)).clamp(0, 1),
        "relative_update": update[0] / weight[0],
        "scaled_update": update[0] / scale,
        "scaled_weight": weight[0] / scale,
    }


def cosine_of(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine between two tensors, in float64, where squares of float32 numbers neither over- nor underflow.

    NaN if one of them is zero.
    """
    first, second = first.double(), second.double()
    norms = torch.linalg.vector_norm(first) * torch.linalg.vector_norm(second)
    return torch.div((first * second).sum(), norms).clamp(-1, 1)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class MatrixUpdates(InterventionHook):
    """Measure the spectrum of the update of weight matrices, relative to the matrix and to its shape.

    ΔW = W − W₋ is the measured change of a matrix in one step, of any optimizer (Muon, Shampoo, SOAP, Adam),
    including weight decay; W₋ is the matrix before the step and σ₁ ≥ σ₂ ≥ … are singular values. For width-independent
    training both σ₁(W)/√(out/in) and σ₁(ΔW)/√(out/in) should be of order 1 times a constant of the learning rate, in
    every layer (Yang, Simon and Bernstein, arXiv 2310.17813, condition 1). Muon makes all singular values of its update
    about equal; the entropy of those of Adam and SGD is lower (Liu et al., arXiv 2502.16982).

    Measures step 1 and then every ``interval`` steps, a fixed sample of the matrices that is spread evenly over the
    model, and those in ``names``. Matrices are the weights of linear and recurrent layers, of convolutions, unfolded to
    (out, in·kernel), of transposed ones, unfolded to (out·kernel, in), and of experts: a three-dimensional parameter
    has one matrix per expert, ``PARAMETER.INDEX``. Embeddings that no layer multiplies by are left out.

    Assumes that a parameter is stored as (out, in), except in ``Conv1D``, transposed convolutions and experts whose
    module says ``is_transposed``. Several matrices in one parameter, as in a fused query-key-value projection, count as
    one. Singular values are the roots of eigenvalues of ΔW·ΔWᵀ in float64, and exact to 1e-8 of the largest: about a
    tenth of a second per matrix of width 512. Keeps copies of weights and gradients of the measured matrices from
    PRE_UPDATE to POST_STEP; gathers sharded ones.

    Args:
        interval: steps between two measurements.
        matrices: number of matrices in the sample.
        names: glob patterns, separated by commas, of further matrices to measure; ``*`` selects all.
    """

    name = "matrix_updates"
    hook_points = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
    intervention_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    metrics = """
        update_norm/<parameter> | σ₁(ΔW) = ‖ΔW‖₂ | [0, ∞)
            | The most that the step changes the output for an input of norm 1; ‖ΔW‖_F is update_norm of
            parameter_norms. Under Muon about the learning rate times its factor for the shape. Here and below NaN: an
            element is not finite.
        update_stable_rank/<parameter> | ‖ΔW‖_F²/σ₁(ΔW)² = Σσ²/σ₁² | [1, min(out, in)], NaN
            | The number of directions that the step changes as much as the strongest. Near 1: the gradient of one
            direction dominates, as of few tokens or a common mean of the inputs. NaN: the matrix does not move.
        update_entropy/<parameter> | −Σ p ln p / ln min(out, in), p = σ/Σσ over all singular values of ΔW | [0, 1], NaN
            | Near 1 under Muon and Shampoo, whose steps are nearly orthogonal; lower under Adam and SGD. A fall: the
            updates collapse to few directions. NaN: the matrix does not move.
        relative_update/<parameter> | σ₁(ΔW)/σ₁(W₋) | [0, ∞], NaN
            | Compare the layers: a layer far above the others changes its function most in a step. It follows the
            schedule of the learning rate. ∞: the matrix was zero, like a factor of LoRA at first; NaN: it still is.
        scaled_update/<parameter> | σ₁(ΔW)/√(out/in) | [0, ∞)
            | Equal in all layers, and at all widths with the same learning rate: features learn at the same speed
            everywhere. Growing with width: reduce the learning rate of that layer in proportion.
        scaled_weight/<parameter> | σ₁(W₋)/√(out/in) | [0, ∞)
            | Of order 1, from initialisation on. Growing throughout: the weights lack decay.
        momentum_gradient_cosine/<parameter> | cos(m, g), m the optimizer's momentum after the step, g the gradient that
            it received | [−1, 1], NaN
            | 1 at the first step. Later √(1−β₁²), 0.44 at β₁ = 0.9, if the gradients are pure noise; more: they agree
            from step to step; near 0 or negative: they point back, as in oscillations. Omitted without momentum; NaN:
            one of both is zero.
        update_entropy_mean | mean over the measured matrices that moved of update_entropy | [0, 1], NaN
            | As update_entropy.
        relative_update_max | max over the measured matrices of relative_update | [0, ∞]
            | The layer that changes most; a sudden rise: instability.
        scaled_update_spread | max / min over the measured matrices that moved of scaled_update | [1, ∞], NaN
            | Near 1: all layers learn at the same speed. Far above 10: the learning rates do not fit the shapes. NaN:
            no matrix moved.
    """

    interval: int = 200
    matrices: int = 8
    names: str = ""

    _chosen = Remembered[dict[str, WeightMatrix]](dict, saved=False)
    # Values between the points of one step, and that step
    _step = Remembered(0, saved=False)
    _weights = Remembered[dict[str, Tensor]](dict, saved=False)
    _gradients = Remembered[dict[str, Tensor]](dict, saved=False)

    def __post_init__(self) -> None:
        for option in ("interval", "matrices"):
            value = getattr(self, option)
            require(value >= 1, f"matrix_updates.{option} is {value}; it must be at least 1.")
        self._budget = SeriesBudget(self.name, self.names, top=0, bottom=0)
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)

    def start(self, run: RunInfo) -> None:
        """Choose the matrices.

        Raises:
            UnsuitableError: if the model has no trainable matrices.
        """
        matrices = weight_matrices(run.model)
        if not matrices:
            raise UnsuitableError(
                "Hook 'matrix_updates' needs trainable matrices of linear layers, convolutions or experts, but the "
                "model has none."
            )
        self._budget.check_names(matrices)
        chosen = {*spread(matrices, self.matrices), *self._budget.choose(dict.fromkeys(matrices, 0.0))}
        self._chosen = {name: matrix for name, matrix in matrices.items() if name in chosen}

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Keep weights and gradients of the matrices before the step."""
        parameters = dict(ctx.model.named_parameters())
        self._step, self._weights, self._gradients = ctx.step, {}, {}
        for name, matrix in self._chosen.items():
            parameter = parameters[matrix.parameter]
            if parameter.grad is not None:
                self._weights[name] = _copied(matrix.of(parameter))
                self._gradients[name] = _copied(matrix.of(parameter.grad))
        return {}

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Return the metrics of the step just made; nothing if no matrix had a gradient."""
        if self._step != run_ctx.step or not self._weights:
            return {}
        parameters, states = dict(run_ctx.model.named_parameters()), model_ctx.optimizer_state
        weights, gradients, self._weights, self._gradients = self._weights, self._gradients, {}, {}
        updates = {name: self._update(name, parameters, before) for name, before in weights.items()}
        update_values, weight_values = singular_values_by_name(updates), singular_values_by_name(weights)
        families: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            metrics = spectral_metrics(update_values[name], weight_values[name], *weight.shape)
            matrix = self._chosen[name]
            momentum = momentum_of(states.get(matrix.parameter, {}), parameters[matrix.parameter])
            if momentum is not None:
                metrics["momentum_gradient_cosine"] = cosine_of(matrix.of(momentum), gradients[name])
            for family, value in metrics.items():
                families.setdefault(family, {})[name] = value
        by_name = {f"{family}/{name}": value for family, values in families.items() for name, value in values.items()}
        return by_name | summaries(families)

    def _update(self, name: str, parameters: Mapping[str, Tensor], before: Tensor) -> Tensor:
        matrix = self._chosen[name]
        return matrix.of(parameters[matrix.parameter]).to(before.dtype) - before


def summaries(families: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the metrics of all measured matrices together; matrices that did not move count only for the maximum.

    Zero matrices that did not move, whose relative update is 0/0, do not count at all.
    """
    entropy, relative, scaled = (
        stacked(families[name].values()) for name in ("update_entropy", "relative_update", "scaled_update")
    )
    has_moved = scaled != 0  # true for NaN, which remains in the results
    smallest = torch.where(has_moved, scaled, torch.inf).min()
    return {
        "update_entropy_mean": entropy.nanmean(),
        "relative_update_max": torch.where(has_moved, relative, 0.0).max(),
        "scaled_update_spread": torch.where(has_moved.any(), scaled.max() / smallest, torch.nan),
    }


def momentum_of(state: Mapping[str, Any], parameter: Tensor) -> Tensor | None:
    """Return the average of gradients in the state of a parameter, ``None`` without one of its shape."""
    for key in MOMENTA:
        momentum = state.get(key)
        if isinstance(momentum, Tensor) and momentum.shape == parameter.shape and momentum.is_floating_point():
            return momentum
    return None


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
