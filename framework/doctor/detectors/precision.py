"""Detectors of weights and gradients that 16-bit formats cannot hold."""

from collections.abc import Iterable

import numpy as np

from .. import Detector, Evidence, Finding, History, Threshold
from ..detector import SetUpDetector
from ..measures import CHECKS
from .learning_rates import lr_curve

NO_RATE = 1e-4
"""Share of the largest learning rate below which rounding may remove every update."""


class RoundedUpdates(Detector):
    """Finds 16-bit weights whose updates are lost to rounding.

    Symptom: Weights in bfloat16 stop changing

    bfloat16 has 8 bits of precision: an update below 0.2 % of a weight is rounded away. Keep float32 weights and
    use autocast, or an optimizer with stochastic rounding.

    Applies to: bfloat16 and float16 weights

    Source: Zamirai et al., arXiv 2010.06192
    """

    name = "rounded-updates"
    stage = "updates"
    measured = Threshold(0.7, "share of gradient updates that rounding removes")
    expected = Threshold(0.6, "share of weights whose half ulp exceeds the learning rate, for Adam-type optimizers")
    needs = ()

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from the measured share, or before it is known from the expected one."""
        measured = history.curve("weight_updates/rounded_away_fraction")
        expected = history.facts.get("rounded_away") or {}
        if len(measured):
            share, metric, confidence = measured.last, "weight_updates/rounded_away_fraction", 0.95
            limit, step = self.measured, measured.first_step
        elif history.is_adam_like and expected and not _rounds_stochastically(history) and history.step < 1:
            share, metric, confidence = expected["share"], "facts/rounded_away", 0.7
            limit, step = self.expected, 0
        else:
            return
        if share > limit:
            why = (
                f"Rounding removes {share:.0%} of the updates of 16-bit weights: the updates are smaller than half of "
                "the distance between neighbouring numbers."
            )
            remedy = "Keep the weights in float32 and use torch.autocast(dtype=torch.bfloat16)."
            evidence = Evidence(metric, share, limit, "below 0.3")
            yield self.finding("warning", step, why, remedy, evidence, confidence=confidence)


def _rounds_stochastically(history: History) -> bool:
    options = [item for group in history.facts.get("groups", ()) for item in group.items()]
    return any("stochastic" in str(name) and value for name, value in options)


class Float16WithoutScaler(SetUpDetector):
    """Finds float16 gradients without a loss scaler.

    Symptom: The loss stops falling in float16

    Gradients below 6e-8 become 0 in float16, and Adam's eps of 1e-8 as well. Use torch.amp.GradScaler with float32
    weights, or bfloat16.

    Applies to: float16 weights or autocast to float16

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2
    """

    name = "float16-without-scaler"
    law = "precision_is_enough"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if float16 is used without a scaler."""
        dtypes = history.facts.get("dtypes") or {}
        used = history.curve(f"{CHECKS}/float16_used")
        has_weights = dtypes.get("float16", 0) > 0 and history.facts.get("trainable", 0) > 0
        if history.facts.get("scaler") or not (has_weights or used.last > 0):
            return
        zeros = history.curve(f"{CHECKS}/gradient_zero_fraction")
        lost = f"; {zeros.last:.0%} of the gradient's elements are exactly 0" if zeros.last > 0.05 else ""
        what = "The weights are in float16" if has_weights else "The forward pass runs in float16"
        why = f"{what} without a loss scaler, so small gradients become 0{lost}."
        remedy = "Use bfloat16, or float32 weights with torch.autocast(dtype=torch.float16) and torch.amp.GradScaler."
        evidence = Evidence(f"{CHECKS}/gradient_zero_fraction", zeros.last if len(zeros) else "unknown", None, "near 0")
        yield self.finding("warning", 0 if has_weights else used.first_step, why, remedy, evidence, confidence=0.85)


class GradientsNotUnscaled(SetUpDetector):
    """Finds updates by gradients that are still multiplied by the loss scale.

    Symptom: The first step with a loss scaler destroys the weights

    optimizer.step() is called in place of scaler.step(optimizer), so that the update uses gradients that are
    multiplied by the loss scale.

    Applies to: trainings with a loss scaler

    Source: torch.amp documentation: scaler.step unscales the gradients
    """

    name = "gradients-not-unscaled"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the gradient before the update is that of the backward pass times the scale."""
        factors, scales = history.curve(f"{CHECKS}/clip_factor"), history.curve(f"{CHECKS}/loss_scale")
        scale = scales.at(factors.first_step)
        if scale > 2 and abs(factors.first / scale - 1) < 0.01:
            why = f"The update uses gradients that are multiplied by the loss scale of {scale:,.0f}."
            remedy = "Call scaler.step(optimizer) and scaler.update() in place of optimizer.step()."
            evidence = Evidence(f"{CHECKS}/clip_factor", factors.first, 1.0, "1, or below with clipping")
            yield self.finding("critical", factors.first_step, why, remedy, evidence, confidence=0.97)


def _rate_was_zero(history: History, steps: "np.typing.NDArray[np.int64]") -> bool:
    """Return whether the learning rate was nearly 0 at one of these steps, where a step has no effect by design."""
    rate = lr_curve(history)
    least = NO_RATE * float(np.nanmax(rate.values, initial=0.0))
    return any(rate.at(int(step)) <= least for step in steps)


class OptimizerWithoutEffect(Detector):
    """Finds steps of the optimizer that change no weight.

    Symptom: The loss does not change at all

    There are gradients and a learning rate, but optimizer.step() changes nothing: zero_grad() is called between
    backward() and step(), or the optimizer holds other tensors than the model.

    Source: torch.optim documentation: the order of backward, step and zero_grad
    """

    name = "optimizer-without-effect"
    stage = "updates"
    checks = Threshold(2, "one step may be skipped by a loss scaler")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if steps change nothing, or if something restores the weights after each step."""
        weights = history.curve("parameter_norms/total_weight_norm")
        moves = history.last(f"{CHECKS}/update_ratio") > 0
        if len(weights) >= 3 and moves and np.ptp(weights.values) == 0 and weights.first != 0:
            why = (
                "The weights are the same before every checked step, although steps change them: something restores "
                "them after each step, such as load_state_dict."
            )
            remedy = "Look for load_state_dict, deepcopy or torch.load within the loop."
            evidence = Evidence("parameter_norms/total_weight_norm", weights.last, None, "changes")
            yield self.finding("critical", weights.steps[1].item(), why, remedy, evidence)
            return
        ratios, unchanged = history.curve(f"{CHECKS}/update_ratio"), history.curve(f"{CHECKS}/unchanged_count")
        is_idle = ratios.values == 0
        norms = history.curve(f"{CHECKS}/grad_norm")
        has_rate = any(group.get("lr", 1) != 0 for group in history.facts.get("groups", ({},)))
        if is_idle.sum() < self.checks or not is_idle[-1] or not has_rate or not norms.last > 0:
            return
        if _rate_was_zero(history, ratios.steps[is_idle]):
            return
        yield self.finding(
            "critical",
            ratios.first_step_where(is_idle) or 1,
            "optimizer.step() changes no weight, although there are gradients and the learning rate is above 0: the "
            "gradients are probably set to zero before the step.",
            "Call in this order: loss.backward(), optimizer.step(), optimizer.zero_grad().",
            Evidence(f"{CHECKS}/update_ratio", 0.0, None, "1e-4 to 1e-2"),
            Evidence(f"{CHECKS}/unchanged_count", unchanged.last if len(unchanged) else "unknown"),
        )
