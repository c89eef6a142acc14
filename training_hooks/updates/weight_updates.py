"""Periodic checks of the gradients and of the optimizer's updates."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields
from functools import partial
from operator import methodcaller
from typing import Any

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, StepSchedule, TrainingHook
from loopscope.errors import UnsuitableError, UsageError, require
from loopscope.hooks import Alert, Metrics, RunInfo, Severity
from loopscope.state.parameter_groups import number_or
from loopscope.tensors import trainable

from ..measures import Alerts
from .update_monitor import GradientDiagnostics, UpdateDiagnostics, WeightUpdateMonitor, embeddings_of, step_rate
from .update_severity import TINY_SHARE, UpdateSeverity

CONDITIONS = {
    "vanishing": ("has a vanishing gradient", "have vanishing gradients"),
    "exploding": ("has an exploding gradient", "have exploding gradients"),
    "nonfinite": ("has a non-finite gradient", "have non-finite gradients"),
    "frozen": ("is frozen", "are frozen"),
    "rounded_away": ("loses its update to rounding", "lose their updates to rounding"),
}
"""For each condition: the predicate of a sentence about one parameter, and about several."""
IDS = {
    "vanishing": "vanishing-gradients",
    "exploding": "exploding-gradients",
    "nonfinite": "nonfinite",
    "frozen": "optimizer-without-effect",
    "rounded_away": "rounded-updates",
}
"""For each condition: the id of the doctor's finding."""
NORM = (
    "n_p = ‖g_p‖₂ over the parameters p that have a gradient, g_p before clipping (sampled: × √(n/k), but of all "
    "elements in embeddings, or if that vanishes)"
)
RATIO = (
    "r_p = ‖θ_p' − θ_p‖₂ / (‖θ_p‖₂ + 1e-12), θ and θ' the weights before and after the optimizer's step, over the "
    "parameters p with a gradient and ‖θ_p‖₂ ≠ 0 (sampled: typically a lower bound for embeddings under SGD)"
)


@HookRegistry.register
@dataclass(kw_only=True, eq=False)
class WeightUpdates(TrainingHook):
    """Check the gradients, and how far the optimizer's step really moves each parameter, every ``interval`` steps.

    Checks step 1, then every ``interval`` steps. The gradients are those at POST_BACKWARD: complete, unscaled, before
    clipping. The update is the difference of the weights at POST_BACKWARD and after the optimizer's step, so it
    includes momentum, weight decay and clipping; a step that the loss scaler skips has no update. Learning rates are
    those of the step itself. The hook checks a fixed sample of elements of each parameter (norms are scaled by √(n/k)
    for k sampled of n elements), or all elements with ``exact``; ``training_checks`` and ``parameter_norms`` report
    ratios of all elements. When a condition appears or spreads to more parameters, an alert reports the step, the
    number of parameters and the worst of them. When the condition ends, a notice reports that.

    A non-finite gradient is critical. The other conditions are warnings only where they are faults; otherwise the alert
    is a remark. Exploding: the norm is also at least 100 times the median of its last 9 checks. Vanishing: a parameter
    with two dimensions or more whose norm is also at most 1e-4 times the largest one, or, at two checks in a row, if no
    gradient was ever above the threshold; a norm of exactly 0 counts at two checks in a row. Frozen: the parameter has
    a gradient, and its learning rate is not 0. Rounded away: at two checks in a row rounding removes more than half of
    the model's update, at a learning rate of at least a tenth of the highest. A bias counts as healthy
    if its gradient vanishes and is at most 1e-4 times that of its weight, which does not vanish. This is usual before a
    normalisation layer, which removes the effect of the bias. The metrics still count it.

    Assumes that a sample represents its parameter: events in a few elements of a large parameter show in exact mode
    only. The gradient of an embedding has few nonzero rows, and those of frequent tokens are rarely in the sample, so
    all elements of the gradients of ``nn.Embedding`` and ``nn.EmbeddingBag`` are measured. Update ratios of embeddings,
    and gradients of lookup tables in other modules, are those of the sample. Under SGD, with Zipf frequencies, they are
    typically 0.25 to 0.65 of the exact ones. If a gradient vanishes in the sample, the hook checks all of its elements
    before it reports a vanishing gradient. If only the sample had no gradient and did not move, the update is omitted.
    Parameters without a gradient are skipped and not counted. Keeps 8 bytes for each sampled element (float32), or one
    copy of the parameters in exact mode.

    Args:
        interval: steps from one check to the next.
        sample_size: number of elements to check in each parameter; a smaller parameter is checked completely.
        exact: check all elements.
        vanishing_grad_threshold: a gradient vanishes if its norm is at most this.
        exploding_grad_threshold: a gradient explodes if its norm is at least this, or not finite.
        frozen_update_ratio_threshold: a parameter has not moved if its update ratio is at most this.
        frozen_patience_steps: consecutive checks without movement after which a parameter is frozen.
        topk: number of parameters with the smallest update ratios to report by name.
    """

    name = "weight_updates"
    hook_points = frozenset({HookPoint.POST_BACKWARD, HookPoint.POST_STEP})
    in_health = True
    monitor = Remembered[WeightUpdateMonitor](methodcaller("new_monitor"), by_options=True)
    _conditions = Remembered(partial(Alerts, CONDITIONS, ids=IDS))
    _severity = Remembered(UpdateSeverity)
    _kept_at = Remembered(int)
    _biases_without_effect = Remembered(set[str], saved=False)
    """Biases at the last check whose gradient vanished, while the weight of their module had one."""
    metrics = f"""
        grad_norm_median | median of {NORM}; of an even count the mean of the two middle values | [0, ∞]
            | The typical size of gradients. Infinite: half of the parameters have infinite or NaN gradients.
        grad_norm_p95 | the ⌈0.95·P⌉-th smallest of the P norms {NORM} | [0, ∞]
            | Far above the median: a few layers get most of the gradient.
        grad_norm_min | min {NORM} | [0, ∞] | Falling by orders of magnitude: a layer loses its gradient.
        grad_norm_max | max {NORM}; NaN counts as ∞ | [0, ∞] | Rising steadily: the run may be diverging.
        vanishing_count | parameters with n_p ≤ vanishing_grad_threshold | 0, 1, 2, …
            | Above 0: dead units, a saturated or detached path, or a parameter without effect, such as a bias before a
            normalisation.
        exploding_count | parameters with n_p ≥ exploding_grad_threshold, or n_p infinite or NaN | 0, 1, 2, …
            | Repeatedly above 0: lower the learning rate, lengthen the warm-up, or clip. A loss that is summed over
            tokens instead of averaged also raises it.
        nonfinite_count | parameters with n_p infinite or NaN; part of exploding_count | 0, 1, 2, …
            | Expected occasionally at steps that a float16 loss scaler skips, without a warning; otherwise the run is
            broken.
        update_ratio_median | median of {RATIO}; of an even count the mean of the two middle values | [0, ∞]
            | Proportional to the learning rate: compare at the same point of the schedule, and between runs of one
            optimizer. At the highest learning rate about 1e-3 is usual for Adam and SGD, 1e-2 early under AdamW, and
            for optimizers whose steps have a fixed size, such as Muon, the learning rate × that size / ‖θ_p‖.
        update_ratio_p95 | the ⌈0.95·P⌉-th smallest of the P ratios {RATIO} | [0, ∞]
            | Above 0.1: some parameters are overwritten rather than trained; harmless for biases early in training.
        update_ratio_min | min {RATIO} | [0, ∞] | 0: at least one parameter does not move.
        update_ratio_max | max {RATIO}; NaN counts as ∞ | [0, ∞]
            | Usually a small parameter that was initialised with zeros. Infinite: weights are no longer finite.
        frozen_count | parameters with r_p ≤ frozen_update_ratio_threshold for frozen_patience_steps checks in a row,
            except those of low precision whose update was rounded away | 0, 1, 2, …
            | Above 0: learning rate 0, not in the optimizer, or a gradient of zero and no decay.
        rounded_away_fraction | elements of parameters below float32 that have a gradient and are, after a step at a
            rate above 0, where decoupled weight decay alone takes them / those that have a gradient | [0, 1]
            | The share of gradient updates that rounding removes. Near 1: the precision of the weights is too low; keep
            float32 weights, or round stochastically. Missing if the optimizer rounds stochastically, since weights then
            move as they should on average.
        decay_rounded_away_fraction | elements θ ≠ 0 of parameters below float32 with θ·(1 − lr·λ), rounded, = θ / those
            θ ≠ 0, over groups with decoupled decay λ and lr > 0 | [0, 1]
            | Near 1: weight decay alone has no effect, though gradients may move the weights. An optimizer that rounds
            both terms together (``fused``) applies some of the decay with the gradient.
        topk_frozen/<parameter> | r_p of the topk parameters where it is smallest (‖θ_p‖₂ = 0 included) | [0, ∞]
            | The parameters that move least at this check; their names may differ between checks.
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
        """Return a monitor with the options of this hook."""
        return WeightUpdateMonitor(**{option.name: vars(self)[option.name] for option in fields(WeightUpdateMonitor)})

    def start(self, run: RunInfo) -> None:
        """Refuse a model without trainable parameters.

        Raises:
            UnsuitableError: if the model has none.
        """
        if not trainable(run.model):
            raise UnsuitableError("Hook 'weight_updates' needs trainable parameters, but the model has none.")

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Check the gradients at POST_BACKWARD, the weights at POST_STEP of the same step."""
        if ctx.hook_point is HookPoint.POST_BACKWARD:
            self._kept_at = ctx.step
            # read now: at POST_STEP the scheduler has already set the learning rates of the next step
            rates = {
                name: step_rate(group.lr, group.weight_decay, group.options)
                for group in ctx.optimizer_groups
                for name in group.names
            }
            self.monitor.expect_stochastic_rounding(
                name
                for group in ctx.optimizer_groups
                if group.options.get("stochastic_rounding")
                for name in group.names
            )
            gradients = self.monitor.gradients(
                trainable(ctx.model), rates, extremes=False, embeddings=embeddings_of(ctx.model)
            )
            return self._gradient_metrics(gradients, ctx) if gradients else {}
        updates = self.monitor.updates(ctx.model) if self._kept_at == ctx.step else {}
        return self._update_metrics(updates, ctx) if updates else {}

    def _gradient_metrics(self, gradients: Mapping[str, GradientDiagnostics], ctx: RunDataContext) -> Metrics:
        """Return the metrics and record conditions; infinite gradients are no condition under a loss scaler."""
        is_scaled = ctx.loss_scale is not None
        exploding = {name: item for name, item in gradients.items() if item.is_exploding and item.is_finite}
        nonfinite = {name: item for name, item in gradients.items() if not (item.is_finite or is_scaled)}
        matrices = {name for name, parameter in trainable(ctx.model).items() if parameter.ndim >= 2}
        vanishing = {name: item for name, item in gradients.items() if item.is_vanishing}
        weights = {name: gradients.get(_weight_of(name)) for name in vanishing}
        self._biases_without_effect = {
            name
            for name, weight in weights.items()
            if weight is not None and not weight.is_vanishing and gradients[name].l2_norm <= TINY_SHARE * weight.l2_norm
        }
        for name in self._biases_without_effect:
            del vanishing[name]
        low, high = self.monitor.vanishing_grad_threshold, self.monitor.exploding_grad_threshold
        vanished = self._severity.vanished(gradients, matrices, low)
        exploded = self._severity.exploded(gradients)
        self._update_gradients("vanishing", vanishing, gradients, ctx.step, limit=low, serious=vanished)
        self._update_gradients("exploding", exploding, gradients, ctx.step, limit=high, serious=exploded)
        self._update_gradients("nonfinite", nonfinite, gradients, ctx.step, severity="critical")
        return self.monitor.aggregate_gradient_stats(gradients)

    def _update_gradients(
        self,
        condition: str,
        affected: Mapping[str, GradientDiagnostics],
        checked: Mapping[str, GradientDiagnostics],
        step: int,
        *,
        limit: float | None = None,
        serious: Set[str] | None = None,
        severity: Severity = "warning",
    ) -> None:
        """Record the gradients in a condition, worst first."""
        pairs = self.monitor.top_k_largest_gradients(affected, len(affected))
        if condition == "vanishing":
            pairs.reverse()
        self._conditions.update(
            condition,
            {name: f"‖g‖ = {norm:.3g}" for name, norm in pairs},
            step=step,
            checked=len(checked),
            worst=pairs[0][1] if pairs else None,
            limit=limit,
            serious=serious,
            severity=severity,
        )

    def _update_metrics(self, updates: Mapping[str, UpdateDiagnostics], ctx: RunDataContext) -> Metrics:
        smallest = self.monitor.top_k_smallest_updates(updates, len(updates))
        frozen = [pair for pair in smallest if updates[pair[0]].is_frozen]
        threshold = self.monitor.frozen_update_ratio_threshold
        initial_rates = [number_or(group.options.get("initial_lr"), 0.0) for group in ctx.optimizer_groups]
        conditions = (
            ("frozen", [pair for pair in frozen if pair[0] not in self._biases_without_effect], threshold),
            ("rounded_away", [pair for pair in smallest if updates[pair[0]].is_rounded_away], None),
        )
        serious = {
            "frozen": self._severity.frozen(updates),
            "rounded_away": self._severity.rounded_away(updates, initial_rates),
        }
        for condition, pairs, limit in conditions:
            self._conditions.update(
                condition,
                {name: _describe(updates[name]) for name, _ in pairs},
                step=ctx.step,
                checked=len(updates),
                worst=pairs[0][1] if pairs else None,
                limit=limit,
                serious=serious[condition],
            )
        smallest_ratios = {f"topk_frozen/{name}": ratio for name, ratio in smallest[: self.topk]}
        return self.monitor.aggregate_update_stats(updates) | smallest_ratios

    def check(self, values: Mapping[str, Any], step: int) -> list[Alert]:
        """Return the alerts of checks up to ``step``."""
        return self._conditions.take_due(step)


def _weight_of(bias: str) -> str:
    """Return the name of the weight in the module of a bias; an empty text for other parameters."""
    module, _, name = bias.rpartition(".")
    return f"{module}.weight".removeprefix(".") if name == "bias" else ""


def _describe(update: UpdateDiagnostics) -> str:
    text = f"update ratio {update.update_ratio:.3g} at lr {update.learning_rate:g}"
    return f"{text}, lost: {' and '.join(update.lost)}" if update.lost else text
