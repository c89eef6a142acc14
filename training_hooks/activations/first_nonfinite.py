"""The first NaN or infinite value of a training: its step, its producer and its rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from loopscope import HookPoint, HookRegistry, Remembered, RunDataContext, TrainingHook
from loopscope.errors import listed
from loopscope.hooks import Alert, Metrics, RunInfo
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..measures import compute_once, joint_gradient_norm
from .nonfinite_search import Producer, nonfinite_names, search

NAMED = 5  # parameters and rows that the alert names
STAGES = ("weights", "batch", "input", "output", "loss", "gradient", "unknown")
"""The kinds of producers in the order of a step, from the weights that the previous step left."""


@dataclass(frozen=True)
class FirstProducer:
    """The producer of the first non-finite value, as a sentence; ``stage`` and ``position`` order findings in time."""

    stage: str
    sentence: str
    step: int
    position: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The place in time within a step."""
        return STAGES.index(self.stage), self.position


@HookRegistry.register
class FirstNonfinite(TrainingHook):
    """Find the first NaN or infinite value of the training, and name the module, gradient, data or optimizer behind it.

    After every backward pass the hook reads one flag: whether loss and joint gradient norm are finite. At the first
    step at which they are not, it looks for the producer, the place that makes non-finite values of finite ones:

    1. weights that are already non-finite were written by the optimizer in the step before, whose loss and gradient
       were finite;
    2. the batch: its tensors and rows are named;
    3. otherwise the pass is repeated from the intact weights, with the random numbers of the step, and every module is
       observed. In the forward pass the producer is the innermost module with finite inputs and a non-finite output,
       and in the backward pass the innermost module whose output has a finite gradient, and its input, or one of its
       own parameters, a non-finite one. Code between modules counts as that of the module around it.

    At SNAPSHOT the weights themselves are checked, so that the last step's update is covered, too.

    Assumes that the repeated pass equals the first one: that the loop draws no random numbers between the start of a
    step and its pass, and that buffers, which are those after the pass, do not matter. If the repeated pass is finite,
    or if a custom loop gives no ``loss=``, the hook names the parameters with non-finite gradients that come last in
    the model, nearest to the loss. Steps of a loss scaler with infinite gradients are not an event: the scaler skips
    them. An additive mask with −inf is no producer. On an accelerator, reading the flag waits for the backward pass.
    """

    name = "first_nonfinite"
    hook_points = frozenset({HookPoint.POST_BACKWARD, HookPoint.SNAPSHOT})
    in_health = True
    needs_step_series = True
    needs_step_replay = True
    _has_event = Remembered(False)
    _findings = Remembered(list[list[Any]])
    """Step, sentence and step of the value of each finding that ``check`` has not yet reported."""
    metrics = """
        step | the first step at which the loss, a gradient or a weight is not finite; reported at that step only
            | 0, 1, 2, … | 0: the initial weights. The alert names the producer. Look at the rows of the step, and at
            the step before.
        nonfinite_gradients | number of parameters with a non-finite gradient at that step | 0, 1, 2, …
            | All parameters: the loss, or its gradient, is not finite. Few: those before the producer.
        nonfinite_weights | number of parameters with a non-finite weight, at that step and at SNAPSHOT | 0, 1, 2, …
            | Above 0: the optimizer wrote them. Look at its epsilon, at its state and at its learning rate.
    """

    def __init__(self) -> None:
        self._can_repeat = True

    def start(self, run: RunInfo) -> None:
        """Find out whether the loop has a loss, so that its pass can be repeated."""
        self._can_repeat = "needs_loss" not in run.lacks

    def compute(self, ctx: RunDataContext) -> Metrics:
        """Return the number of non-finite weights at SNAPSHOT, and in steps nothing before the event."""
        at_snapshot = ctx.hook_point is HookPoint.SNAPSHOT
        if not at_snapshot and (self._has_event or self._is_finite(ctx)):
            return {}
        bad_weights = nonfinite_names([*ctx.model.named_parameters()])
        numbers = {"nonfinite_weights": len(bad_weights)}
        if at_snapshot and (self._has_event or not bad_weights):
            return numbers
        gradients = [(name, leaf.grad) for name, leaf in ctx.model.named_parameters() if leaf.grad is not None]
        bad_gradients = [] if at_snapshot else nonfinite_names(gradients)
        if not (bad_weights or bad_gradients or _is_nonfinite(ctx.loss)):
            return {}  # the norm of finite gradients has overflowed
        finding = self._find(ctx, bad_weights, bad_gradients)
        self._has_event = True
        self._findings.append([ctx.step, finding.sentence, finding.step])
        return {"step": finding.step, "nonfinite_gradients": len(bad_gradients), **numbers}

    def _is_finite(self, ctx: RunDataContext) -> bool:
        if ctx.loss_scale is not None:
            return not _is_nonfinite(ctx.loss)
        norm = ctx.grad_norm
        if norm is None:
            norm = compute_once(ctx, joint_gradient_norm)
        loss = 0.0 if ctx.loss is None else ctx.loss
        return math.isfinite(norm + loss)  # one transfer from a device

    def _find(self, ctx: RunDataContext, bad_weights: Sequence[str], bad_gradients: Sequence[str]) -> FirstProducer:
        """Return the finding of the rank with the earliest producer."""
        finding = self._find_here(ctx, bad_weights, bad_gradients)
        if not ctx.ranks.are_many:
            return finding
        fields = (finding.stage, finding.sentence, finding.step, finding.position)
        findings = [FirstProducer(*values) for values in ctx.ranks.gather(fields)]
        return min(findings, key=attrgetter("order"))

    def _find_here(
        self, ctx: RunDataContext, bad_weights: Sequence[str], bad_gradients: Sequence[str]
    ) -> FirstProducer:
        step, count = ctx.step, len([*ctx.model.parameters()])
        if bad_weights:
            names = listed(bad_weights, NAMED)
            if ctx.hook_point is HookPoint.POST_BACKWARD:
                step -= 1
            if step == 0:
                return FirstProducer("weights", f"The initial weights are not finite: {names}.", 0)
            if (every := self.step_schedule.every_n_steps) > 1 and ctx.hook_point is HookPoint.POST_BACKWARD:
                sentence = (
                    f"{len(bad_weights):,} of {count:,} parameters are not finite, first seen after step {step:,} "
                    f"(measured every {every:,} steps): {names}."
                )
                return FirstProducer("weights", sentence, step)
            sentence = (
                f"In step {step:,} the optimizer wrote non-finite values into {len(bad_weights):,} of {count:,} "
                f"parameters: {names}. Loss and gradients were finite."
            )
            return FirstProducer("weights", sentence, step)
        if bad_inputs := _nonfinite_inputs(ctx.batch_data):
            return FirstProducer(
                "batch", f"The batch of step {step:,} is not finite: {listed(bad_inputs, NAMED)}.", step
            )
        producer = self._repeated(ctx) if self._can_repeat else None
        if producer is not None:
            return FirstProducer(producer.kind, _describe(producer, ctx), step, producer.position)
        return self._nearest(ctx, bad_gradients)

    def _repeated(self, ctx: RunDataContext) -> Producer | None:
        with ctx.replayed():
            return search(ctx.model, partial(ctx.compute_batch_gradients, ctx.batch_data))

    def _nearest(self, ctx: RunDataContext, bad_gradients: Sequence[str]) -> FirstProducer:
        """Return the finding for a pass that is not repeated, or that is finite when it is repeated."""
        step = ctx.step
        if self._can_repeat and _is_nonfinite(ctx.loss):
            sentence = f"The loss of step {step:,} is {_value(ctx.loss)}, computed from finite outputs of all modules."
            return FirstProducer("loss", sentence, step)
        if not bad_gradients:
            return FirstProducer(
                "loss", f"The loss of step {step:,} is {_value(ctx.loss)}; the gradients are finite.", step
            )
        why = "repeating the pass gave finite values" if self._can_repeat else "the loop gives no loss= to repeat it"
        sentence = (
            f"{len(bad_gradients):,} parameters have a non-finite gradient at step {step:,}; nearest to the loss is "
            f"{bad_gradients[-1]}, going by the order of the model ({why})."
        )
        return FirstProducer("unknown", sentence, step)

    def is_urgent(self, metrics: Metrics) -> bool:
        """Return whether the step has a non-finite value, which is always reported at once."""
        return bool(metrics)

    def check(self, values: Mapping[str, Any], step: int) -> Iterator[Alert]:
        """Yield an alert with the producer."""
        due = [finding for finding in self._findings if finding[0] <= step]
        self._findings = [finding for finding in self._findings if finding[0] > step]
        for _, sentence, producing_step in due:
            yield Alert(
                sentence,
                metric="step",
                step=max(producing_step, 1),
                value=math.nan,
                severity="critical",
                id="nonfinite",
            )


def _is_nonfinite(loss: float | Tensor | None) -> bool:
    return loss is not None and not math.isfinite(float(loss))


def _value(loss: float | Tensor | None) -> str:
    return "unknown" if loss is None else f"{float(loss):g}"


def _nonfinite_inputs(batch: object) -> list[str]:
    """Return a phrase, with place and rows, for each tensor of a batch with NaN or +inf; a mask may contain −inf."""
    phrases = []
    for path, leaf in tree_leaves_with_path(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            is_bad = leaf.isnan() | (leaf == math.inf)
            if bool(is_bad.any()):
                rows = is_bad.reshape(len(leaf), -1).any(1).nonzero().flatten().tolist() if leaf.ndim else []
                phrases.append(f"{keystr(path) or 'its tensor'}{_row_text(rows)}")
    return phrases


def _row_text(rows: Sequence[int]) -> str:
    return f", row {listed([*map(str, rows)], NAMED)}" if rows else ""


def _describe(producer: Producer, ctx: RunDataContext) -> str:
    """Return the sentence of a producer that the repeated pass has found."""
    kind = type(ctx.model.get_submodule(producer.module)).__name__
    module = f"{producer.module} ({kind})" if producer.module else f"the model's own code ({kind})"
    rows = _row_text(producer.rows)
    if producer.kind == "input":
        return f"The input of the model is not finite at step {ctx.step:,}{rows}."
    if producer.kind == "output":
        return (
            f"The first non-finite value of step {ctx.step:,} is in the output of {module}, from finite inputs{rows}."
        )
    return (
        f"The first non-finite value of step {ctx.step:,} is a gradient that the backward pass through {module} "
        f"computes from finite gradients{rows}; the loss is {_value(ctx.loss)}."
    )
