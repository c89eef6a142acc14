"""Clipping thresholds that follow the history of the gradient's own norms: ZClip and AdaGC."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from loopscope.hooks import Remembered, Remembering
from loopscope.tensors import total_of
from torch import Tensor


class ZClipStep(NamedTuple):
    """The result of ZClip for one step; zero-dimensional, float64.

    ``mean`` and ``std`` describe the history before the step, ``z`` is the step's distance from the mean in standard
    deviations, ``threshold`` the norm above which it is a spike. All four are NaN during warm-up.
    """

    factor: Tensor
    mean: Tensor
    std: Tensor
    z: Tensor
    threshold: Tensor
    history: Tensor
    """Shape (3,): number of included steps, mean and population variance of their norms; zeros before the first."""


@dataclass(frozen=True, kw_only=True)
class ZClip:
    """The update rule of ZClip (arXiv 2504.02507) with reciprocal clipping.

    With z = (‖g‖ − μ)/σ, a norm with z > z_thres is reduced to μ + (z_thres²/z)·σ. The clipped norm enters
    μ ← α·μ + (1 − α)·‖g‖ and then σ² ← α·σ² + (1 − α)·(‖g‖ − μ)². Both start as mean and population variance of the
    first ``warmup`` norms, which are not clipped.

    This follows the paper. The published code differs: it adds 1e-6 to σ, whereas with σ = 0 this class reduces any
    larger norm to μ; and it can also cap the norm (``max_grad_norm``), even during the warm-up.
    """

    alpha: float
    z_threshold: float
    warmup: int

    def __call__(self, history: Tensor, norm: Tensor) -> ZClipStep:
        """Return the result for a step's gradient norm; a norm that is not finite is neither clipped nor included."""
        norm, (count, mean, variance) = norm.double(), history.unbind()
        warm, std, above = count < self.warmup, variance.sqrt(), norm - mean
        spike = ~warm & (above > self.z_threshold * std) & norm.isfinite()
        # μ + (z_thres²/z)·σ = μ + z_thres²·σ²/(‖g‖ − μ), which does not divide by σ
        kept = torch.where(spike, mean + self.z_threshold**2 * variance / above, norm)
        share = torch.where(warm, 1 / (count + 1), 1 - self.alpha)
        # During the warm-up this is Welford's recurrence for mean and variance of all norms so far.
        # After it ‖g‖ − μ_new = α·(‖g‖ − μ_old), hence the factor α².
        scatter = (kept - mean).square() * torch.where(warm, 1 - share, (1 - share) ** 2)
        new = torch.stack([count + 1, mean + share * (kept - mean), (1 - share) * variance + share * scatter])
        judged = torch.stack([mean, std, above / std, mean + self.z_threshold * std])
        mean, std, z, threshold = torch.where(warm, torch.nan, judged).unbind()
        factor = torch.where(spike, kept / norm, 1.0)
        return ZClipStep(factor, mean, std, z, threshold, torch.where(norm.isfinite(), new, history))


class AdaGCStep(NamedTuple):
    """The result of AdaGC for one step, for each of n parameters; float64."""

    factors: Tensor
    """Shape (n,)."""
    ratios: Tensor
    """‖g_p‖ / γ_p with γ_p before the step, shape (n,); NaN for a parameter without history."""
    gammas: Tensor
    """Shape (n,); infinite for a parameter without history."""
    taken: Tensor
    """Number of included steps, zero-dimensional."""


@dataclass(frozen=True, kw_only=True)
class AdaGC:
    """The update rule of AdaGC (arXiv 2502.11034).

    A gradient whose norm exceeds λ_rel·γ_p is scaled to that norm. γ_p is a moving average of the clipped norms:
    γ_p ← β·γ_p + (1 − β)·‖g_p‖. In the first ``warmup`` steps the joint norm of all gradients is limited to λ_abs
    instead, and γ_p is the smallest norm so far.

    The paper has λ_rel = 1.05 and β = 0.98, the published code 1.04 and 0.99. That code warms up for 100 steps, like
    this class; the paper's pseudo-code for 99. The code also adds 1e-6 to its denominators. Unlike both, this class
    ignores a norm of exactly zero, because γ_p would approach zero and every later gradient of the parameter would be
    clipped to zero. A parameter whose first gradient arrives after the warm-up starts with the norm of that gradient.
    """

    beta: float
    lambda_rel: float
    lambda_abs: float
    warmup: int

    def __call__(self, gammas: Tensor, taken: Tensor, norms: Tensor) -> AdaGCStep:
        """Return the result for a step's gradient norms; if one is not finite, nothing is clipped or included."""
        norms = norms.double()
        joint = total_of(norms)
        usable, warm, limits = joint.isfinite(), taken < self.warmup, self.lambda_rel * gammas
        # c = min(1, λ_abs/‖g‖) in the warm-up, then c_p = min(1, λ_rel·γ_p/‖g_p‖), shape (n,)
        in_common = torch.where(joint > self.lambda_abs, self.lambda_abs / joint, 1.0)
        by_itself = torch.where(norms > limits, limits / norms, 1.0)
        factors = torch.where(usable, torch.where(warm, in_common, by_itself), 1.0)
        kept = factors * norms
        average = torch.where(gammas.isfinite(), self.beta * gammas + (1 - self.beta) * kept, kept)
        grown = torch.where(warm, torch.minimum(gammas, kept), average)
        return AdaGCStep(
            factors,
            torch.where(gammas.isfinite(), norms / gammas, torch.nan),
            torch.where(usable & (norms > 0), grown, gammas),
            taken + usable,
        )


class Gammas(Remembering):
    """The history of AdaGC: γ of every parameter that has had a gradient, and the number of included steps."""

    names = Remembered(list[str])
    values = Remembered(partial(torch.zeros, 0, dtype=torch.float64))
    taken = Remembered(partial(torch.zeros, (), dtype=torch.int64))

    def take(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return γ of these parameters, infinite for new ones, and move the history to ``device``."""
        self.values, self.taken = self.values.to(device), self.taken.to(device)
        existing = set(self.names)
        if new := [name for name in names if name not in existing]:
            self.names += new
            self.values = torch.cat([self.values, self.values.new_full((len(new),), torch.inf)])
        return self.values[self._places(names)]

    def put(self, names: Sequence[str], step: AdaGCStep) -> None:
        """Store the new γ of the parameters that were passed to :meth:`take`."""
        self.taken, self.values = step.taken, self.values.clone()
        self.values[self._places(names)] = step.gammas

    def _places(self, names: Sequence[str]) -> Tensor | slice:
        if self.names == list(names):
            return slice(None)
        places = {name: place for place, name in enumerate(self.names)}
        return torch.tensor([places[name] for name in names], device=self.values.device)
