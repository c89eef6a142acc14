"""Norms of the weights, and the spectrum of each weight matrix: its ranks, and its largest singular value."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.hooks import Metrics, RunInfo
from loopscope.tensors import Vector, as_matrices, total_of, trainable, unsharded
from torch import Tensor

from ..measures import (
    FamilyFile,
    SeriesBudget,
    compute_once,
    effective_rank,
    reported_series,
    singular_values,
    smaller_gram,
    stable_rank,
    stacked,
    weight_norms,
)

TOGETHER = 2**20
"""Elements of the products WWᵀ of matrices that are decomposed together."""


def edge_excess(values: Tensor, rows: int, columns: int) -> Tensor:
    """Return (σ₁²/s² − μ)/τ of singular values (…, n) of a rows × columns matrix, with s² = Σσ²/(rows·columns).

    μ and τ are location and scale of the largest eigenvalue of WWᵀ for independent entries of variance 1: with p the
    smaller and q the larger dimension less 1, μ = (√q + √p)² and τ = (√q + √p)·(1/√q + 1/√p)^(1/3) (Johnstone 2001).
    Then the result has approximately the Tracy-Widom distribution of order 1, of order 2 for complex entries. NaN for
    zeros, and for vectors.
    """
    p, q = min(rows, columns), max(rows, columns) - 1
    if p < 2:
        return torch.full_like(values[..., 0], torch.nan)
    edge = q**0.5 + p**0.5
    scale = edge * (q**-0.5 + p**-0.5) ** (1 / 3)
    relative = values[..., 0].square() / values.square().sum(-1) * (rows * columns)
    statistic: Tensor = (relative - edge**2) / scale
    return statistic


def spectra_by_size(matrices: Vector) -> list[tuple[list[str], Tensor]]:
    """Return the singular values of matrices, decomposed together for equal numbers of singular values.

    Matrices are decomposed in groups of at most :data:`TOGETHER` elements of WWᵀ, which limits the memory.

    Returns:
        For each group, of one number n = min(rows, columns), the names of the matrices, and their singular values as a
        float64 tensor of shape (names, n), descending; NaN for a matrix with an infinite or NaN element.
    """
    by_size: dict[tuple[int, bool, torch.device], list[str]] = {}
    for name, matrix in matrices.items():
        by_size.setdefault((min(matrix.shape), matrix.is_complex(), matrix.device), []).append(name)
    groups = []
    for (size, *_), names in by_size.items():
        count = max(1, TOGETHER // max(1, size**2))
        groups += [names[first : first + count] for first in range(0, len(names), count)]
    return [(group, singular_values(torch.stack([smaller_gram(matrices[name]) for name in group]))) for group in groups]


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WeightTracking(TrainingHook):
    """Measure the norms of the weights and the spectrum of each matrix: its ranks, and how far it is from random.

    Reports norms after every epoch and everything at SNAPSHOT, since a spectrum costs about a millisecond for a matrix
    of width 128. W is a matrix, σ are all its min(rows, columns) singular values in descending order. The kernel of a
    convolution is unfolded as (out, everything else), and a parameter with the matrices of several experts (experts,
    rows, columns) is reported by expert, as ``<parameter>.<expert>``. Other parameters only have a norm.

    Assumes that the first dimension of a convolution is the output (a transposed convolution, whose first dimension is
    the input, is unfolded as (in, out·k·k)). Several matrices in one two-dimensional parameter, as in a fused
    query-key-value projection, count as one.

    Args:
        names: globs, separated by commas, of parameters and experts that are always reported; ``*`` selects all.
        top: number of parameters with the largest values that each family reports in addition.
        bottom: number of parameters with the smallest values that each family reports in addition.
        write_all: write the values of all parameters to a file in the run's folder.
    """

    name = "weight_tracking"
    hook_points = frozenset({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT})
    metrics = """
        total_norm | ‖θ‖₂ over all trainable parameters | [0, ∞)
            | Weight decay reduces it; in grokking it peaks while the data are memorised and falls afterwards.
        norm/<parameter> | ‖W‖_F of one parameter; here and below of a model with more than top + bottom of them, of
            those where the value is largest or smallest, and of names | [0, ∞) | Shows which layers grow or decay.
        spectral_norm/<parameter> | ‖W‖₂ = σ₁ (SNAPSHOT) | [0, ∞)
            | The largest factor by which the matrix stretches a vector. NaN here and below: an element is not finite.
        effective_rank/<parameter> | exp(−Σ p ln p), p = σ/Σσ over all singular values (Roy and Vetterli 2007; SNAPSHOT)
            | [1, n], n = min(rows, columns), NaN | The number of equally strong directions with this entropy. Falls
            as structure replaces noise. NaN: the matrix is zero.
        stable_rank/<parameter> | ‖W‖_F²/‖W‖₂² = Σσ²/σ₁² (SNAPSHOT) | [1, n], NaN
            | The number of directions as strong as the strongest. Unlike the effective rank insensitive to small
            singular values.
        edge_excess/<parameter> | (σ₁²/s² − μ)/τ, s² = ‖W‖_F²/(rows·columns), μ = (√q + √p)², τ = (√q + √p)·(1/√q +
            1/√p)^(1/3), p the smaller dimension, q the larger one less 1 (Johnstone 2001; SNAPSHOT) | (−∞, ∞), NaN
            | How far σ₁ is above that of a random matrix of the same size and norm. For Gaussian or uniform independent
            entries the mean is −1 to −2, the standard deviation about 1, and at most 1 of 80 exceeds 2.0. Far above:
            one direction is stronger than chance makes it, by training or by the initialisation. Far below: singular
            values that are more alike than by chance, as after an orthogonal initialisation. NaN: the matrix is zero,
            or a single row or column.
        mean_spectral_norm | mean over the matrices of ‖W‖₂ (SNAPSHOT) | [0, ∞) | Shows whether the matrices grow.
        mean_effective_rank | mean over the matrices, NaNs left out, of effective_rank (SNAPSHOT) | [1, ∞), NaN
            | Falls as the model as a whole becomes simpler.
        mean_stable_rank | mean over the matrices, NaNs left out, of stable_rank (SNAPSHOT) | [1, ∞), NaN
            | Falls as a few directions come to dominate the model as a whole.
    """

    names: str = ""
    top: int = 10
    bottom: int = 10
    write_all: bool = False

    _file = Remembered(FamilyFile)

    def __post_init__(self) -> None:
        self._budget = SeriesBudget(self.name, self.names, self.top, self.bottom)

    @classmethod
    def file_names(cls, strategy: str) -> Sequence[str]:
        """Return the name of the file of ``write_all``."""
        return [FamilyFile.name(cls.name, strategy)]

    def start(self, run: RunInfo) -> None:
        """Check the patterns of names, and choose the file."""
        shapes = {name: torch.empty(value.shape, device="meta") for name, value in run.model.named_parameters()}
        matrices = {name: value for name, value in shapes.items() if value.ndim > 1 and value.numel()}
        self._budget.check_names([*dict.fromkeys([*shapes, *as_matrices(run.model, matrices)])])
        if self.write_all:
            self._file.start(self.name, run)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the norms, and at SNAPSHOT the metrics of the spectra as well."""
        weights = trainable(ctx.model)
        families = {"norm": compute_once(ctx, weight_norms)}
        totals = {"total_norm": total_of(stacked(families["norm"].values()))} if weights else {}
        if ctx.hook_point is HookPoint.SNAPSHOT:
            whole = {name: unsharded(value) for name, value in weights.items() if value.ndim > 1 and value.numel()}
            spectra = spectral_families(as_matrices(ctx.model, whole))
            families |= spectra
            for averaged in ("spectral_norm", "effective_rank", "stable_rank"):
                if spectra[averaged]:
                    totals[f"mean_{averaged}"] = stacked(spectra[averaged].values()).nanmean()
        file = self._file if self.write_all else None
        return reported_series(families, self._budget, totals, step=ctx.step, file=file)


def spectral_families(matrices: Vector) -> dict[str, dict[str, Tensor]]:
    """Return the metrics of the spectra of matrices, each by name."""
    columns: dict[str, dict[str, Tensor]] = {
        column: {} for column in ("spectral_norm", "effective_rank", "stable_rank", "edge_excess")
    }
    for names, spectra in spectra_by_size(matrices):
        for name, values in zip(names, spectra.unbind(), strict=True):
            rows, width = matrices[name].shape
            measured = (values[0], effective_rank(values), stable_rank(values), edge_excess(values, rows, width))
            for column, value in zip(columns.values(), measured, strict=True):
                column[name] = value
    return columns
