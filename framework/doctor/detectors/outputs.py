"""Detectors of outputs that ignore the inputs, and of scores that the loss contradicts."""

import math
import re
from collections.abc import Iterable

from .. import Curve, Detector, Evidence, Finding, History, Threshold
from ..history import median_of
from ..measures import CHECKS, compared, is_minimised
from .learning_rates import is_warming_up
from .losses import validation_loss

SCORES = frozenset(
    {"acc", "accuracy", "f1", "iou", "miou", "dice", "recall", "precision", "bleu", "jaccard", "exact", "em", "auc"}
    | {"match", "right", "correct", "hit", "hits", "success", "retrieval", "map", "ndcg", "mrr", "score"}
)
"""Words in the names of scores between 0 and 1 of which higher is better."""
LEAST_STEPS = 200
"""Steps after which a loss that has not fallen counts as that of a constant, if the latter is unknown."""
SHARES_OF_RIGHT = frozenset({"acc", "accuracy"})
"""Words in the names of shares of rows whose largest output is the right class."""


class OutputsIgnoreInputs(Detector):
    """Finds a model whose outputs are the same for all rows.

    Symptom: The model gives the same output for every row

    The outputs do not depend on the inputs: a mask that hides all of them (inverted), a layer whose output is
    multiplied by 0 or not used, all units dead, or a term of the loss, such as a KL divergence that is summed while
    the others are averaged, that outweighs the one that compares outputs and targets.

    Applies to: cross-entropies, binary ones and losses of numbers, on the CPU, after 200 steps

    Source: Lucas et al., arXiv 1911.02469, on the collapse of autoencoders; the information of rows in predictions
    """

    name = "outputs-ignore-inputs"
    law = "input_matters"
    stage = "outputs"
    variation = Threshold(1e-6, "of the targets; models of shuffled labels see their inputs and vary by more than 1e-4")
    of_term = Threshold(0.02, "the same where other terms compete, which leave a little; it explains 2 % at most")
    share = Threshold(0.97, "of the loss of the best constant, below which the outputs are useful")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the last checked outputs hardly vary and are no better than a constant."""
        curve = history.curve(f"{CHECKS}/output_variation")
        variation = median_of(curve.values[-3:])
        ratio, loss, constant = compared(history)
        if math.isnan(ratio) and history.step >= LEAST_STEPS and history.falls_short(1 - self.share):
            ratio, loss, constant = 1.0, history.loss.end_level(), history.loss.start_level()
        is_term = history.last(f"{CHECKS}/loss_has_terms") > 0
        limit = self.of_term if is_term else self.variation
        if is_warming_up(history) or not (variation < limit and ratio > self.share):
            return
        if not is_minimised(history):  # the outputs of a critic follow returns that grow
            return
        remedy = (
            "Feed two different rows and look where their activations become equal: a mask (True means 'take part' in "
            "scaled_dot_product_attention), a multiplication by 0, dead units."
        )
        if is_term:
            remedy = (
                "Print each term of the loss: a term that is summed while others are averaged outweighs them. Give all "
                "the same reduction, or raise the weight of the one that compares outputs and targets."
            )
        yield self.finding(
            "warning",
            curve.first_step_where(curve.values < limit) or curve.last_step,
            f"The outputs are the same for all rows: they vary by {variation:.1g} of what the targets vary, and their "
            f"loss of {loss:.3g} is no better than that of a constant, {constant:.3g}.",
            remedy,
            Evidence(f"{CHECKS}/output_variation", variation, limit, "above 0.1"),
            Evidence(f"{CHECKS}/term_loss", loss, self.share * constant, f"far below {constant:.3g}"),
            confidence=0.8,
        )


class ScoreContradictsLoss(Detector):
    """Finds a score that stays low although the loss is that of a model that is right.

    Symptom: The loss falls to almost nothing, but a score stays low

    Loss and score do not judge the same: the loss leaves out or rewards something (an ignored class, a decoder that
    sees its targets, a frequent background), or the score compares something else than predictions and targets, or
    runs the model in another way. Compute both by hand on one batch.

    Applies to: evaluations with a score in its name, such as acc, iou, dice, f1, exact or recall

    Source: a wrong class has a probability of at most 1/2 and costs ln 2 or more, so that the share of wrong rows
    is at most loss / ln 2; Lin et al., arXiv 1708.02002, for scores of 0 at frequent backgrounds
    """

    name = "score-contradicts-loss"
    stage = "validation"
    evaluations = Threshold(3, "scores of hard tasks are low in the first ones")
    zeros = Threshold(5, "evaluations with a score of exactly 0, at any loss that has fallen by half")
    fall = Threshold(0.5, "of the first loss")
    learned = Threshold(0.05, "of ln(C), or of the first loss, from which on the model is right about the loss")
    low = Threshold(0.6, "a score that a loss near 0 leaves no room for")
    margin = Threshold(0.2, "below the least accuracy that the loss allows")
    needs = ("training_metrics",)
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for the first score that contradicts the losses."""
        for metric, curve in history.curves.items():
            hook, _, name = metric.partition("/")
            words = {*re.split(r"[/_\W]+", name.lower())}
            if hook != "training_metrics" or not words & SCORES or "train" in words or not len(curve):
                continue
            if why := self._why(history, curve, name.removeprefix("evaluation/"), words):
                yield self.finding(
                    "warning",
                    curve.first_step,
                    f"Suspicious: {why}",
                    "Print predictions and targets of a batch, and compute loss and score by hand: is a class ignored, "
                    "does the model see its targets, does the score run the model in another way, or is one class so "
                    "frequent that the others do not count?",
                    Evidence(metric, curve.last, None, "near 1"),
                    Evidence(f"{CHECKS}/loss", history.loss.end_level()),
                    confidence=0.7,
                )
                return

    def _why(self, history: History, curve: Curve, name: str, words: set[str]) -> str:
        """Return in words how a score contradicts the loss; empty if it does not."""
        values = curve.values
        if len(values) >= self.zeros and not values.any() and history.loss_fall > self.fall:
            return (
                f"{name} is 0 in all {len(values)} evaluations, although the loss falls to "
                f"{history.loss.end_level():.3g}: the model may predict only the most frequent class."
            )
        best, held_out = float(values.max()), validation_loss(history)[1].last
        if len(values) < self.evaluations or not 0 <= values.min() <= best < self.low:
            return ""
        shown = f"{name} is at most {best:.3g} in all {len(values)} evaluations, although the loss"
        if words & SHARES_OF_RIGHT and history.uniform_loss > 0 and math.isfinite(held_out):
            least = 1 - held_out / math.log(2)
            if best < least - self.margin:
                return f"{shown} of the same evaluation, {held_out:.3g}, allows no accuracy below {least:.3g}."
        scale = history.uniform_loss if history.uniform_loss > 0 else history.loss.first
        learned = self.learned * scale
        trained = history.loss.end_level()
        if not 0 <= trained < learned or held_out > learned:
            return ""
        of_both = f"s of training and evaluation are {trained:.2g} and {held_out:.2g}"
        return f"{shown}{of_both if math.isfinite(held_out) else f' has fallen to {trained:.2g}'}."
