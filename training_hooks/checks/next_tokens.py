"""Whether the targets of a batch are the next tokens of its inputs, which a model must not see."""

from collections.abc import Sequence

import torch
from loopscope.hooks import BackwardPass

from .batch_facts import BatchPart

LEAST_SHARE = 0.99
"""Share of the targets that must be equal to the next input."""


def predicts_next_tokens(parts: Sequence[BatchPart], passes: Sequence[BackwardPass]) -> bool:
    """Return whether the targets of the first micro-batch are its inputs, shifted by one position.

    Separate targets are compared with the inputs. Targets that equal the inputs, and rows without targets, count as
    shifted if the cross-entropy has exactly one target less in each row, as causal models of Hugging Face have.

    Args:
        parts: inputs and targets of the micro-batches.
        passes: the descriptions of their losses.
    """
    if not parts or not passes or not passes[0].class_count:
        return False
    inputs, targets = parts[0].inputs, parts[0].targets
    if inputs.ndim != 2 or inputs.is_floating_point() or inputs.shape[1] < 3:
        return False
    if targets is not None and targets.shape != inputs.shape:
        return False
    if targets is None or _are_equal(targets, inputs):
        rows, length = inputs.shape
        return passes[0].target_count == rows * (length - 1)
    return _are_equal(targets[:, :-1], inputs[:, 1:])


def _are_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return float((first == second).float().mean()) >= LEAST_SHARE
