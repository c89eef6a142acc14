"""Detectors of learning rates and their schedules."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .. import Curve, Detector, Evidence, Finding, History, Threshold
from ..history import median_of
from ..measures import compared, is_sorted_by_class, jump_of_gradient

LR = "training_metrics/lr"
LARGEST_RATE = 10.0
"""The largest learning rate that is recommended."""
LARGEST_FACTOR = 1e4
"""Factor by which a learning rate is too high at most; larger updates come from exploding gradients."""
EARLY_RISE = 1.2
"""Rise of the loss within 20 steps, relative to the first loss, that a training with large updates may not recover."""
LARGE_GROWTH = 2.5
"""Growth of the weight norm within 60 steps that no useful training needs; Adam at 0.01 has less than 2."""


def lr_curve(history: History) -> Curve:
    """Return the learning rate of the first group over the steps, as densely as it was recorded."""
    return max((history.curve(LR), history.curve("training_checks/lr")), key=len)


def initial_lr(history: History) -> float:
    """Return the learning rate of the first group before the first step; NaN if unknown."""
    groups = history.facts.get("groups") or [{}]
    value = groups[0].get("lr")
    return float(value) if isinstance(value, (int, float)) else math.nan


def has_scheduler(history: History) -> bool:
    """Return whether the training has a scheduler, or its learning rate has changed."""
    values = lr_curve(history).values
    is_changing = len(values) > 1 and bool(np.ptp(values) > 1e-9 * np.max(np.abs(values)))
    return bool(history.settings.get("scheduler")) or is_changing


class LearningRateTooHigh(Detector):
    """Finds steps that overwrite the weights instead of adjusting them.

    Symptom: The loss rises at once, or becomes NaN

    A step changes the weights by a large share of their size, and the loss does not fall. Divide the learning rate
    by 10; transformers under Adam also need a warm-up.

    Applies to: every optimizer, from the first step on

    Source: update-to-data ratio of about 1e-3, Karpathy, cs231n notes and the lecture on makemore
    """

    name = "learning-rate-too-high"
    stage = "updates"
    ratio = Threshold(0.1, "usual are 1e-4 to 1e-2, and up to 0.05 in the first steps of Adam")
    certain = Threshold(0.5, "one step replaces half of the weights")
    at_once = Threshold(2.0, "one step replaces all weights, so that a run in progress needs no further evidence")
    lasting = Threshold(0.2, "in every check of the first 20 steps; weights that start at 0 are above it for five")
    needs = ("training_checks", "parameter_norms")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for large updates in the first steps, or for a loss that diverges."""
        ratios = history.update_ratios
        if not len(ratios):
            return
        early = ratios.steps <= 20
        is_large = early & (ratios.values > self.ratio)
        weights = history.curve("parameter_norms/total_weight_norm")
        starts_at_zero = len(weights) and weights.first < 1e-3
        if not (is_large.any() and np.isfinite(ratios.values[early]).any()) or starts_at_zero:
            return
        if history.loss.first_nonfinite == history.loss.first_step:  # before any update
            return
        if _follows_a_jump(history, int(ratios.steps[is_large][0]), self.ratio):
            return
        finite = np.where(is_large & np.isfinite(ratios.values), ratios.values, -np.inf)
        place = int(np.argmax(finite)) if np.isfinite(finite).any() else int(np.argmax(is_large))
        high, step = float(ratios.values[place]), int(ratios.steps[place])
        is_brief = high <= self.certain and _ends_at_once(ratios, self.ratio)
        harm = _early_harm(history, is_large=high > self.certain, is_brief=is_brief)
        is_certain = high > self.certain and history.step < 20
        only_lasts = not harm and _stays_above(history, self.lasting)
        if only_lasts:
            harm = ", and all others of the first 20 do likewise, so that they overwrite the weights"
        if not (harm or is_certain):
            return
        lr = initial_lr(history)
        change = "made the weights infinite"
        if math.isfinite(high):
            change = f"changed the weights by {_ratio_text(high)} their size"
        finding = self.finding(
            "warning" if only_lasts else "critical",
            int(ratios.steps[is_large][0]),
            f"The learning rate {_text(lr)} is too high: at step {step:,} one update {change}{harm}.",
            _remedy(lr, high, has_schedule=has_scheduler(history)),
            Evidence("training_checks/update_ratio", high, self.ratio, "1e-4 to 1e-2"),
            confidence=0.95 if harm and high > self.certain else 0.85,
        )
        yield replace(finding, waits=not high > self.at_once)


def _stays_above(history: History, limit: float) -> bool:
    """Return whether all checked updates of the first 20 steps, of all weights and of the median matrix, are larger."""
    curves = (history.update_ratios, history.curve("training_checks/update_ratio_median"))
    values = [curve.between(1, 20) for curve in curves]
    return min(map(len, values)) >= 5 and history.step >= 20 and all(bool((item > limit).all()) for item in values)


def _follows_a_jump(history: History, step: int, limit: float) -> bool:
    """Return whether updates were small until a single extreme gradient, which a row of the data causes."""
    jump = jump_of_gradient(history)
    ratios = history.update_ratios
    before = ratios.values[ratios.steps < (jump or 0)]
    return jump is not None and jump <= step and len(before) > 1 and float(np.max(before)) < 0.5 * limit


def _remedy(lr: float, ratio: float, *, has_schedule: bool) -> str:
    """Return what to do about updates of this size, relative to the weights."""
    factor = _factor(ratio)
    if factor > LARGEST_FACTOR:  # such a rate would train nothing
        return (
            "Clip the gradients, with torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before each step, check "
            f"the initialisation, and lower the learning rate, to {_text(lr / 100)} for example."
        )
    warm_up = "" if has_schedule else ", or add a warm-up"
    return f"Lower the learning rate, to {_text(lr / factor)} for example{warm_up}."


def _factor(ratio: float) -> float:
    """Return the power of ten that brings an update ratio to at most 0.01."""
    return float(10.0 ** max(1, math.ceil(math.log10(ratio / 0.01)))) if ratio < 1e300 else 1000.0


def _text(lr: float) -> str:
    return f"{lr:.3g}" if math.isfinite(lr) else "of the first group"


def _ratio_text(ratio: float) -> str:
    """Return a ratio in words that end with "of" or "times".

    >>> _ratio_text(0.72), _ratio_text(35.0), _ratio_text(7.1e16)
    ('72% of', '35 times', '7.1e+16 times')
    """
    if ratio < 10:
        return f"{ratio:.0%} of"
    return f"{ratio:,.0f} times" if ratio < 1e6 else f"{ratio:.2g} times"


def _ends_at_once(ratios: Curve, limit: float) -> bool:
    """Return whether only the first updates were large, as those of Adam are for a new layer of small weights."""
    later = ratios.values[ratios.steps >= 5]
    return len(later) >= 2 and bool((later < limit).all())


def _early_harm(history: History, *, is_large: bool, is_brief: bool) -> str:
    """Return in words how the loss suffered; empty if it fell as it should.

    Args:
        history: the record.
        is_large: the update is so large that it explains a loss that is not finite.
        is_brief: only the first updates were large, so that they do not explain a loss that neither rises nor falls.
    """
    loss = history.loss
    if loss.first_nonfinite is not None and (is_large or loss.first_nonfinite <= 3):
        return f", and the loss is not finite from step {loss.first_nonfinite:,} on"
    if len(loss) < 5 or not loss.first > 0:
        return ""
    highest = float(np.nanmax(loss.values[1 : max(6, len(loss) // 5)]))
    if highest > 2 * loss.first:
        return f", and the loss rose from {loss.first:.3g} to {highest:.3g}"
    lowest = median_of(np.sort(loss.values)[: max(3, len(loss) // 10)])
    if not is_brief and len(loss) >= 20 and lowest > 0.95 * loss.first:
        return ", and the loss does not fall"
    highest = float(np.nanmax(loss.values[1:20]))
    if len(loss) >= 100 and highest > EARLY_RISE * loss.first and lowest > 0.5 * loss.first:
        return f", the loss rose from {loss.first:.3g} to {highest:.3g}, and it has only fallen to {lowest:.3g} since"
    if len(loss) >= 100 and lowest > 0.93 * history.uniform_loss and _has_dead_layers(history):
        return ", units died, and the loss stays at that of equal probabilities"
    weights = history.curve("parameter_norms/total_weight_norm")
    growth = weights.at(60) / weights.first if len(weights) > 1 and weights.first > 0 else 1.0
    if growth > LARGE_GROWTH and lowest > 0.7 * loss.first:
        return f", and the weights grew {growth:.1f}-fold within {int(min(weights.last_step, 60))} steps"
    return ""


def _has_dead_layers(history: History) -> bool:
    """Return whether half of the units of a layer are dead at the end."""
    families = (history.family(name) for name in ("activations/dead_fraction", "training_checks/dead_units"))
    return any(curve.last > 0.5 for family in families for curve in family.values())


class LearningRateTooLow(Detector):
    """Finds updates that are too small to train the weights.

    Symptom: The loss hardly falls

    The updates are tiny compared with the weights although there are gradients. Raise the learning rate; under SGD
    with a small gradient also check that the loss is not divided twice.

    Applies to: every optimizer, outside of a warm-up and of the end of a schedule

    Source: update-to-data ratio of about 1e-3, Karpathy, cs231n notes
    """

    name = "learning-rate-too-low"
    stage = "updates"
    ratio = Threshold(1e-4, "10 times below the usual 1e-3; only counts if the loss does not fall")
    certain = Threshold(5e-6, "about 1e5 steps would be needed to replace the weights")
    fall = Threshold(0.03, "a training that works falls by more within 50 steps")
    constant = Threshold(0.9, "of the loss of the best constant, as an alternative to the fall")
    clipped = Threshold(0.1, "of the gradient norm that is left; then clipping is the cause")
    needs = ("training_checks", "parameter_norms")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if all updates at a steady learning rate are tiny."""
        ratios = history.update_ratios
        values = ratios.values[np.isfinite(ratios.values) & (ratios.values > 1e-300)]
        rising = is_warming_up(history)
        if not len(values) or rising or not history.gradient_norms.last > 0:
            return
        lr = initial_lr(history)
        if not lr > 0 or history.facts.get("rounded_away", {}).get("share", 0) > 0.5:
            return
        highest = float(values.max())
        at_once = highest < self.certain and not has_scheduler(history)
        hardly_learns = history.loss_fall < self.fall or compared(history)[0] > self.constant
        is_slow = highest < self.ratio and history.step >= 50 and hardly_learns
        if not (at_once or is_slow):
            return
        clipped = history.curve("training_checks/clip_factor").median
        if clipped < self.clipped and not history.is_adam_like:
            return  # the gradients are clipped to a small part of their norm
        factor = 10.0 ** round(-3 - math.log10(highest))
        remedy = f"Raise the learning rate, to {_text(lr * factor)} for example."
        if lr * factor > LARGEST_RATE:
            remedy = (
                "Look for what makes the gradients small, such as a factor of the loss, and raise the learning rate."
            )
        why = (
            f"The learning rate {_text(lr)} is too low: an update changes the weights by only {highest:.1e} of their "
            f"size, so that the loss hardly falls."
        )
        evidence = Evidence("training_checks/update_ratio", highest, self.ratio, "1e-4 to 1e-2")
        yield self.finding("warning", ratios.first_step, why, remedy, evidence, confidence=0.9 if is_slow else 0.75)


def is_warming_up(history: History) -> bool:
    """Return whether the newest learning rate is the highest so far, and a warm-up has not reached its end.

    It has not if the learning rate was lower a quarter of the steps ago, or is lower than the one that was set.
    """
    curve = lr_curve(history)
    if len(curve) < 2 or not curve.last > 1.01 * curve.first or curve.last < 0.99 * float(np.nanmax(curve.values)):
        return False
    return curve.last > 1.01 * curve.at(int(0.75 * curve.last_step)) or curve.last < 0.9 * max(set_rates(history))


def set_rates(history: History) -> list[float]:
    """Return the learning rates that a warm-up leads to: that of the optimizer, and the largest of OneCycleLR."""
    group = (history.facts.get("groups") or [{}])[0]
    rates = [group.get(name) for name in ("initial_lr", "max_lr")]
    return [float(rate) for rate in rates if isinstance(rate, (int, float))] or [0.0]


class ScheduleDetector(Detector):
    """Looks for one problem in the learning rates of all steps."""

    stage = "set-up"
    needs = ("training_metrics",)


class WarmUpTooLong(ScheduleDetector):
    """Finds a warm-up that takes longer than the training.

    Symptom: The loss hardly falls

    The learning rate still rises at the end of the training and is far below the one that was set: the warm-up
    counts more steps than the training has, or it is stepped per epoch instead of per batch.

    Applies to: schedules that start below the learning rate of the optimizer

    Source: torch.optim.lr_scheduler; transformers' warmup_steps: the number of steps of the warm-up
    """

    name = "warm-up-too-long"
    level = Threshold(0.2, "of the learning rate that was set; warm-ups of 5 to 10 % have ended by then")
    level_at_end = Threshold(0.9, "of the learning rate that was set, once all planned steps are made")
    share = Threshold(0.5, "of the planned steps; without a plan, the end of the run")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the newest learning rate is the highest, and far below the one of the optimizer."""
        known, curve = set_rates(history), lr_curve(history)
        target = max(known)
        if not target or len(curve) < 20 or not is_warming_up(history):
            return
        planned = history.planned_steps or 0
        is_late = history.step >= self.share * planned if planned else history.is_over
        level = self.level_at_end if 0 < planned <= history.step else self.level
        if is_late and not curve.last >= level * target:
            yield self.finding(
                # A run without a plan may be the start of a longer one, but OneCycleLR knows its number of steps.
                "warning" if planned or len(known) > 1 else "info",
                curve.first_step,
                f"The warm-up is longer than the training: after {history.step:,} steps the learning rate is "
                f"{curve.last:.3g}, still rising, and {target:.3g} was set.",
                "Use a warm-up of 1 to 10 % of the steps, and step its scheduler after every batch.",
                Evidence(LR, curve.last, level * target, "the learning rate that was set, after the warm-up"),
            )


class LearningRateZero(ScheduleDetector):
    """Finds a learning rate of zero before the end of the training.

    Symptom: The loss does not change at all

    The learning rate is 0: a scheduler with a wrong length, a warm-up that starts at 0 and never rises because it
    is stepped per epoch, or a wrong lambda. Print scheduler.get_last_lr() for a few steps.

    Source: torch.optim.lr_scheduler documentation
    """

    name = "learning-rate-zero"
    steps = Threshold(5, "a warm-up may start at 0 for one step")
    share = Threshold(0.1, "of the training, at its start")
    share_at_end = Threshold(0.25, "of the training; schedules may end at 0 for a while")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding for a learning rate that is zero now, or was zero at the start, for several steps."""
        curve = lr_curve(history)
        is_zero = curve.values == 0
        if not len(curve) or not (is_zero[0] or is_zero[-1]):
            return
        positive = np.flatnonzero(~is_zero)
        is_over = bool(len(positive)) and not is_zero[-1]
        if is_over:
            first, end = int(curve.steps[0]), int(curve.steps[positive[0]])
        else:
            first = int(curve.steps[positive[-1] + 1]) if len(positive) else int(curve.steps[0])
            end = history.step + 1
        duration, total = end - first, max(history.planned_steps or 0, history.step)
        share = self.share_at_end if len(positive) and not is_over else self.share
        if duration < self.steps or duration < share * total:
            return
        yield self.finding(
            "warning" if is_over else "critical",
            first,
            f"The learning rate was 0 for the first {duration:,} steps, which changed no weight."
            if is_over
            else f"The learning rate is 0 from step {first:,} on ({duration:,} steps up to now), so the weights do not "
            "change.",
            "Print scheduler.get_last_lr() over the first steps, and check the scheduler's total steps and its lambda.",
            Evidence(LR, 0.0, None, "above 0 until the last steps"),
            confidence=0.95,
        )


def returns_after_burst(values: "np.typing.NDArray[np.float64]") -> bool:
    """Return whether the last values are about those before the peak, so that the peak was no start of a decay."""
    before = values[: int(np.argmax(values > 0.5 * np.nanmax(values)))]
    usual, newest = float(np.median(before)) if len(before) >= 10 else 0.0, float(np.median(values[-10:]))
    return 0.5 * usual < newest < 2 * usual


class ScheduleEndsEarly(ScheduleDetector):
    """Finds a schedule that has used up the learning rate long before the end.

    Symptom: The loss stops falling early

    The learning rate has decayed to almost nothing long before the end of the training: the scheduler is stepped
    per batch but was set up for epochs, or its number of steps is too small.

    Source: torch.optim.lr_scheduler documentation: call scheduler.step() once per epoch, or per batch, as it was
    set up
    """

    name = "schedule-ends-early"
    level = Threshold(0.005, "below 0.5 % of the peak a step has no effect; usual final values are 1 to 10 %")
    share = Threshold(0.35, "the share of the training that is spent there; cosine schedules spend 5 %")
    small = Threshold(0.015, "of the peak, which usual schedules reach late")
    long = Threshold(0.85, "the share of the training that is spent below that")
    nothing = Threshold(1e-4, "of the peak, from which no schedule returns; for trainings in progress")
    waits = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the learning rate is far below its peak for a large part of the training."""
        curve = lr_curve(history)
        if len(curve) < 3 or not np.nanmax(curve.values) > 0:
            return
        peak = float(np.nanmax(curve.values))
        if returns_after_burst(curve.values):
            return
        scheduler = str(history.settings.get("scheduler") or "the scheduler")
        if "Restarts" in scheduler:
            return
        total = max(history.planned_steps or 0, history.step)
        limits = [(self.level, self.share)]
        if "Plateau" not in scheduler:
            limits.append((self.small, self.long))
        steps = [(self._used_up_at(history, curve, level * peak, share * total), level) for level, share in limits]
        found = [(step, level) for step, level in steps if step is not None]
        if not found:
            return
        step, level = found[0]
        remaining = (total - step) / total
        if "Plateau" in scheduler:
            reason = f"{scheduler} has cut it again and again, though its metric may have improved."
            remedy = "Check its mode, 'min' for a loss and 'max' for an accuracy, its patience and the metric it gets."
        else:
            reason = f"{scheduler} is probably stepped per batch but was set up for epochs."
            remedy = "Call scheduler.step() once per epoch, or give the scheduler the number of batches."
        why = (
            f"The learning rate has fallen below {100 * level:g} % of its peak of {peak:.3g} at step {step:,}, with "
            f"{remaining:.0%} of the {total:,} steps left: {reason}"
        )
        evidence = Evidence(LR, curve.last, level * peak, "1 to 10 % of the peak at the end")
        yield self.finding("warning", step, why, remedy, evidence)

    def _used_up_at(self, history: History, curve: Curve, low: float, least: float) -> int | None:
        """Return the step from which on the learning rate is below ``low``, if at least ``least`` steps follow it."""
        # Only the stretch at the end counts: a schedule with restarts comes back from its minima.
        last_high = int(np.flatnonzero(curve.values >= low)[-1])
        step = curve.first_step_where(np.arange(len(curve)) > last_high)
        if step is None:
            return None
        peak = float(np.nanmax(curve.values))
        # Of a run without a plan, a learning rate that has been nearly 0 for half of the steps so far.
        is_nothing = curve.last / peak < self.nothing and history.step >= 100
        is_used_up = is_nothing and history.step - step > 0.5 * history.step
        if not (history.planned_steps or history.is_over or is_used_up):
            return None
        total = max(history.planned_steps or 0, history.step)
        return step if total - step >= least and history.step - step >= 0.05 * total else None


class CosineRises(ScheduleDetector):
    """Finds a cosine schedule that is stepped beyond its length, so that the learning rate rises again.

    Symptom: The learning rate goes up and down

    CosineAnnealingLR is stepped more often than T_max, so that its learning rate rises again: it is stepped per
    batch with T_max in epochs. Set T_max to the number of calls of scheduler.step().

    Applies to: CosineAnnealingLR, and unknown schedulers whose learning rate falls to 0 and rises gradually

    Source: torch.optim.lr_scheduler.CosineAnnealingLR: T_max is half of a period
    """

    name = "cosine-schedule-rises"
    rise = Threshold(0.2, "share of the peak by which the learning rate rises after a minimum")

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the learning rate of CosineAnnealingLR rises after it has fallen."""
        curve = lr_curve(history)
        scheduler = str(history.settings.get("scheduler") or "")
        if len(curve) < 10 or not ("CosineAnnealingLR" in scheduler or not scheduler):
            return
        values = curve.values
        if not np.isfinite(values).any():
            return
        peak, first = float(np.nanmax(values)), int(np.nanargmax(values))
        lowest = np.minimum.accumulate(values[first:])
        has_risen = values[first:] > lowest + self.rise * peak
        if not scheduler:  # the shape alone: down to nearly 0, and gradually up again, as no usual schedule does
            is_gradual = bool(np.max(np.diff(values)) < 0.3 * peak)
            # A cyclic schedule begins with a rise about as long as its fall, and not with a short warm-up or the peak.
            fall = int(np.argmin(values[first:]))
            is_cyclic = values[0] < 0.5 * peak and first >= 0.5 * fall
            has_risen = (lowest < 0.02 * peak) & (values[first:] > 0.5 * peak) & (is_gradual and not is_cyclic)
        if not has_risen.any():
            return
        step = int(curve.steps[first + int(np.flatnonzero(has_risen)[0])])
        why = (
            f"The learning rate rises again gradually at step {step:,}: a cosine schedule is stepped more often "
            "than its T_max, probably per batch with a T_max in epochs."
        )
        remedy = "Set T_max to the total number of scheduler.step() calls, or call it once per epoch."
        evidence = Evidence(LR, float(values[first:][has_risen][0]), float(lowest.min()), "falls until the end")
        yield self.finding("warning", step, why, remedy, evidence)


class LearningRateJump(Detector):
    """Finds a sudden rise of the learning rate that raises the loss.

    Symptom: The loss spikes in the middle of a training

    The learning rate rose, suddenly or without end, and the loss with it. Check the schedule around this step.

    Source: Loshchilov and Hutter, arXiv 1608.03983, for restarts, which raise the loss for a while
    """

    name = "learning-rate-jump"
    stage = "set-up"
    factor = Threshold(5.0, "warm-ups rise more slowly from step to step")
    rise = Threshold(1.5, "the loss after the jump over that before; restarts raise it less or recover")
    growth = Threshold(20.0, "highest over first learning rate, if it is highest at the end; warm-ups end early")
    needs = ("training_metrics", "training_checks")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the learning rate jumps after the first 20 steps and the loss rises."""
        curve, loss = lr_curve(history), history.loss
        values, steps = curve.values, curve.steps
        if len(values) < 3:
            return
        jumps = np.flatnonzero((values[1:] > self.factor * values[:-1]) & (values[:-1] > 0) & (steps[1:] > 20))
        for index in jumps:
            step = int(steps[index + 1])
            before = median_of(loss.between(step - 20, step - 1))
            after = loss.between(step, step + 20)
            highest = float(np.nanmax(after)) if len(after) and np.isfinite(after).any() else math.inf
            is_restart = values[index + 1] <= 1.01 * float(np.max(values[: index + 1]))
            # Losses of single batches scatter, above all with mixup: a planned restart harms if it lifts their level.
            later = np.sort(loss.values[loss.steps >= step])
            recovers = median_of(later[: max(5, len(later) // 4)]) < 1.1 * before and loss.first_nonfinite is None
            is_planned = is_restart and (recovers or median_of(after) < self.rise * before)
            if highest > self.rise * before and not is_planned:
                yield self.finding(
                    "warning",
                    step,
                    f"The learning rate jumped from {values[index]:.3g} to {values[index + 1]:.3g} at step {step:,}, "
                    f"and the loss rose from {before:.3g} to {highest:.3g}.",
                    "Check the schedule around this step, or lower the learning rate of the restart.",
                    Evidence(LR, float(values[index + 1]), self.factor * float(values[index]), "a gradual change"),
                    confidence=0.85,
                )
                return
        yield from self._growth(history, curve)

    def _growth(self, history: History, curve: Curve) -> Iterable[Finding]:
        """Yield a finding if the learning rate grows until the end, and the loss is far above its lowest level."""
        values, losses = curve.values, history.loss.values
        highest, count = float(np.max(values, initial=0.0, where=np.isfinite(values))), max(5, len(losses) // 20)
        ends_high = curve.last >= 0.5 * highest and highest > self.growth * values[0] > 0
        if len(losses) < 60 or not ends_high:
            return
        levels = [median_of(losses[start : start + count]) for start in range(0, len(losses) - count + 1, count)]
        if not np.isfinite(levels).any():
            return
        best = int(np.nanargmin(levels))
        last = history.loss.end_level()
        lowest_at = int(history.loss.steps[best * count])
        at_lowest = curve.at(lowest_at)
        if best >= len(levels) - 2 or not last > self.rise * levels[best] or not curve.last > 3 * at_lowest:
            return
        why = (
            f"The learning rate grows from {values[0]:.3g} to {highest:.3g}, and the loss rises with it, from "
            f"{levels[best]:.3g} around step {lowest_at:,}, at a learning rate of {at_lowest:.3g}, to {last:.3g}."
        )
        remedy = "Check the schedule: a warm-up has to end, and its factor multiplies the initial learning rate."
        evidence = Evidence(LR, highest, self.growth * float(values[0]), "falls after a short warm-up")
        yield self.finding("warning", lowest_at, why, remedy, evidence)


class WarmUpMissing(Detector):
    """Finds an early rise of the loss under Adam without a warm-up, which recovers later.

    Symptom: The loss rises in the first steps and falls later

    Adam's first steps have the full learning rate although its second moments are not reliable yet. Raise the
    learning rate over the first 1 to 5 % of the steps.

    Applies to: Adam-type optimizers with a cross-entropy, in the first tenth of the training

    Source: Liu et al., arXiv 1908.03265; Xiong et al., arXiv 2002.04745
    """

    name = "warm-up-missing"
    stage = "updates"
    rise = Threshold(1.3, "the highest early loss over the initial one; noise stays below 1.2")
    ratio = Threshold(0.01, "the largest early update; smaller ones do not raise the loss, but noise may")
    fallen = Threshold(0.9, "of the loss, from which on the finding is a remark: the training has recovered")
    yields_to_learning = True

    def detect(self, history: History) -> Iterable[Finding]:
        """Return a finding if the loss rises early without a warm-up and then recovers."""
        loss, curve = history.loss, lr_curve(history)
        is_classifier = history.last("training_checks/class_count") > 1  # losses of regressions are noisier
        if not (history.is_adam_like and is_classifier) or len(loss) < 40 or loss.first_nonfinite is not None:
            return
        if is_sorted_by_class(history):  # then the loss rises with each new class
            return
        has_warm_up = len(curve) > 1 and curve.first < 0.5 * float(np.nanmax(curve.values))
        early = loss.values[1 : max(11, len(loss) // 10)]
        smooth = np.median(np.lib.stride_tricks.sliding_window_view(early, 5), axis=1)  # single outliers do not count
        highest = float(smooth.max())
        recovers = loss.start_level(1) > median_of(loss.values[-10:])
        is_new = loss.first > 0.5 * history.uniform_loss  # a trained model that continues starts lower
        ratios = history.update_ratios
        is_small = float(np.max(ratios.values[ratios.steps <= 20], initial=0.0)) < self.ratio
        if has_warm_up or not recovers or not is_new or highest < self.rise * loss.first:
            return
        if len(ratios) and is_small:
            return
        step = loss.first_step_where(loss.values > self.rise * loss.first) or 1
        yield self.finding(
            "info" if history.loss_fall > self.fallen else "warning",
            step,
            f"The loss rose from {loss.first:.3g} to {highest:.3g} in the first steps, which start at the full "
            f"learning rate of {_text(initial_lr(history))}: a warm-up is missing.",
            "Add a warm-up: torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=100).",
            Evidence("training_checks/loss", highest, self.rise * loss.first, "falls from the start"),
            confidence=0.7,
        )
