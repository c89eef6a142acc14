"""Curvature of the training loss: largest eigenvalues, trace, spectral density, critical sharpness."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext
from loopscope.data import Loader
from loopscope.errors import UsageError, require, unknown
from loopscope.hooks import Metrics, MetricValue, ModelDataContext, OptimizerGroup, RunInfo
from torch import Tensor
from torch.optim import Adam, Optimizer

from ..measures import drawn_loader, notice, refuse_complex
from .lanczos import (
    Density,
    KnownPairs,
    Product,
    Quadrature,
    Tridiagonal,
    jackknife_error,
    lanczos,
    mean_and_error,
    rademacher,
    residuals,
)
from .measured_loss import CRITICAL_SHARPNESS, BatchHessian, MeasuredLoss, gradient_metrics, update_metrics
from .product_method import CHOICES, EXACT_PRODUCTS, Choice, Chosen, choose_method
from .stability import adam_preconditioner, refuse_exact_on_shards, stability_threshold, steps_taken

LEAST = dict(batches=1, critical_passes=0, density_points=9, density_probes=0, iterations=0, k=1, probes=1)
"""The minimum of each numeric option."""


def top_metrics(product: Product, run: Tridiagonal, count: int) -> dict[str, MetricValue]:
    """Return the largest eigenvalues with their residuals, and the smallest one with its residual."""
    values, vectors = run.largest(count)
    smallest, smallest_residual = run.smallest()
    return {
        "sharpness": values[0],
        "eigenvalues": list(values),
        "residuals": list(residuals(product, values, vectors)),
        "smallest_eigenvalue": smallest,
        "smallest_residual": smallest_residual,
    }


def rows_metrics(
    loss: MeasuredLoss, parts: Sequence[BatchHessian], start: Tensor, iterations: int, sharpness: Tensor
) -> dict[str, MetricValue]:
    """Return mean excess over ``sharpness`` and spread of the largest eigenvalue of few rows.

    ``sharpness`` is the largest eigenvalue of all rows. The few rows are disjoint groups of 1, 2, 4, ... batches, as
    long as there are two groups. A smaller last batch is excluded.
    """
    even = [part for part in parts if part.rows == parts[0].rows]
    bias, spread, size = {}, {}, 1
    while 2 * size <= len(even):
        groups = [even[first : first + size] for first in range(0, len(even) - size + 1, size)]
        values = torch.stack([lanczos(loss.product(group), start, iterations).largest(1)[0][0] for group in groups])
        rows = str(size * parts[0].rows)
        bias[rows], spread[rows] = values.mean() - sharpness, values.std(correction=1)
        size *= 2
    return {"sharpness_bias_by_rows": bias, "sharpness_spread_by_rows": spread} if bias else {}


def density_metrics(
    runs: Sequence[Tridiagonal], points: int, known: KnownPairs | None = None
) -> dict[str, MetricValue]:
    """Return moments and density of a spectrum from Lanczos runs of probes, with errors for two or more probes.

    ``known`` are the eigenpairs that the runs have in common.
    """
    quadratures = (known or KnownPairs.of(runs)).deflated(runs)
    grid, size = Density.of(quadratures).grid(points), runs[0].basis.shape[1]

    def estimate(some: Sequence[Quadrature]) -> Tensor:
        density = Density.of(some)
        # √(tr(A²)/n), (Σ|λ|)²/Σλ², and the share of negative eigenvalues in tr(A²)
        square, mean_size = density.moment(2), (density.weights * density.nodes.abs()).sum()
        directions = (size * mean_size.square() / square).clamp(1, size)  # weights below 1/n would leave the range
        moments = [square.sqrt(), directions, density.negative_energy()]
        return torch.cat([torch.stack(moments), density.smoothed(grid)])

    names = ("eigenvalue_rms", "effective_directions", "negative_energy")
    metrics: dict[str, MetricValue] = {"density_grid": list(grid)}
    estimates = {"": estimate(quadratures)}
    if len(runs) > 1:
        estimates["_error"] = jackknife_error(estimate, quadratures)
    for suffix, values in estimates.items():
        metrics |= {f"{name}{suffix}": value for name, value in zip(names, values[:3], strict=True)}
        metrics[f"density{suffix}"] = list(values[3:])
    return metrics


SPECTRUM = """
    {prefix}sharpness | largest eigenvalue of {operator} | (−∞, ∞)
        | The curvature in the direction of largest curvature; a lower bound, accurate to the first of the residuals.
    {prefix}eigenvalues | the k largest Ritz values λ of {operator} | (−∞, ∞), descending
        | Typically a few are far above the rest, about as many as there are classes.
    {prefix}residuals | ‖Av − λv‖₂, v the Ritz vectors, A = {operator} | [0, ∞)
        | The operator has an eigenvalue within this distance of λ. Large: increase iterations.
    {prefix}smallest_eigenvalue | smallest Ritz value of {operator} | (−∞, ∞)
        | Below 0: a direction of negative curvature exists. An upper bound of the smallest eigenvalue.
    {prefix}smallest_residual | ‖Av − λv‖₂ of smallest_eigenvalue λ, as |β_m·s_m| of Lanczos, A = {operator} | [0, ∞)
        | The operator has an eigenvalue within this distance of smallest_eigenvalue. Large: increase iterations.
"""
MOMENTS = """
    rows | number of rows over which H is the mean Hessian | [1, ∞) | Compare sharpness only at equal numbers of rows.
    sharpness_bias_by_rows | mean over disjoint groups of r of the rows of the group's sharpness, minus sharpness, by r
        | (−∞, ∞)
        | The average excess of sharpness with fewer rows. The largest eigenvalue is convex in H, so if the groups
        contain all rows it is at least 0, up to the residuals. If it still falls when r doubles, more rows would give
        even lower values. Missing for fewer than two batches.
    sharpness_spread_by_rows | standard deviation over the same groups (divisor groups − 1), by r | [0, ∞)
        | The variation of sharpness with the choice of r rows; with all rows it is smaller than the last value.
    trace | mean over probes z, random ±1, of zᵀHz − Σλ(u·z)² + Σλ over the eigenpairs λ, u on which the density probes
        agree (|cos| of their Ritz vectors above 0.99); without such pairs, the mean of zᵀHz (Hutchinson) | (−∞, ∞)
        | An estimate of the sum of all eigenvalues, with the error trace_error.
    trace_error | s/√probes, s the standard deviation of these numbers over the probes (divisor probes − 1) | [0, ∞)
        | The standard error of trace: trace ± t·trace_error, with Student's t for probes − 1 degrees of freedom (2.57
        for 6), is a 95 % interval, whose measured coverage is below. Missing for one probe.
    eigenvalue_rms | √(tr(H²)/n), n the number of parameters, by quadrature | [0, ∞)
        | The root mean square of all eigenvalues; far below sharpness: the curvature is in a few directions.
    effective_directions | (Σ|λ|)²/Σλ² over all eigenvalues, by quadrature, at least 1 | [1, n], NaN
        | The effective number of directions with curvature: m if m eigenvalues are equal in size and the others zero.
    negative_energy | Σ λ² over λ < 0 / Σ λ², by quadrature | [0, 1], NaN | 0: the loss is convex here; falls in
        training.
    eigenvalue_rms_error | {jackknife}, e = eigenvalue_rms | [0, ∞) | {error}
    effective_directions_error | {jackknife}, e = effective_directions | [0, ∞) | {error}
    negative_energy_error | {jackknife}, e = negative_energy | [0, ∞) | {error}
    density_grid | density_points even steps over the quadrature nodes with three extra steps on each side
        | (−∞, ∞), ascending | The eigenvalues at which density is reported.
    density | Σ w·N(grid; node, step²) over nodes and weights of stochastic Lanczos quadrature (arXiv 1901.10159)
        | [0, ∞), NaN | The share of eigenvalues per unit of λ, smoothed by one grid step; plot it on a logarithmic
        axis.
    density_error | {jackknife}, e = density, at each λ of density_grid | [0, ∞) | {error}
""".format(
    jackknife="√((K−1)/K·Σ(e₋ᵢ − ē)²), e₋ᵢ without the i-th of the K density probes, ē their mean (jackknife)",
    error="The standard error over the probes, to be used like trace_error with t for density_probes − 1 (12.7 for 2); "
    "it excludes the error of too few iterations. Missing for one density probe.",
)
STABILITY = """
    stability_ratio | SGD: sharpness/(2/η), with momentum μ and dampening τ sharpness/((2+2μ)/((1−τ)η)), with Nesterov
        momentum sharpness/((2+2μ)/((1+2μ)η)), weight decay λ subtracted from each of these thresholds; Adam and AdamW:
        preconditioned_sharpness/((1−β₁ᵗ)·(2+2β₁)/((1−β₁)η)), t the number of steps | (−∞, ∞)
        | Near 1 at the edge of stability (arXiv 2103.00065, 2207.14484); for β₁ = 0.9 the threshold grows from 3.8/η
        to 38/η. Too few rows increase it like sharpness. Missing for other optimizers, for parameter groups with
        different settings, and if weight decay alone diverges.
"""


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class Sharpness(InterventionHook):
    """Measure the curvature of the training loss: eigenvalues of its Hessian, trace, density, critical sharpness.

    H is the Hessian over all trainable parameters of the mean training loss over the same rows at every hook call:
    ``batches`` batches, drawn with a fixed seed. They are the same in every run on the same data, for any order of the
    batches, so that at equal weights all orders give equal numbers. For a loader that cannot draw them (a stream) the
    hook uses its first batches and issues a notice. The model keeps its current modes, as in training: BatchNorm uses
    the statistics of each batch, and dropout has one mask per batch, fixed within a hook call. Eigenvalues are Ritz
    values of Lanczos with full reorthogonalisation, each with its residual.

    The largest eigenvalue of the Hessian on few rows is too high, and varies. ``sharpness_bias_by_rows`` and
    ``sharpness_spread_by_rows`` estimate both from groups of the rows, but not for the preconditioned eigenvalue. Time
    grows with ``batches``, and the groups of 1, 2, 4, ... batches cost ``iterations`` products with all rows per size:
    with 4 batches and Adam 90 products instead of 58, with 8 batches 106 with twice the rows.

    With Adam and AdamW the hook also measures P^(−1/2)·H·P^(−1/2), P = √v̂ + ε, which determines their stability.

    Critical sharpness (arXiv 2601.16979) needs only forward passes. It is 2/η_c, with η_c the learning rate at which
    the loss after a step along a direction u returns to its earlier value, L(θ − η_c·u) = L(θ). On a quadratic loss it
    is uᵀHu/gᵀu: for u = g, the gradient, the curvature along g; for u = P⁻¹g the curvature of the preconditioned
    Hessian along its own gradient. Neither exceeds the largest eigenvalue. It is also measured along the step that the
    optimizer would now take on the first of the batches, with momentum and weight decay, for the loss of that batch.

    During a call, Lanczos needs memory for ``iterations`` vectors of the size of the parameters (for each of the
    ``density_probes``). Exact products also need the graph of the gradient, with all activations, of each of the
    ``batches``. On sharded models each rank stores unsharded vectors, and products are finite differences.
    With several processes a batch consists of the batches of all ranks, which each rank draws from its loader. The
    metrics equal those of one process if the loaders split batches that all ranks draw alike, as a distributed sampler
    does; if each loader has different rows, they are those of other rows.

    Assumes a twice differentiable loss; for ReLU networks the derivatives are those of the current linear piece. The
    thresholds assume a quadratic loss, the gradient of the full data, and for Adam a constant P. Weight decay is not
    part of H: SGD's is in the threshold, and Adam's is ignored.

    Args:
        batches: number of batches of the loader's size to draw; bias and spread need at least 2.
        critical_passes: number of forward passes per search for a critical sharpness; 0: no search.
        density_points: number of grid points of the density.
        density_probes: number of random vectors for the density, with ``iterations`` products each; 0: no density. Its
            errors need at least 2.
        epsilon: absolute step of ``finite_difference`` along the normalised vector.
        iterations: number of Lanczos steps, with one Hessian-vector product each; 0: only critical sharpness.
        k: number of largest eigenvalues to report.
        method: method for Hessian-vector products, ``"exact"`` (reverse over reverse), central
            ``"finite_difference"``, or ``"auto"``: exact, unless exact products fail or are wrong, which the first call
            checks.
        probes: number of random vectors for the trace, including those of the density; its error needs at least 2.
    """

    name = "sharpness"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    needs_loss = True
    needs_dense_gradients = True
    needs_loader = True
    _drawn = Remembered[Loader | None](None, saved=False)
    _method = Remembered[Chosen]("")
    metrics = (
        SPECTRUM.format(prefix="", operator="H")
        + MOMENTS
        + SPECTRUM.format(prefix="preconditioned_", operator="P^(−1/2)·H·P^(−1/2), P = √v̂ + ε of Adam")
        + STABILITY
        + EXACT_PRODUCTS
        + CRITICAL_SHARPNESS
    )

    batches: int = 4
    critical_passes: int = 14
    density_points: int = 32
    density_probes: int = 2
    epsilon: float = 1e-2
    iterations: int = 16
    k: int = 3
    method: Choice = "auto"
    probes: int = 6

    def __post_init__(self) -> None:
        for option, least in LEAST.items():
            value = vars(self)[option]
            require(value >= least, f"sharpness.{option} is {value}; it must be at least {least}.")
        if self.method not in CHOICES:
            raise unknown("sharpness.method", self.method, CHOICES)
        require(0 < self.epsilon < math.inf, f"sharpness.epsilon is {self.epsilon}; it must be a positive number.")
        iterations, k, probes, density_probes = self.iterations, self.k, self.probes, self.density_probes
        if 0 < iterations < k:
            raise UsageError(f"sharpness.iterations is {iterations}; for k = {k} eigenvalues it must be at least {k}.")
        if density_probes > probes:
            raise UsageError(
                f"sharpness.density_probes is {density_probes}; it must be at most sharpness.probes ({probes}), "
                "because the density uses the first of these probes."
            )
        if not iterations and not self.critical_passes:
            raise UsageError("sharpness.iterations and sharpness.critical_passes are both 0; set at least one of them.")
        self._optimizer_class: type[Optimizer] = Optimizer

    def start(self, run: RunInfo) -> None:
        """Store the optimizer's class, and issue notices about missing errors.

        Raises:
            UnsuitableError: a parameter is complex, or the parameters are sharded, and ``method`` is ``"exact"``.
        """
        refuse_complex(self.name, run)
        if self.method == "exact" and self.iterations:
            refuse_exact_on_shards(self.name, run.model)
        self._optimizer_class = run.optimizer_class
        sentences = [
            f"sharpness.{option} is 1; the error of sharpness/{metric} needs at least 2."
            for metric, option in {"trace": "probes", "density": "density_probes", "sharpness": "batches"}.items()
            if vars(self)[option] == 1
        ]
        if self.batches > 1 and run.steps_per_epoch == 1:
            sentences.append("The data are a single batch; the error of sharpness/sharpness needs at least 2.")
        for sentence in sentences if self.iterations else ():
            notice(sentence)

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Measure the spectra, then the critical sharpness."""
        if self._drawn is None:
            self._drawn = drawn_loader(self.name, model_ctx.loader)
        loss = MeasuredLoss(model_ctx, list(islice(self._drawn.batches(0), self.batches)))
        groups = run_ctx.optimizer_groups
        preconditioner = self._preconditioner(loss, groups)
        metrics: dict[str, MetricValue] = {}
        if self.iterations:
            metrics |= self._spectra(loss, preconditioner)
            steps = steps_taken(model_ctx.optimizer_state)
            threshold = stability_threshold(self._optimizer_class, groups, steps)
            metric = "preconditioned_sharpness" if issubclass(self._optimizer_class, Adam) else "sharpness"
            if threshold is not None and metric in metrics:
                metrics["stability_ratio"] = metrics[metric] / threshold
        if self.critical_passes:
            first = max((group.lr for group in groups if group.lr > 0), default=1.0)
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
        generator = torch.Generator().manual_seed(
            random.getrandbits(63)
        )  # torch's random stream must not advance: it determines the dropout masks
        like = torch.empty(0, dtype=loss.space.dtype, device=loss.model_ctx.device)
        probes = rademacher(loss.space.size, self.probes, generator, like)
        if not self._method:
            self._method = choose_method(self.name, self.method, self.epsilon, loss.model_ctx, loss.batches[0])
        parts = loss.hessians(self._method, self.epsilon)
        product = loss.product(parts)
        metrics = self._spectrum(product, probes) | {"rows": sum(part.rows for part in parts)}
        metrics["exact_products"] = self._method == "exact"
        metrics |= rows_metrics(loss, parts, probes[0], self.iterations, metrics["sharpness"])
        if preconditioner is not None:
            root = preconditioner.rsqrt()  # P^(−1/2), shape (n,); zero for parameters without a step

            def preconditioned(flat: Tensor) -> Tensor:
                return root * product(root * flat)

            run = lanczos(preconditioned, root.sign() * probes[0], self.iterations)
            top = top_metrics(preconditioned, run, self.k)
            metrics |= {f"preconditioned_{name}": value for name, value in top.items()}
        return metrics

    def _spectrum(self, product: Product, probes: Tensor) -> dict[str, MetricValue]:
        """Measure the operator's spectrum from probes of ±1, shape (probes, n).

        The first probe starts the search for the largest eigenvalues. The first Lanczos step of every probe z gives
        zᵀAz, a sample of the trace. The first ``density_probes`` continue to a full quadrature.
        """
        size = probes.shape[1]
        depths = [self.iterations if index < max(1, self.density_probes) else 1 for index in range(len(probes))]
        runs = [lanczos(product, probe, depth) for probe, depth in zip(probes, depths, strict=True)]
        # Lanczos starts from q = z/√n for z of ±1, so zᵀAz = n·qᵀAq = n·α₁.
        samples = size * torch.stack([run.diagonal[0] for run in runs])
        full_runs = runs[: max(1, self.density_probes)]
        known = KnownPairs.of(full_runs)
        samples = known.deflated_trace(samples, probes)
        metrics = top_metrics(product, runs[0], self.k) | {"trace": samples.mean()}
        if len(runs) > 1:
            metrics["trace_error"] = mean_and_error(samples)[1]
        if self.density_probes:
            metrics |= density_metrics(full_runs, self.density_points, known)
        return metrics
