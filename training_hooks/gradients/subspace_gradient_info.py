"""How many dimensions the recent gradients span, and how much of a new one lies in them."""

from itertools import islice
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import trainable
from torch import Tensor

from ..measures import FlatSpace, participation_ratio
from .gradient_history import GradientHistory, check_dimensions, refuse_above, spectrum


def centred(gram: Tensor) -> Tensor:
    """Return the inner products of k vectors after their mean was taken away, from those before; shape (k, k)."""
    rows = gram - gram.mean(dim=0, keepdim=True)
    return rows - rows.mean(dim=1, keepdim=True)


def dimension_of_share(values: Tensor, share: float) -> Tensor:
    """Return the smallest m with λ₁ + … + λ_m ≥ share·Σλ, zero-dimensional float64; NaN if all are zero or NaN.

    ``values`` are eigenvalues λ, largest first.

    >>> dimension_of_share(torch.tensor([6.0, 3.0, 1.0]), 0.8).item()
    2.0
    """
    total = values.sum()
    count = 1 + (values.cumsum(0) < share * total).sum()
    return torch.where(total > 0, count.double(), torch.nan)


def held_out_share(gram: Tensor, top: int, resolution: float) -> tuple[Tensor, Tensor]:
    """Return the share ‖VVᵀg‖²/‖g‖² of a new gradient in the span of earlier ones, and the number of columns of V.

    ``gram`` has shape (k + 1, k + 1): inner products of k earlier gradients X (rows) and, last, of g. V holds the
    ``top`` leading right singular vectors of X = UΣVᵀ, fewer if the numerical rank of X is smaller. From the products
    alone: v_j·g = u_j·(Xg)/σ_j. The share is NaN for g = 0.
    """
    values, vectors = spectrum(gram[:-1, :-1], resolution)
    values, vectors = values[:top], vectors[:, :top]
    components = (vectors.T @ gram[:-1, -1]).square() / values
    inside = torch.where(values == 0, 0.0, components).sum() / gram[-1, -1]
    dimensions = torch.where(values.isnan().any(), torch.nan, (values > 0).sum().double())
    return inside, dimensions


@HookRegistry.register
class SubspaceGradientInfo(TrainingHook):
    """Measure how many dimensions the recent gradients span, and how much of a new gradient lies in them.

    Every ``every`` steps the gradient of the batch, as POST_BACKWARD sees it (before clipping), is held against the
    ``window`` gradients taken before it, and then joins them. Gur-Ari, Roberts and Dyer 2018 (arXiv 1812.04754) report
    that soon after the beginning most of the gradient lies in the span of the Hessian's leading eigenvectors, about as
    many as there are classes. Here the span is that of the leading right singular vectors of the earlier gradients: the
    leading eigenvectors of their second moment, which for a likelihood is close to the Fisher matrix and so to the
    Hessian's positive part. The new gradient has no part in making that span, so its share in it is not high by
    construction: for a gradient of random direction its expectation is the null.

    Memory: (``window`` + 1) × n × 4 bytes, n the number of trainable elements (40 MiB for 21 gradients of half a
    million); a model for which that exceeds ``memory`` is refused. With ``projection`` = d each gradient is replaced by
    a count sketch: (``window`` + 1) × d × 4 bytes, and the null is the number of directions over d instead of over n.

    Assumes that the window is short against the time in which the gradients' norm changes: a gradient of ten times the
    norm counts like a hundred others. The ratio and the dimension cannot exceed the number of gradients, so values
    near that number only say that the dimension is larger than the window can tell.

    Args:
        window: earlier gradients that make up the subspace, and gradients whose spectrum is taken.
        top: dimensions of the subspace; 10 is the number of classes in most of Gur-Ari's experiments.
        every: steps between two gradients.
        projection: dimensions of the random projection, a power of two; 0: the gradients themselves.
        memory: MiB that the kept gradients may take.
    """

    name = "subspace_gradient_info"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _history = Remembered(lambda hook: GradientHistory(hook.window + 1, hook.projection), by_options=True, merged=True)
    metrics = """
        participation_ratio | (Σλ)²/Σλ², λ the eigenvalues of XXᵀ, the rows of X the newest k gradients; λ ≤ k·ε·max λ
            counts as 0, ε the rounding error of their dtype | [1, k] | How many dimensions the gradients fill evenly.
            1: one direction; k: gradients of equal norm that are orthogonal, as isotropic noise is.
        participation_ratio_centred | the same of the gradients minus their mean: of their covariance; from k = 3 on
            | [1, k − 1]
            | The dimensions of the noise alone. Far above participation_ratio: the mean gradient dominates.
        dimension_90 | the smallest m with λ₁ + … + λ_m ≥ 0.9·Σλ | 1..k
            | How many directions hold 90 % of the gradients' energy.
        subspace_share | ‖VVᵀg‖²/‖g‖², g the present gradient, V the top leading right singular vectors of the up to
            window gradients before it; once top of them are there | [0, 1] | How much of a gradient is foreseen by the
            earlier ones. Near null_share: nothing; near 1: training moves in a tiny subspace.
        null_share | subspace_dimension / n, n the number of trainable elements (projection, if that is set) | [0, 1)
            | The expectation of subspace_share for a gradient of random direction.
        subspace_dimension | columns of V: the smaller of top and the numerical rank of the earlier gradients | 0..top
            | Below top: the earlier gradients span no more.
        gradients | k | [2, window] | How many gradients the spectrum rests on.
    """

    def __init__(
        self, *, window: int = 20, top: int = 10, every: int = 100, projection: int = 0, memory: int = 1024
    ) -> None:
        given = f"subspace_gradient_info.top is {top} and window is {window}"
        limits = "the window must hold at least 2 gradients, and top must lie in 1..window"
        require(1 <= top <= window and window >= 2, f"{given}; {limits}.")
        check_dimensions("subspace_gradient_info.projection", projection)
        self.window, self.top = window, top
        self.projection, self.memory = projection, memory
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def start(self, run: RunInfo) -> None:
        """Refuse a run of fewer than two gradients, and a model too small for the subspace or too large to keep."""
        if len(list(islice(filter(self.step_schedule.is_due, range(1, run.steps + 1)), 2))) < 2:
            raise UnsuitableError(
                f"Hook 'subspace_gradient_info' compares gradients of different steps, and it sees fewer than two in "
                f"the {run.steps} steps of this run; choose fewer steps between them with --hook-config "
                "subspace_gradient_info.every=N."
            )
        elements = FlatSpace(trainable(run.model)).size
        if self.top >= elements:
            raise UnsuitableError(
                f"Hook 'subspace_gradient_info' needs more than {self.top} trainable elements, or a subspace of "
                f"so many dimensions holds every gradient; the model has {elements}. Choose a smaller one "
                "with --hook-config subspace_gradient_info.top=N."
            )
        refuse_above(self.name, self.memory, self._history.capacity, run.model, self._history.projection)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Record the gradient and return the spectrum, and the share once ``top`` earlier gradients are there."""
        self._history.append(ctx.model)
        gram, resolution = self._history.gram(), self._history.resolution
        metrics: dict[str, Any] = {}
        if len(gram) > self.top:
            share, dimensions = held_out_share(gram, self.top, resolution)
            null = dimensions / (self._history.projection or FlatSpace(trainable(ctx.model)).size)
            metrics |= {"subspace_share": share, "null_share": null, "subspace_dimension": dimensions}
        recent = gram[-self.window :, -self.window :]
        if len(recent) < 2:
            return metrics
        values = spectrum(recent, resolution)[0]
        metrics["participation_ratio"] = participation_ratio(values)
        metrics["dimension_90"] = dimension_of_share(values, 0.9)
        if len(recent) > 2:
            metrics["participation_ratio_centred"] = participation_ratio(spectrum(centred(recent), resolution)[0])
        return {**metrics, "gradients": len(recent)}
