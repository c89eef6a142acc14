"""Targets that outputs cannot reach, since the last function of the model has a bounded range."""

import math
from typing import Any

import torch
from torch import Tensor

from .loss_numbers import last_functions
from .recorded_step import RecordedCall, RecordedStep, Value
from .trial import Trial
from .values import tensors_within

UNIT, POSITIVE = (0.0, 1.0), (0.0, math.inf)
RANGES = dict.fromkeys(("Sigmoid", "Softmax"), UNIT) | dict.fromkeys(("Softplus", "Exp", "Relu"), POSITIVE)
RANGES["Tanh"] = (-1.0, 1.0)
"""The ranges of functions, by the names of their nodes."""
DISTANCES = {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
SUBTRACTIONS, POWERS, MEANS = {"sub", "rsub", "subtract"}, {"pow", "square", "abs"}, {"mean", "sum"}
LEAST_OUTSIDE = 0.2
"""The part of the targets that must be out of range, since noise also moves targets there."""
MARGIN, MARGIN_OF_HALF = 0.05, 0.25
"""The distance from the range, as a part of its width, or of the targets' standard deviation."""


def unreachable_targets(trial: Trial) -> str:
    """Return a sentence on targets outside of the range of the outputs with which a loss compares them, or nothing."""
    found: list[str] = []
    differences = _differences(trial.step)

    def note(call: RecordedCall, arguments: Any, options: Any) -> None:
        if call.name not in DISTANCES and not any(call is item for item in differences):
            return
        one, other, *_ = [*tensors_within((arguments, options)), None, None]
        if one is None or other is None or one.shape != other.shape:
            return
        for output, target in ((one, other), (other, one)):
            kind = next(iter(last_functions(output)), "")
            if kind in RANGES and not target.requires_grad:
                low, high = RANGES[kind]
                part = _outside(target.detach().double(), low, high)
                if part > LEAST_OUTSIDE:
                    limits = f"between {low:g} and {high:g}" if math.isfinite(high) else f"above {low:g}"
                    found.append(
                        f"outputs of a {kind.lower()} are {limits}, and {part:.0%} of their targets, which reach from "
                        f"{float(target.min()):.3g} to {float(target.max()):.3g}, are not"
                    )

    with trial.branch(), torch.enable_grad():
        trial.step.streams.restore()
        trial.step.replay(observe=note)
    return next(iter(found), "")


def _outside(target: Tensor, low: float, high: float) -> float:
    margin = MARGIN * (high - low) if math.isfinite(high) else MARGIN_OF_HALF * float(target.std())
    return float(((target < low - margin) | (target > high + margin)).double().mean())


def _differences(step: RecordedStep) -> list[RecordedCall]:
    """Return the subtractions whose result a power and a mean follow, as in a mean squared error written by hand.

    In the density of a normal distribution, whose values lie beyond its mean, a division follows.
    """
    producers = {value: call for call in step.calls for value in call.results}

    def before(call: RecordedCall, names: set[str]) -> list[RecordedCall]:
        made = [producers[item] for item in step.items_of(call) if isinstance(item, Value) and item in producers]
        return [one for one in made if one.operation in names]

    means = [call for call in step.calls if call.operation in MEANS]
    return [one for mean in means for power in before(mean, POWERS) for one in before(power, SUBTRACTIONS)]
