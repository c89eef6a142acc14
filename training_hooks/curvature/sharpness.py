"""The curvature of the training loss: largest eigenvalues, trace, spectral density, critical sharpness."""

import math
import random
from collections.abc import Sequence

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, RunDataContext
from loopscope.errors import UsageError, require, unknown
from loopscope.hooks import Metrics, MetricValue, ModelDataContext, OptimizerGroup, RunInfo
from loopscope.training import METHODS, Method
from torch import Tensor
from torch.optim import Adam, Optimizer

from .lanczos import Density, Product, Tridiagonal, lanczos, mean_and_error, rademacher, residuals
from .measured_loss import CRITICAL_SHARPNESS, MeasuredLoss, gradient_metrics, spread_batches, update_metrics
from .stability import adam_preconditioner, refuse_exact_under_fsdp, stability_threshold

LEAST = dict(batches=1, critical_passes=0, density_points=9, density_probes=0, iterations=0, k=1, probes=2)
"""The least value of each number that is an option."""


def top_metrics(product: Product, run: Tridiagonal, count: int) -> dict[str, MetricValue]:
    """Return the largest eigenvalues with their residuals, and the smallest one."""
    values, vectors = run.largest(count)
    return {
        "sharpness": values[0],
        "eigenvalues": list(values),
        "residuals": list(residuals(product, values, vectors)),
        "smallest_eigenvalue": run.ritz()[0][0],
    }


SPECTRUM = """
    {prefix}sharpness | largest eigenvalue of {operator} | (−∞, ∞)
        | The curvature along the steepest direction; a lower bound, good to the first of the residuals.
    {prefix}eigenvalues | the k largest Ritz values λ of {operator} | (−∞, ∞), descending
        | A few far above the rest are typical: about as many as there are classes.
    {prefix}residuals | ‖Av − λv‖₂, v the Ritz vectors, A = {operator} | [0, ∞)
        | An eigenvalue lies within this distance of λ. Large: raise iterations.
    {prefix}smallest_eigenvalue | smallest Ritz value of {operator} | (−∞, ∞)
        | Below 0: there is a direction of negative curvature.
"""
MOMENTS = """
    trace | mean over probes z of zᵀHz, z random ±1 (Hutchinson) | (−∞, ∞)
        | The sum of all eigenvalues, estimated; read it with trace_error.
    trace_error | s/√probes, s the standard deviation of zᵀHz over the probes (divisor probes − 1) | [0, ∞)
        | The standard error of trace: the truth lies within two of it most of the time.
    eigenvalue_rms | √(tr(H²)/n), n the number of parameters, by quadrature | [0, ∞)
        | The root mean square of all eigenvalues; far below sharpness: a few directions have the curvature.
    effective_directions | (Σ|λ|)²/Σλ² over all eigenvalues, by quadrature | [1, n]
        | How many directions share the curvature: m if m eigenvalues have one size and the rest are zero.
    negative_energy | Σ λ² over λ < 0 / Σ λ², by quadrature | [0, 1] | 0: a convex valley; falls as training settles.
    density_grid | density_points even steps over the quadrature nodes and three steps beyond on either side
        | (−∞, ∞), ascending
        | The eigenvalues at which density is given.
    density | Σ w·N(grid; node, step²) over nodes and weights of stochastic Lanczos quadrature (arXiv 1901.10159)
        | [0, ∞)
        | The share of eigenvalues per unit of λ, smoothed by one grid step; look at it on a logarithmic axis.
"""
STABILITY = """
    stability_ratio | SGD: sharpness/(2/η), with momentum μ and dampening τ sharpness/((2+2μ)/((1−τ)η)), with Nesterov
        momentum sharpness/((2+2μ)/((1+2μ)η)); Adam and AdamW: preconditioned_sharpness/((2+2β₁)/((1−β₁)η)) | (−∞, ∞)
        | Hovers about 1 at the edge of stability (arXiv 2103.00065, 2207.14484); the threshold is 38/η at β₁ = 0.9.
        Left out for other optimizers and for parameter groups with different settings.
"""


@HookRegistry.register
class Sharpness(InterventionHook):
    """Measure the curvature of the training loss: eigenvalues of its Hessian, trace, density, critical sharpness.

    H is the Hessian over all trainable parameters of the mean training loss over the same rows at every fire: those of
    ``batches`` batches, spread evenly over the order of epoch 0. The model is in its present modes, as in training:
    BatchNorm takes the statistics of each batch, dropout has one mask for each, fixed within a fire. Eigenvalues are
    Ritz values of Lanczos with full reorthogonalisation, each with its residual.

    With Adam and AdamW the same is measured for P^(−1/2)·H·P^(−1/2), P = √v̂ + ε, on which their stability depends.

    Critical sharpness (arXiv 2601.16979) needs forward passes only: it is 2/η_c, η_c the learning rate at which the
    loss after a step along a direction u is back at its value before, L(θ − η_c·u) = L(θ). On a quadratic loss that is
    uᵀHu/gᵀu: for u = g, the gradient, the curvature along g, for u = P⁻¹g that of the preconditioned Hessian along its
    own gradient; neither exceeds the largest eigenvalue. It is also measured along the step that the optimizer itself,
    momentum and weight decay included, would now make from the first of the batches, on that batch.

    While it runs, Lanczos keeps ``iterations`` vectors as long as the parameters (for each of the ``density_probes``).
    With exact products it also keeps the graph of the gradient, with all activations, of each of the ``batches``. On
    sharded models each rank keeps them whole, and only ``method="finite_difference"`` works.

    Assumes that the loss is twice differentiable; ReLU networks are taken piece by piece. The thresholds assume a
    quadratic loss, the gradient of the full data, and for Adam a constant P; weight decay is not part of H.

    Args:
        batches: how many of the run's batches are measured.
        critical_passes: forward passes of each search for a critical sharpness; 0: none.
        density_points: points of the grid on which the density is reported.
        density_probes: random vectors for the density, ``iterations`` products each; 0: no density.
        epsilon: absolute step of ``finite_difference`` along the normalised vector.
        iterations: Lanczos steps, one Hessian-vector product each; 0: no spectrum, critical sharpness only.
        k: how many of the largest eigenvalues are reported.
        method: Hessian-vector products ``"exact"`` (reverse over reverse) or by central ``"finite_difference"``.
        probes: random vectors for the trace, those of the density included; its error needs at least 2.
    """

    name = "sharpness"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    metrics = (
        SPECTRUM.format(prefix="", operator="H")
        + MOMENTS
        + SPECTRUM.format(prefix="preconditioned_", operator="P^(−1/2)·H·P^(−1/2), P = √v̂ + ε of Adam")
        + STABILITY
        + CRITICAL_SHARPNESS
    )

    def __init__(
        self,
        *,
        batches: int = 2,
        critical_passes: int = 14,
        density_points: int = 32,
        density_probes: int = 1,
        epsilon: float = 1e-2,
        iterations: int = 16,
        k: int = 3,
        method: Method = "exact",
        probes: int = 6,
    ) -> None:
        self.batches, self.critical_passes = batches, critical_passes
        self.k, self.iterations, self.probes = k, iterations, probes
        self.density_probes, self.density_points = density_probes, density_points
        for option, least in LEAST.items():
            value = vars(self)[option]
            require(value >= least, f"sharpness.{option} is {value}; it must be at least {least}.")
        if method not in METHODS:
            raise unknown("sharpness.method", method, METHODS)
        require(0 < epsilon < math.inf, f"sharpness.epsilon is {epsilon}; it must be a positive number.")
        if 0 < iterations < k:
            raise UsageError(f"sharpness.iterations is {iterations}; for k = {k} eigenvalues it must be at least {k}.")
        if density_probes > probes:
            raise UsageError(
                f"sharpness.density_probes is {density_probes}; it must be at most sharpness.probes ({probes}), of "
                "which they are the first."
            )
        if not iterations and not critical_passes:
            raise UsageError("sharpness.iterations and sharpness.critical_passes are both 0; nothing is left to do.")
        self.epsilon = epsilon
        self.method: Method = method
        self._optimizer_class: type[Optimizer] = Optimizer

    def start(self, run: RunInfo) -> None:
        """Learn which optimizer trains; raises :class:`UnsuitableError` where FSDP2 forbids exact products."""
        if self.method == "exact" and self.iterations:
            refuse_exact_under_fsdp(self.name, run.model)
        self._optimizer_class = run.optimizer_class

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Measure the spectra, then the critical sharpness."""
        loss = MeasuredLoss(model_ctx, spread_batches(model_ctx.loader, self.batches))
        groups = run_ctx.optimizer_groups
        preconditioner = self._preconditioner(loss, groups)
        metrics: dict[str, MetricValue] = {}
        if self.iterations:
            metrics |= self._spectra(loss, preconditioner)
            threshold = stability_threshold(self._optimizer_class, groups)
            deciding = "preconditioned_sharpness" if issubclass(self._optimizer_class, Adam) else "sharpness"
            if threshold is not None and deciding in metrics:
                metrics["stability_ratio"] = metrics[deciding] / threshold
        if self.critical_passes:
            first = max(group.lr for group in groups) or 1.0
            metrics |= gradient_metrics(loss, preconditioner, first, self.critical_passes)
            metrics |= update_metrics(loss, groups, self.critical_passes)
        return metrics

    def _preconditioner(self, loss: MeasuredLoss, groups: Sequence[OptimizerGroup]) -> Tensor | None:
        """Return Adam's √v̂ + ε, flat, infinite for parameters without a step; ``None`` for other optimizers."""
        states = loss.model_ctx.optimizer_state
        if not (states and issubclass(self._optimizer_class, Adam)):
            return None
        flat = loss.space.flat(adam_preconditioner(states, groups))
        return torch.where(flat > 0, flat, math.inf)

    def _spectra(self, loss: MeasuredLoss, preconditioner: Tensor | None) -> dict[str, MetricValue]:
        generator = torch.Generator().manual_seed(random.getrandbits(63))  # leaves torch's stream to dropout
        like = torch.empty(0, dtype=loss.space.dtype, device=loss.model_ctx.device)
        probes = rademacher(loss.space.size, self.probes, generator, like)
        product = loss.hessian(self.method, self.epsilon)
        metrics = self._spectrum(product, probes)
        if preconditioner is not None:
            root = preconditioner.rsqrt()

            def preconditioned(flat: Tensor) -> Tensor:
                return root * product(root * flat)

            run = lanczos(preconditioned, root.sign() * probes[0], self.iterations)
            found = top_metrics(preconditioned, run, self.k)
            metrics |= {f"preconditioned_{name}": value for name, value in found.items()}
        return metrics

    def _spectrum(self, product: Product, probes: Tensor) -> dict[str, MetricValue]:
        """Measure the operator's spectrum from probes of ±1, shape (probes, n).

        The first probe starts the search for the largest eigenvalues. Of every probe z the first Lanczos step gives
        zᵀAz, a sample of the trace; that of the first ``density_probes`` is followed by the rest of a quadrature.
        """
        size = probes.shape[1]
        depths = [self.iterations if index < max(1, self.density_probes) else 1 for index in range(len(probes))]
        runs = [lanczos(product, probe, depth) for probe, depth in zip(probes, depths, strict=True)]
        trace, error = mean_and_error(size * torch.stack([run.diagonal[0] for run in runs]))
        metrics = top_metrics(product, runs[0], self.k) | {"trace": trace, "trace_error": error}
        if self.density_probes:
            density = Density.of(runs[: self.density_probes])
            mean_size, square = density.mean_size(), density.moment(2)
            grid, values = density.smoothed(self.density_points)
            metrics |= {
                "eigenvalue_rms": square.sqrt(),
                "effective_directions": size * mean_size.square() / square,
                "negative_energy": density.negative_energy(),
                "density_grid": list(grid),
                "density": list(values),
            }
        return metrics
