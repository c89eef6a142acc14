"""Detectors of gradients that are missing, left over, vanishing or exploding."""

import math
from collections.abc import Iterable

import numpy as np

from ...errors import listed
from .. import Curve, Detector, Evidence, Finding, History, Threshold
from ..detector import SetUpDetector
from ..history import Floats, median_of
from ..measures import CHECKS, JUMP, jump_of_gradient, learns_values
from .parameters import named

EXPERTS = ("expert",)
"""Parts of names of parameters that get a gradient only if a token is routed to them."""


def never_trained(history: History) -> list[str]:
    """Return names of parameters without a gradient in all checked steps, up to those that the record has."""
    newest = history.curve("training_checks/never_gradient_count").last_step
    family = history.family("training_checks/never_gradient")
    return [name for name, curve in family.items() if curve.last_step == newest]


def are_experts(names: list[str]) -> bool:
    """Return whether parameters belong to the experts of a mixture, by their names."""
    return bool(names) and all(any(word in name for word in EXPERTS) for name in names)


class WithoutGradient(Detector):
    """Finds trainable parameters that the loss does not reach.

    Symptom: Some layers never change

    Trainable parameters get no gradient: the loss does not depend on them. Usual causes are detach() or
    torch.no_grad() in the forward pass, a layer that is not called, or an output that is not used.

    Source: autograd: .grad is None, or zero at every checked step
    """

    name = "parameters-without-gradient"
    law = "every_parameter_learns"
    stage = "gradients"
    share_at_once = Threshold(0.3, "so many parameters at step 1 are no unused head and no unrouted expert")
    patience = Threshold(3, "layers with a zero at their output, as in LoRA, get a gradient from step 2 on")
    fall = Threshold(0.05, "of the loss, by which something trains parameters that all seem to have no gradient")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding about parameters that have had no gradient in any checked step."""
        never = history.curve("training_checks/never_gradient_count")
        missing = history.curve("training_checks/without_gradient_count")
        trainable = max(int(history.facts.get("trainable", 0)), 1)
        # A gradient of 0 may be one of the next step; parameters that something else changes are in neither count.
        absent = min(missing.first, never.last)
        at_once = absent / trainable > self.share_at_once
        if not len(never) or not never.last:
            return
        is_early = never.last_step < self.patience
        if is_early and not at_once:
            return
        norms = history.gradient_norms
        if norms.last == 0 and not norms.values.any() and not missing.values.any():
            return  # all gradients exist and are 0, see gradients-all-zero
        names = never_trained(history)
        if are_experts(names):  # see router-collapse
            return
        count = int(absent if is_early else never.last)
        share = count / trainable
        if share >= 1 and history.loss_fall > self.fall:
            return  # the optimizer steps within the backward pass, and clears the gradients there
        # An output's bias cancels in losses that use only differences of outputs, as for pairs and Wasserstein critics.
        is_bias = len(names) == count == 1 and names[0].endswith("bias") and missing.last == 0
        # Models of transformers have a pooler, whose output a head or another pooling does not use.
        is_pooler = len(names) == count and all("pooler." in name for name in names)
        if missing.last == 0:
            problem = "have a gradient of exactly 0 in all checked steps"
            remedy = (
                "Look for what makes these gradients 0: a factor that is 0, units that are dead or saturated for all "
                "rows, or a loss that is already at its lowest value."
            )
        else:
            problem = "get no gradient"
            remedy = (
                "Look for detach(), .data, .item() or torch.no_grad() between these layers and the loss, and for "
                "layers whose output is not used."
            )
        yield self.finding(
            "info" if is_bias or is_pooler else "critical" if share > 0.5 else "warning",
            1,
            f"{count} of {trainable} trainable parameters {problem}, so they are not trained: {named(names, count)}.",
            remedy,
            Evidence("training_checks/never_gradient_count", count, 0, "0"),
            confidence=0.95 if share > 0.1 else 0.8,
        )


class LayersStopLearning(Detector):
    """Finds parameters that were trained at first, and are frozen or without a gradient since.

    Symptom: The loss falls more slowly from some step on

    Parameters that were trained have requires_grad=False, or no gradient any more: a helper, such as an evaluation
    or a probe, freezes them and does not set it back, or torch.no_grad() or detach() applies from some step on.
    Ignore it if the training freezes layers on purpose.

    Source: torch.nn.Module.requires_grad_; torch.no_grad
    """

    name = "layers-stop-learning"
    stage = "gradients"
    share = Threshold(0.1, "of the trainable parameters; fewer are a remark")
    checks = Threshold(3, "checked steps in a row without a gradient; heads of rare tasks have one in between")
    lasting = Threshold(50, "steps to the end; two networks that are trained in turn are frozen for less")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding about parameters that are frozen, or else without a gradient, for a while."""
        frozen = _streaks(history, "frozen_later", 2)
        without = _streaks(history, "without_gradient", int(self.checks))
        never = never_trained(history)
        lost = {name: step for name, step in without.items() if name not in never and not are_experts([name])}
        # The families name few parameters, their counts contain all.
        frozen_count = int(max(history.curve(f"{CHECKS}/frozen_later_count").last, 0)) if frozen else 0
        counts = [history.curve(f"{CHECKS}/{name}_count").last for name in ("without_gradient", "never_gradient")]
        lost_count = max(int(counts[0] - counts[1]), len(lost)) if lost else 0
        if frozen and history.step - max(frozen.values()) >= self.lasting:
            yield self._finding(history, "frozen_later", "are frozen", frozen, frozen_count)
        elif lost and history.step - max(lost.values()) >= self.lasting:
            yield self._finding(history, "without_gradient", "have no gradient", lost, lost_count)

    def _finding(self, history: History, family: str, problem: str, steps: dict[str, int], count: int) -> Finding:
        trainable = max(int(history.facts.get("trainable", 0)), 1)
        step = min(steps.values())
        return self.finding(
            "warning" if count / trainable > self.share else "info",
            step,
            f"{count} of {trainable} trainable parameters {problem} since step {step:,} or shortly before, though they "
            f"were trained until then: {named([*steps], count)}.",
            "Look for requires_grad_(False), torch.no_grad() or detach() that applies from there on; if it is "
            "intended, ignore this finding.",
            Evidence(f"{CHECKS}/{family}_count", count, 0, "0, or the layers that a training freezes on purpose"),
            confidence=0.6,
        )


def _streaks(history: History, family: str, least: int) -> dict[str, int]:
    """Return the first step of each parameter's newest streak of checked steps, if that has at least so many."""
    newest = history.curve(f"{CHECKS}/{family}_count").last_step
    return {
        name: int(curve.steps[max(0, len(curve) - int(curve.last))])
        for name, curve in history.family(f"{CHECKS}/{family}").items()
        if curve.last_step == newest and curve.last >= least
    }


class LeftoverGradients(SetUpDetector):
    """Finds gradients that nothing sets to zero between two steps.

    Symptom: The loss falls at first and then oscillates or grows

    Gradients of earlier steps are still there when the next backward pass starts, so that every step uses the sum
    over all steps. Call optimizer.zero_grad() once per step.

    Source: torch.optim documentation: zero_grad
    """

    name = "gradients-not-zeroed"
    share = Threshold(0.5, "half of all parameters; another loss may leave gradients in a few")
    checks = Threshold(3, "checked steps, or all of them in a shorter run")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most parameters had a gradient before the backward passes of several checked steps."""
        leftover = history.curve(f"{CHECKS}/leftover_gradient_count")
        shares = _leftover_shares(history)
        is_left = (shares > self.share) & (leftover.steps > 1)
        if shares.size and leftover.first_step == 1 and shares[0] > self.share:
            return  # SecondBackwardPass reports these
        if _sees_updates(history):
            # Gradients that wait for an update accumulate on purpose; OptimizerNotStepped looks at these.
            updates = {*history.curve("parameter_norms/total_clipped_grad_norm").steps.tolist()}
            is_left &= np.array([step - 1 in updates for step in leftover.steps.tolist()], dtype=bool)
        # A loop that zeroes gradients once per epoch has none at some of the steps.
        if not len(is_left) or int(is_left.sum()) < min(self.checks, len(is_left)):
            return
        count = int(leftover.values[is_left][-1])
        why = (
            f"Gradients are not set to zero between steps: {count} parameters still had one when the "
            "backward pass started, so every step adds all earlier gradients."
        )
        remedy = "Call optimizer.zero_grad() after every optimizer.step()."
        evidence = Evidence("training_checks/leftover_gradient_count", count, 0, "0")
        yield self.finding("critical", leftover.first_step_where(is_left) or 0, why, remedy, evidence, confidence=0.97)


class SecondBackwardPass(SetUpDetector):
    """Finds another backward pass of the same step before the one that the loop reports.

    Symptom: The weights move further than the learning rate says

    The script calls loss.backward() and then scope.backward(loss), which runs the backward pass itself, so that
    gradients are doubled. Or a step has several losses, of which the hooks see only the last one.

    Applies to: custom loops

    Source: Scope.backward and Scope.gradients_ready
    """

    name = "second-backward-pass"
    share = Threshold(0.5, "half of all parameters; another loss may train a few")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most parameters had a gradient before the first backward pass of the training."""
        leftover, shares = history.curve(f"{CHECKS}/leftover_gradient_count"), _leftover_shares(history)
        # At later steps, the gradients may be those of an earlier step. Gradients from before the training are zeroed.
        later = shares[1:4]
        if leftover.first_step == 1 and later.size and min(shares[0], *later) > self.share:
            count = int(leftover.first)
            yield self.finding(
                "warning",
                1,
                f"{count} parameters had a gradient before the first backward pass that the loop reported, and at "
                "later steps, so another backward pass of the same step came before.",
                "If it was loss.backward() of the same loss, remove it, since scope.backward(loss) adds the same "
                "gradients again; for several losses, call scope.gradients_ready(loss) after the last backward pass.",
                Evidence(f"{CHECKS}/leftover_gradient_count", count, 0, "0"),
            )


def _leftover_shares(history: History) -> Floats:
    """Return the shares of the trainable parameters with a gradient before the backward pass, of the checked steps."""
    # Nothing zeroes the gradients of parameters that are in no optimizer, which is another finding.
    outside = int(history.facts.get("without_optimizer", {}).get("count", 0))
    trainable = max(int(history.facts.get("trainable", 0)) - outside, 1)
    return (history.curve(f"{CHECKS}/leftover_gradient_count").values - outside) / trainable


def _sees_updates(history: History) -> bool:
    """Return whether the hook runs that records every update."""
    return "parameter_norms" in history.hooks and "parameter_norms" not in history.left_out


class OptimizerNotStepped(SetUpDetector):
    """Finds a loop that never steps its optimizer, and one whose accumulation attach does not know.

    Symptom: The loss does not change, or leftover gradients are reported under gradient accumulation

    optimizer.step() is missing, or it follows several backward passes, each of which attach counts as a step. Call
    it, or pass their number as accumulate= to attach.

    Applies to: custom loops

    Source: torch.optim documentation: taking an optimization step
    """

    name = "optimizer-not-stepped"
    passes = Threshold(64, "without an update while the training runs; at its end three are enough")
    needs = (CHECKS, "parameter_norms")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if there are several backward passes for each update, or no update at all."""
        alerts = history.alerts_of("loop", "passes_without_update")
        if alerts and not len(history.loss):
            count = int(alerts[-1]["value"])
            evidence = Evidence("loop/passes_without_update", count, None, "1, or the number of micro-batches")
            yield self._never_called(count, "loss.backward()", evidence)
            return
        if not _sees_updates(history) or history.facts.get("scaler"):
            return
        passes = history.curve(f"{CHECKS}/grad_norm")
        updates = history.curve("parameter_norms/total_clipped_grad_norm")
        # Optimizers that take a closure, or step within the backward pass, have no PRE_UPDATE with gradients.
        others = ("weight_updates/update_ratio_median", f"{CHECKS}/update_ratio", "parameter_norms/total_update_norm")
        is_unused = not len(updates) and not any(len(history.curve(name)) for name in others)
        is_unused &= bool((passes.values > 0).any())
        if is_unused and len(passes) >= (3 if history.is_over else self.passes):
            evidence = Evidence(f"{CHECKS}/update_ratio", "missing", None, "1e-4 to 1e-2")
            yield self._never_called(len(passes), "scope.backward(loss)", evidence)
        if len(updates) < 3:
            return
        period = float(np.median(np.diff(updates.steps)) / np.median(np.diff(passes.steps)))
        if period >= 2:
            why = f"optimizer.step() follows every {period:g} backward passes, and attach counts each pass as a step."
            remedy = f"Pass accumulate={period:g} to loopscope.attach, so that they are micro-batches of one step."
            evidence = Evidence("parameter_norms/total_clipped_grad_norm", period, 1.0, "1 backward pass for each step")
            yield self.finding("info", 1, why, remedy, evidence)

    def _never_called(self, passes: int, backward: str, evidence: Evidence) -> Finding:
        why = f"optimizer.step() was not called after any of {passes:,} backward passes, so no weight changes."
        remedy = f"Call optimizer.step() after {backward}, then optimizer.zero_grad()."
        return self.finding("critical", 1, why, remedy, evidence, confidence=0.95)


class GradientsAllZero(Detector):
    """Finds a training in which no parameter has a gradient, from the start or from some step on.

    Symptom: The loss stops at a value and stays there exactly, or is 0 from the start

    All gradients are exactly 0. At a loss of 0 from the start nothing can be learned: a margin that no row
    violates, a CTC loss with fewer frames than labels, or rewards that are all equal. At another loss the outputs
    have collapsed to a constant, all units are dead, or the loss no longer depends on the parameters.

    Source: Hermans et al., arXiv 1703.07737, on the collapse of triplet losses at the margin
    """

    name = "gradients-all-zero"
    stage = "gradients"
    steps = Threshold(10, "in a row and up to now; single batches may have no error")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the gradient has been 0 for several steps, unless the loss has been learned to be 0."""
        if history.last(f"{CHECKS}/moved_count") > 0:  # the optimizer steps within the backward pass
            return
        norms, loss = history.gradient_norms, history.loss
        trained = np.flatnonzero(norms.values != 0)
        since = int(trained[-1]) + 1 if len(trained) else 0
        if len(norms) - since < self.steps or (since and loss.last == 0):
            return
        if not since and history.curve(f"{CHECKS}/without_gradient_count").values.any():
            return  # see parameters-without-gradient
        step = int(norms.steps[since])
        if not since and not loss.values.any():
            why = (
                f"The loss and all gradients are exactly 0 at all {len(norms):,} steps, so nothing is learned: its "
                "condition is met by every row, or no row takes part in it."
            )
            remedy = (
                "Print the terms of the loss for one batch: a margin that is already met, sequences that are longer "
                "than their frames (CTC with zero_infinity), a mask of zeros, or rewards that are all equal."
            )
        else:
            when = f"since step {step:,}" if since else "from the first step on"
            learns = "no longer learns" if since else "learns nothing"
            why = f"All gradients have been exactly 0 {when}, at a loss of {loss.last:.4g}: the model {learns}."
            remedy = (
                "Print the outputs of a few rows: are they equal? Then lower the learning rate, or change what lets "
                "them collapse, such as a margin or a missing negative term."
            )
        evidence = Evidence(f"{CHECKS}/grad_norm", 0.0, None, "above 0")
        yield self.finding("critical", step, why, remedy, evidence, confidence=0.9)


class GradientsZeroedTooEarly(SetUpDetector):
    """Finds gradients that are set to zero before the optimizer has used them.

    Symptom: The loss does not fall, or not as it should with gradient accumulation

    optimizer.zero_grad() is called between backward() and step(), so that the update has no gradient, or before
    every micro-batch, so that only the last one counts. Call it once per step, after optimizer.step().

    Source: torch.optim documentation: the order of backward, step and zero_grad
    """

    name = "gradients-zeroed-too-early"
    checks = Threshold(3, "checked steps, or all of them in a shorter run")
    share = Threshold(0.9, "of the checked steps; a misplaced call takes the gradients of every step")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if several checked steps lost all gradients before their update or between micro-batches."""
        if alerts := history.alerts_of("loop", "cleared_gradients"):
            why = (
                "The gradients are set to zero before the update: the backward pass has computed them, and "
                "optimizer.step() finds none."
            )
            remedy = "Call in this order: loss.backward(), optimizer.step(), optimizer.zero_grad()."
            evidence = Evidence("loop/cleared_gradients", len(alerts), None, "no alert")
            yield self.finding("critical", int(alerts[0]["step"] or 0), why, remedy, evidence, confidence=0.97)
            return
        norms, factors = history.gradient_norms, history.curve(f"{CHECKS}/clip_factor")
        has_gradient = np.array([norms.at(int(step)) > 0 for step in factors.steps], dtype=bool)
        is_lost = (factors.values == 0) & has_gradient
        # A mask over rows may leave nothing of single gradients.
        if int(is_lost.sum()) >= max(1, min(self.checks, len(is_lost)), self.share * len(is_lost)):
            yield self.finding(
                "critical",
                factors.first_step_where(is_lost) or 0,
                f"The gradients are set to zero before the update: their norm is {norms.last:.3g} after the backward "
                "pass and 0 at optimizer.step().",
                "Call in this order: loss.backward(), optimizer.step(), optimizer.zero_grad().",
                Evidence(f"{CHECKS}/clip_factor", 0.0, None, "1, or below with clipping"),
                confidence=0.97,
            )
        if alerts := history.alerts_of("loop", "cleared_micro_batches"):
            why = (
                f"The gradients are set to zero between the {int(alerts[0]['value'])} micro-batches of a step, whose "
                "losses are divided by their number, so that only the last micro-batch counts."
            )
            remedy = "Call optimizer.zero_grad() once per step, after optimizer.step()."
            evidence = Evidence("loop/cleared_micro_batches", alerts[0]["value"], 1, "1")
            yield self.finding("warning", int(alerts[0]["step"] or 0), why, remedy, evidence)
        lost = history.curve(f"{CHECKS}/lost_gradient_fraction")
        are_all = lost.values == 1
        if len(are_all) and int(are_all.sum()) >= min(self.checks, len(are_all)):
            why = (
                "The gradients are set to zero between the micro-batches of a step: no parameter had one when the "
                "second backward pass started, so that only the last micro-batch counts."
            )
            remedy = "Call optimizer.zero_grad() once per step, after optimizer.step()."
            evidence = Evidence(f"{CHECKS}/lost_gradient_fraction", lost.last, 1.0, "0")
            yield self.finding("warning", lost.first_step_where(are_all) or 0, why, remedy, evidence)


LAST_CHECKS = 3
"""Checks at which a gradient must be tiny, since alerts already report those that are so at a single one."""


class VanishingGradients(Detector):
    """Finds weights whose gradient is tiny compared with that of the others.

    Symptom: The first layers hardly learn

    The gradient shrinks from layer to layer on its way back. Use ReLU-type activation functions, normalisation,
    residual connections, and an initialisation that keeps the size of activations (He, Xavier).

    Source: Glorot and Bengio 2010; He et al., arXiv 1502.01852
    """

    name = "vanishing-gradients"
    stage = "gradients"
    ratio = Threshold(1e-4, "healthy layers of one network differ by a factor of 10 to 100")
    count = Threshold(2, "a single parameter may have no effect by design")
    needs = ("parameter_norms",)
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if several weights have had a tiny gradient at two checks."""
        total = history.curve("parameter_norms/total_grad_norm")
        if not total.last > 0 or total.last_step < 2:
            return
        tiny: dict[str, float] = {}
        norms = history.family("parameter_norms/grad_norm")
        for name, curve in norms.items():
            totals = [max(total.at(int(step)), 1e-30) for step in curve.steps]
            recent = (curve.values / np.array(totals))[-LAST_CHECKS:]
            if len(curve) > 1 and 0 < np.max(recent) < self.ratio:
                tiny[name] = float(recent[-1])
        has_weight = any("weight" in name for name in tiny)  # a bias before a normalisation has no effect by design
        if has_weight and len(tiny) >= self.count and history.falls_short(0.5):
            worst = min((name for name in tiny if "weight" in name), key=tiny.__getitem__)
            checks = min(LAST_CHECKS, len(history.curve(f"parameter_norms/grad_norm/{worst}")))
            yield self.finding(
                "warning",
                total.first_step,
                f"At each of the last {checks} checks, the gradients of {len(tiny)} of {len(norms)} parameters were "
                f"more than {1 / self.ratio:,.0f} times smaller than the joint gradient "
                f"({listed(sorted(tiny), 3)}), so these layers hardly learn.",
                "Use an initialisation that keeps the size of activations, residual connections or normalisation; the "
                "hook gradient_flow shows where the gradient shrinks.",
                Evidence(f"parameter_norms/grad_norm/{worst}", tiny[worst], self.ratio, "0.01 to 1 of the total"),
                confidence=0.8,
            )


CLIP = "Clip it: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()."
RARE = 0.05
"""Share of the steps up to which extreme gradients are the fault of single rows rather than of the model."""


class ExplodingGradients(Detector):
    """Finds gradients that grow without bound, or in single steps by orders of magnitude.

    Symptom: The gradient norm jumps by orders of magnitude

    Gradients grow from layer to layer or from time step to time step, as in recurrent networks without clipping.
    Clip the gradient norm, lower the learning rate, or use a smaller initialisation.

    Applies to: every optimizer but LBFGS, whose line search accepts gradients of any size

    Source: Pascanu et al., arXiv 1211.5063
    """

    name = "exploding-gradients"
    stage = "gradients"
    first = Threshold(1e4, "usual first gradients of a mean loss have a norm of 0.1 to 100")
    first_of_diverging = Threshold(1e3, "the same, where the loss is not finite within five steps")
    jump = Threshold(JUMP, "over all earlier steps, where the loss is not finite afterwards")
    growth = Threshold(100.0, "healthy gradients change by a factor of 10 over a training")
    spike = Threshold(300.0, "steps this far above the median are rare even for heavy-tailed gradients")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for a lasting growth, or for repeated extreme steps."""
        norms = history.gradient_norms
        values = norms.values[np.isfinite(norms.values)]
        if any(group.get("optimizer") == "LBFGS" for group in history.facts.get("groups", ())):
            return
        if (jump := jump_of_gradient(history)) is not None:
            yield self._finding(
                jump,
                f"In step {jump:,} the gradient norm is {norms.at(jump):.3g}, over a thousand times all earlier ones, "
                "and the loss diverges from there: a row of the data may be unlike the others.",
                norms.at(jump),
                self.jump * float(np.nanmax(norms.values[norms.steps < jump])),
                remedy=f"Look at the rows of the batch of step {jump:,}; remove wrong ones, or clip gradients.",
            )
            return
        if len(values) < 20 and not self._is_huge_at_once(history):
            return
        # Steps without a gradient, such as those of equal rewards, are no measure.
        first, last, usual = norms.start_level(10), norms.end_level(), median_of(values[values > 0])
        if self._is_huge_at_once(history):
            yield self._finding(
                1,
                f"The gradient norm of the first step is {norms.first:.3g}, at an ordinary loss of "
                f"{history.loss.first:.3g}: it grows from layer to layer, or from time step to time step.",
                norms.first,
                self._first_limit(history),
                confidence=0.97,
            )
            return
        if first > 0 and last / first > self.growth and history.falls_short(0.1):
            is_large = norms.values > first * self.growth
            yield self._finding(
                norms.first_step_where(is_large) or 0,
                f"The gradient norm has grown {last / first:,.0f}-fold, from {first:.3g} to {last:.3g}, while the loss "
                "does not fall.",
                last,
                first * self.growth,
            )
            return
        # Gradients fall with the loss, so the median alone would make the first steps of a good training spikes.
        at_the_start = max(first, float(np.nanmax(norms.values[:3])))
        is_spike = (norms.values > max(usual, 1e-12) * self.spike) & (norms.values > 10 * at_the_start)
        if is_spike.sum() >= 2 and not history.facts.get("scaler"):  # a scaler skips steps that overflow
            spikes = norms.steps[is_spike].tolist()
            are_rare = len(spikes) <= RARE * len(values)
            steps = listed(list(map(str, spikes)), 4)
            rows = f"Look at the rows of the batches of steps {steps}; remove those that are wrong, or clip gradients."
            yield self._finding(
                norms.first_step_where(is_spike) or 0,
                f"In {len(spikes)} steps the gradient norm was more than {self.spike:.0f} times its median of "
                f"{usual:.3g}{', and ordinary in all others: a row of the data may be unlike the others' * are_rare}.",
                float(np.nanmax(values)),
                usual * self.spike,
                remedy=rows if are_rare else CLIP,
            )

    def _is_huge_at_once(self, history: History) -> bool:
        norm, loss = history.gradient_norms.first, history.loss.first
        is_mean = history.last("training_checks/loss_is_summed") == 0
        return is_mean and abs(loss) < 100 and norm > self._first_limit(history)

    def _first_limit(self, history: History) -> float:
        diverges = (history.loss.first_nonfinite or math.inf) <= 5
        return self.first_of_diverging if diverges else self.first

    def _finding(
        self, step: int, why: str, value: float, limit: float, *, remedy: str = CLIP, confidence: float = 0.75
    ) -> Finding:
        evidence = Evidence("training_checks/grad_norm", value, limit, "within a factor of 10 of its median")
        return self.finding("warning", step, why, remedy, evidence, confidence=confidence)


class GradientJump(Detector):
    """Finds a lasting jump of the gradient under an optimizer whose second moments lag behind.

    Symptom: The loss rises after a pause, a change of the data, or a resume

    The gradient became much larger within a few steps, for example after a change of the data or of the loss. Adam
    divides by an average over about 1/(1 − β₂) steps, which is still small, so its steps are too large. Lower the
    learning rate for a while, lower β₂, clip, or reset the optimizer.

    Applies to: Adam-type optimizers, after the first 50 steps

    Source: Wortsman et al., arXiv 2304.13013, section 3.4
    """

    name = "gradient-jump"
    stage = "gradients"
    factor = Threshold(10.0, "gradients of healthy runs change by less within 10 steps, and back")
    lasting = Threshold(20, "steps; spikes of a small loss recover within 10")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if gradients are far above the median of the 50 steps before, and do not return to it."""
        norms = history.gradient_norms
        if not history.is_adam_like or len(norms) < 60 or learns_values(history):
            return
        step = jump_step(norms, self.factor)
        if step is None or not _loss_rose(history, step):
            return
        before, after = median_of(norms.between(step - 50, step - 1)), median_of(norms.between(step, step + 4))
        lasting = median_of(norms.between(step, step + int(self.lasting) - 1))
        if lasting >= before * self.factor / 2 and after < math.inf:
            yield self.finding(
                "warning",
                step,
                f"At step {step:,} the gradient norm jumped {after / before:,.0f}-fold (from {before:.3g} to "
                f"{after:.3g}) and stayed there, while the second moments of {history.optimizer} were those of the "
                f"small gradients, so its steps were too large{_change_of_divisor(history, step)}.",
                "Lower the learning rate around this step or reset optimizer.state; look at what changed in the data "
                "there.",
                Evidence("training_checks/grad_norm", after, before * self.factor, "no lasting jump"),
                confidence=0.75,
            )


def _change_of_divisor(history: History, step: int) -> str:
    """Return in words whether the factor of the loss has changed at about a step."""
    divisor = history.curve("training_checks/loss_divisor")
    before, after = divisor.at(step - 1), divisor.last
    return f"; the divisor of the loss changed from {before:g} to {after:g}" if before != after and after > 0 else ""


def jump_step(norms: Curve, factor: float) -> int | None:
    """Return the first step from which 4 of 5 gradients are above ``factor`` times the median of the 50 before."""
    values = norms.values
    usual = np.median(np.lib.stride_tricks.sliding_window_view(values, 50), axis=1)  # of values[i : i + 50]
    following = np.lib.stride_tricks.sliding_window_view(values, 5)[50:]
    usual = usual[: len(following)]
    is_jump = (usual > 0) & (following[:, 0] > factor * usual)
    is_jump &= (following > factor * usual[:, None]).sum(axis=1) >= 4
    indices = np.flatnonzero(is_jump)
    return int(norms.steps[indices[0] + 50]) if len(indices) else None


def _loss_rose(history: History, step: int) -> bool:
    """Return whether the loss is higher than before a step, and does not fall from its value there."""
    loss = history.loss
    before, after = median_of(loss.between(step - 20, step - 1)), median_of(loss.between(step, step + 9))
    # That value was measured before the first update by the new gradient, so harmless updates lower it.
    at_jump = loss.at(step)
    return after > before + 0.2 * abs(before) and after > at_jump - 0.2 * abs(at_jump)
