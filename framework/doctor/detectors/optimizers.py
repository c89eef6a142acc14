"""Detectors of optimizer settings and of gradient clipping."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import Detector, Evidence, Finding, History, Threshold
from ..detector import HooklessDetector, SetUpDetector
from ..history import median_of


def _number(value: object) -> float:
    """Return an option as a number, 0 if it is missing or no number."""
    return float(value) if isinstance(value, (int, float)) else 0.0


def _decay(group: Mapping[str, Any]) -> float:
    return _number(group.get("weight_decay"))


class ClippingTooStrong(Detector):
    """Finds clipping that shrinks nearly every gradient by a large factor.

    Symptom: The loss falls very slowly with clipping

    Nearly every gradient is clipped to a small part of its norm, so under SGD the steps are that much smaller.
    Choose a threshold near the usual gradient norm.

    Applies to: every optimizer; under Adam, which ignores the scale, it is a remark

    Source: Pascanu et al., arXiv 1211.5063: a threshold at the average norm, or up to ten times it
    """

    name = "clipping-too-strong"
    stage = "updates"
    clipped = Threshold(0.9, "of the steps; clipping is meant for exceptions")
    factor = Threshold(0.1, "what remains of the gradient norm")
    fall = Threshold(0.8, "of the loss; where it falls further, clipping is a remark")
    needs = ("parameter_norms",)
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most steps are clipped to less than a tenth."""
        fraction = history.curve("parameter_norms/clipped_fraction")
        before, after = (history.curve(f"parameter_norms/total_{name}grad_norm") for name in ("", "clipped_"))
        if len(fraction) < 1 or not len(after) or history.step < 10:
            return
        norms = [before.at(int(step)) for step in after.steps]
        factors = [value / norm for value, norm in zip(after.values, norms, strict=True) if norm > 0]
        factor = median_of(np.array(factors))
        if not (fraction.median > self.clipped and 0 < factor < self.factor):
            return
        if (scale := _scale_of_clipping(history, after.values)) is not None:
            yield self.finding(
                "warning",
                fraction.first_step,
                f"The gradients are clipped while they are multiplied by the loss scale of {scale:,.0f}, so only "
                f"{factor:.1e} of their norm is left.",
                "Call scaler.unscale_(optimizer) before clip_grad_norm_.",
                Evidence("parameter_norms/total_clipped_grad_norm", after.last, None, "near the limit of clipping"),
                confidence=0.95,
            )
            return
        is_harmless = history.is_adam_like or history.loss_fall > self.fall
        yield self.finding(
            "info" if is_harmless else "warning",
            fraction.first_step,
            f"{fraction.median:.0%} of the gradients are clipped, to {factor:.1%} of their norm in the "
            f"median (from {before.median:.3g} to {after.median:.3g}).",
            f"Raise the threshold of clipping, to {before.median:.2g} for example.",
            Evidence("parameter_norms/clipped_fraction", fraction.median, self.clipped, "below 0.1"),
            confidence=0.85,
        )


def _scale_of_clipping(history: History, norms: "np.typing.NDArray[np.float64]") -> float | None:
    """Return the loss scale with which the clipped gradients were still multiplied; ``None`` if they were not.

    The product of norm and scale is then the limit of clipping in every step.
    """
    scale = history.last("training_checks/loss_scale")
    products = norms[np.isfinite(norms) & (norms > 0)] * scale
    if not scale > 1 or len(products) < 3:
        return None
    limit = float(np.median(products))
    return scale if limit < 100 and float(np.median(np.abs(products - limit))) < 0.01 * limit else None


class EpsilonTooLarge(SetUpDetector):
    """Finds an eps of Adam that is larger than the gradients.

    Symptom: Adam learns as slowly as SGD

    Adam's eps exceeds the size of most gradients, so that steps shrink with them. The default is 1e-8.

    Applies to: Adam-type optimizers

    Source: Kingma and Ba, arXiv 1412.6980
    """

    name = "optimizer-eps-too-large"
    share = Threshold(0.8, "of the elements whose second moment is below eps squared")
    eps = Threshold(1e-5, "usual are 1e-8 to 1e-6")
    needs = ("optimizer_health",)

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for an unusual eps that determines most steps."""
        curve = history.curve("optimizer_health/below_eps_fraction")
        largest = max((_number(group.get("eps")) for group in history.facts.get("groups", ())), default=0.0)
        share = curve.median
        if largest > self.eps and share > self.share:
            why = (
                f"{history.optimizer} has eps = {largest:g}, which exceeds the gradients of {share:.0%} of the "
                "weights, so their steps are much smaller than the learning rate."
            )
            remedy = "Set eps=1e-8."
            evidence = Evidence("optimizer_health/below_eps_fraction", share, self.share, "near 0")
            yield self.finding("warning", curve.first_step, why, remedy, evidence, confidence=0.85)


class MomentumUnusual(HooklessDetector):
    """Finds swapped betas, and momentum so close to 1 that the training oscillates.

    Symptom: The loss oscillates or reacts with delay

    Adam's betas are swapped, or the momentum is so close to 1 that gradients of many hundred steps ago count. Usual
    are betas=(0.9, 0.999) or (0.9, 0.95), and a momentum of 0.9.

    Applies to: before the first step

    Source: Kingma and Ba, arXiv 1412.6980; torch.optim.SGD
    """

    name = "momentum-unusual"
    momentum = Threshold(0.995, "an average over 200 steps; recipes use up to 0.99")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding from the options of the parameter groups."""
        for group in history.facts.get("groups", ()):
            betas, momentum = group.get("betas") or [], group.get("momentum") or 0
            if len(betas) >= 2 and betas[0] > betas[1] and betas[0] >= 0.98:
                why = f"The betas ({betas[0]:g}, {betas[1]:g}) are probably swapped."
                evidence = Evidence("facts/betas", betas, None, "0.9")
                yield self.finding("warning", 0, why, "Use betas=(0.9, 0.999).", evidence)
                return
            first = betas[0] if betas else momentum if isinstance(momentum, (int, float)) else 0
            if first >= self.momentum:
                steps = 1 / (1 - min(first, 0.999999))
                why = f"The momentum of {group['optimizer']} is {first:g}, an average over {steps:,.0f} steps."
                remedy = "Use betas=(0.9, 0.999)." if betas else "Use momentum=0.9."
                evidence = Evidence("facts/momentum", first, None, "0.9")
                yield self.finding("warning", 0, why, remedy, evidence, confidence=0.8)
                return


class WeightsShrink(SetUpDetector):
    """Finds weight decay that shrinks the weights faster than the gradient trains them.

    Symptom: All weights go to zero

    The weight norm falls to a small part of its initial value and the loss does not fall: weight decay times
    learning rate is too large. Usual are a weight decay of 0.01 to 0.1 for AdamW and 1e-4 for SGD.

    Source: Loshchilov and Hutter, arXiv 1711.05101
    """

    name = "weight-decay-too-large"
    shrinkage = Threshold(0.5, "of the initial norm; trainings that work keep or raise it")
    per_step = Threshold(0.02, "a weight without gradient is halved within 35 steps; usual are 1e-6 to 1e-3")
    adamw = Threshold(0.1, "usual for AdamW, with any learning rate that trains")
    usual = Threshold(1e-3, "up to which decay only shrinks weights that have hardly any gradient")
    added = Threshold(0.1, "of Adam and other optimizers that divide the sum with the gradient by its size")
    needs = ("parameter_norms",)
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the weight norm falls far, with a decay, while the loss does not fall as it should."""
        norms = history.curve("parameter_norms/total_weight_norm")
        groups = history.facts.get("groups") or []
        decay = max(map(_decay, groups), default=0.0)
        # A usual decay of AdamW shrinks weights as fast only if the learning rate is far too high.
        unusual = [group for group in groups if group.get("optimizer") != "AdamW" or _decay(group) > self.adamw]
        per_step = max((_decay(group) * _number(group.get("lr")) for group in unusual), default=0.0)
        if per_step > self.per_step:
            why = (
                f"The weight decay {decay:g} times the learning rate shrinks the weights by {per_step:.1%} in "
                "every step."
            )
            remedy = "Use weight_decay=0.01 with AdamW, or 1e-4 with SGD."
            evidence = Evidence("facts/groups", per_step, self.per_step, "1e-6 to 1e-3")
            yield self.finding("critical", 0, why, remedy, evidence)
            return
        added = [group for group in groups if _adds_decay(group) and group["weight_decay"] >= self.added]
        if added:
            kind = added[0]["optimizer"]
            why = (
                f"{kind} adds the weights times its weight_decay of {added[0]['weight_decay']:g} to the gradients and "
                "outweighs them: its steps then mostly shrink the weights."
            )
            remedy = f"Use AdamW, which does not mix both, or a weight_decay of at most 1e-3 with {kind}."
            evidence = Evidence("facts/groups", added[0]["weight_decay"], self.added, "0 to 1e-3")
            yield self.finding("warning", 0, why, remedy, evidence, confidence=0.75)
            return
        if len(norms) < 2 or not norms.first > 0 or not decay > self.usual:
            return
        share = norms.last / norms.first
        is_failing = history.falls_short(0.3)
        if share < self.shrinkage and is_failing:
            has_shrunk = norms.values < self.shrinkage * norms.first
            yield self.finding(
                "critical" if share < 0.1 else "warning",
                norms.first_step_where(has_shrunk) or norms.last_step,
                f"The weights have shrunk to {share:.0%} of their initial norm under a weight decay of {decay:g}, and "
                "the loss does not fall.",
                "Use weight_decay=0.01 with AdamW, or 1e-4 with SGD.",
                Evidence("parameter_norms/total_weight_norm", norms.last, self.shrinkage * norms.first, "grows"),
            )


def _adds_decay(group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer adds its weight decay to a gradient that it then divides by its size."""
    is_adaptive = group.get("optimizer") in ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")
    return is_adaptive and not group.get("decoupled_weight_decay") and _decay(group) > 0
