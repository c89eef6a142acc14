"""Detectors of the data: repeated rows, order, scale, padding and labels."""

import math
from collections.abc import Iterable

import numpy as np

from .. import Detector, Evidence, Finding, History, Rule, Threshold
from ..detector import SetUpDetector, median
from ..history import median_of
from ..measures import CHECKS, FEW_CLASSES, are_tokens, classes_of_batches, is_sorted_by_class
from .losses import TrainValidationDiverging, validation_rises


class RowsRepeated(Detector):
    """Finds rows that occur several times within a batch or an epoch.

    Symptom: The training loss is far below the validation loss

    The training data contain rows several times: a loader that yields the same rows on every worker, data that were
    appended twice, or a sampler with replacement. The model memorises them.

    Source: Lee et al., arXiv 2107.06499
    """

    name = "rows-repeated"
    stage = "evaluation"
    share = Threshold(0.2, "of the rows; natural data have a few percent")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for repeated rows; a warning if the validation loss suffers."""
        repeated, duplicated = (history.curve(f"{CHECKS}/{name}_row_fraction") for name in ("repeated", "duplicate"))
        within_epoch, within_batch = (float(np.mean(repeated.values)) if len(repeated) else 0.0, duplicated.median)
        if not max(within_epoch, within_batch) > self.share or any(SameBatch().detect(history)):
            return
        # Random draws repeat rows by design; they harm if the validation loss rises.
        is_harmful = any(TrainValidationDiverging().detect(history)) or validation_rises(history)
        place, share = ("batch", within_batch) if within_batch > within_epoch else ("epoch", within_epoch)
        yield self.finding(
            "warning" if is_harmful else "info",
            repeated.first_step_where(repeated.values > self.share) or 1,
            f"{share:.0%} of the rows of a batch occur more than once within the same {place}, so the model sees "
            "the same rows again and again.",
            "Remove duplicates from the data."
            if place == "batch"
            else "Check that every step fetches a new batch, that the data have no duplicates, and that every "
            "worker of the loader has other rows.",
            Evidence(f"{CHECKS}/repeated_row_fraction", share, self.share, "0 to 0.05"),
            confidence=0.85,
        )


class SameBatch(SetUpDetector):
    """Finds a training that gets the same batch at every step.

    Symptom: The training loss falls to 0 at once, and the validation loss rises

    Every step gets the same rows in the same order: a random generator that is seeded again in the function that
    draws the batch, or next(iter(loader)) in every step. Create generator and iterator once, before the loop.

    Applies to: batches on the CPU; the same tensors, given again and again on purpose, do not count

    Source: torch.Generator.manual_seed; torch.utils.data.DataLoader: every iter() starts again
    """

    name = "same-batch-at-every-step"
    batches = Threshold(9, "equal batches in a row after the first; data of single rows repeat fewer")
    share = Threshold(0.9, "equal batches in a row, as a share of all steps")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if nearly all batches are equal; data that a policy generates may become equal later."""
        curve = history.curve(f"{CHECKS}/same_batch_count")
        if not curve.last >= max(self.batches, self.share * curve.last_step):
            return
        rows = history.settings.get("batch_size")
        yield self.finding(
            "warning",
            max(1, curve.first_step_where(curve.values > 0) or 1),
            f"Every step gets the same batch{f' of {rows} rows' if rows else ''}: {int(curve.last)} batches in a row "
            "had the rows of the one before, in the same order, so the model learns nothing but these rows.",
            "Create the iterator of the loader, or the random generator of the batches, once before the loop, and "
            "print the first rows of two batches.",
            Evidence(f"{CHECKS}/same_batch_count", curve.last, self.batches, "0"),
            confidence=0.95,
        )


class SortedByClass(SetUpDetector):
    """Finds batches that contain a single class each, or far fewer classes than random rows would.

    Symptom: The loss goes up and down with the order of the data

    The data are sorted by class and not shuffled, so every batch pulls towards few classes: set shuffle=True.

    Applies to: classification with integer targets

    Source: Bengio, arXiv 1206.5533, section 3.1: shuffle
    """

    name = "data-sorted-by-class"
    share = Threshold(0.75, "of the checked batches; shuffled batches of 8 rows have one class rarely")
    top = Threshold(0.9, "of the targets of a batch; of shuffled data always the same class may reach it")
    batches = Threshold(0.25, "of the checked batches that a class dominates, not always the same one")
    classes = Threshold(FEW_CLASSES, "of the classes that a batch of equally frequent ones would have")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if most checked batches had one class or few, and the loss has many."""
        curve = history.curve(f"{CHECKS}/single_class_batch_fraction")
        rows = history.settings.get("batch_size") or 0
        classes = history.last(f"{CHECKS}/class_count")
        if curve.last_step < 3 or rows < 8 or not classes > 1 or history.last(f"{CHECKS}/normalised_over_rows") > 0:
            return
        if history.last(f"{CHECKS}/loss_compares_outputs") > 0:  # the target of a contrastive loss is a position
            return
        if curve.last > self.share:
            problem = (
                f"In {curve.last:.0%} of the checked batches all targets are the same class: the data are sorted and "
                "not shuffled, or all labels are equal."
            )
            evidence = Evidence(f"{CHECKS}/single_class_batch_fraction", curve.last, self.share, "0")
        elif (dominated := self._dominated(history)) is not None:
            share, count = dominated
            problem = (
                f"In {share:.0%} of the checked batches nearly all targets are the same class, and {count} different "
                "classes are that of a batch: the data are sorted by class and not shuffled."
            )
            evidence = Evidence(f"{CHECKS}/target_top_fraction", share, self.batches, "0")
        else:
            counts = classes_of_batches(history)
            if counts is None or not is_sorted_by_class(history):
                return
            found, expected = counts
            problem = (
                f"A batch of {rows} rows has {found:g} of {classes:g} classes in the median, where random rows would "
                f"have about {expected:.0f}: the data are sorted by class and not shuffled."
            )
            limit = self.classes * expected
            evidence = Evidence(f"{CHECKS}/target_class_count", found, limit, f"about {expected:.0f}")
        remedy = "Set shuffle=True in the DataLoader."
        tops = history.curve(f"{CHECKS}/target_top").values
        if curve.last == 1 and len({*tops.tolist()}) == 1:
            problem = f"All targets of all checked batches are the class {tops[0]:g}: the labels are equal, or sorted."
            remedy = "Print the labels of the data set; if they differ, set shuffle=True in the DataLoader."
        yield self.finding("warning", 1, problem, remedy, evidence, confidence=0.9)

    def _dominated(self, history: History) -> tuple[float, int] | None:
        """Return the share of the checked batches that one class dominates, and the number of such classes.

        ``None`` for few such batches, for unbalanced data, in which it is always the same class, and for tokens.
        """
        fractions, tops = (history.curve(f"{CHECKS}/{name}") for name in ("target_top_fraction", "target_top"))
        if are_tokens(history) or len(fractions) != len(tops) or len(fractions) < 3:
            return None
        is_dominated = fractions.values > self.top
        share, count = float(is_dominated.mean()), len({*tops.values[is_dominated].tolist()})
        return (share, count) if share > self.batches and count > 1 else None


class InputsNotNormalised(SetUpDetector):
    """Finds inputs whose values are far from mean 0 and deviation 1.

    Symptom: The first loss is huge, or training is unstable

    The inputs have large values or a large offset, such as pixels from 0 to 255. Subtract the mean and divide by
    the standard deviation of the training set.

    Applies to: floating-point inputs

    Source: LeCun et al., Efficient BackProp, 1998, section 4.3
    """

    name = "inputs-not-normalised"
    deviation = Threshold(10.0, "standard deviation; normalised inputs have 1, embeddings up to 5")
    offset = Threshold(10.0, "absolute mean in standard deviations")
    kept = Threshold(0.05, "largest activation over the inputs; below it the model normalises them itself")
    small = Threshold(0.005, "standard deviation below which inputs hardly matter next to biases")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the first checked inputs are out of range."""
        mean, deviation = history.curve(f"{CHECKS}/input_mean"), history.curve(f"{CHECKS}/input_std")
        if not 0 < deviation.first < math.inf or not math.isfinite(mean.first):
            return
        if history.last(f"{CHECKS}/normalises_inputs") > 0:
            return
        offset = abs(mean.first) / deviation.first
        is_large = deviation.first > self.deviation
        is_offset = offset > self.offset and abs(mean.first) > 1
        is_small = deviation.first < self.small and abs(mean.first) < 1
        if not (is_large or is_offset or is_small):
            return
        outputs = [curve.first for curve in history.family("activations/rms").values()]
        if outputs and not is_small and max(outputs) < self.kept * max(abs(mean.first), deviation.first):
            return  # the model normalises them itself
        metric, value, limit = "input_std", deviation.first, self.deviation if is_large else self.small
        if is_offset and not is_large:
            metric, value, limit = "input_mean", mean.first, self.offset * deviation.first
        why = (
            f"The inputs are not normalised: their mean is {mean.first:.3g} and their standard deviation "
            f"{deviation.first:.3g}."
        )
        remedy = "Subtract the mean and divide by the standard deviation of the training set."
        evidence = Evidence(f"{CHECKS}/{metric}", value, limit, "mean 0, standard deviation 1")
        yield self.finding("warning", 1, why, remedy, evidence, confidence=0.85)


class InputsDrift(SetUpDetector):
    """Finds inputs whose scale leaves the usual range during the training.

    Symptom: The loss falls at first, then validation or training gets worse from epoch to epoch

    The inputs are normalised again and again: a transform that works in place (sub_, div_, inplace=True) changes
    the stored data, so that each epoch normalises what the last one has normalised. Normalise a copy.

    Applies to: floating-point inputs that start in a usual range

    Source: torchvision.transforms.functional.normalize: inplace
    """

    name = "inputs-drift"
    factor = Threshold(10.0, "last over first standard deviation; those of states that an agent reaches grow less")
    deviation = Threshold(10.0, "see inputs-not-normalised")
    small = Threshold(0.005, "see inputs-not-normalised")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the deviation of the last inputs is out of range and far from that of the first."""
        curve = history.curve(f"{CHECKS}/input_std")
        if len(curve) < 5 or not 0 < curve.first < math.inf:
            return
        first, last = median_of(curve.values[:3]), median_of(curve.values[-3:])
        grows = first < self.deviation < last and last > self.factor * first
        shrinks = 0 < last < self.small < first and last * self.factor < first
        if not (grows or shrinks):
            return
        is_out = curve.values > self.deviation if grows else curve.values < self.small
        yield self.finding(
            "warning",
            curve.first_step_where(is_out) or 1,
            f"The standard deviation of the inputs goes from {first:.3g} to {last:.3g} during the training: the data "
            "are changed again and again.",
            "Look for transforms that work in place, such as sub_, div_ or inplace=True, on data that stay in memory; "
            "normalise a copy.",
            Evidence(f"{CHECKS}/input_std", last, self.deviation if grows else self.small, f"about {first:.3g}"),
        )


class TargetsExtreme(SetUpDetector):
    """Finds targets of a regression that are far outside of all others.

    Symptom: The loss of a regression jumps, or is dominated by a few rows

    A few targets are far outside of the range of the others, and the squared error follows them: codes for missing
    values, such as −999, wrong units, or a distribution with a long tail. Remove or mask these rows, or train on
    the logarithm of the targets.

    Applies to: mse_loss, smooth_l1_loss and huber_loss, on the CPU

    Source: the squared error weights a target by the square of its distance
    """

    name = "targets-extreme"
    distance = Threshold(30.0, "ranges of the middle 80 %; a normal distribution stays below 1.5")
    repeated = Threshold(0.2, "of the checks with the same extreme value, as of a code; counts repeat theirs rarely")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the least or the largest target is far outside of the middle 80 %."""
        curves = {name: history.curve(f"{CHECKS}/target_{name}") for name in ("min", "low", "high", "max")}
        low, high = curves["low"].median, curves["high"].median
        if len(curves["low"]) < 2 or not high > low:
            return
        extremes = {"min": low - curves["min"].values, "max": curves["max"].values - high}
        side = max(extremes, key=lambda name: float(np.max(extremes[name])))
        distance = float(np.max(extremes[side])) / (high - low)
        if not distance > self.distance:
            return
        curve = curves[side]
        value = float(np.min(curve.values) if side == "min" else np.max(curve.values))
        count = int((curve.values == value).sum())
        is_code = count >= max(2, self.repeated * len(curve))
        is_harmful = is_code or history.falls_short(0.5)
        step = int(curve.steps[curve.values == value][0])
        yield self.finding(
            "warning" if is_harmful else "info",
            1 if is_code else step,
            f"Targets reach {value:.4g} at step {step:,}, while 80 % of them lie between {low:.3g} and {high:.3g}"
            + (": the same value at several steps, such as a code for missing values." if is_code else "."),
            "Print the rows with extreme targets: mask or remove missing values and errors, or train on the logarithm "
            "of the targets.",
            Evidence(f"{CHECKS}/target_{side}", value, None, f"{low:.3g} to {high:.3g}"),
            confidence=0.85 if is_code else 0.6,
        )


class InputsConstant(SetUpDetector):
    """Finds inputs that are the same number everywhere.

    Symptom: The loss does not fall, and gradients of the first layer are 0

    All inputs are one number: pixels divided as integers, a mask that removes everything, a wrong column, or data
    that were never loaded. Print a few rows.

    Applies to: floating-point inputs

    Source: Karpathy, A Recipe for Training Neural Networks (2019): look at the data right before the model
    """

    name = "inputs-constant"
    law = "input_matters"
    fall = Threshold(0.5, "of the first loss; a model that needs no inputs learns more")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if all checked inputs have the deviation 0 and the loss hardly falls."""
        deviation, mean = history.curve(f"{CHECKS}/input_std"), history.curve(f"{CHECKS}/input_mean")
        if len(deviation) >= 2 and not deviation.values.any() and history.falls_short(self.fall):
            why = f"All values of the inputs are {mean.first:.3g}, in every checked batch: the model sees no data."
            remedy = "Print a few rows right before the model; look for an integer division, a wrong column or a mask."
            evidence = Evidence(f"{CHECKS}/input_std", deviation.last, 0.0, "1")
            yield self.finding("critical", deviation.first_step, why, remedy, evidence, confidence=0.97)


class PaddingInLoss(Rule):
    """Finds padding tokens that count as targets.

    Symptom: The loss falls fast, but generated text is empty

    Padding tokens count in the loss, so that the model mostly learns to predict padding. Set the labels of padding
    to -100, the default ignore_index of cross_entropy.

    Applies to: sequences of integer targets

    Source: torch.nn.CrossEntropyLoss: ignore_index
    """

    name = "padding-in-loss"
    law = "padding_does_not_matter"
    stage = "evaluation"
    share = Threshold(0.1, "of the targets; natural text does not end with runs of one token")
    read = staticmethod(median)
    metric = f"{CHECKS}/padding_fraction"
    above = "share"
    why = (
        "{value:.0%} of the targets look like padding (the same token up to the end of most rows) and count in the "
        "loss."
    )
    remedy = "Set labels of padding to -100: labels[attention_mask == 0] = -100."
    confidence = 0.75


class ClassIgnored(Detector):
    """Finds a class or a token that the loss leaves out together with the padding.

    Symptom: One class is never predicted, or generated text does not end

    The number that marks padding is also a class or a token that occurs, and the loss ignores it everywhere:
    ignore_index equals a class, or pad_token equals eos_token. Give padding a separate number, such as -100.

    Applies to: rows of integer targets with padding, on the CPU

    Source: torch.nn.CrossEntropyLoss: ignore_index; transformers' DataCollatorForLanguageModeling masks pad tokens
    """

    name = "class-never-a-target"
    stage = "evaluation"
    inside = Threshold(0.1, "of the ignored targets; padding is at the ends of rows")
    masked = Threshold(0.8, "of all targets; masked language models ignore more on purpose")
    ends = Threshold(0.5, "of the rows; texts that are cut off have no end")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if ignored classes are within rows, or the last tokens of rows are ignored."""
        inside = history.curve(f"{CHECKS}/ignored_inside_fraction")
        ends = history.curve(f"{CHECKS}/ignored_end_fraction")
        ignored = history.curve(f"{CHECKS}/ignored_target_fraction").median
        if (share := inside.median) > self.inside and ignored < self.masked:
            why = (
                f"The loss ignores one of its classes, {ignored:.0%} of the targets, and {share:.0%} of these are not "
                "padding at the end of a row but between other targets: this class is never learned."
            )
            remedy = "Set the targets of padding to -100 and leave ignore_index at its default."
            evidence = Evidence(f"{CHECKS}/ignored_inside_fraction", share, self.inside, "0")
            yield self.finding("warning", inside.first_step, why, remedy, evidence, confidence=0.8)
        elif (share := ends.median) > self.ends:
            yield self.finding(
                "warning",
                ends.first_step,
                f"In {share:.0%} of the rows the last token within the attention mask is ignored by the loss, so that "
                "the model never learns to end a text: padding and end of text are probably the same token.",
                "Use another token for padding than eos_token, or set labels to -100 only where attention_mask is 0.",
                Evidence(f"{CHECKS}/ignored_end_fraction", share, self.ends, "0"),
                confidence=0.75,
            )


class TargetsIgnored(SetUpDetector):
    """Finds batches in which nearly all targets are ignored.

    Symptom: The loss is NaN or constant from the start

    Nearly all labels are -100, which cross_entropy ignores: the mask of the labels is inverted or too large.

    Applies to: integer targets

    Source: torch.nn.CrossEntropyLoss: ignore_index
    """

    name = "targets-ignored"
    share = Threshold(0.98, "masked language models ignore 85 %, long prompts up to 95 %")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the share of ignored targets is near 1, or if those left are all the same."""
        ignored = history.curve(f"{CHECKS}/ignored_target_fraction")
        classes = history.curve(f"{CHECKS}/target_class_count")
        share = ignored.median
        is_one_token = len(classes) > 2 and share > 0.1 and float(np.max(classes.values)) == 1
        if not (share > self.share or is_one_token):
            return
        problem = "so that hardly any target is trained"
        if is_one_token:
            problem = "and the others are all the same, such as padding or a mask"
        why = f"{share:.1%} of the labels are ignored by the loss (-100), {problem}."
        remedy = (
            "Print a row of labels: those of tokens to predict must not be -100, those of padding must be. Copy the "
            "labels (input_ids.clone()) before masks are written into the inputs."
        )
        evidence = Evidence(f"{CHECKS}/ignored_target_fraction", share, self.share, "0 to 0.95")
        yield self.finding("critical" if share == 1 else "warning", 1, why, remedy, evidence)
