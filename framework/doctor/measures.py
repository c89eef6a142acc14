"""Measures of a history that several detectors share."""

import math

import numpy as np

from .history import History, median_of
from .policy_numbers import PolicyNumbers

CHECKS = "training_checks"
"""The hook behind most detectors: without its values, nothing that they look for was checked."""
FEW_CLASSES = 0.2
"""Share of the expected classes of a batch below which its rows are not a random draw."""


LEARNED = 0.8
"""Share by which a loss falls in a training that learns."""
FAR_ABOVE = 5.0
"""First loss over that of the best constant from which on its fall says nothing: a constant also has it."""


def learned_share(history: History) -> float:
    """Return by which share the loss has fallen, if it is also far below that of constant predictions; else 0."""
    loss, last = history.loss, history.loss.end_level()
    # The first steps may have raised the loss, from which it falls back.
    fall = 1 - last / loss.first if loss.first > 0 and len(loss) >= 10 else math.nan
    fall = min(fall, history.loss_fall)
    names = ("uniform_loss", "term_loss", "constant_loss")
    uniform, of_outputs, constant = (history.last(f"{CHECKS}/{name}") for name in names)
    is_far_below = all(value < 0.5 * least for value, least in ((last, uniform), (of_outputs, constant)) if least > 0)
    of_term, of_constant = (history.curve(f"{CHECKS}/{name}") for name in names[1:])
    if of_term.first > FAR_ABOVE * of_constant.first > 0:
        fall = min(fall, 1 - median_of(of_term.values[-3:]) / median_of(of_constant.values[-3:]))
    return fall if is_far_below and fall > 0 and math.isfinite(loss.last) else 0.0


def compared(history: History, steps: int = 200, checks: int = 3) -> tuple[float, float, float]:
    """Return the ratio of the loss of the outputs and of the best constant, on the last checked batches, and both.

    All are NaN before ``steps``.

    Args:
        history: the record.
        steps: the first step at which the result counts, later for a training that is planned to be long.
        checks: the number of batches of which the result is the median.
    """
    of_outputs, of_constant = (history.curve(f"{CHECKS}/{name}") for name in ("term_loss", "constant_loss"))
    last_step = history.loss.last_step
    patience = 0 if history.is_over else 0.2 * (history.planned_steps or 1500)
    if last_step < max(steps, patience) or len(of_outputs) != len(of_constant):
        return math.nan, math.nan, math.nan
    is_late = (of_constant.steps > 0.25 * last_step) & (of_constant.values > 0)
    losses, constants = of_outputs.values[is_late], of_constant.values[is_late]
    if len(constants) < checks:
        return math.nan, math.nan, math.nan
    # Of the same batches, so that the differences between them cancel.
    return median_of((losses / constants)[-checks:]), median_of(losses[-checks:]), median_of(constants)


def learns_values(history: History) -> bool:
    """Return whether the loss compares values with targets of a target network, with which it jumps and grows."""
    return "policy_health/target_network_age" in history.curves


def are_tokens(history: History) -> bool:
    """Return whether the targets are sequences of tokens."""
    return any(len(history.curve(f"{CHECKS}/{name}")) for name in ("padding_fraction", "target_shift"))


def classes_of_batches(history: History) -> tuple[float, float] | None:
    """Return the median number of classes in a batch, and the expected one if all were equally frequent.

    ``None`` for tokens, whose frequencies differ, and for fewer than 8 expected classes.
    """
    rows, classes = history.settings.get("batch_size") or 0, history.last(f"{CHECKS}/class_count")
    if are_tokens(history) or not classes > 1:
        return None
    found = history.curve(f"{CHECKS}/target_class_count").median
    expected = float(classes * (1 - (1 - 1 / classes) ** rows))
    return (found, expected) if expected >= 8 and found > 0 else None


def is_sorted_by_class(history: History) -> bool:
    """Return whether batches have far fewer classes than random rows would."""
    counts = classes_of_batches(history)
    return counts is not None and counts[0] < FEW_CLASSES * counts[1]


def target_sizes(history: History) -> "np.typing.NDArray[np.float64]":
    """Return the size of the targets of a regression at each check, the larger one of its 10 and 90 % quantiles."""
    low, high = (history.curve(f"{CHECKS}/target_{name}").values for name in ("low", "high"))
    return np.maximum(np.abs(low), np.abs(high)) if len(low) == len(high) else np.array([])


def is_minimised(history: History) -> bool:
    """Return whether the loss measures progress: it has one sign, and the targets of a regression do not grow.

    Losses of policies and adversaries are positive and negative, and critics follow returns that grow, also where their
    loss is a part of a policy's.
    """
    sizes, values, numbers = target_sizes(history), history.loss.values, PolicyNumbers(history)
    if any(common in numbers for common in ("reward", "approx_kl", "explained_variance")):
        return False
    grows = len(sizes) > 1 and float(np.max(sizes)) > 2 * float(sizes[0])
    return not grows and not (bool((values < 0).any()) and bool((values > 0).any()))


def divided_afterwards(history: History) -> bool:
    """Return whether gradients are divided by whole numbers, such as those of tokens, between backward and update.

    Clipping also makes gradients smaller, but by other factors.
    """
    factors = history.curve(f"{CHECKS}/clip_factor").values
    divisors = 1 / factors[np.isfinite(factors) & (factors > 0)]
    is_whole = (divisors > 1.5) & (np.abs(divisors - np.round(divisors)) < 1e-4 * divisors)
    return bool(np.mean(is_whole) > 0.3) if len(divisors) else False


JUMP = 1000.0
"""Factor by which a gradient norm jumps in a single step because of a row that is unlike the others."""


def jump_of_gradient(history: History) -> int | None:
    """Return the first step whose gradient norm is a thousand times all earlier ones and after which losses diverge.

    At least three steps come before it. ``None`` without such a step.
    """
    norms, loss = history.gradient_norms, history.loss
    if loss.first_nonfinite is None:
        return None
    earlier = np.maximum.accumulate(np.nan_to_num(norms.values[:-1], posinf=np.inf))
    is_jump = np.concatenate([[False], norms.values[1:] > JUMP * earlier])
    places = [int(place) for place in np.flatnonzero(is_jump & np.isfinite(norms.values)) if place >= 3]
    if not places or norms.steps[places[0]] > loss.first_nonfinite:
        return None
    # A loss that has risen before diverges step by step, as under a learning rate that is too high.
    before = loss.values[(loss.steps > 1) & (loss.steps < norms.steps[places[0]])]
    is_calm = len(before) > 1 and float(np.max(before)) < 3 * abs(loss.first)
    return int(norms.steps[places[0]]) if is_calm else None
