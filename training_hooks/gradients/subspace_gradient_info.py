"""Dimension of the subspace of recent gradients, and the share of a new gradient inside it."""

from itertools import islice
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.option_words import hook_option_text
from loopscope.tensors import trainable
from torch import Tensor

from ..measures import FlatSpace, is_overflowed, participation_ratio
from .gradient_history import GradientHistory, check_dimensions, check_memory, spectrum


def centred(gram: Tensor) -> Tensor:
    """Return the Gram matrix of k vectors minus their mean, given the Gram matrix of the vectors; shape (k, k)."""
    # (I − 11ᵀ/k) G (I − 11ᵀ/k): subtract the mean of each column, then that of each row
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

    V holds the ``top`` leading right singular vectors of X = UΣVᵀ, or fewer if the numerical rank of X is smaller. The
    share is NaN for g = 0.

    Args:
        gram: inner products of the k rows of X (the earlier gradients) and, last, of g, shape (k + 1, k + 1).
        top: the largest number of columns of V.
        resolution: machine epsilon of the gradients' dtype.
    """
    # The Gram matrix suffices: XXᵀ = UΣ²Uᵀ and v_j·g = u_j·(Xg)/σ_j, so ‖VVᵀg‖² = Σ_j (u_j·(Xg))²/σ_j²
    values, vectors = spectrum(gram[:-1, :-1], resolution)
    values, vectors = values[:top], vectors[:, :top]
    components = (vectors.T @ gram[:-1, -1]).square() / values
    inside = torch.where(values == 0, 0.0, components).sum() / gram[-1, -1]
    dimensions = torch.where(values.isnan().any(), torch.nan, (values > 0).sum().double())
    return inside, dimensions


@HookRegistry.register
class SubspaceGradientInfo(TrainingHook):
    """Measure how many dimensions the recent gradients span, and how much of a new gradient is inside that span.

    Every ``every`` steps the hook compares the gradient at POST_BACKWARD (before clipping) with the previous ``window``
    gradients that it took, and then adds it to them. Gur-Ari, Roberts and Dyer 2018 (arXiv 1812.04754) report that soon
    after the start most of the gradient is in the span of the leading eigenvectors of the Hessian, about as many as
    there are classes. Here the span is that of the leading right singular vectors of the earlier gradients. These are
    the leading eigenvectors of the gradients' second moment, which for a likelihood is close to the Fisher matrix and
    so to the positive part of the Hessian. The new gradient does not contribute to the span, so its share is not high
    by construction: for a gradient of random direction the expected share is null_share.

    Memory: (``window`` + 1) × n × 4 bytes, n the number of trainable elements (40 MiB for 21 gradients of half a
    million). If that exceeds ``memory``, the hook refuses the model. With ``projection`` = d it is
    (``window`` + 1) × d × 4 bytes: a count sketch replaces each gradient, and the null share is the number of
    directions over d instead of over n.

    Assumes that the norm of the gradients changes little within the window: a gradient of ten times the norm counts
    like a hundred others. Participation ratio and dimension cannot exceed the number of gradients; values near that
    number only mean that the true dimension is larger.

    Args:
        window: number of earlier gradients that span the subspace, and of gradients in the spectrum.
        top: dimensions of the subspace; 10 is the number of classes in most of Gur-Ari's experiments.
        every: steps between two gradients.
        projection: dimensions of the random projection, a power of two; 0 keeps the gradients themselves.
        memory: the most MiB that the gradients may take; by default as many as the trained parameters, at least 128.
    """

    name = "subspace_gradient_info"
    has_fixed_schedule = True
    needs_dense_gradients = True
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    _history = Remembered(lambda hook: GradientHistory(hook.window + 1, hook.projection), by_options=True, merged=True)
    metrics = """
        participation_ratio | (Σλ)²/Σλ², λ the eigenvalues of XXᵀ, the rows of X the newest k gradients; λ ≤ k·ε·max λ
            counts as 0, ε the rounding error of their dtype | [1, k], NaN | Number of dimensions that the gradients
            fill evenly. 1: one direction; k: orthogonal gradients of equal norm, like isotropic noise.
        participation_ratio_centred | the same of the gradients minus their mean: of their covariance; from k = 3 on
            | [1, k − 1], NaN
            | The dimensions of the noise alone. Far above participation_ratio: the mean gradient dominates.
        dimension_90 | the smallest m with λ₁ + … + λ_m ≥ 0.9·Σλ | 1..k, NaN
            | Number of directions that contain 90 % of the gradients' energy.
        subspace_share | ‖VVᵀg‖²/‖g‖², g the current gradient, V the top leading right singular vectors of the up to
            window previous gradients; once there are top of them | [0, 1], NaN | The share of a gradient that the
            earlier ones predict. Near null_share: none; near 1: training moves in a tiny subspace.
        null_share | subspace_dimension / n, n the number of trainable elements (projection, if that is set) | [0, 1)
            | Expected subspace_share of a gradient of random direction.
        subspace_dimension | columns of V: the smaller of top and the numerical rank of the earlier gradients | 0..top
            | Below top: the earlier gradients span fewer dimensions.
        gradients | k | [2, window] | Number of gradients behind the spectrum.
    """

    def __init__(
        self, *, window: int = 20, top: int = 10, every: int = 100, projection: int = 0, memory: int | None = None
    ) -> None:
        values = f"subspace_gradient_info.top is {top} and window is {window}"
        limits = "window must be at least 2, and top must be in 1..window"
        require(1 <= top <= window and window >= 2, f"{values}; {limits}.")
        check_dimensions("subspace_gradient_info.projection", projection)
        self.window, self.top = window, top
        self.projection, self.memory = projection, memory
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=every)

    def start(self, run: RunInfo) -> None:
        """Check the length of the run, and the size of the model against the subspace and the memory.

        Raises:
            UnsuitableError: if fewer than two steps are due, the subspace is not smaller than the model, or the
                gradients take too much memory.
        """
        if len(list(islice(filter(self.step_schedule.is_due, range(1, run.steps + 1)), 2))) < 2:
            raise UnsuitableError(
                f"Hook 'subspace_gradient_info' compares gradients of different steps, but fewer than two of the "
                f"{run.steps} steps of this run are due; set fewer steps between gradients with "
                f"{hook_option_text(self.name, every='N')}."
            )
        elements = FlatSpace(trainable(run.model)).size
        if self.top >= elements:
            raise UnsuitableError(
                f"Hook 'subspace_gradient_info' needs a model with more than {self.top} trainable elements, since a "
                f"subspace of {self.top} dimensions contains every gradient of a smaller one; this model has "
                f"{elements}. Choose fewer dimensions with {hook_option_text(self.name, top='N')}."
            )
        check_memory(self.name, self.memory, self._history.capacity, run.model, self._history.projection)

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Append the gradient and return the spectrum, and the share once there are ``top`` earlier gradients."""
        if is_overflowed(ctx):  # the loss scaler skips the step
            return {}
        self._history.append(ctx.model)
        gram, resolution = self._history.gram(), self._history.resolution
        metrics: dict[str, Any] = {}
        if len(gram) > self.top:
            share, dimensions = held_out_share(gram, self.top, resolution)
            null = dimensions / (self._history.projection or FlatSpace(trainable(ctx.model)).size)
            metrics |= {"subspace_share": share.clamp(max=1), "null_share": null, "subspace_dimension": dimensions}
        recent = gram[-self.window :, -self.window :]
        if len(recent) < 2:
            return metrics
        values = spectrum(recent, resolution)[0]
        metrics["participation_ratio"] = participation_ratio(values)
        metrics["dimension_90"] = dimension_of_share(values, 0.9)
        if len(recent) > 2:
            metrics["participation_ratio_centred"] = participation_ratio(spectrum(centred(recent), resolution)[0])
        return {**metrics, "gradients": len(recent)}
