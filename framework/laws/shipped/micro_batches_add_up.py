"""The law that micro-batches have the gradient of the whole batch."""

import torch
from torch import Tensor

from ..joined_batches import JoinedBatches
from ..law import Law, Outcome, broken, holds, not_checked
from ..loss_numbers import LossPath
from ..recorded_step import RecordedStep
from ..trial import TIMES_NOISE, Trial, distance

LEAST_PART = 1e-3
"""The part of the gradient that must differ."""
LEAST_DIVIDED = 3
"""Micro-batches whose number is no common factor of a loss, such as the 2 of half of the squared error."""
NEAR = 1e-6


class MicroBatchesAddUp(Law):
    """Compare the sum of the gradients of a step's micro-batches with the gradient of all their rows in one pass.

    All rows, or all tokens, must have one weight. If the loss is a mean, the loop must divide by the number of
    micro-batches; a factor that the step does not show, as in a loss of several terms, is free.
    """

    name = "micro_batches_add_up"
    statement = "micro-batches have the gradient of the whole batch"
    remedy = "call zero_grad once per update, and divide the summed losses once, by all rows or valid tokens together"

    def check(self, trial: Trial) -> Outcome:
        """Join the micro-batches, after a test that joining one of them with itself changes nothing."""
        steps = trial.steps
        if len(steps) < 2:
            return not_checked("the step has one backward pass")
        if any(step.constants[index].requires_grad for step in steps for index in step.constants_of_passes()):
            return not_checked("a backward pass is made for the gradients of inputs")
        if lost := _lost(trial):
            return broken(f"the update has the gradient of the last {lost} of {len(steps)} micro-batches")
        one, noise = trial.gradient(), trial.gradient_noise
        batches = JoinedBatches(trial)
        twice = self._gradient(trial, batches.joined([0, 0]))
        factors = [factor for factor in (1, 2) if distance(twice, factor * one) <= factor * TIMES_NOISE * noise]
        if not factors:
            return not_checked("the loss cannot be computed for more rows")
        shortest = batches.shortest
        if shortest is not None:
            bare, padded = (self._gradient(trial, batches.joined([shortest], is_full=item)) for item in (False, True))
            if not trial.is_noise(distance(bare, padded)):
                return not_checked("the micro-batches have different lengths, and padding changes the gradient")
        total = sum_of(trial, steps, train=False)
        joint = self._gradient(trial, batches.joined(range(len(steps))))
        factor = float(total @ joint / (joint @ joint).clamp(min=1e-300))
        remaining, size = distance(total, factor * joint), float(total.norm())
        if _are_of_different_losses(steps):
            return not_checked("the backward passes belong to different losses")
        if not trial.is_noise(remaining, gradients=len(steps)) and remaining > LEAST_PART * size:
            return broken(
                f"{remaining / size:.1%} of the gradient of {len(steps)} micro-batches differ from the batch's"
            )
        if factors == [1] and (sentence := _wrong_division(steps, factor)):
            return broken(sentence)
        return holds()

    def _gradient(self, trial: Trial, constants: dict[int, Tensor]) -> Tensor:
        return trial.evaluate(constants, gradients=True, train=False, **trial.derivation).joint_gradient()


def _wrong_division(steps: list[RecordedStep], factor: float) -> str:
    """Return a sentence if mean losses are divided by their number twice, or by nothing, apart from a loss scale."""
    count, step = len(steps), steps[0]
    divisions = [item for item in LossPath.of(step).divisions if abs(count * item - 1) < NEAR]
    if count >= LEAST_DIVIDED and len(divisions) > 1:
        return f"the mean losses of {count} micro-batches are divided by {count} twice"
    is_undivided = all(one >= 1 for one in step.factors)
    return f"the gradient is {factor:.3g} times that of the batch, since nothing divides the mean losses" * is_undivided


def sum_of(trial: Trial, steps: list[RecordedStep], *, train: bool) -> Tensor:
    """Return the sum of the gradients of micro-batches."""
    parts = [trial.evaluate(step=step, gradients=True, train=train).joint_gradient() for step in steps]
    return torch.stack(parts).sum(0)


def _lost(trial: Trial) -> int:
    """Return how many of the last micro-batches have gradients that reach the update; 0 if all do, or it is unclear."""
    parameters = [item for item in trial.model.parameters() if item.requires_grad]
    if any(step.problem for step in trial.steps):
        return 0
    grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in parameters]
    given = torch.cat([item.detach().double().flatten() for item in grads])
    parts = [trial.evaluate(step=step, gradients=True).joint_gradient() for step in trial.steps]
    for count in (1, *range(len(parts) - 1, 1, -1)):
        if _is_multiple(given, torch.stack(parts[-count:]).sum(0)):
            return 0 if _is_multiple(given, torch.stack(parts).sum(0)) else count
    return 0


def _is_multiple(one: Tensor, other: Tensor) -> bool:
    factor = float(one @ other / (other @ other).clamp(min=1e-300))
    return factor > 0 and distance(one, factor * other) < LEAST_PART * float(one.norm())


def _are_of_different_losses(steps: list[RecordedStep]) -> bool:
    """Return whether the backward passes of a step are no micro-batches of one loss.

    They have the same inputs, or each has targets of one value, such as those of real and generated images, or the
    first inputs of one are outputs of another, such as the state of a recurrent network.
    """
    first, second = steps[:2]
    inputs = [[step.constants[index] for index in step.constants_of_passes()] for step in (first, second)]
    if all(one.shape == other.shape and torch.equal(one, other) for one, other in zip(*inputs, strict=False)):
        return True
    targets = [
        [item for item in (step.constants[index] for index in sorted(step.constants_of_calls())) if item.numel() > 1]
        for step in (first, second)
    ]
    for one, other in zip(*targets, strict=False):
        values = one.unique(), other.unique()
        if len(values[0]) == len(values[1]) == 1 and values[0] != values[1]:
            return True
    outputs = [item for item in first.outputs.values() if item.ndim]
    return any(
        one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        for one in inputs[1]
        for other in outputs
    )
