"""The curvature of the training loss: largest eigenvalues, trace, spectral density, critical sharpness."""

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
from loopscope.training import METHODS, Method
from torch import Tensor
from torch.optim import Adam, Optimizer

from ..measures import drawn_loader, notice
from .lanczos import Density, Product, Tridiagonal, jackknife_error, lanczos, mean_and_error, rademacher, residuals
from .measured_loss import CRITICAL_SHARPNESS, MeasuredLoss, Part, gradient_metrics, update_metrics
from .stability import adam_preconditioner, refuse_exact_on_shards, stability_threshold, steps_taken

LEAST = dict(batches=1, critical_passes=0, density_points=9, density_probes=0, iterations=0, k=1, probes=1)
"""The minimum of each numeric option."""


def top_metrics(product: Product, run: Tridiagonal, count: int) -> dict[str, MetricValue]:
    """Return the largest eigenvalues with their residuals, and the smallest one."""
    values, vectors = run.largest(count)
    return {
        "sharpness": values[0],
        "eigenvalues": list(values),
        "residuals": list(residuals(product, values, vectors)),
        "smallest_eigenvalue": run.ritz()[0][0],
    }


def rows_metrics(
    loss: MeasuredLoss, parts: Sequence[Part], start: Tensor, iterations: int, whole: Tensor
) -> dict[str, MetricValue]:
    """Compare the largest eigenvalue of few rows with ``whole``, that of all: its mean excess and its spread.

    Disjoint groups of 1, 2, 4, ... parts are measured as all rows were, as long as there are two groups; a smaller last
    batch belongs to none.
    """
    even = [part for part in parts if part.rows == parts[0].rows]
    bias, spread, size = {}, {}, 1
    while 2 * size <= len(even):
        groups = [even[first : first + size] for first in range(0, len(even) - size + 1, size)]
        values = torch.stack([lanczos(loss.product(group), start, iterations).largest(1)[0][0] for group in groups])
        rows = str(size * parts[0].rows)
        bias[rows], spread[rows] = values.mean() - whole, values.std(correction=1)
        size *= 2
    return {"sharpness_bias_by_rows": bias, "sharpness_spread_by_rows": spread} if bias else {}


def density_metrics(runs: Sequence[Tridiagonal], points: int) -> dict[str, MetricValue]:
    """Return moments and density of a spectrum from the Lanczos runs of probes; from two probes on, with errors."""
    grid, size = Density.of(runs).grid(points), runs[0].basis.shape[1]

    def estimate(some: Sequence[Tridiagonal]) -> Tensor:
        density = Density.of(some)
        square, mean_size = density.moment(2), (density.weights * density.nodes.abs()).sum()
        moments = [square.sqrt(), size * mean_size.square() / square, density.negative_energy()]
        return torch.cat([torch.stack(moments), density.smoothed(grid)])

    names = ("eigenvalue_rms", "effective_directions", "negative_energy")
    found: dict[str, MetricValue] = {"density_grid": list(grid)}
    for suffix, values in (("", estimate(runs)), *((("_error", jackknife_error(estimate, runs)),) if runs[1:] else ())):
        found |= {f"{name}{suffix}": value for name, value in zip(names, values[:3], strict=True)}
        found[f"density{suffix}"] = list(values[3:])
    return found


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
    rows | the rows of which H is the mean Hessian | [1, ∞) | Compare sharpness only at equal numbers of rows.
    sharpness_bias_by_rows | mean over disjoint groups of r of the rows of the group's sharpness, minus sharpness, by r
        | [0, ∞) up to residuals, if the groups hold all rows
        | How far fewer rows lie above these. The largest eigenvalue is convex in H, so fewer rows are never too low on
        average: if it still falls from one r to its double, more rows would be lower yet. Left out below two batches.
    sharpness_spread_by_rows | standard deviation over the same groups (divisor groups − 1), by r | [0, ∞)
        | How much sharpness depends on which r rows are drawn; that of all rows varies by less than the last.
    trace | mean over probes z of zᵀHz, z random ±1 (Hutchinson) | (−∞, ∞)
        | The sum of all eigenvalues, estimated; read it with trace_error.
    trace_error | s/√probes, s the standard deviation of zᵀHz over the probes (divisor probes − 1) | [0, ∞)
        | The standard error of trace. Where many eigenvalues share the curvature, trace ± t·trace_error holds the truth
        in 95 of 100 draws, t Student's for probes − 1 degrees of freedom (2.57 for 6); where one has it all, in about
        84. Left out with one probe.
    eigenvalue_rms | √(tr(H²)/n), n the number of parameters, by quadrature | [0, ∞)
        | The root mean square of all eigenvalues; far below sharpness: a few directions have the curvature.
    effective_directions | (Σ|λ|)²/Σλ² over all eigenvalues, by quadrature | [1, n]
        | How many directions share the curvature: m if m eigenvalues have one size and the rest are zero.
    negative_energy | Σ λ² over λ < 0 / Σ λ², by quadrature | [0, 1] | 0: a convex valley; falls as training settles.
    eigenvalue_rms_error | {jackknife}, e = eigenvalue_rms | [0, ∞) | {error}
    effective_directions_error | {jackknife}, e = effective_directions | [0, ∞) | {error}
    negative_energy_error | {jackknife}, e = negative_energy | [0, ∞) | {error}
    density_grid | density_points even steps over the quadrature nodes and three steps beyond on either side
        | (−∞, ∞), ascending | The eigenvalues at which density is given.
    density | Σ w·N(grid; node, step²) over nodes and weights of stochastic Lanczos quadrature (arXiv 1901.10159)
        | [0, ∞) | The share of eigenvalues per unit of λ, smoothed by one grid step; look at it on a logarithmic axis.
    density_error | {jackknife}, e = density, at each λ of density_grid | [0, ∞) | {error}
""".format(
    jackknife="√((K−1)/K·Σ(e₋ᵢ − ē)²), e₋ᵢ from all K density probes but the i-th, ē their mean (jackknife)",
    error="The standard error over the probes, read like trace_error with t for density_probes − 1 (12.7 for 2); "
    "what too few iterations blur is not in it. Left out with one density probe.",
)
STABILITY = """
    stability_ratio | SGD: sharpness/(2/η), with momentum μ and dampening τ sharpness/((2+2μ)/((1−τ)η)), with Nesterov
        momentum sharpness/((2+2μ)/((1+2μ)η)), weight decay λ subtracted from each of these thresholds; Adam and AdamW:
        preconditioned_sharpness/((1−β₁ᵗ)·(2+2β₁)/((1−β₁)η)), t the steps taken | (−∞, ∞)
        | Hovers about 1 at the edge of stability (arXiv 2103.00065, 2207.14484); at β₁ = 0.9 the threshold grows from
        3.8/η to 38/η. Few rows raise it as they raise sharpness. Left out for other optimizers, for parameter groups
        with different settings, and where weight decay alone diverges.
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

    The largest eigenvalue of few rows is too high, and scatters: ``sharpness_bias_by_rows`` and
    ``sharpness_spread_by_rows`` tell by how much, from parts of the rows. The preconditioned one, measured on the same
    rows, is not taken apart so. Time grows with ``batches``, and the groups of 1, 2, 4, ... of them cost
    ``iterations`` products with all rows for each size: with 4 batches and Adam 90 products are made in place of 58,
    with 8 batches 106 of twice the rows.

    With Adam and AdamW the same is measured for P^(−1/2)·H·P^(−1/2), P = √v̂ + ε, on which their stability depends.

    Critical sharpness (arXiv 2601.16979) needs forward passes only: it is 2/η_c, η_c the learning rate at which the
    loss after a step along a direction u is back at its value before, L(θ − η_c·u) = L(θ). On a quadratic loss that is
    uᵀHu/gᵀu: for u = g, the gradient, the curvature along g, for u = P⁻¹g that of the preconditioned Hessian along its
    own gradient; neither exceeds the largest eigenvalue. It is also measured along the step that the optimizer itself,
    momentum and weight decay included, would now make from the first of the batches, on that batch.

    While it runs, Lanczos keeps ``iterations`` vectors as long as the parameters (for each of the ``density_probes``).
    With exact products it also keeps the graph of the gradient, with all activations, of each of the ``batches``. On
    sharded models each rank keeps them whole, and only ``method="finite_difference"`` works. Over several processes a
    batch is made of those of all ranks, which each of them draws of what its loader has: the numbers are those of one
    process where the loaders part batches that they all draw alike, as a distributed sampler does, and of other rows
    if each loader has different rows.

    Assumes that the loss is twice differentiable; ReLU networks are taken piece by piece. The thresholds assume a
    quadratic loss, the gradient of the full data, and for Adam a constant P. Weight decay is not part of H: SGD's is
    in the threshold, Adam's is left out.

    Args:
        batches: how many batches of the loader's size are drawn; their bias and spread need at least 2.
        critical_passes: forward passes of each search for a critical sharpness; 0: none.
        density_points: points of the grid on which the density is reported.
        density_probes: random vectors for the density, ``iterations`` products each; 0: no density. Its errors need at
            least 2.
        epsilon: absolute step of ``finite_difference`` along the normalised vector.
        iterations: Lanczos steps, one Hessian-vector product each; 0: no spectrum, critical sharpness only.
        k: how many of the largest eigenvalues are reported.
        method: Hessian-vector products ``"exact"`` (reverse over reverse) or by central ``"finite_difference"``.
        probes: random vectors for the trace, those of the density included; its error needs at least 2.
    """

    name = "sharpness"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    needs_loss = True
    needs_loader = True
    _drawn = Remembered[Loader | None](lambda: None, saved=False)
    metrics = (
        SPECTRUM.format(prefix="", operator="H")
        + MOMENTS
        + SPECTRUM.format(prefix="preconditioned_", operator="P^(−1/2)·H·P^(−1/2), P = √v̂ + ε of Adam")
        + STABILITY
        + CRITICAL_SHARPNESS
    )

    batches: int = 4
    critical_passes: int = 14
    density_points: int = 32
    density_probes: int = 2
    epsilon: float = 1e-2
    iterations: int = 16
    k: int = 3
    method: Method = "exact"
    probes: int = 6

    def __post_init__(self) -> None:
        for option, least in LEAST.items():
            value = vars(self)[option]
            require(value >= least, f"sharpness.{option} is {value}; it must be at least {least}.")
        if self.method not in METHODS:
            raise unknown("sharpness.method", self.method, METHODS)
        require(0 < self.epsilon < math.inf, f"sharpness.epsilon is {self.epsilon}; it must be a positive number.")
        iterations, k, probes, density_probes = self.iterations, self.k, self.probes, self.density_probes
        if 0 < iterations < k:
            raise UsageError(f"sharpness.iterations is {iterations}; for k = {k} eigenvalues it must be at least {k}.")
        if density_probes > probes:
            raise UsageError(
                f"sharpness.density_probes is {density_probes}; it must be at most sharpness.probes ({probes}), of "
                "which they are the first."
            )
        if not iterations and not self.critical_passes:
            raise UsageError("sharpness.iterations and sharpness.critical_passes are both 0; nothing is left to do.")
        self._optimizer_class: type[Optimizer] = Optimizer

    def start(self, run: RunInfo) -> None:
        """Store the optimizer's class; raises :class:`UnsuitableError` if shards rule out exact products."""
        if self.method == "exact" and self.iterations:
            refuse_exact_on_shards(self.name, run.model)
        self._optimizer_class = run.optimizer_class
        sentences = [
            f"sharpness/{metric} has no error: that needs sharpness.{option} to be at least 2, and it is 1."
            for metric, option in {"trace": "probes", "density": "density_probes", "sharpness": "batches"}.items()
            if vars(self)[option] == 1
        ]
        if self.batches > 1 and run.steps_per_epoch == 1:
            sentences.append("sharpness/sharpness has no error: that needs 2 batches, and the data are one.")
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
        parts = loss.hessians(self.method, self.epsilon)
        product = loss.product(parts)
        metrics = self._spectrum(product, probes) | {"rows": sum(part.rows for part in parts)}
        metrics |= rows_metrics(loss, parts, probes[0], self.iterations, metrics["sharpness"])
        if preconditioner is not None:
            root = preconditioner.rsqrt()
            preconditioned: Product = lambda flat: root * product(root * flat)
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
        samples = size * torch.stack([run.diagonal[0] for run in runs])
        metrics = top_metrics(product, runs[0], self.k) | {"trace": samples.mean()}
        if len(runs) > 1:
            metrics["trace_error"] = mean_and_error(samples)[1]
        if self.density_probes:
            metrics |= density_metrics(runs[: self.density_probes], self.density_points)
        return metrics
