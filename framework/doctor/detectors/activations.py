"""Detectors of units: dead, growing, massive, and experts that get no tokens."""

import math
from collections.abc import Iterable

import numpy as np

from ...errors import listed
from .. import Curve, Detector, Evidence, Finding, History, Rule, Threshold
from ..detector import count
from ..measures import learns_values, target_sizes
from .gradients import are_experts, never_trained


class DeadUnits(Detector):
    """Finds layers most of whose units are the same for every row, or get no gradient.

    Symptom: A layer gives the same output for all inputs

    Most units of a layer are 0 (ReLU) or saturated (sigmoid, tanh) for all rows and get no gradient. Usual causes
    are a learning rate that is or was too high, a large negative bias, and inputs that are not normalised.

    Source: Lu et al., arXiv 1903.06733, dying ReLU; Sokar et al., arXiv 2302.12902
    """

    name = "dead-units"
    stage = "activations"
    share = Threshold(0.5, "of the units; small batches let up to a third of ReLU units look dead")
    checks = Threshold(2, "one batch may not activate a unit")
    harmful = Threshold(0.75, "smaller shares are a remark if the loss has fallen by 80 %: the remaining units learn")
    needs = ("activations", "training_checks")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if a layer has had many dead units at the last two checks."""
        for metric in ("activations/dead_fraction", "training_checks/dead_units"):
            if dead := self._affected(history.family(metric)):
                break
        if not dead or not _loses_gradients(history):
            return
        worst = max(dead, key=lambda name: dead[name].last)
        curve = dead[worst]
        learns_anyway = curve.last < self.harmful and history.loss_fall > 0.8
        is_fatal = curve.last > 0.95 and history.falls_short(0.2)
        yield self.finding(
            "critical" if is_fatal else "info" if learns_anyway else "warning",
            curve.first_step_where(curve.values > self.share) or curve.first_step,
            f"{curve.last:.0%} of the units of {worst} are dead: they have the same value for all rows of the batch "
            f"and get no gradient ({len(dead)} {'layer' if len(dead) == 1 else 'layers'}: {listed(sorted(dead), 3)}).",
            "Check the initialisation, biases and the scale of the inputs."
            if curve.first > self.share and curve.first_step <= 1
            else "Lower the learning rate, check biases and the scale of the inputs, or use GELU or LeakyReLU.",
            Evidence(f"{metric}/{worst}", curve.last, self.share, "below 0.1"),
            confidence=0.85,
        )

    def _affected(self, layers: dict[str, Curve]) -> dict[str, Curve]:
        """Return the layers whose last two values are above the limit."""
        count = int(self.checks)
        newest = {name: curve.values[-count:] for name, curve in layers.items() if len(curve) >= count}
        return {name: layers[name] for name, values in newest.items() if np.all(values > self.share)}


def _loses_gradients(history: History) -> bool:
    """Return whether some units have no gradient; units that are only nearly constant still have one."""
    if "training_checks/zero_gradient_count" not in history.curves:
        return True  # unknown
    names = ("dead_units_max", "zero_gradient_count", "without_gradient_count")
    return any(history.last(f"training_checks/{name}") > 0.3 for name in names)


class ActivationsGrow(Detector):
    """Finds outputs of blocks that grow without end.

    Symptom: Activations grow until they overflow

    The outputs of blocks grow over the training by orders of magnitude. Normalise before each block, lower the
    learning rate, or add weight decay.

    Source: Dehghani et al., arXiv 2302.05442
    """

    name = "activations-grow"
    stage = "activations"
    growth = Threshold(100.0, "over the first value; residual streams grow by a factor of 10")
    needs = ("activations",)
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if a block's root mean square has grown by a factor and the loss does not fall."""
        if learns_values(history):  # which grow to the size of the returns, with their targets
            return
        sizes = target_sizes(history)
        wanted = 2 * float(sizes[-1]) if len(sizes) else 0.0  # the size of outputs that fit the targets of a regression
        for name, curve in history.family("activations/rms").items():
            is_known = len(curve) >= 3 and curve.first > 1e-6 and curve.last > wanted
            if is_known and self.growth < curve.last / curve.first < math.inf and history.falls_short(0.1):
                step = curve.first_step_where(curve.values > self.growth * curve.first) or curve.last_step
                why = (
                    f"The output of {name} has grown {curve.last / curve.first:,.0f}-fold, to a root mean square of "
                    f"{curve.last:.3g}, while the loss does not fall."
                )
                remedy = "Lower the learning rate, and normalise the input of each block."
                evidence = Evidence(f"activations/rms/{name}", curve.last, self.growth * curve.first, "a factor of 10")
                yield self.finding("warning", step, why, remedy, evidence, confidence=0.7)
                return


class MassiveActivations(Rule):
    """Reports single activations that are far larger than all others.

    Symptom: A question about low precision

    Single activations are above 1,000 times the median. Normal in large language models; 8-bit formats suffer.

    Source: Sun et al., arXiv 2402.17762
    """

    name = "massive-activations"
    stage = "activations"
    needs = ("activations",)
    read = staticmethod(count)
    metric = "activations/total_massive_count"
    severity = "info"
    why = "{value:.0f} activations are above 100 and above 1,000 times the median of their layer."
    remedy = "Keep these layers out of 8-bit formats; activations/massive_count names the blocks."
    usual = "0, or a few in large language models"


class RouterCollapse(Detector):
    """Finds experts of a mixture to which the router has sent nothing.

    Symptom: A mixture of experts is no better than one expert

    The router sends all rows or tokens to a few experts, so that the others get no gradient and never learn. Add a
    load-balancing loss, or noise on the logits of the router, and start with equal logits.

    Applies to: models whose experts have names with 'expert', and those that the hook moe_router measures

    Source: Shazeer et al., arXiv 1701.06538, section 4; Fedus et al., arXiv 2101.03961, section 2.2
    """

    name = "router-collapse"
    stage = "activations"
    patience = Threshold(100, "steps; many experts and few tokens leave some out for a while")
    checks = Threshold(4, "successive checks without a gradient, of experts that had one before")
    entropy = Threshold(0.5, "of the entropy of equal loads; trained routers have 0.8 to 1")
    remedy = (
        "Add a load-balancing loss (check its sign) or noise to the logits of the router; the hook moe_router measures "
        "the load of each expert."
    )

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if experts have no gradient in many steps, or if measured loads are very unequal."""
        entropy = history.curve("moe_router/load_entropy")
        if len(entropy) >= 3 and entropy.last_step >= 50 and np.max(entropy.values[-2:]) < self.entropy:
            is_low = entropy.values < self.entropy
            yield self.finding(
                "warning",
                entropy.first_step_where(is_low) or 0,
                f"The loads of experts are very unequal: their entropy is {entropy.last:.0%} of that of equal ones.",
                self.remedy,
                Evidence("moe_router/load_entropy", entropy.last, self.entropy, "0.8 to 1"),
            )
            return
        found = self._without_gradient(history)
        if found is None:
            return
        first_step, metric, names = found
        checked = history.curve(metric)
        yield self.finding(
            "warning",
            first_step,
            f"{int(checked.last)} parameters of experts ({listed(sorted(names), 3)}) have had no gradient in "
            f"{checked.last_step - first_step + 1:,} steps: the router sends nothing to them.",
            self.remedy,
            Evidence(metric, checked.last, 0, "0"),
            confidence=0.85,
        )

    def _without_gradient(self, history: History) -> tuple[int, str, list[str]] | None:
        """Return the first of many steps in which only experts have no gradient, the metric, and their names."""
        count = "training_checks/never_gradient_count"
        never, names = history.curve(count), never_trained(history)
        if never.last > 0 and are_experts(names) and never.last_step >= self.patience:
            return 1, count, names
        count = "training_checks/without_gradient_count"
        checked, family = history.curve(count), history.family("training_checks/without_gradient")
        streaks = {name: curve.last for name, curve in family.items() if curve.last_step == checked.last_step}
        if not checked.last > 0 or not are_experts([*streaks]):
            return None
        # The value is the number of successive checks without a gradient; the shortest streak in the record counts.
        checks = min(int(min(streaks.values())), len(checked))
        first_step = int(checked.steps[-checks]) if checks else checked.last_step
        is_long = checks >= self.checks and checked.last_step - first_step >= self.patience
        return (first_step, count, [*streaks]) if is_long else None
