"""The health of gradients and of the updates that the optimizer makes of them, at some steps."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, counted, require
from loopscope.hooks import Metrics, RunInfo
from loopscope.state import trainable

from ..measures import Alerts, notice
from .update_monitor import GradientDiagnostics, UpdateDiagnostics, WeightUpdateMonitor, step_rate

CONDITIONS = {
    "vanishing": ("has a vanishing gradient", "have vanishing gradients"),
    "exploding": ("has an exploding gradient", "have exploding gradients"),
    "frozen": ("is frozen", "are frozen"),
    "rounded_away": (
        "does not move as it should, its update being rounded away",
        "do not move as they should, their updates being rounded away",
    ),
}
NORM = (
    "n_p = ‖g_p‖₂ over the parameters p that have a gradient, g_p before clipping (sampled: × √(n/k), of all elements "
    "where that vanishes)"
)
RATIO = (
    "r_p = ‖θ_p' − θ_p‖₂ / (‖θ_p‖₂ + 1e-12), θ and θ' the weights before and after the optimizer's step, over the "
    "parameters p with a gradient and ‖θ_p‖₂ ≠ 0"
)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WeightUpdates(TrainingHook):
    """Check at some steps the gradients' health, and how far the optimizer's step really moves each parameter.

    The gradients are those of POST_BACKWARD: complete, unscaled, before clipping. The update is measured from the
    weights before and after the optimizer's step, with momentum, weight decay and clipping in it; a step that the loss
    scaler skips has none. Learning rates are those of the step itself. Checked are step 1 and every ``interval``-th
    step after it. Of each parameter a sample of elements is looked at, always the same ones (norms are scaled by
    √(n/k), n the elements, k those sampled), or with ``exact`` all; a line at the beginning says which. A warning names
    step, number and worst parameters when a condition appears or takes hold of more parameters, a note says when it has
    ended; in between there is silence.

    Assumes that a sample stands for its parameter: what happens in a few elements of a large one shows in exact mode
    only. But a gradient that vanishes in a sample (an embedding, none of whose sampled rows had a token) is looked at
    whole before it is called so; where only the sample had none and has not moved, the update is left out. Parameters
    without gradient are skipped and not counted. Keeps 8 bytes for each sampled element (float32), in exact mode one
    copy of the parameters.

    Args:
        interval: steps from one check to the next.
        sample_size: elements of each parameter to look at; a smaller parameter is taken whole.
        exact: look at all elements instead.
        vanishing_grad_threshold: a gradient vanishes if its norm is at most this.
        exploding_grad_threshold: a gradient explodes if its norm is at least this, or not finite.
        frozen_update_ratio_threshold: a parameter has not moved if its update ratio is at most this.
        frozen_patience_steps: checks in a row without movement that make a parameter frozen.
        topk: parameters with the smallest update ratios to report by name.
    """

    name = "weight_updates"
    hook_points = frozenset({HookPoint.POST_BACKWARD, HookPoint.POST_STEP})
    monitor = Remembered[WeightUpdateMonitor](lambda hook: hook.new_monitor(), by_options=True)
    _conditions = Remembered(lambda: Alerts(CONDITIONS))
    _kept_at = Remembered(int)
    _checks = Remembered(int)
    metrics = f"""
        grad_norm_median | median of {NORM}; of an even count the mean of the two middle values | [0, ∞]
            | The level of the gradients. Infinite from here on: half of the parameters have infinite or NaN gradients.
        grad_norm_p95 | the ⌈0.95·P⌉-th smallest of the P norms {NORM} | [0, ∞]
            | Far above the median: a few layers get most of the gradient.
        grad_norm_min | min {NORM} | [0, ∞] | Falling by orders of magnitude: a layer is cut off.
        grad_norm_max | max {NORM}; NaN counts as ∞ | [0, ∞] | Rising steadily: the run may be diverging.
        vanishing_count | parameters with n_p ≤ vanishing_grad_threshold | 0, 1, 2, …
            | Above 0: dead units, a saturated or cut path, or a parameter that cannot matter, such as a bias before a
            normalisation.
        exploding_count | parameters with n_p ≥ exploding_grad_threshold, or n_p infinite or NaN | 0, 1, 2, …
            | Above 0 again and again: lower the learning rate, lengthen the warm-up, clip. A loss summed over tokens
            instead of averaged raises it, too.
        nonfinite_count | parameters with n_p infinite or NaN; part of exploding_count | 0, 1, 2, …
            | With a float16 loss scaler now and then at a skipped step, and no cause to warn; else the run is broken.
        update_ratio_median | median of {RATIO}; of an even count the mean of the two middle values | [0, ∞]
            | About 1e-3 is usual, 1e-2 early under AdamW. Far below: raise the learning rate; far above: lower it.
        update_ratio_p95 | the ⌈0.95·P⌉-th smallest of the P ratios {RATIO} | [0, ∞]
            | Above 0.1: some parameters are rewritten rather than trained. Young biases are, and harmless.
        update_ratio_min | min {RATIO} | [0, ∞] | 0: at least one parameter stands still.
        update_ratio_max | max {RATIO}; NaN counts as ∞ | [0, ∞]
            | Mostly a small parameter that began at zero. Infinite: weights are no longer finite.
        frozen_count | parameters with r_p ≤ frozen_update_ratio_threshold for frozen_patience_steps checks in a row,
            except those of low precision whose update was rounded away | 0, 1, 2, …
            | Above 0: learning rate 0, missing from the optimizer, or no gradient and no decay.
        rounded_away_fraction | elements of parameters below float32 that have a gradient and are, after a step at a
            rate above 0, where decoupled weight decay alone takes them / those that have a gradient | [0, 1]
            | The gradient's part of the updates that is lost. Near 1: the weights' precision is too low for them; keep
            float32 weights, or round stochastically.
        decay_rounded_away_fraction | elements θ ≠ 0 of parameters below float32 with θ·(1 − lr·λ), rounded, = θ / those
            θ ≠ 0, over groups with decoupled decay λ and lr > 0 | [0, 1]
            | Near 1: weight decay by itself does nothing, though gradients may move the weights. An optimizer that
            rounds both parts at once (``fused``) lets some of it through with the gradient's.
        topk_frozen/<parameter> | r_p of the topk parameters where it is smallest (‖θ_p‖₂ = 0 included) | [0, ∞]
            | Who moves least. At each check the names are those of then.
    """

    interval: int = 100
    sample_size: int = 1024
    exact: bool = False
    vanishing_grad_threshold: float = 1e-7
    exploding_grad_threshold: float = 1e2
    frozen_update_ratio_threshold: float = 1e-12
    frozen_patience_steps: int = 3
    topk: int = 5

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"weight_updates.interval is {self.interval}; it must be at least 1.")
        require(self.topk >= 0, f"weight_updates.topk is {self.topk}; it must be at least 0.")
        try:
            self.monitor = self.new_monitor()
        except UsageError as error:
            raise UsageError(f"weight_updates.{error}") from error
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=self.interval)

    def new_monitor(self) -> WeightUpdateMonitor:
        """Return a monitor with those of the options that are its own."""
        return WeightUpdateMonitor(**{each.name: vars(self)[each.name] for each in fields(WeightUpdateMonitor)})

    def start(self, run: RunInfo) -> None:
        """Say what is watched; refuse a model without trained parameters."""
        trained = trainable(run.model)
        if not trained:
            raise UnsuitableError("Hook 'weight_updates' needs parameters that are trained; the model has none.")
        elements = sum(parameter.numel() for parameter in trained.values())
        sample = counted(self.monitor.sample_size, "element")
        how = "exactly" if self.monitor.exact else f"in samples of up to {sample} each"
        often = "every step" if self.interval == 1 else f"step 1 and every {self.interval:,} steps after it"
        notice(
            f"weight_updates checks the {counted(len(trained), 'parameter')} ({counted(elements, 'element')}) of "
            f"strategy {run.strategy!r} {how}, at {often}."
        )

    def end(self, status: str) -> None:
        """Say what the checks came to; nothing of a run that ended before the first of them."""
        if not self._checks and status != "completed":
            return
        last = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in self._conditions.counts.items())
        outcome = f"of the parameters were, when last checked, {last}" if self._checks else "none was due"
        checked = counted(self._checks, "step")
        notice(f"weight_updates has checked {checked}: {outcome}.")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Check the gradients at POST_BACKWARD, the weights at POST_STEP of the same step."""
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            self._kept_at = ctx.step
            groups = ctx.optimizer_groups  # at POST_STEP the scheduler has stepped, and they have the next step's rates
            rates = {n: step_rate(each.lr, each.weight_decay, each.options) for each in groups for n in each.names}
            gradients = self.monitor.gradients(trainable(ctx.model), rates, extremes=False)
            return self._gradient_metrics(gradients, ctx) if gradients else {}
        updates = self.monitor.updates(ctx.model) if self._kept_at == ctx.step else {}
        return self._update_metrics(updates, ctx) if updates else {}

    def _gradient_metrics(self, gradients: Mapping[str, GradientDiagnostics], ctx: RunDataContext) -> Metrics:
        """Return the metrics, and take note of conditions: that a loss scaler meets infinite gradients is none."""
        self._checks += 1
        scaled = ctx.loss_scale is not None
        exploding = {n: each for n, each in gradients.items() if each.is_exploding and (each.is_finite or not scaled)}
        vanishing = {n: each for n, each in gradients.items() if each.is_vanishing}
        largest = self.monitor.top_k_largest_gradients(exploding, len(exploding))
        smallest = self.monitor.top_k_largest_gradients(vanishing, len(vanishing))[::-1]
        low, high = self.monitor.vanishing_grad_threshold, self.monitor.exploding_grad_threshold
        for condition, pairs, limit in (("vanishing", smallest, low), ("exploding", largest, high)):
            found, worst = {name: f"‖g‖ = {norm:.3g}" for name, norm in pairs}, pairs[0][1] if pairs else None
            self._conditions.see(condition, found, step=ctx.step, checked=len(gradients), worst=worst, limit=limit)
        return self.monitor.aggregate_gradient_stats(gradients)

    def _update_metrics(self, updates: Mapping[str, UpdateDiagnostics], ctx: RunDataContext) -> Metrics:
        smallest = self.monitor.top_k_smallest_updates(updates, len(updates))
        frozen = [pair for pair in smallest if updates[pair[0]].is_frozen]
        rounded_away = [pair for pair in smallest if updates[pair[0]].is_rounded_away]
        least = self.monitor.frozen_update_ratio_threshold
        for condition, pairs, limit in (("frozen", frozen, least), ("rounded_away", rounded_away, None)):
            found, worst = {name: _told(updates[name]) for name, _ in pairs}, pairs[0][1] if pairs else None
            self._conditions.see(condition, found, step=ctx.step, checked=len(updates), worst=worst, limit=limit)
        named = {f"topk_frozen/{name}": ratio for name, ratio in smallest[: self.topk]}
        return self.monitor.aggregate_update_stats(updates) | named

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Give the warnings that have come up by ``step``."""
        self._conditions.tell(step)


def _told(update: UpdateDiagnostics) -> str:
    text = f"update ratio {update.update_ratio:.3g} at lr {update.learning_rate:g}"
    return f"{text}, lost: {' and '.join(update.lost)}" if update.lost else text
