"""Detectors of the loss: its formula, its start, its course, and its validation."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ...errors import counted, listed
from .. import Curve, Detector, Evidence, Finding, History, Rule, Threshold
from ..detector import SetUpDetector
from ..findings import Stage
from ..history import median_of
from ..measures import CHECKS, compared, divided_afterwards, is_minimised, learns_values
from .learning_rates import is_warming_up


class WrongFormula(Rule):
    """Finds a mistake in the formula of the loss, with which no training succeeds."""

    stage = "set-up"
    severity = "critical"
    confidence = 0.97


class DoublyNormalised(WrongFormula):
    """Finds a softmax before a loss that contains one, or a sigmoid likewise.

    Symptom: The loss falls slowly and stays high

    The model ends with a softmax (or sigmoid), and the loss, such as cross_entropy, applies another one. Return the
    logits from the model.

    Source: torch.nn.CrossEntropyLoss: the input is expected to contain unnormalized logits
    """

    name = "softmax-applied-twice"
    metric = f"{CHECKS}/doubly_normalised"
    why = (
        "The model's output passes through a softmax or sigmoid, and the loss applies another one, so that its "
        "gradients are small and the loss cannot approach 0."
    )
    remedy = "Remove the softmax or sigmoid from the model: cross_entropy and BCEWithLogitsLoss take logits."


class LogSoftmaxMissing(WrongFormula):
    """Finds a likelihood of outputs that are not log-probabilities.

    Symptom: The loss is negative

    nll_loss, ctc_loss and kl_div take log-probabilities, but get the logits or the probabilities of the model.
    Apply log_softmax, or use cross_entropy in place of nll_loss.

    Applies to: nll_loss, ctc_loss and kl_div

    Source: torch.nn.NLLLoss and CTCLoss: the input is expected to contain log-probabilities
    """

    name = "log-softmax-missing"
    metric = f"{CHECKS}/lacks_log_softmax"
    why = (
        "nll_loss, ctc_loss or kl_div gets logits or probabilities instead of log-probabilities, so that the loss is "
        "not a likelihood."
    )
    remedy = "Apply torch.log_softmax(logits, dim=-1) before the loss, or use cross_entropy in place of nll_loss."


class OneClass(SetUpDetector):
    """Finds a cross-entropy over a single class.

    Symptom: The loss is exactly 0

    cross_entropy gets one output per row, whose probability is always 1, so that the loss is 0 and has no gradient.
    Use binary_cross_entropy_with_logits for one output, or give the model an output for each class.

    Applies to: cross-entropy

    Source: torch.nn.CrossEntropyLoss: an input of shape (N, C) with the logits of C classes
    """

    name = "cross-entropy-of-one-class"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the loss has one class."""
        curve = history.curve(f"{CHECKS}/class_count")
        if curve.last == 1:
            why = (
                "The cross-entropy has a single class: its probability is always 1, so that the loss is 0 and nothing "
                "is learned."
            )
            remedy = "Use binary_cross_entropy_with_logits for one output, or one output for each class."
            evidence = Evidence(f"{CHECKS}/class_count", 1, 2, "the number of classes")
            yield self.finding("critical", curve.first_step, why, remedy, evidence, confidence=0.97)


class TemperatureMissing(SetUpDetector):
    """Finds a cross-entropy of cosines that no temperature divides.

    Symptom: A contrastive loss, or one of cosines, stops falling at a high value

    The logits are cosines between −1 and 1, so that the right class gets at most e² times the probability of each
    other one, and the loss has a high lower bound. Divide them by a temperature, such as 0.1.

    Applies to: cross-entropies whose logits are products of normalised vectors, on the CPU

    Source: Wang et al., NormFace, arXiv 1704.06369, section 3.3; Chen et al., SimCLR, arXiv 2002.05709, table 5
    """

    name = "temperature-missing"
    scale = Threshold(1.2, "factor of the cosines; temperatures of 0.05 to 0.5 give 2 to 20")
    bound = Threshold(0.3, "of ln(C), below which a model can still be certain")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the factor of the cosines leaves a high lower bound of the loss."""
        curve = history.curve(f"{CHECKS}/cosine_scale")
        scale, classes = abs(curve.last), history.last(f"{CHECKS}/class_count")
        if not scale < self.scale or not classes > 1:
            return
        # The right class has the cosine 1 and all others −1: −ln(eˢ / (eˢ + (C − 1) e⁻ˢ)).
        bound = math.log1p((classes - 1) * math.exp(-2 * scale))
        if bound > self.bound * math.log(classes):
            why = (
                f"The logits are cosines times {scale:.3g}, so the cross-entropy over {classes:g} classes cannot fall "
                f"below {bound:.3g}, and equal probabilities give {math.log(classes):.3g}."
            )
            remedy = "Divide the cosines by a temperature, such as 0.1, or multiply them by a trained factor."
            evidence = Evidence(f"{CHECKS}/cosine_scale", scale, self.scale, "2 to 20")
            yield self.finding("warning", curve.first_step, why, remedy, evidence)


class LossBroadcast(WrongFormula):
    """Finds a loss that compares every output with every target of the batch.

    Symptom: A regression learns the mean of its targets only

    Outputs of shape (N, 1) and targets of shape (N,) broadcast to N × N pairs, so that every output is compared
    with every target, and the best output is their mean. Give both the same shape.

    Applies to: losses that compare outputs and targets element by element

    Source: torch.nn.functional.mse_loss warns about different sizes; PyTorch's broadcasting semantics
    """

    name = "loss-broadcast"
    metric = f"{CHECKS}/loss_is_broadcast"
    why = (
        "The shapes of outputs and targets differ, such as (N, 1) and (N,), and broadcast to N × N pairs: every "
        "output is compared with every target of the batch, so that the model learns their mean."
    )
    remedy = "Give both the same shape before the loss: outputs.squeeze(-1), or targets.unsqueeze(-1)."


class CausalMaskMissing(Detector):
    """Finds attention without a causal mask in a model that is trained to predict the next token.

    Symptom: The loss of a language model falls far too low, but generated text is bad

    The targets are the next tokens of the inputs, but attention has no causal mask, so that each position sees its
    own target. Pass is_causal=True, or a causal mask.

    Applies to: models with attention that predict the next token, not compiled

    Source: Vaswani et al., arXiv 1706.03762, section 3.2.3
    """

    name = "causal-mask-missing"
    law = "future_is_not_seen"
    stage = "evaluation"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if all attention operations look ahead."""
        ahead = history.curve(f"{CHECKS}/look_ahead_fraction")
        if ahead.last == 1 and history.last(f"{CHECKS}/target_shift") == 1:
            why = (
                "The targets are the next tokens of the inputs, but attention has no causal mask: every position sees "
                "the token that it should predict, which it will not see when text is generated."
            )
            remedy = "Use scaled_dot_product_attention(q, k, v, is_causal=True), or pass a causal mask to the layer."
            evidence = Evidence(f"{CHECKS}/look_ahead_fraction", 1, 1, "below 1")
            yield self.finding("critical", ahead.first_step, why, remedy, evidence)


class TargetsShiftedWrongly(SetUpDetector):
    """Finds a causal model whose targets are its inputs, or the tokens after the next.

    Symptom: A language model has a good loss, but generates nonsense

    The targets are the inputs themselves, so that a model with a causal mask learns to copy, or they are shifted
    twice, by the data and by the model. Shift them once: logits[:, :-1] against tokens[:, 1:].

    Applies to: models with causal attention and a cross-entropy over tokens, on the CPU

    Source: causal models of transformers shift labels inside of the model; a custom loss must do it itself
    """

    name = "targets-shifted-wrongly"

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the shift is 0 or 2 at every checked step, and attention is masked."""
        shifts = history.curve(f"{CHECKS}/target_shift")
        is_causal = history.last(f"{CHECKS}/look_ahead_fraction") < 1
        if not len(shifts) or np.ptp(shifts.values) > 0 or shifts.last == 1 or not is_causal:
            return
        problem = "shifted by two positions, so that the model learns to skip a token"
        remedy = "Shift them once: models of transformers shift labels themselves, so pass labels=input_ids."
        if shifts.last == 0:
            problem = "the inputs themselves, so that the model only learns to copy"
            remedy = "Compare logits[:, :-1] with tokens[:, 1:]."
        why = f"The targets of the loss are {problem}."
        evidence = Evidence(f"{CHECKS}/target_shift", shifts.last, None, "1")
        yield self.finding("critical", shifts.first_step, why, remedy, evidence)


class TargetsAreInputs(Rule):
    """Finds a model that gets the targets of its loss as inputs.

    Symptom: The loss falls to 0, but what the model generates is wrong

    An embedding of the model looks up the very targets that it should predict: a decoder gets the target sequence
    without a start token, so that each position sees its own answer. Shift its inputs by one position.

    Applies to: cross-entropies over tokens whose inputs are others, on the CPU

    Source: Sutskever et al., arXiv 1409.3215: the decoder gets the tokens before the one that it predicts
    """

    name = "targets-are-inputs"
    stage = "evaluation"
    metric = f"{CHECKS}/reads_targets"
    severity = "critical"
    why = (
        "An embedding of the model looks up the targets of the loss themselves, position by position: the model sees "
        "what it should predict, which it will not see when it generates."
    )
    remedy = "Shift the decoder's inputs: torch.cat([start, targets[:, :-1]], dim=1), and compare with targets."


class LogitsRectified(Rule):
    """Finds a ReLU at the end of a classifier.

    Symptom: A classifier learns slowly, or some classes never

    The model ends with a ReLU, so that its logits cannot be negative, and classes whose logit is 0 get no gradient.
    Remove the activation after the last layer.

    Applies to: cross-entropies, and binary ones with logits

    Source: torch.nn.CrossEntropyLoss: the input is expected to contain unnormalized logits
    """

    name = "relu-before-loss"
    stage = "set-up"
    metric = f"{CHECKS}/logits_rectified"
    why = "The model ends with a ReLU: no logit can be negative, and a class whose logit is 0 gets no gradient."
    remedy = "Remove the ReLU after the last layer."


class TargetsOutOfReach(SetUpDetector):
    """Finds a regression whose last activation cannot give its targets.

    Symptom: A regression predicts some of its targets badly, with any settings

    The model ends with an activation whose range does not contain the targets: ReLU gives nothing below 0, sigmoid
    nothing outside of 0 to 1, tanh nothing outside of −1 to 1. Remove it, or scale the targets.

    Applies to: mse_loss, smooth_l1_loss and huber_loss, on the CPU

    Source: the ranges of the activations of torch.nn
    """

    name = "targets-out-of-reach"
    share = Threshold(0.03, "of the targets; fewer may be rounding or noise around a bound")
    many = Threshold(0.3, "a critical finding")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if a part of the targets is out of reach in the median over the checks."""
        curve = history.curve(f"{CHECKS}/unreachable_target_fraction")
        share = curve.median
        if not share > self.share:
            return
        lowest, highest = (history.curve(f"{CHECKS}/target_{name}") for name in ("min", "max"))
        why = (
            f"The model ends with an activation (such as ReLU, sigmoid or tanh) whose range leaves out {share:.0%} of "
            f"the targets, which go from {np.min(lowest.values):.3g} to {np.max(highest.values):.3g}."
        )
        remedy = "Remove the activation after the last layer, or scale the targets to its range."
        evidence = Evidence(f"{CHECKS}/unreachable_target_fraction", share, self.share, "0")
        yield self.finding("critical" if share > self.many else "warning", curve.first_step, why, remedy, evidence)


class TargetsNotProbabilities(SetUpDetector):
    """Finds losses of numbers that are not probabilities, such as several labels of a row, or masks of 255.

    Symptom: The loss of a classifier is negative, or worse than it should be with several labels

    cross_entropy takes probabilities that add up to 1, but the targets of a row add up to another number: rows with
    several labels need binary_cross_entropy_with_logits, which asks for each class alone. A binary cross-entropy
    takes targets from 0 to 1, but they go beyond, such as masks of 0 and 255: divide them. kl_div takes probabilities,
    or with log_target=True their logarithms, but gets the other of the two, or weights.

    Applies to: cross-entropies of targets that are numbers, and kl_div, on the CPU

    Source: torch.nn.CrossEntropyLoss, BCEWithLogitsLoss and KLDivLoss: targets are probabilities
    """

    name = "targets-not-probabilities"
    deviation = Threshold(0.1, "of the mean sum from 1; rounding and smoothing stay below")
    beyond = Threshold(0.001, "of the targets outside of 0 to 1; rounding reaches none that count")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the targets of a row do not add up to 1, or if some are outside of 0 to 1."""
        invalid = history.curve(f"{CHECKS}/invalid_target_fraction")
        share = invalid.median
        if share > self.beyond:
            lowest, highest = (history.curve(f"{CHECKS}/target_{name}").values for name in ("min", "max"))
            yield self.finding(
                "critical",
                invalid.first_step,
                f"The binary cross-entropy gets targets from {np.min(lowest):.3g} to {np.max(highest):.3g}: "
                f"{share:.0%} are outside of 0 to 1, where it has no lower bound and drives the outputs to infinity.",
                "Bring the targets to 0 and 1, such as mask / 255 or (mask > 0).float(), or use a loss for numbers.",
                Evidence(f"{CHECKS}/invalid_target_fraction", share, self.beyond, "0"),
                confidence=0.97,
            )
            return
        curve = history.curve(f"{CHECKS}/soft_target_sum")
        total = curve.median
        if not abs(total - 1) > self.deviation:
            return
        remedy = (
            "Use binary_cross_entropy_with_logits if rows have several labels; else give probabilities, or the numbers "
            "of the classes."
        )
        is_divergence = not history.last(f"{CHECKS}/class_count") > 0
        if is_divergence:
            remedy = (
                "Give kl_div the probabilities of the teacher, teacher.softmax(-1), or with log_target=True their "
                "logarithms, teacher.log_softmax(-1)."
            )
        why = (
            f"The {'divergence' if is_divergence else 'cross-entropy'} gets targets whose rows add up to {total:.3g} "
            "on average, not to 1, so they are not probabilities of classes that exclude each other."
        )
        evidence = Evidence(f"{CHECKS}/soft_target_sum", total, 1 + self.deviation, "1")
        yield self.finding("warning", curve.first_step, why, remedy, evidence)


class NormalisedOverRows(WrongFormula):
    """Finds a softmax over the batch, in the model or in the loss.

    Symptom: The loss falls, but the accuracy stays low

    A softmax runs over the rows of the batch, dim=0, so that rows compete, and not classes of the loss or positions
    of an attention: the output for a row depends on the others. Use dim=-1, or cross_entropy on logits.

    Applies to: cross-entropies over a matrix of logits that is not square, and softmax operations of the model

    Source: torch.nn.functional.log_softmax: dim
    """

    name = "softmax-over-batch"
    law = "rows_do_not_mix"
    metric = f"{CHECKS}/normalised_over_rows"
    why = (
        "A softmax, of the model or in the loss, runs over the rows of the batch and not over classes or positions, so "
        "that the rows compete with each other, and single rows get other outputs than batches."
    )
    remedy = "Use dim=-1 (or dim=1 for positions) in softmax and log_softmax, or cross_entropy(logits, targets)."
    confidence = 0.95


class LossSummed(SetUpDetector):
    """Finds a loss that is a sum over the batch instead of a mean.

    Symptom: The loss and its gradients are very large

    The loss is the sum over the rows or tokens of the batch, so that gradients, and under SGD the steps, grow with
    the batch size. Use reduction='mean', or divide by the number of rows or tokens.

    Applies to: every optimizer; under Adam, which ignores the scale, it is a remark unless the loss is a
    cross-entropy

    Source: torch.nn losses: the argument reduction
    """

    name = "loss-summed"
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the graph of the loss ends with a sum that nothing divides."""
        curve = history.curve(f"{CHECKS}/loss_is_summed")
        rows = history.settings.get("batch_size")
        if not curve.last > 0 or rows == 1 or divided_afterwards(history):
            return
        # Adam ignores the scale of gradients, and some losses, such as those of autoencoders, are sums by definition.
        is_by_definition = history.is_adam_like and not history.last(f"{CHECKS}/class_count") > 0
        why = (
            f"The loss is summed over the batch{f' of {rows} rows' if rows else ''} instead of averaged, so gradients "
            "grow with the batch size."
        )
        remedy = "Use reduction='mean' in the loss, or divide it by the number of rows."
        evidence = Evidence(f"{CHECKS}/loss_is_summed", 1, 0, "0")
        yield self.finding("info" if is_by_definition else "warning", curve.first_step, why, remedy, evidence)


class AccumulationNotAveraged(SetUpDetector):
    """Finds gradient accumulation whose micro-batches are not averaged, or divided by another number.

    Symptom: Gradients grow with the number of accumulated batches

    With gradient accumulation over N micro-batches each loss must be divided by N (or by the tokens of the step).
    Otherwise the gradient, and under SGD the step, is N times as large.

    Applies to: training with gradient accumulation

    Source: gradient accumulation: the gradient of a mean is the mean of gradients
    """

    name = "accumulation-not-averaged"
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the losses of several micro-batches are not divided by their number."""
        averaged = history.curve(f"{CHECKS}/averages_micro_batches")
        is_summed = history.last(f"{CHECKS}/loss_is_summed") > 0  # see loss-summed
        if averaged.last != 0 or is_summed or divided_afterwards(history):
            return
        # The last step of an epoch may have fewer micro-batches, and does not report whether it averages one.
        parts = int(history.curve(f"{CHECKS}/micro_batches").at(averaged.last_step))
        if parts < 2:
            return
        divisor = history.curve(f"{CHECKS}/loss_divisor").at(averaged.last_step)
        done = "not divided" if divisor == 1 else f"divided by {divisor:.4g}"
        yield self.finding(
            "warning",
            averaged.first_step_where(averaged.values == 0) or averaged.first_step,
            f"A step accumulates {parts} micro-batches, but their losses are {done}, so the gradient is not their "
            "mean.",
            f"Divide each loss by {parts} before the backward pass.",
            Evidence(f"{CHECKS}/micro_batches", parts),
            Evidence(f"{CHECKS}/loss_divisor", divisor, None, str(parts)),
            confidence=0.9 if divisor == 1 else 0.7,
        )


LEAST_SCALE = 256
"""Factor of a loss scaler from which on its loss is not mistaken for a high one."""


class InitialLossHigh(Detector):
    """Finds a first loss far above that of equal probabilities.

    Symptom: The first loss is much larger than ln(number of classes)

    An untrained classifier should give all classes about the same probability, a loss of ln(C). A far larger loss
    means that logits are large at the start: weights that are initialised too large, inputs that are not
    normalised, or a summed loss.

    Applies to: cross-entropy, at the first step; a remark if a part of the model is frozen, or if inputs and
    initial weights have usual scales, as in fine-tuning

    Source: Karpathy, A Recipe for Training Neural Networks (2019): verify the loss at initialisation
    """

    name = "initial-loss-high"
    law = "loss_starts_at_chance"
    stage = "activations"
    factor = Threshold(3.5, "usual initialisations give 1.0 to 1.5 times ln(C), new heads on other features up to 3.4")
    weights = Threshold(3.0, "times 1/√fan_in; usual initialisations give 0.5 to 1.5")
    inputs = Threshold(3.0, "mean or standard deviation of inputs, which are normalised below it")
    certain = Threshold(30.0, "times ln(C), which no pretrained model gives")
    growth = Threshold(100.0, "largest over smallest block activation; those of sound models differ by 10")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the first loss exceeds the uniform one by a factor."""
        # The loss of a step whose micro-batches are not averaged is their sum.
        averages = history.last(f"{CHECKS}/averages_micro_batches") != 0
        parts = 1 if averages else max(history.last(f"{CHECKS}/micro_batches"), 1)
        uniform, first = history.uniform_loss, history.loss.first / parts
        if not first > max(self.factor * uniform, uniform + 2) or history.loss.first_step > 1:
            return
        if history.facts.get("scaler") and first > LEAST_SCALE * uniform:
            return  # the loss times the factor of a loss scaler
        if history.last(f"{CHECKS}/loss_is_summed") > 0 or divided_afterwards(history):
            return  # the loss of all elements together, see loss-summed
        # The logits of a pretrained model may be large for other data.
        is_pretrained = bool(history.facts.get("frozen_modules")) or (
            first < self.certain * uniform and self._has_usual_scales(history)
        )
        when, remedy = self._reason(history, first / uniform)
        if is_pretrained:
            when = "for a pretrained model, other data may be the reason"
        why = f"The first loss is {first:.3g}, but equal probabilities give ln(C) = {uniform:.3g}: {when}."
        evidence = Evidence(f"{CHECKS}/loss", first, self.factor * uniform, f"about {uniform:.3g}")
        yield self.finding("info" if is_pretrained else "warning", 1, why, remedy, evidence, confidence=0.8)

    def _reason(self, history: History, ratio: float) -> tuple[str, str]:
        """Return why the first loss is ``ratio`` times ln(C), and what to do."""
        divisor = history.curve(f"{CHECKS}/loss_divisor").first
        if 0 < divisor < 0.5 and 0.5 < ratio * divisor < 2:
            return f"the loss is multiplied by {1 / divisor:,.4g}", "Remove the factor, which acts as a learning rate."
        blocks = {name: curve.first for name, curve in history.family("activations/rms").items() if curve.first > 0}
        largest = max(blocks, key=blocks.__getitem__, default="")
        if blocks and blocks[largest] > self.growth * min(blocks.values()):
            why = f"activations grow from block to block, up to {blocks[largest]:.3g} in {largest}"
            return why, "Normalise the blocks, scale their residual branches, or divide sums by the number of terms."
        remedy = "Check the initialisation of the last layer and the scale of the inputs."
        return "the logits are too large before any training", remedy

    def _has_usual_scales(self, history: History) -> bool:
        """Return whether the initial weights of all layers and the inputs, of numbers, have usual sizes."""
        _, largest = (history.facts.get("weight_scales") or {}).get("largest", ("", math.inf))
        mean, deviation = (history.curve(f"{CHECKS}/{name}").first for name in ("input_mean", "input_std"))
        return largest < self.weights and max(abs(mean), deviation) < self.inputs


class TargetsNotNormalised(SetUpDetector):
    """Finds a regression loss that is huge at the start, because its targets are.

    Symptom: The loss is huge, or training is unstable

    The loss is no cross-entropy and starts at a huge value, so the targets, or the outputs, have large values.
    Standardise the targets, and undo it for reports.

    Applies to: losses that are no cross-entropy, at the first step

    Source: a mean squared error of standardised targets starts near 1
    """

    name = "targets-not-normalised"
    loss = Threshold(1e4, "a deviation of 100 in targets or outputs")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the first loss is above the limit and inputs and weights are not the reason."""
        loss, deviation = history.loss, history.curve(f"{CHECKS}/input_std").first
        scale = (history.facts.get("weight_scales") or {}).get("median", 0)
        is_known = history.last(f"{CHECKS}/class_count") == 0 and history.last(f"{CHECKS}/loss_is_summed") == 0
        is_huge = self.loss < loss.first < math.inf
        if loss.first_step == 1 and is_known and is_huge and not (deviation > 10 or scale > 4):
            why = (
                f"The first loss is {loss.first:.3g}, so targets or outputs have a deviation of about "
                f"{math.sqrt(loss.first):,.0f}."
            )
            remedy = "Standardise the targets: (targets - targets.mean()) / targets.std()."
            evidence = Evidence(f"{CHECKS}/loss", loss.first, self.loss, "near 1")
            yield self.finding("warning", 1, why, remedy, evidence, confidence=0.7)


class LossRising(Detector):
    """Finds a loss that rises steadily, or is the negative of a cross-entropy.

    Symptom: The loss rises

    The training maximises the loss: its sign is wrong, the optimizer has maximize=True, or a custom update adds the
    gradient. A learning rate that is too high also raises the loss.

    Source: a gradient step with a small learning rate lowers the loss
    """

    name = "loss-rising"
    stage = "loss"
    factor = Threshold(1.5, "the last loss over the first; noise and harder data stay below")
    trend = Threshold(0.8, "rank correlation of loss and step")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for a negative cross-entropy, an optimizer that maximises, or a steady rise."""
        loss = history.loss
        uniform = history.uniform_loss  # the loss of a policy gradient is negative, too, but has another size
        if loss.first < 0 and loss.last < 0 and 0.5 * uniform < -loss.first < 3 * uniform:
            yield self._finding(
                1,
                f"The loss is a cross-entropy with the wrong sign ({loss.first:.3g} at the first step), so the "
                "training makes its predictions worse.",
                "Remove the minus sign: loss = cross_entropy(logits, targets).",
                loss.first,
                0.97,
                "set-up",
            )
            return
        maximises = any(group.get("maximize") is True for group in history.facts.get("groups", ()))
        if len(loss) < 20 or not loss.first > 0 or not is_minimised(history):
            return
        first, last = loss.start_level(), loss.end_level()
        finite = np.isfinite(loss.values)
        trend = rank_correlation(loss.values[finite])
        factor = 1.05 if maximises else self.factor
        if last > factor * first and (maximises or trend > self.trend):
            reason = "the optimizer has maximize=True" if maximises else "its sign, or that of the update, may be wrong"
            yield self._finding(
                loss.first_step_where(loss.values > factor * first) or 1,
                f"The loss rises steadily, from {first:.3g} to {last:.3g}: {reason}.",
                "Set maximize=False." if maximises else "Check the sign of the loss and of custom updates.",
                last,
                0.9 if maximises else 0.7,
                "set-up" if maximises else "loss",
            )

    def _finding(self, step: int, why: str, next_step: str, value: float, confidence: float, stage: Stage) -> Finding:
        evidence = Evidence(f"{CHECKS}/loss", value, None, "falls")
        finding = self.finding("critical", step, why, next_step, evidence, confidence=confidence)
        return replace(finding, stage=stage)


def rank_correlation(values: "np.typing.NDArray[np.float64]") -> float:
    """Return Spearman's correlation of values with their position."""
    if len(values) < 3:
        return 0.0
    ranks = np.argsort(np.argsort(values)).astype(np.float64)
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


class NothingLearned(Detector):
    """Looks for one sign that the model has learned nothing up to now."""

    stage = "loss"
    waits = True


class NoBetterThanUniform(NothingLearned):
    """Finds a classifier whose loss stays at that of equal probabilities.

    Symptom: The loss stays at ln(number of classes)

    The model predicts equal probabilities, so it has learned nothing from its inputs: labels that do not belong to
    their inputs (shuffled), inputs without information, or a cause that another finding names.

    Applies to: cross-entropy, after 100 steps

    Source: cross-entropy of equal probabilities over C classes is ln(C)
    """

    name = "no-better-than-uniform"
    share = Threshold(0.93, "of ln(C); a training that works is far below after 100 steps")
    share_of_plan = Threshold(0.2, "of the planned steps, or of 1,500 if the plan is unknown")
    first_update = Threshold(0.03, "of the weights; the first updates of AdamW change about 1 %")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the last losses are near ln(C)."""
        uniform, loss = history.uniform_loss, history.loss
        # Large models and hard tasks start with a plateau, so a run in progress gets a fifth of its plan.
        patience = self.share_of_plan * (history.planned_steps or 1500)
        if len(loss) < 100 or loss.last_step < (100 if history.is_over else max(100, patience)):
            return
        last = loss.end_level()
        lowest = median_of(np.sort(loss.values)[: max(5, len(loss) // 10)])
        if is_warming_up(history) or not (lowest > self.share * uniform and last < 1.5 * uniform):
            return
        frozen = sorted((history.facts.get("frozen_modules") or {}).items(), key=lambda item: -item[1])
        first_update = history.update_ratios.first
        print_rows = (
            "print a few rows with their labels; try to overfit a single batch, which must bring the loss near 0."
        )
        if frozen:
            names = listed([f"{share:.0%} of {name}" for name, share in frozen], 3)
            reason = f"Frozen: {names}. This works only if these weights were trained before."
            remedy = "Load trained weights of the frozen parts, or set requires_grad=True for their parameters."
        elif first_update > self.first_update:
            reason = (
                f"The first update changed {first_update:.0%} of the weights, which may have spoiled them; or else the "
                "labels do not belong to their inputs."
            )
            remedy = f"Add a warm-up or lower the learning rate. Then {print_rows}"
        else:
            reason = (
                "If no other finding explains it, the labels may not belong to their inputs, or the model does not see "
                "what tells them apart, such as the order of tokens."
            )
            remedy = f"{print_rows[0].upper()}{print_rows[1:]}"
        why = (
            f"Suspicious: after {loss.last_step:,} steps the loss is {last:.3g}, and equal probabilities give ln(C) = "
            f"{uniform:.3g}, so the model has learned nothing. {reason}"
        )
        evidence = Evidence(f"{CHECKS}/loss", last, self.share * uniform, f"far below {uniform:.3g}")
        yield self.finding("warning", 100, why, remedy, evidence, confidence=0.5)


class NoBetterThanFrequencies(NothingLearned):
    """Finds a classifier or language model that predicts how frequent its targets are, for every input.

    Symptom: The loss falls in the first steps, to the entropy of the targets, and stays there

    The model predicts the frequencies of the targets for all inputs, so it has learned nothing from them: targets
    that do not belong to their inputs (shuffled, or two dimensions mixed up), inputs without information, or a
    cause that another finding names.

    Applies to: cross-entropies without class weights, with ten targets or more for each class, after 200 steps

    Source: the cross-entropy of predicting the frequencies is the entropy of the targets
    """

    name = "no-better-than-frequencies"
    share = Threshold(0.97, "of the entropy of the same batch; models that learn from inputs are below")
    even = Threshold(0.93, "of ln(C), above which no-better-than-uniform reports the same")
    steps = Threshold(200, "steps; models that learn are below the entropy by then")
    checks = Threshold(3, "last checked batches after a quarter of the steps, of which the median counts")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the last checked losses are those of predicting the frequencies of their batches."""
        if not history.last(f"{CHECKS}/class_count") > 1 or is_warming_up(history):
            return
        ratio, last, entropy = compared(history, int(self.steps), int(self.checks))
        if not self.share < ratio < 1.1 or entropy > self.even * history.uniform_loss:
            return
        yield self.finding(
            "warning",
            int(self.steps),
            f"Suspicious: after {history.loss.last_step:,} steps the loss is {last:.3g}, and predicting how frequent "
            f"the targets are gives {entropy:.3g}, so the model has learned nothing from its inputs. If no other "
            "finding explains it, the targets may not belong to their inputs.",
            "Print a few rows with their targets; check that view, reshape and flatten keep outputs and targets in the "
            "same order; try to overfit a single batch, which must bring the loss near 0.",
            Evidence(f"{CHECKS}/term_loss", last, self.share * entropy, f"far below {entropy:.3g}"),
            confidence=0.5,
        )


NEAR_MEAN = 2.0
"""Loss relative to that of the mean up to which the model is likely to predict the mean."""


class NoBetterThanMean(NothingLearned):
    """Finds a regression that always predicts the mean of its targets, or is worse than that.

    Symptom: The loss of a regression stays at or far above the variance of the targets

    The model predicts the mean of its targets for all inputs, so it has learned nothing from them: targets that do
    not belong to their inputs (shuffled, or noise drawn again), inputs without information, or a cause that another
    finding names.

    Applies to: mse_loss, binary cross-entropies and kl_div without further terms, on the CPU, after 200 steps

    Source: the mean squared error of the mean is the variance; the binary cross-entropy of frequencies their
    entropy; the divergence from the mean the information of the rows in the targets
    """

    name = "no-better-than-mean"
    share = Threshold(0.97, "of the variance of the same batch; targets that inputs explain by less are rare")
    worse = Threshold(5.0, "times the variance; critics, whose targets move, can be above it for a while")
    steps = Threshold(200, "steps; models that learn are below the variance by then")
    checks = Threshold(3, "last checked batches after a quarter of the steps, of which the median counts")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the last checked losses are those of predicting the mean of their batches."""
        ratio, last, variance = compared(history, int(self.steps), int(self.checks))
        is_term = history.last(f"{CHECKS}/loss_has_terms") > 0
        if is_term or history.last(f"{CHECKS}/class_count") > 0 or is_warming_up(history):
            return
        if not (self.share < ratio < NEAR_MEAN or ratio > self.worse):
            return
        loss = history.curve(f"{CHECKS}/term_loss")
        losses = (
            f"{history.loss.last_step:,} steps the loss is {last:.3g}, and always predicting the mean of the "
            f"targets gives {variance:.3g}"
        )
        if ratio < NEAR_MEAN:
            why = (
                f"Suspicious: after {losses}, so the model has learned nothing from its inputs. If no other finding "
                "explains it, the targets may not belong to their inputs."
            )
            remedy = (
                "Print a few rows with their targets and predictions; check that the targets are those that belong to "
                "the inputs; try to overfit a single batch, which must bring the loss near 0."
            )
        elif loss.first > self.worse * variance:
            why = (
                f"After {losses}: the outputs are too large or too small from the start, where the loss is "
                f"{loss.first:.3g}."
            )
            remedy = (
                "Use smaller initial weights for embeddings and the last layer, start its bias at the mean of the "
                "targets, and standardise targets whose mean is far from 0."
            )
        else:
            why = f"After {losses}: the training makes the model worse."
            remedy = "Lower the learning rate, and print a few rows with their targets and predictions."
        step = int(self.steps)
        evidence = Evidence(f"{CHECKS}/term_loss", last, self.share * variance, f"far below {variance:.3g}")
        yield self.finding("warning", step, why, remedy, evidence, confidence=0.5 if ratio < NEAR_MEAN else 0.7)


class LossConstant(Detector):
    """Finds a loss that is one number, although weights and batches change.

    Symptom: The loss is the same number at every step

    The value of the loss depends neither on the weights nor on the batch: terms cancel, such as a model and its
    reference that are one object, or the outputs do not reach the loss.

    Applies to: losses of at least 50 steps whose weights change

    Source: the loss of DPO is ln(2) where model and reference agree, Rafailov et al., arXiv 2305.18290
    """

    name = "loss-constant"
    stage = "outputs"
    spread = Threshold(1e-4, "of the loss; losses of different batches differ by more")
    steps = Threshold(50, "steps")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if all losses agree to four digits, and the optimizer changes the weights."""
        loss = history.loss
        values, level = loss.values, abs(loss.first)
        if len(loss) < self.steps or not np.isfinite(values).all() or not level > 0:
            return
        if np.ptp(values) < self.spread * level and history.update_ratios.median > 1e-7:
            yield self.finding(
                "warning",
                int(loss.steps[1]),
                f"The loss is {loss.first:.4g} at all {len(loss):,} steps, although the weights change: terms of the "
                "loss cancel, or it does not depend on the outputs of the model.",
                "Check that a reference or target model is a copy (copy.deepcopy) and not the model itself, and that "
                "the outputs of the model reach the loss.",
                Evidence(f"{CHECKS}/loss", loss.last, None, "differs between batches"),
                confidence=0.8,
            )


class LossNotFalling(NothingLearned):
    """Reports a loss that has not fallen, when nothing explains it.

    Symptom: The loss does not fall

    The loss is where it started. Look at the other findings first; without any, try to overfit one batch.

    Applies to: positive losses, after 200 steps

    Source: Karpathy, A Recipe for Training Neural Networks (2019): overfit one batch
    """

    name = "loss-not-falling"
    fall = Threshold(0.02, "trainings that work fall by more within 200 steps")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if the loss has fallen by less than 2 %."""
        loss = history.loss
        if len(loss) < 100 or loss.last_step < 200 or loss.first_nonfinite is not None:
            return
        if history.loss_fall < self.fall:
            yield self.finding(
                "info",
                200,
                f"The loss has not fallen in {loss.last_step:,} steps: it was {loss.start_level():.3g} and is "
                f"{loss.end_level():.3g}.",
                "Try to overfit one batch: without success, model or loss have a fault; with success, look at the "
                "data.",
                Evidence(f"{CHECKS}/loss", loss.end_level(), None, "falls by more than 2 % in 200 steps"),
                confidence=0.5,
            )


class LossSpike(Detector):
    """Reports spikes of the loss from which it did not recover at once; a remark if it has recovered or falls again.

    Symptom: The loss spikes

    The loss jumped within one step. Usual causes are rows of the data that are unlike the others, a learning rate
    that is too high, and second moments that are out of date. loopscope rewind RUN --spike looks for the cause. A
    remark if the loss falls from its new level, as after a change of the data or of the loss.

    Source: hook loss_spikes
    """

    name = "loss-spike"
    stage = "loss"
    fall = Threshold(0.7, "of the level of the 20 steps after the spike: the loss falls from there")
    patience = Threshold(60, "steps after the spike, so that noise is no fall")
    needs = ("loss_spikes",)
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding about the first alert of a spike above the severity info."""
        spikes = history.alerts_of("loss_spikes", "loss_deviation", "loss_rise")
        alerts = [alert for alert in spikes if alert.get("severity", "warning") != "info"]
        if not alerts or learns_values(history):
            return
        alert = alerts[0]
        rows, step = alert.get("rows") or [], int(alert["step"] or 0)
        before = median_of(history.loss.between(step - 20, step - 1))
        after = history.loss.between(step + 1, history.step)
        has_recovered = len(after) >= 10 and median_of(after[len(after) // 2 :]) <= before + 0.1 * abs(before)
        level, newest = median_of(after[:20]), median_of(after[-max(1, len(after) // 4) :])
        is_falling = len(after) >= self.patience and newest < self.fall * level
        yield self.finding(
            "info" if has_recovered or is_falling else "warning",
            step,
            f"{alert['sentence'].rstrip('.')}, and {counted(len(alerts) - 1, 'time')} later."
            if len(alerts) > 1
            else alert["sentence"],
            "loopscope rewind RUN --spike looks for the cause; look at the rows of the batch"
            + (f": {', '.join(map(str, rows[:5]))}." if 0 < len(rows) <= 64 else "."),
            Evidence(f"loss_spikes/{alert['metric']}", alert["value"], alert["limit"], f"below {alert['limit']:g}"),
            confidence=0.7,
        )


class LossUnbounded(Detector):
    """Finds a loss that falls below zero ever faster.

    Symptom: The loss becomes negative and falls ever faster

    The loss has no lower bound, so that the training only drives it further below zero: a term with the wrong sign,
    a distance that should be limited by a margin, or a likelihood whose variance may shrink to 0.

    Source: a loss that trains a model has a minimum
    """

    name = "loss-unbounded"
    stage = "loss"
    size = Threshold(30.0, "times the first loss; likelihoods of continuous data become less negative")
    speed = Threshold(1.2, "fall in the last third over that in the second; trainings slow down")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the last third of the losses falls faster than the second, far below zero."""
        loss = history.loss
        third = len(loss) // 3
        if third < 30:
            return
        width = max(5, third // 5)
        first = loss.start_level()
        middle, late, last = (median_of(loss.values[end - width : end]) for end in (third, 2 * third, len(loss)))
        is_large = last < -self.size * max(1.0, abs(first))
        if is_large and last < late < middle and late - last > self.speed * (middle - late):
            why = f"The loss falls ever faster below zero, from {first:.3g} to {last:.3g}: it has no lower bound."
            remedy = (
                "Check the signs of its terms, and limit distances by a margin and variances from below. With binary "
                "cross-entropy, check that all targets are between 0 and 1."
            )
            evidence = Evidence(f"{CHECKS}/loss", last, -self.size * max(1.0, abs(first)), "approaches a minimum")
            yield self.finding("warning", int(loss.steps[third]), why, remedy, evidence, confidence=0.8)


def validation_loss(history: History) -> tuple[str, Curve]:
    """Return the name and the curve of a validation loss; an empty curve if there is none."""
    prefix = "training_metrics/evaluation/"
    evaluated = {name: name.removeprefix(prefix) for name in history.curves if name.startswith(prefix)}
    names = [name for name, number in evaluated.items() if "loss" in number and "train_" not in number]
    preferred = [name for name in names if any(word in name for word in ("val", "eval", "test", "valid"))]
    name = next(iter(preferred or names), "")
    return name, history.curve(name)


NEW_ROWS = 0.05
"""Share of the rows of a batch that may have been seen in the epoch before."""


def validation_rises(history: History) -> bool:
    """Return whether the last validation losses are above the lowest one by more than they scatter."""
    values = validation_loss(history)[1].values
    best = int(np.argmin(values)) if len(values) else 0
    later = values[best + 1 :]
    return len(later) >= 2 and bool(np.all(later[-3:] > 1.02 * values[best])) and later[-1] >= later[0]


class TrainValidationDiverging(Detector):
    """Finds a model that memorises its training data.

    Symptom: The validation loss rises while the training loss falls

    The model memorises the training data. Stop at the best validation loss, use more or more varied data, weight
    decay or dropout, and check for rows that occur several times. If the validation loss was high from the start,
    its data are prepared differently. A remark if the validation accuracy still rises: the model may only be
    overconfident, or generalise late.

    Source: early stopping, Prechelt 1998
    """

    name = "train-validation-diverging"
    stage = "validation"
    rise = Threshold(1.3, "validation loss over its minimum; noise and mild overfitting stay below")
    memorised_rise = Threshold(1.15, "the same limit if the training loss is below 2 % of the validation loss")
    unlike = Threshold(2.0, "best validation loss over the first training loss; overfitting starts below that")
    at_once = Threshold(2.0, "validation over training loss after one epoch, in which no row was seen twice")
    apart = Threshold(0.1, "of the first training loss; the least such difference that counts")
    gain = Threshold(0.02, "rise of the validation accuracy since the best validation loss; noise is below")
    gap = Threshold(0.25, "train accuracy minus validation accuracy once the training set is learned")
    chance = Threshold(0.97, "of ln(C), which every validation loss exceeds if labels belong to no input")
    learned = Threshold(0.85, "of ln(C), which the training loss is below in the same case")
    unmoved = Threshold(0.9, "of the first validation loss; a model that learns is below it once")
    trained = Threshold(0.6, "share by which the training loss has fallen in the same case")
    fallen = Threshold(0.2, "the same share if all validation losses are the same number")
    learned_later = Threshold(0.93, "as learned, after five evaluations or more")
    learned_at_end = Threshold(0.96, "as learned_later, at the end of the training")
    flat = Threshold(0.03, "of the first validation loss; a model that is trained on other data moves it by more")
    memorised = Threshold(0.05, "share by which the training loss has fallen if the model memorises its data")
    small = Threshold(0.02, "of the first training loss; smaller rises cost nothing")
    needs = ("training_metrics",)
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the validation loss has risen by a factor, or accuracies differ widely at the end."""
        name, validation = validation_loss(history)
        for judge in (self._unchanged, self._apart_at_once, self._rising, self._like_chance, self._unmoved):
            if (found := judge(history, name, validation)) is not None:
                yield found
                return
        yield from self._accuracies_apart(history)

    def _unchanged(self, history: History, name: str, validation: Curve) -> Finding | None:
        """Return a finding if all validation losses are the same number while the training loss falls."""
        values = validation.values
        if len(values) < 3 or np.ptp(values) != 0 or not history.loss_fall > self.fallen:
            return None
        if not values[0] > 1.2 * history.loss.end_level():  # both are at the lowest possible value, such as 0
            return None
        why = (
            f"The validation loss is exactly {values[0]:.4g} in all {len(values)} evaluations, while the training loss "
            f"has fallen to {history.loss.end_level():.3g}: the evaluated weights are not the trained ones."
        )
        remedy = "Evaluate the trained model itself; update averaged weights or a copy before you evaluate them."
        evidence = Evidence(name, validation.last, None, "changes with the weights")
        return self.finding("warning", validation.first_step, why, remedy, evidence)

    def _apart_at_once(self, history: History, name: str, validation: Curve) -> Finding | None:
        """Return a finding if validation losses are far above those of training rows that were not seen before."""
        if len(validation) < 2 or not 0 < validation.first_step <= history.first_epoch_end:
            return None
        repeated = history.curve(f"{CHECKS}/repeated_row_fraction")
        seen = repeated.values[repeated.steps <= validation.first_step]
        if not len(seen) or float(np.max(seen)) > NEW_ROWS:
            return None
        loss = history.loss
        levels = [median_of(loss.between(int(step - max(5, step // 5)), int(step))) for step in validation.steps]
        trained, ratios = np.array(levels), validation.values / np.array(levels)
        gap = self.apart * loss.start_level()
        # Later losses may be apart because the model memorises; those of the first epoch may not.
        if not (trained.min() > 0 and ratios.min() > self.at_once and validation.first - trained[0] > gap > 0):
            return None
        return self._suspicious(
            validation.first_step,
            f"the validation loss is {validation.first:.3g} after the first epoch already, where the training loss of "
            f"rows that were never seen before is {trained[0]:.3g}: no model can have memorised them yet, so the "
            "validation data differ, or are prepared differently.",
            "Compare a batch of both: normalisation, preprocessing, labels, and the formula of the loss.",
            Evidence(name, validation.first, self.at_once * float(trained[0]), f"about {trained[0]:.3g}"),
            confidence=0.8,
        )

    def _rising(self, history: History, name: str, validation: Curve) -> Finding | None:
        """Return a finding if the validation loss rises while the training loss falls."""
        values = validation.values[np.isfinite(validation.values)]
        if len(values) < 3 or not values.min() > 0:
            return None
        best = int(np.argmin(values))
        step, later = int(validation.steps[best]), values[best + 1 :]
        level = median_of(later[-3:]) if len(later) >= 2 else math.nan  # a single value may be noise
        loss = history.loss
        train_then, train_now = loss.at(step), loss.end_level()
        rise = self.memorised_rise if train_now < 0.02 * values[-1] else self.rise
        is_rising = level > rise * values[best] and values[-1] > rise * values[best]
        is_small = values[-1] - values[best] < self.small * loss.start_level()
        has_learned = history.loss_fall > self.memorised or not loss.start_level() > 0
        if is_small or not (is_rising and has_learned and train_now < train_then and train_now < values[-1]):
            return None
        accuracy = history.curve("training_metrics/val_acc")
        then, now = accuracy.at(step), accuracy.last
        if now > then + self.gain and self._generalises(history, step):
            return self.finding(
                "info",
                step,
                f"The validation loss rises, from {values[best]:.3g} at step {step:,} to {values[-1]:.3g}, while the "
                f"validation accuracy rises, too, from {then:.1%} to {now:.1%}.",
                "Judge the model by its accuracy; if you need its probabilities, use label smoothing or weight decay.",
                Evidence("training_metrics/val_acc", now, then + self.gain, "near its maximum"),
                confidence=0.7,
            )
        course = (
            f"validation loss rises, from {values[best]:.3g} at step {step:,} to {values[-1]:.3g}, while the training "
            f"loss falls to {train_now:.3g}"
        )
        evidence = (
            Evidence(name, float(values[-1]), rise * float(values[best]), "near its minimum"),
            Evidence(f"{CHECKS}/loss", train_now),
        )
        if values[best] > self.unlike * loss.start_level() > 0:
            return self._suspicious(
                step,
                f"the {course}. Even its best value is far above the first training loss of {loss.start_level():.3g}, "
                "so the validation data may be prepared differently.",
                "Compare a batch of both: normalisation, preprocessing, labels, and the formula of the loss.",
                *evidence,
            )
        return self._like_chance(history, name, validation) or self._memorises(
            step, f"The {course}: the model memorises its training data.", *evidence
        )

    def _like_chance(self, history: History, name: str, validation: Curve) -> Finding | None:
        """Return a finding if the validation loss was never below that of equal probabilities."""
        if not self._does_not_generalise(history, validation):
            return None
        trained, uniform = history.loss.end_level(), history.uniform_loss
        is_flat = np.ptp(validation.values) < self.flat * validation.first
        averages = "If you evaluate averaged weights or a copy, check their decay and when they are updated. "
        return self._suspicious(
            validation.first_step,
            f"the validation loss was never below that of equal probabilities, ln(C) = {uniform:.3g}, while the "
            f"training loss has fallen to {trained:.3g}: the model does not generalise at all.",
            f"{averages if is_flat else ''}Compare a batch of both sets: normalisation, preprocessing, vocabulary, and "
            "whether the labels belong to their inputs; check that both losses are averaged in the same way.",
            Evidence(name, validation.last, uniform, f"below {uniform:.3g}"),
            Evidence(f"{CHECKS}/loss", trained),
        )

    def _unmoved(self, history: History, name: str, validation: Curve) -> Finding | None:
        """Return a finding if the validation loss stays near the first training loss, far above the later ones."""
        values, first = validation.values, history.loss.start_level()
        if len(values) < 5 or not first > 0 or not history.loss_fall > self.trained:
            return None
        start, lowest, highest = (float(value) for value in (values[0], values.min(), values.max()))
        is_near_start = 0.75 * first < start < 1.5 * first
        if not (is_near_start and lowest > self.unmoved * start and highest < 1.2 * start):
            return None
        trained = history.loss.end_level()
        return self._suspicious(
            validation.first_step,
            f"the validation loss hardly changes, from {start:.3g} to {validation.last:.3g}, while the training loss "
            f"falls from {first:.3g} to {trained:.3g}: the weights that are evaluated may not be those that are "
            "trained.",
            "Evaluate the trained model itself; if you evaluate averaged weights or a copy, check their decay and when "
            "they are updated.",
            Evidence(name, validation.last, self.unmoved * start, "falls with the training"),
            Evidence(f"{CHECKS}/loss", trained),
        )

    def _accuracies_apart(self, history: History) -> Iterable[Finding]:
        """Yield a finding if the training set is learned and the validation accuracy stays far below."""
        train, held_out = history.curve("training_metrics/train_acc"), history.curve("training_metrics/val_acc")
        gap = train.last - held_out.last
        learned = held_out.values[train.values > 0.95] if len(train) == len(held_out) else held_out.values
        is_stuck = len(learned) >= 5 and held_out.last <= learned[0] + 0.02  # a gap that closes is grokking
        if train.last > 0.95 and gap > self.gap and is_stuck:
            yield self._memorises(
                train.first_step_where(train.values > 0.95) or train.last_step,
                f"The training accuracy is {train.last:.0%}, but the validation accuracy {held_out.last:.0%}: the "
                "model memorises its training data.",
                Evidence("training_metrics/val_acc", held_out.last, train.last - self.gap, "near train_acc"),
            )

    def _does_not_generalise(self, history: History, validation: Curve) -> bool:
        """Return whether all validation losses are those of equal probabilities or worse, and training losses not."""
        uniform, values = history.uniform_loss, validation.values
        if not len(values) or not math.isfinite(uniform) or not values.min() > self.chance * uniform:
            return False
        if len(values) < 3:  # so few must be far off, and be measured after the training
            is_late = validation.first_step > 0.5 * history.step
            return is_late and values.min() > 1.1 * uniform and history.loss.end_level() < 0.5 * uniform
        accuracy = history.last("training_metrics/val_acc")
        later = self.learned_at_end if history.is_over else self.learned_later
        learned = self.learned if len(values) < 5 else later
        return history.loss.end_level() < learned * uniform and not accuracy > 2 * math.exp(-uniform)

    def _generalises(self, history: History, best_step: int) -> bool:
        """Return whether the validation accuracy still rises, or is not far below that of the training."""
        accuracy = history.curve("training_metrics/val_acc")
        recent = accuracy.last_step - (accuracy.last_step - best_step) // 4
        is_rising = accuracy.last > accuracy.at(recent) + self.gain
        return is_rising or history.last("training_metrics/train_acc") - accuracy.last < self.gap

    def _suspicious(self, step: int, why: str, remedy: str, *evidence: Evidence, confidence: float = 0.6) -> Finding:
        return self.finding("warning", step, f"Suspicious: {why}", remedy, *evidence, confidence=confidence)

    def _memorises(self, step: int, why: str, *evidence: Evidence) -> Finding:
        remedy = "Stop at the best validation loss, or add data, weight decay or dropout."
        return self.finding("warning", step, why, remedy, *evidence, confidence=0.85)


class ValidationBetter(Detector):
    """Reports a validation loss that is clearly below the training loss without dropout.

    Symptom: The validation loss is below the training loss

    Suspicious: without dropout and augmentation the validation loss should not be clearly lower. Rows of the
    validation set may be in the training set, it may be easier, or the loss may be computed differently.

    Applies to: runs without dropout that report a validation loss

    Source: a training loss averaged over an epoch lags behind by half an epoch, which is a smaller difference
    """

    name = "validation-better-than-training"
    stage = "validation"
    ratio = Threshold(0.7, "validation over training loss at the end, where a lag is small")
    needs = ("training_metrics", CHECKS)
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a remark if the last validation losses are far below the training loss."""
        name, validation = validation_loss(history)
        if len(validation) < 3 or history.facts.get("dropouts") or len(history.loss) < 20:
            return
        train, held_out = history.loss.end_level(), median_of(validation.values[-3:])
        if train > 0.02 and 0 < held_out < self.ratio * train and not history.falls_short(0.1):
            why = (
                f"Suspicious: the validation loss of {held_out:.3g} is clearly below the training loss of {train:.3g}, "
                "although there is no dropout."
            )
            remedy = "Check that no row is in both sets, and that both losses are computed in the same way."
            evidence = Evidence(name, held_out, self.ratio * train, "at or above the training loss")
            yield self.finding("info", validation.last_step, why, remedy, evidence, confidence=0.4)
