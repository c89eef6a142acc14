"""Gradient clipping by one of six rules, as a declared intervention."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart
from loopscope.errors import UsageError, require, unknown
from loopscope.hooks import Metrics, ModelDataContext
from loopscope.tensors import (
    Vector,
    gradients,
    groups_of,
    joint_norm,
    local_shards,
    norm_of_each,
    norms,
    over_shards,
    total_of,
)
from torch import Tensor

from ..measures import stacked
from .adaptive_clipping import AdaGC, Gammas, ZClip

Rule = Literal["norm", "value", "parameter", "norm_sum", "zclip", "adagc"]
OPTIONS: Mapping[Rule, Sequence[str]] = {
    "norm": ["max_norm"],
    "value": ["max_value"],
    "parameter": ["max_norm"],
    "norm_sum": ["max_norm"],
    "zclip": ["alpha", "z_threshold", "warmup"],
    "adagc": ["beta", "lambda_rel", "lambda_abs", "warmup"],
}
"""The options of each rule."""
PUBLISHED_WARMUP: Mapping[Rule, int] = {"zclip": 25, "adagc": 100}


def clamp_statistics(vector: Vector, max_value: float) -> tuple[Tensor, Tensor]:
    """Return the share of a vector's elements with a magnitude above ``max_value``, and its norm after clamping.

    Processes one tensor at a time, so that at most one of them is copied.
    """
    counts: list[Tensor] = []

    def clamped() -> Iterator[Tensor]:
        for tensor in vector.values():
            size = tensor.abs()
            counts.append(torch.count_nonzero(local_shards([size])[0] > max_value))
            yield size.clamp_(max=max_value)

    after = total_of(norms(clamped()))
    total = over_shards(stacked(counts), groups_of(vector.values())).sum()
    return total / sum(tensor.numel() for tensor in vector.values()), after


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class GradClip(InterventionHook):
    """Clip the gradients of every step: by their joint norm, by value, per parameter, or relative to past norms.

    ``norm`` scales all gradients so that their joint norm is at most ``max_norm``, ``value`` clamps every element into
    [−max_value, max_value], ``parameter`` scales each parameter's gradient so that its own norm is at most
    ``max_norm``. Their arithmetic is that of ``torch.nn.utils.clip_grad_norm_`` (of all parameters, of each one alone)
    and ``clip_grad_value_``: with float32 and float64 gradients the run is bit for bit the one that calls them between
    backward and update. Lower precisions are reduced in float32.

    ``zclip`` (arXiv 2504.02507) clips a joint norm that is z > ``z_threshold`` standard deviations above the moving
    average μ of the earlier norms, and reduces it to μ + (z_threshold²/z)·σ. ``adagc`` (arXiv 2502.11034) reduces each
    parameter's norm to ``lambda_rel`` times its moving average γ. Both histories contain the clipped norms. If the
    published programs differ from the papers, the hook follows the papers: no constant is added to σ or to a norm,
    ``zclip`` clips nothing during its warm-up, β is 0.98 and λ_rel 1.05. Unlike both, ``adagc`` does not include a norm
    of exactly zero in its history, since γ = 0 would clip a parameter to nothing forever.

    ``norm_sum`` follows the published Metis code (arXiv 2509.00404): all gradients are scaled so that the sum of the
    parameters' norms is at most ``max_norm``. The sum is up to √P times the joint norm of P parameters, so this rule
    clips harder than ``norm``.

    Infinite or NaN gradients are not repaired: ``norm``, ``parameter`` and ``norm_sum`` spread the NaN, as torch's
    functions do, ``value`` bounds infinities and keeps NaN. ``zclip`` and ``adagc`` leave all gradients, the history
    and the warm-up of such a step unchanged, so that a step that float16 skips has no effect.

    Assumes unscaled gradients; ``zclip`` and ``adagc`` also assume norms that change slowly except for spikes.

    Args:
        method: the rule.
        max_norm: the largest Euclidean norm, of all gradients together, with ``parameter`` of each gradient; with
            ``norm_sum`` the largest sum of their norms.
        max_value: the largest magnitude of an element, for ``value``.
        alpha: weight of the past in the moving averages of ``zclip``.
        z_threshold: number of standard deviations above the mean at which a norm becomes a spike, for ``zclip``.
        warmup: steps that only build the history; 0: as published, 25 for ``zclip`` and 100 for ``adagc``.
        beta: weight of the past in the moving averages of ``adagc``.
        lambda_rel: largest ratio of a parameter's norm to its moving average, for ``adagc``.
        lambda_abs: the largest joint norm during the warm-up of ``adagc``.
    """

    name = "grad_clip"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    mutates = False
    commits = frozenset({StatePart.GRADIENTS})
    _history = Remembered(partial(torch.zeros, 3, dtype=torch.float64), saved=False)
    _calls = Remembered(int, saved=False)
    _gammas = Remembered(Gammas, saved=False)
    metrics = """
        norm_before | ‖g‖₂ of all gradients together, before clipping | [0, ∞)
            | Its trend shows whether max_norm fits. A spike far above max_norm: a bad batch, or the start of a
            divergence. Infinite or NaN: the gradients contain such values, and clipping does not repair them.
        norm_after | ‖g'‖₂ of all gradients together, g' as clipped: c·‖g‖₂ with one coefficient c, √Σ_p (c_p·‖g_p‖₂)²
            with one for each parameter | [0, ∞); method norm: [0, max_norm] | The norm that the optimizer receives.
        coefficient | norm: c = min(1, max_norm / (‖g‖₂ + 1e-6)); parameter: min over p of c_p = min(1, max_norm /
            (‖g_p‖₂ + 1e-6)); norm_sum: c = min(1, max_norm / Σ_p ‖g_p‖₂);
            zclip: c = (μ + (z_threshold²/z)·σ) / ‖g‖₂ for z > z_threshold, else 1; adagc: min over p
            of c_p = min(1, lambda_rel·γ_p / ‖g_p‖₂), in the warm-up c = min(1, lambda_abs / ‖g‖₂) | [0, 1]
            | The factor on every gradient, or the smallest one. Far below 1 throughout: clipping normalises the
            gradient.
        clipped | 1 if a coefficient is < 1 (method value: an element is clamped), else 0 | {0, 1}
            | Its mean is the share of clipped steps. Above about one half (method norm): max_norm sets the effective
            learning rate. zclip: above a few per cent, the norms do not change slowly.
        clipped_fraction | value: elements with |gᵢ| > max_value / all elements; parameter and adagc: parameters with
            c_p < 1 / all that have a gradient | [0, 1]
            | The share that clipping changes. Near 1 throughout: the limit is too tight and destroys the gradient's
            shape.
        mean | zclip: μ of the history before this step, after the warm-up | [0, ∞), NaN
            | The usual norm. NaN: the warm-up is not finished, since norms were not finite.
        std | zclip: σ of the history before this step | [0, ∞), NaN | The usual spread of the norms.
        z | zclip: z = (‖g‖₂ − μ) / σ | [−∞, ∞], NaN
            | Above z_threshold: a spike, which is clipped. Mostly positive: the norm rises faster than the average.
        threshold | zclip: μ + z_threshold·σ | [0, ∞), NaN
            | The norm above which a step is clipped (to less than this: the larger the spike, the nearer to μ).
        gamma_ratio | adagc: max over p of ‖g_p‖₂ / γ_p, γ_p of the history before this step | [0, ∞), NaN
            | The ratio of the most unusual parameter to its past norms; above lambda_rel it is clipped (after the
            warm-up).
    """

    method: Rule = "norm"
    max_norm: float = 1.0
    max_value: float = 1.0
    alpha: float = 0.97
    z_threshold: float = 2.5
    warmup: int = 0
    beta: float = 0.98
    lambda_rel: float = 1.05
    lambda_abs: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in OPTIONS:
            raise unknown("grad_clip.method", self.method, OPTIONS)
        given = {name: value for name, value in vars(self).items() if name != "method"}
        _check_ranges(given)
        _refuse_options_of_other_rules(self.method, given)
        warmup = self.warmup or PUBLISHED_WARMUP.get(self.method, 0)
        self._zclip = ZClip(alpha=self.alpha, z_threshold=self.z_threshold, warmup=warmup)
        self._adagc = AdaGC(beta=self.beta, lambda_rel=self.lambda_rel, lambda_abs=self.lambda_abs, warmup=warmup)
        self._act: Mapping[Rule, Callable[[Vector, ModelDataContext], Metrics]] = {
            "value": self._by_value,
            "parameter": self._by_parameter,
            "norm_sum": self._by_norm_sum,
            "zclip": self._by_zclip,
            "adagc": self._by_adagc,
        }

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Request the clipped gradients and return the metrics; nothing if there is no gradient."""
        if self.method == "norm":
            return _scaled(*model_ctx.clip_gradients(self.max_norm))
        live = gradients(model_ctx.model)
        return self._act[self.method](live, model_ctx) if live else {}

    def _by_value(self, live: Vector, model_ctx: ModelDataContext) -> Metrics:
        model_ctx.clamp_gradients(self.max_value)
        share, after = clamp_statistics(live, self.max_value)
        clipped = (share > 0).to(share.dtype)
        before = joint_norm(list(live.values()))
        return {"norm_before": before, "norm_after": after, "clipped": clipped, "clipped_fraction": share}

    def _by_parameter(self, live: Vector, model_ctx: ModelDataContext) -> Metrics:
        norms = stacked(norm_of_each(live).values())
        # the formula of ``clip_grad_norm_``, in its dtype
        factors = torch.clamp(self.max_norm / (norms.to(_factor_dtype(live)) + 1e-6), max=1.0)
        model_ctx.scale_gradients(dict(zip(live, factors.unbind(), strict=True)))
        return _scaled_each(norms, factors)

    def _by_norm_sum(self, live: Vector, model_ctx: ModelDataContext) -> Metrics:
        norms = stacked(norm_of_each(live).values())
        total = norms.sum()
        # c = min(1, max_norm/Σ_p ‖g_p‖)
        factor = torch.where(total < self.max_norm, 1.0, self.max_norm / total).to(_factor_dtype(live))
        model_ctx.scale_gradients(factor)
        return _scaled(total_of(norms), factor)

    def _by_zclip(self, live: Vector, model_ctx: ModelDataContext) -> Metrics:
        norm = joint_norm(list(live.values()))
        step = self._zclip(self._history.to(norm.device), norm)
        factor = step.factor.to(_factor_dtype(live))
        model_ctx.scale_gradients(factor)
        self._history = step.history
        self._calls += 1
        metrics = _scaled(norm, factor)
        if self._calls > self._zclip.warmup:
            metrics |= {"mean": step.mean, "std": step.std, "z": step.z, "threshold": step.threshold}
        return metrics

    def _by_adagc(self, live: Vector, model_ctx: ModelDataContext) -> Metrics:
        norms, names, is_first = stacked(norm_of_each(live).values()), list(live), not self._gammas.names
        step = self._adagc(self._gammas.take(names, norms.device), self._gammas.taken, norms)
        factors = step.factors.to(_factor_dtype(live))
        model_ctx.scale_gradients(dict(zip(names, factors.unbind(), strict=True)))
        self._gammas.put(names, step)
        metrics = _scaled_each(norms, factors)
        if is_first:
            return metrics
        largest = torch.where(step.ratios.isnan(), -torch.inf, step.ratios).max()  # NaN: no history yet
        return metrics | {"gamma_ratio": torch.where(largest == -torch.inf, torch.nan, largest)}

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the rule and its history."""
        if self.method == "zclip":
            return {"method": self.method, "history": self._history, "calls": self._calls}
        if self.method == "adagc":
            return {"method": self.method, "gammas": self._gammas.state_dict()}
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the history of :meth:`state_dict`, unless it belongs to another rule."""
        self.reset()
        if state.get("method") != self.method:
            return
        if self.method == "zclip":
            self._history, self._calls = state["history"], state["calls"]
        else:
            self._gammas.load_state_dict(state["gammas"])


def _check_ranges(options: Mapping[str, float]) -> None:
    for name in ("max_norm", "max_value", "z_threshold", "lambda_abs"):
        require(0 < options[name] < math.inf, f"grad_clip.{name} is {options[name]}; it must be a positive number.")
    for name in ("alpha", "beta"):
        require(0 <= options[name] < 1, f"grad_clip.{name} is {options[name]}; it must be in [0, 1).")
    if not 1 <= options["lambda_rel"] < math.inf:
        raise UsageError(
            f"grad_clip.lambda_rel is {options['lambda_rel']}; it must be a number of at least 1, or every step would "
            "shrink the gradient further."
        )
    warmup = options["warmup"]
    sentence = f"grad_clip.warmup is {warmup}; it must be at least 2 steps, or 0 for the published number."
    require(warmup == 0 or warmup >= 2, sentence)


def _refuse_options_of_other_rules(method: Rule, options: Mapping[str, float]) -> None:
    for name, value in options.items():
        if value != vars(GradClip)[name] and name not in OPTIONS[method]:
            owners = " and ".join(f"'{rule}'" for rule, rule_options in OPTIONS.items() if name in rule_options)
            accepted = ", ".join(OPTIONS[method])
            raise UsageError(
                f"grad_clip.{name} is {value}, but method {method!r} has no such option: it belongs to {owners}, and "
                f"{method!r} takes {accepted}."
            )


def _factor_dtype(live: Vector) -> torch.dtype:
    """Return the dtype of factors for gradients: float64 if one of them is, otherwise float32."""
    return torch.float64 if any(gradient.dtype is torch.float64 for gradient in live.values()) else torch.float32


def _scaled(norm: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """Return the metrics of gradients that are all scaled by one factor."""
    clipped = (factor < 1).to(norm.dtype)
    return {"norm_before": norm, "norm_after": norm * factor, "coefficient": factor, "clipped": clipped}


def _scaled_each(norms: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """Return the metrics of gradients with these norms, each scaled by its factor."""
    clipped = (factors < 1).to(norms.dtype)
    return {
        "norm_before": total_of(norms),
        "norm_after": total_of(norms * factors),
        "coefficient": factors.min(),
        "clipped": clipped.max(),
        "clipped_fraction": clipped.mean(),
    }
