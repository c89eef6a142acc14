"""Causal stages of findings: which finding may be the consequence of another one."""

from collections.abc import Mapping
from typing import Literal

Stage = Literal[
    "", "set-up", "activations", "gradients", "updates", "nonfinite", "outputs", "loss", "evaluation", "validation"
]
"""Where in the course of causes and effects a finding belongs.

- ``set-up``: the data, the formula of the loss, the initial weights, the model, the loop, the optimizer, the schedule.
- ``activations``, ``gradients``, ``updates``, ``nonfinite``: what a step computes, in its order.
- ``outputs``, ``loss``: what comes of many steps.
- ``evaluation``: mistakes with which the steps work, but not what is evaluated, such as repeated rows or a wrong mode.
- ``validation``: the numbers of an evaluation.

A finding without a stage explains no other one, and is explained by none.
"""
IN_STEP: tuple[Stage, ...] = ("activations", "gradients", "updates", "nonfinite")
EFFECTS: tuple[Stage, ...] = (*IN_STEP, "outputs", "loss", "validation")
"""The stages that are consequences of earlier ones; all others are decisions of the script, which have no cause."""
EXCEPTIONS: Mapping[str, frozenset[str]] = {
    # The second is another reading of the same decision.
    "class-never-a-target": frozenset({"padding-in-loss"}),
    "constant-initial-weights": frozenset({"initial-weights-scale"}),
    "cosine-schedule-rises": frozenset({"schedule-ends-early"}),
    "gradients-zeroed-too-early": frozenset({"weight-decay-too-large"}),
    "inputs-constant": frozenset({"rows-repeated"}),
    "model-in-eval-mode": frozenset({"batchnorm-frozen"}),
    "optimizer-not-stepped": frozenset({"gradients-not-zeroed"}),
    "same-batch-at-every-step": frozenset({"rows-repeated"}),
    "schedule-ends-early": frozenset({"learning-rate-zero"}),
    "targets-are-inputs": frozenset({"causal-mask-missing"}),
    "targets-extreme": frozenset({"targets-not-normalised"}),
    "targets-ignored": frozenset({"data-sorted-by-class"}),
    "targets-not-probabilities": frozenset({"targets-extreme"}),
    "targets-out-of-reach": frozenset({"inputs-not-normalised", "targets-not-normalised"}),
    "warm-up-too-long": frozenset({"learning-rate-zero"}),
    # A consequence of an earlier stage, or of the same one.
    "causal-mask-missing": frozenset({"learning-rate-too-low"}),  # the loss is low, and so are the gradients
    "gradient-jump": frozenset({"exploding-gradients"}),
    "learning-rate-too-high": frozenset({"vanishing-gradients"}),  # whose step is that of its first check
    "loss-constant": frozenset({"outputs-ignore-inputs"}),
    "no-better-than-frequencies": frozenset({"loss-not-falling"}),
    "no-better-than-mean": frozenset({"loss-not-falling"}),
    "no-better-than-uniform": frozenset({"loss-not-falling"}),
    "nonfinite": frozenset({"weight-decay-too-large"}),  # weights that are NaN have no norm
}
"""Ids of findings that a finding explains, too, by its id; these never explain it."""


def precedes(cause: Stage, effect: Stage, *, same_step: bool) -> bool:
    """Return whether a problem of one stage may cause another, at the same step or at a later one.

    >>> precedes("gradients", "updates", same_step=True), precedes("updates", "gradients", same_step=True)
    (True, False)
    >>> precedes("updates", "gradients", same_step=False)  # a bad update spoils the gradients of later steps
    True
    >>> precedes("evaluation", "validation", same_step=True), precedes("evaluation", "loss", same_step=False)
    (True, False)
    """
    if not cause or effect not in EFFECTS:
        return False
    if cause not in EFFECTS:
        return cause == "set-up" or effect == "validation"
    if EFFECTS.index(cause) < EFFECTS.index(effect):
        return True
    return not same_step and cause in IN_STEP and effect in IN_STEP
